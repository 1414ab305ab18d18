"""Traces of nodes: steps on their own weights, and mixes with others'."""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from jasgd.traces import _file
from jasgd.traces import _merge
from jasgd.traces import _node_schema
from jasgd.traces import _schema


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
    return self.records[self.records['kind'] == _node_schema.NodeKind.STEP]

  @property
  def mixes(self) -> np.ndarray:
    """The records of mixes."""
    return self.records[self.records['kind'] == _node_schema.NodeKind.MIX]

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
    nodes_and_centre = (_node_schema.CENTRE, *range(self.num_nodes))
    names = {node: _get_name(node) for node in nodes_and_centre}
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
    """Reads what `save`, or the nodes of a real run, wrote, as one trace.

    What `save` wrote is put in the order of time again. Of real nodes, whose
    headers say `is_recorded`, there may be files missing, of nodes that never
    came; every record comes after its node's last one and after the versions
    that it reads, and among those that could be next, by time.

    Args:
      folder: Where the files are.
      allow_truncated: Whether files may end in part of a record, as after a
        crash; then the whole ones are read.

    Returns:
      The trace.

    Raises:
      TraceError: if there is no such folder, or a file is missing, truncated,
        damaged, of another version or run, or no trace; or if a version is read
        that was never written, as of a file that was cut off.
    """
    path = pathlib.Path(folder)
    found = _list_files(path)
    # Of none, node 0's is asked for: it has come since, or is said to miss.
    numbers = [node for node in found if node >= 0] or [0]
    first = path / _get_name(min(numbers))
    header = _inspect(first).header
    if not isinstance(header.get('num_nodes'), int):
      raise _schema.TraceError(
        f'{str(first)!r} does not say how many nodes there are: its header has '
        f'num_nodes={header.get("num_nodes")!r}.'
      )
    is_recorded = bool(header.get('is_recorded'))
    nodes = list(range(header['num_nodes']))
    if is_recorded:
      if max(numbers) not in nodes:
        raise _schema.TraceError(
          f'{str(path)!r} has {_get_name(max(numbers))!r}, but its run had '
          f'{len(nodes)} nodes.'
        )
      nodes = sorted(numbers)
    if _node_schema.CENTRE in found:
      nodes.append(_node_schema.CENTRE)
    paths = {node: path / _get_name(node) for node in nodes}
    # Real nodes may be writing: what was there at first is needed, no more.
    num_needed = {node: _inspect(paths[node]).num_records for node in nodes}
    parts = {}
    for node in nodes:
      parts[node], other = _file.read_file(
        paths[node], allow_truncated, _node_schema.NODE_RECORD
      )
      _check_run(paths[node], other, first, header)
    if is_recorded:
      return cls(_merge.merge_records(parts, num_needed), header)
    records = np.concatenate(list(parts.values()))
    return cls(records[np.argsort(records['order'], kind='stable')], header)


def _get_name(node: int) -> str:
  """The name of a node's file."""
  return 'centre' if node == _node_schema.CENTRE else f'node-{node}'


def _list_files(path: pathlib.Path) -> set[int]:
  """The nodes that have a file in a folder."""
  names = {_get_name(_node_schema.CENTRE): _node_schema.CENTRE}
  for file in path.glob('node-*'):
    number = file.name.removeprefix('node-')
    if number.isdecimal() and file.name == _get_name(int(number)):
      names[file.name] = int(number)
  return {node for name, node in names.items() if (path / name).exists()}


def _inspect(path: pathlib.Path) -> _file.Contents:
  """What there is in the file of a node."""
  return _file.inspect_file(str(path), _node_schema.NODE_RECORD)


def _check_run(
  path: pathlib.Path,
  header: dict[str, Any],
  first_path: pathlib.Path,
  first_header: dict[str, Any],
) -> None:
  """Raises a TraceError if a file is of another run than the first."""
  headers = [header, first_header]
  if first_header.get('is_recorded'):  # They may be of hosts that differ.
    keys = ('is_recorded', 'config', 'seed', 'num_nodes')
    headers = [{key: each.get(key) for key in keys} for each in headers]
  if not _file.is_same_header(*headers):
    raise _schema.TraceError(
      f'{str(path)!r} is of another run than {str(first_path)!r}: their '
      'headers differ.'
    )


def _sync_folder(path: pathlib.Path) -> None:
  """Waits until the names in a folder are on the disk."""
  folder = os.open(path, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)
