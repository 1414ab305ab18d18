"""The folder of a real run without a server: a file for each owner."""

import os
import pathlib
from typing import Any

import numpy as np

from jasgd.traces import _file
from jasgd.traces import _merge
from jasgd.traces import _schema

_Path = str | os.PathLike[str]

# Keys that are equal in the headers of all files of a run. Hosts may differ.
_COMMON_KEYS = ('config', 'seed', 'num_workers', 'strategy')


def get_file_name(replica: int) -> str:
  """The name of an owner's file: `node-0` and so on, and `centre`.

  Args:
    replica: Number of the owner's replica.

  Returns:
    The name.

  Examples:
    >>> from jasgd import traces
    >>> traces.get_file_name(3), traces.get_file_name(traces.SERVER)
    ('node-3', 'centre')
  """
  return 'centre' if replica == _schema.SERVER else f'node-{replica}'


def read_folder(
  folder: pathlib.Path, allow_truncated: bool
) -> tuple[np.ndarray, dict[str, Any]]:
  """The records of all files of a folder, in order, and their header.

  Files of nodes that never came may be missing.

  Args:
    folder: The folder.
    allow_truncated: Whether a file may end within a record.

  Returns:
    Records and header, as `read_file` gives them.

  Raises:
    TraceError: as of `Trace.load`.
  """
  found = _list_files(folder)
  if not found:
    raise _schema.TraceError(f'There is no trace in {str(folder)!r}.')
  # A header of a node, if possible: it has the number of nodes.
  found.sort(key=lambda replica: (replica < 0, replica))
  paths = {replica: folder / get_file_name(replica) for replica in found}
  contents = {
    replica: _file.inspect_file(str(path)) for replica, path in paths.items()
  }
  header = contents[found[0]].header
  num_workers = header.get('num_workers')
  if not isinstance(num_workers, int):
    raise _schema.TraceError(
      f'{str(paths[found[0]])!r} does not say how many nodes there are: its '
      f'header has num_workers={num_workers!r}.'
    )
  if max(found) >= num_workers:
    raise _schema.TraceError(
      f'{str(folder)!r} has {get_file_name(max(found))!r}, but its run had '
      f'{num_workers} nodes.'
    )
  parts = {}
  for replica, path in paths.items():
    parts[replica], other = _file.read_file(path, allow_truncated)
    if not _file.is_same_header(*map(_pick_common, (header, other))):
      raise _schema.TraceError(
        f'{str(path)!r} is of another run than {str(paths[found[0]])!r}: their '
        'headers differ.'
      )
    _check_owner(replica, parts[replica])
  # Nodes may still be writing: only records that were inspected are required.
  num_needed = {replica: each.num_records for replica, each in contents.items()}
  return _merge.merge_records(parts, num_needed), header


class TraceTail:
  """Reads the records that were added to a folder's files since the last read.

  The cost grows with the new records, not with the length of the run. They come
  in the order of the owners' clocks; for the order of cause and effect, and for
  hosts whose clocks differ, see `Trace.load`.

  Args:
    folder: Folder in which the files are, or will be.
  """

  def __init__(self, folder: _Path) -> None:
    self._folder = pathlib.Path(folder)
    self._num_read: dict[int, int] = {}

  def read(self) -> np.ndarray:
    """The records written since the last call, in the order of `end_time`."""
    parts = [self._read_on(replica) for replica in _list_files(self._folder)]
    records = np.concatenate([np.zeros(0, _schema.RECORD), *parts])
    return records[np.argsort(records['end_time'], kind='stable')]

  def _read_on(self, replica: int) -> np.ndarray:
    path = str(self._folder / get_file_name(replica))
    contents = _file.inspect_file(path)
    begin = self._num_read.get(replica, 0)
    self._num_read[replica] = contents.num_records
    offset = contents.offset + begin * _schema.RECORD.itemsize
    count = contents.num_records - begin
    return np.fromfile(path, _schema.RECORD, count, offset=offset)


def _list_files(folder: pathlib.Path) -> list[int]:
  """The replicas whose owners have a file in a folder."""
  found = []
  if (folder / get_file_name(_schema.SERVER)).exists():
    found.append(_schema.SERVER)
  for file in folder.glob('node-*'):
    number = file.name.removeprefix('node-')
    # Files that are still being made have a suffix.
    if number.isdecimal() and file.name == get_file_name(int(number)):
      found.append(int(number))
  return sorted(found)


# The kinds that only the owner of a replica records. Others may name another
# node: its messages that were lost, for example.
_OWNERS_KINDS = (
  *(_schema.Kind.STEP, _schema.Kind.MIX, _schema.Kind.MOVE),
  *(_schema.Kind.MEAN, _schema.Kind.RESTART),
)


def _check_owner(replica: int, records: np.ndarray) -> None:
  """Raises a TraceError if a file has the records of another owner."""
  is_others = np.isin(records['kind'], _OWNERS_KINDS)
  is_others &= records['replica'] != replica
  if np.any(is_others):
    index = int(np.argmax(is_others))
    raise _schema.TraceError(
      f'Record {index} of {_merge.describe_replica(replica)} has replica='
      f'{records["replica"][index]}: the file is of another node, or damaged.'
    )


def _pick_common(header: dict[str, Any]) -> dict[str, Any]:
  return {key: header.get(key) for key in _COMMON_KEYS}
