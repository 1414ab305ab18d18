"""Traces of nodes: steps on their own weights, and mixes with others'."""

import dataclasses
import enum
import os
import pathlib
from typing import Any

import numpy as np

from jasgd.traces import _file


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
    # The place of the record among those of all nodes.
    ('order', '<i8'),
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

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes a file per node, `node-0` and so on, into a folder."""
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for node in range(self.header['num_nodes']):
      _file.write_file(path / f'node-{node}', self.header, self.of_node(node))

  @classmethod
  def load(cls, folder: str | os.PathLike[str]) -> 'NodeTrace':
    """Reads what `save` wrote, and puts it in the order of time again.

    Raises:
      TraceError: if there is no such folder, or a file is missing or damaged.
    """
    path = pathlib.Path(folder)
    first, header = _file.read_file(path / 'node-0', False, NODE_RECORD)
    parts = [first]
    for node in range(1, header['num_nodes']):
      part, _ = _file.read_file(path / f'node-{node}', False, NODE_RECORD)
      parts.append(part)
    records = np.concatenate(parts)
    return cls(records[np.argsort(records['order'], kind='stable')], header)
