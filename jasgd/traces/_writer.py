"""Appending to the file of a trace while the run goes on."""

import io
import json
import logging
import os
from typing import Any, Self

import numpy as np

from jasgd.traces import _file
from jasgd.traces import _schema

_BUFFER_SIZE = 1 << 20  # Bytes: about 8,000 records.

_Path = str | os.PathLike[str]


class TraceWriter:
  """Appends records to a file, which can be read at the same time.

  Every process that owns replicas has a file of its own. A file that exists is
  continued, after a crash too: a partial record at its end is cut off, and
  reported in `num_bytes_cut` and the log. A file has one writer at a time.

  Args:
    path: Path of the file. The file of a server is a run's whole trace; nodes
      and a centre have files in one folder, see `Trace.load`.
    header: Header of a new file. A file that exists keeps its own, so give
      the same one, or None, which means the header in the file or an empty one.

  Attributes:
    path: As given.
    header: The header in the file.
    num_bytes_cut: Bytes that were cut off: 0 except after a crash.
    num_records: Records in the file and in the buffer: the index of the next.

  Raises:
    TraceError: if the file exists and is damaged before its last record, or has
      another header.

  Examples:
    >>> import os, tempfile
    >>> from jasgd import traces
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = os.path.join(folder, 'trace')
    ...   with traces.TraceWriter(path, {'seed': 0}) as writer:
    ...     writer.append(traces.make_records(step=[0, 1]))
    ...     writer.flush()
    ...     print(len(traces.Trace.load(path)))
    2
  """

  def __init__(self, path: _Path, header: dict[str, Any] | None = None) -> None:
    self.path = os.fspath(path)
    if not os.path.exists(self.path) or not os.path.getsize(self.path):
      empty = np.zeros(0, _schema.RECORD)
      _file.write_file(self.path, header or {}, empty)
    contents = _file.inspect_file(self.path)
    if header is not None:
      _check_same_header(self.path, contents.header, header)
    self.header = contents.header
    self.num_records = contents.num_records
    self.num_bytes_cut = contents.num_extra_bytes
    self._buffer = bytearray()
    # Unbuffered: after a failed write, our own buffer has just what is missing.
    self._file = io.FileIO(self.path, 'ab')
    if self.num_bytes_cut:
      self._file.truncate(
        contents.offset + self.num_records * _schema.RECORD.itemsize
      )
      logging.getLogger(__name__).warning(
        'Cut %d bytes of a partial record off %r; %d whole records remain.',
        self.num_bytes_cut,
        self.path,
        self.num_records,
      )

  def append(self, records: np.ndarray) -> None:
    """Adds records, in the order in which things happened.

    They may stay in a buffer of this process until `flush` or `close`.

    Args:
      records: An array of dtype `RECORD`.

    Raises:
      ValueError: if the dtype is another one, or the writer is closed.
    """
    if getattr(records, 'dtype', None) != _schema.RECORD:
      raise ValueError(
        'records must be an array of dtype RECORD, got '
        f'{getattr(records, "dtype", type(records).__name__)}.'
      )
    self._check_open()
    records = np.ascontiguousarray(records).reshape(-1)
    self._buffer += records.view(np.uint8).data
    self.num_records += len(records)
    if len(self._buffer) >= _BUFFER_SIZE:
      self.flush()

  def flush(self, sync: bool = False) -> None:
    """Hands the buffer to the operating system: readers see the records.

    From then on they outlive this process. If it fails (the disk is full),
    calling it again continues where it stopped.

    Args:
      sync: Whether to wait for the disk, so that they outlive the machine.

    Raises:
      ValueError: if the writer is closed.
    """
    self._check_open()
    while self._buffer:
      num_written = self._file.write(self._buffer)
      del self._buffer[:num_written]
    if sync:
      self.sync()

  def sync(self) -> None:
    """Waits until the disk has what was flushed. Any thread may call it.

    Raises:
      ValueError: if the writer is closed.
    """
    self._check_open()
    os.fsync(self._file.fileno())

  def read(self) -> np.ndarray:
    """All records so far, flushed and read back from the file."""
    if not self._file.closed:
      self.flush()
    return _file.read_file(self.path, allow_truncated=True)[0]

  def close(self) -> None:
    """Flushes, and closes the file. Doing so twice is no error."""
    if self._file.closed:
      return
    try:
      self.flush()
    finally:
      self._file.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _check_open(self) -> None:
    if self._file.closed:
      raise ValueError(f'The writer of {self.path!r} is closed.')


def _check_same_header(
  path: str, found: dict[str, Any], given: dict[str, Any]
) -> None:
  """Refuses to continue the trace of another run."""
  if not _file.is_same_header(found, given):
    given = json.loads(_file.encode_header(given))
    keys = sorted(
      key
      for key in {*found, *given}
      if not _file.is_same_header({'': found.get(key)}, {'': given.get(key)})
      or (key in found) != (key in given)
    )
    raise _schema.TraceError(
      f'{path!r} exists and has another header: they differ in '
      f'{", ".join(keys)}. Give the same header, or None, or another path.'
    )
