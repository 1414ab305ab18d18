"""Traces of nodes: steps on their own weights, and mixes with others'."""

import dataclasses
import enum
from typing import Any

import numpy as np


class NodeKind(enum.IntEnum):
  """What a record of a node tells of."""

  STEP = 0  # A gradient was computed and applied.
  MIX = 1  # Others' weights were mixed in.


# Who is mixed with, if it is no node.
CENTRE = -2
ALL = -3

NODE_RECORD = np.dtype(
  [
    ('kind', 'u1'),
    ('reserved', 'u1', (3,)),
    ('node', '<i4'),
    # The other node, CENTRE or ALL; -1 in a STEP.
    ('peer', '<i4'),
    # Records of a node with equal `mix` are one mix; -1 in a STEP.
    ('mix', '<i4'),
    # Steps that the node has made, with this one.
    ('step', '<i8'),
    # How often its weights have changed, with this change.
    ('version', '<i8'),
    # In a STEP the version that the gradient was computed on; in a MIX the
    # version of the peer's weights, before that mix.
    ('peer_version', '<i8'),
    # What the own and the peer's weights are multiplied with.
    ('own_weight', '<f8'),
    ('peer_weight', '<f8'),
    ('start_time', '<f8'),
    ('end_time', '<f8'),
  ]
)


@dataclasses.dataclass(frozen=True, eq=False)
class NodeTrace:
  """What the nodes of a run without a server did, in the order of time.

  Attributes:
    records: Of dtype `NODE_RECORD`.
    header: A dict that JSON can hold.
  """

  records: np.ndarray
  header: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return len(self.records)

  def of_node(self, node: int) -> np.ndarray:
    """The records of one node."""
    return self.records[self.records['node'] == node]

  @property
  def steps(self) -> np.ndarray:
    """The records of steps."""
    return self.records[self.records['kind'] == NodeKind.STEP]

  @property
  def mixes(self) -> np.ndarray:
    """The records of mixes."""
    return self.records[self.records['kind'] == NodeKind.MIX]

  @property
  def duration(self) -> float:
    """When the last record ended."""
    return float(self.records['end_time'].max(initial=0.0))
