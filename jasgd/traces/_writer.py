"""Appending to the file of a trace while the run goes on."""

import io
import json
import logging
import os
from typing import Any, ClassVar, Self

import numpy as np

from jasgd.traces import _file
from jasgd.traces import _node_schema
from jasgd.traces import _schema

_BUFFER_SIZE = 1 << 20  # Bytes: about 12,000 records.

_Path = str | os.PathLike[str]


class _Writer:
  """What writers of all kinds of records do."""

  _dtype: ClassVar[np.dtype]
  _dtype_name: ClassVar[str]

  def __init__(self, path: _Path, header: dict[str, Any] | None = None) -> None:
    self.path = os.fspath(path)
    if not os.path.exists(self.path) or not os.path.getsize(self.path):
      _file.write_file(self.path, header or {}, np.zeros(0, self._dtype))
    contents = _file.inspect_file(self.path, self._dtype)
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
        contents.offset + self.num_records * self._dtype.itemsize
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
      records: An array of this writer's dtype.

    Raises:
      ValueError: if it is not, or the writer is closed.
    """
    if getattr(records, 'dtype', None) != self._dtype:
      raise ValueError(
        f'records must be an array of dtype {self._dtype_name}, got '
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
    calling it again goes on where it stopped.

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
    """Waits for the disk, for what was flushed. Any thread may call it.

    Raises:
      ValueError: if the writer is closed.
    """
    self._check_open()
    os.fsync(self._file.fileno())

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


class TraceWriter(_Writer):
  """Appends a server's records to a file, which can be read all the while.

  A file that exists already is continued, after a crash too: part of a record
  at its end is cut off, which `num_bytes_cut` and the log tell. A file has one
  writer at a time.

  Args:
    path: Where the file is, or will be.
    header: The header of a new file. A file that exists keeps its own, so give
      the same one, or None, which stands for that or for an empty one.

  Attributes:
    path: As given.
    header: The header in the file.
    num_bytes_cut: The bytes that were cut off: 0 but after a crash.
    num_records: The records in the file and in the buffer; so the next record
      has this index.

  Raises:
    TraceError: if the file exists and is not a whole trace but for its last
      record, or has another header.

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

  _dtype = _schema.RECORD
  _dtype_name = 'RECORD'


class NodeTraceWriter(_Writer):
  """Appends the records of one node, or of the centre, to a file of its own.

  As `TraceWriter`, which see, with records of dtype `NODE_RECORD`; a record's
  `order` is its index in the file. `NodeTrace.load` reads the files of all
  nodes together if their headers say `is_recorded`: True.

  Args:
    path: `node-0` and so on, or `centre`, in one folder for all.
    header: As in `TraceWriter`. Those of all nodes of a run agree in `config`,
      `seed` and `num_nodes`.

  Raises:
    TraceError: as `TraceWriter` does.

  Examples:
    >>> import os, tempfile
    >>> import numpy as np
    >>> from jasgd import traces
    >>> header = {'is_recorded': True, 'num_nodes': 2}
    >>> records = np.zeros(3, traces.NODE_RECORD)
    >>> records['order'] = range(3)
    >>> records['step'] = records['version'] = [1, 2, 3]
    >>> records['peer_version'] = [0, 1, 2]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = os.path.join(folder, 'node-1')
    ...   with traces.NodeTraceWriter(path, header) as writer:
    ...     writer.append(records)
    ...   print(len(traces.NodeTrace.load(folder)))
    3
  """

  _dtype = _node_schema.NODE_RECORD
  _dtype_name = 'NODE_RECORD'


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
