"""What real nodes write, while they do."""

import os
import pathlib

import numpy as np

from jasgd.traces import _file
from jasgd.traces import _node_schema


class NodeTail:
  """Reads the files of real nodes on, from where it was the last time.

  What it costs grows with what is new, not with the length of the run. The
  order is that of the nodes' clocks: for what follows from what, and on hosts
  whose clocks differ, see `NodeTrace.load`.

  Args:
    folder: Where the files are, or will be.
  """

  def __init__(self, folder: str | os.PathLike[str]) -> None:
    self._path = pathlib.Path(folder)
    self._num_read: dict[str, int] = {}

  def read(self) -> np.ndarray:
    """The records that were written since the last time, by their end."""
    names = [path.name for path in self._path.glob('node-*')]
    # Others have a suffix: they are being made.
    parts = [
      self._read_on(name)
      for name in sorted(name for name in names if '.' not in name)
    ]
    if (self._path / 'centre').exists():
      parts.append(self._read_on('centre'))
    records = np.concatenate([np.zeros(0, _node_schema.NODE_RECORD), *parts])
    return records[np.argsort(records['end_time'], kind='stable')]

  def _read_on(self, name: str) -> np.ndarray:
    path, dtype = str(self._path / name), _node_schema.NODE_RECORD
    contents = _file.inspect_file(path, dtype)
    begin = self._num_read.get(name, 0)
    self._num_read[name] = contents.num_records
    offset = contents.offset + begin * dtype.itemsize
    return np.fromfile(path, dtype, contents.num_records - begin, offset=offset)
