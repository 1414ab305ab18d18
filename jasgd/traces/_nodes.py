"""Traces of nodes: steps on their own weights, and mixes with others'."""

import dataclasses
import enum
import os
import pathlib
from typing import Any

import numpy as np

from jasgd.traces import _file
from jasgd.traces import _schema


class NodeKind(enum.IntEnum):
  """What a record of a node tells of."""

  STEP = 0  # A gradient was computed and applied.
  MIX = 1  # Others' weights were mixed in.
  JOIN = 2  # A node came back; a MIX follows, unless it was alone.
  LEAVE = 3  # A node died.
  LOST = 4  # A message, or a question, that found a dead node.


# Who is mixed with, if it is no node. The centre has records of its own, of the
# moves that it makes, for it is mixed too.
CENTRE = -2
ALL = -3

NODE_RECORD = np.dtype(
  [
    ('kind', 'u1'),
    ('reserved', 'u1', (3,)),
    # A node, or CENTRE; in a LOST the sender.
    ('node', '<i4'),
    # In a MIX the other node, CENTRE or ALL, which is the mean of all nodes
    # with a record of the same `peer_version`. In a LOST the receiver. Else -1.
    ('peer', '<i4'),
    # Records of a node with equal `mix` are one mix; -1 if it is none.
    ('mix', '<i4'),
    # The place of the record among those of all nodes.
    ('order', '<i8'),
    # Steps that the node has made, with this one; of the centre, its moves.
    ('step', '<i8'),
    # How often its weights have changed, with this change. In a LOST the
    # version that was sent, or -1 if it was a question.
    ('version', '<i8'),
    # In a STEP the version that the gradient was computed on; in a MIX the
    # version of the peer's weights, before that mix, or the number of the
    # all-reduce. Else -1.
    ('peer_version', '<i8'),
    # In a MIX the steps that are in the peer's weights. Else, and for ALL, -1.
    ('peer_step', '<i8'),
    # What the own and the peer's weights are multiplied with.
    ('own_weight', '<f8'),
    ('peer_weight', '<f8'),
    # Of push-sum, else 0: what the node has after a STEP or MIX, what is lost
    # with a LEAVE or LOST, and what a JOIN adds.
    ('mass', '<f8'),
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

  @property
  def num_nodes(self) -> int:
    """How many nodes there are, by the header or else by the records."""
    largest = int(self.records['node'].max(initial=-1))
    return self.header.get('num_nodes', largest + 1)

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes a file per node into a folder: `node-0` and so on, and `centre`.

    Each is like the file of a server's trace: it appears whole, may be appended
    to, and can be read after a crash. Of many files it would take long to wait
    for the disk, so that is done once, for the folder: the operating system
    may still have contents to write when this returns.

    Args:
      folder: Where the files go; made if it is not there.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    header = {**self.header, 'num_nodes': self.num_nodes}
    # Sorted once: a look through all records for each node would be too slow.
    order = np.argsort(self.records['node'], kind='stable')
    nodes = self.records['node'][order]
    names = {CENTRE: 'centre'}
    names |= {node: f'node-{node}' for node in range(self.num_nodes)}
    starts = np.searchsorted(nodes, list(names), 'left').tolist()
    ends = np.searchsorted(nodes, list(names), 'right').tolist()
    (path / 'centre').unlink(missing_ok=True)  # It may be of another run.
    for name, start, end in zip(names.values(), starts, ends, strict=True):
      if end > start or name != 'centre':
        part = self.records[order[start:end]]
        _file.write_file(path / name, header, part, sync=False)
    _sync_folder(path)

  @classmethod
  def load(
    cls, folder: str | os.PathLike[str], allow_truncated: bool = False
  ) -> 'NodeTrace':
    """Reads what `save` wrote, and puts it in the order of time again.

    Args:
      folder: Where the files are.
      allow_truncated: Whether files may end in part of a record, as after a
        crash; then the whole ones are read.

    Returns:
      The trace.

    Raises:
      TraceError: if there is no such folder, or a file is missing, truncated,
        damaged, of another version or run, or no trace.
    """
    path = pathlib.Path(folder)
    first, header = _file.read_file(
      path / 'node-0', allow_truncated, NODE_RECORD
    )
    if not isinstance(header.get('num_nodes'), int):
      raise _schema.TraceError(
        f'{str(path / "node-0")!r} does not say how many nodes there are: its '
        f'header has num_nodes={header.get("num_nodes")!r}.'
      )
    names = [f'node-{node}' for node in range(1, header['num_nodes'])]
    if (path / 'centre').exists():
      names.append('centre')
    parts = [first]
    for name in names:
      part, other = _file.read_file(path / name, allow_truncated, NODE_RECORD)
      if not _file.is_same_header(header, other):
        raise _schema.TraceError(
          f'{str(path / name)!r} is of another run than '
          f'{str(path / "node-0")!r}: their headers differ.'
        )
      parts.append(part)
    records = np.concatenate(parts)
    return cls(records[np.argsort(records['order'], kind='stable')], header)


def _sync_folder(path: pathlib.Path) -> None:
  """Waits until the names in a folder are on the disk."""
  folder = os.open(path, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)
