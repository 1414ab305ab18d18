"""The file of a trace: append-only, safe in a crash, memory-mappable.

All numbers are little-endian, and checksums are CRC-32:

======  =====  =================================================================
offset  bytes
======  =====  =================================================================
0       8      `MAGIC`
8       4      `VERSION` of the format
12      4      bytes per record
16      4      bytes of the header, n
20      4      checksum of the header
24      4      records that were written with the header; 0: not known
28      4      checksum of the 28 bytes before it
32      n      the header: JSON, with spaces at its end so that the records
               begin at a multiple of 64
32 + n         records, to the end of the file
======  =====  =================================================================

The file appears whole with its header (it is written under another name first),
and after that it only grows. So a crash can only leave part of a record at the
end, and a reader needs no lock. A file with fewer records than were written
with the header has lost some.
"""

import json
import math
import os
import secrets
import struct
from typing import Any, BinaryIO, NamedTuple
import zlib

import numpy as np

from jasgd.traces import _schema

# The first byte is not valid in UTF-8, and a transfer as text would change the
# last two: no text, and no file damaged in this way, is taken for a trace.
MAGIC = b'\x93JASGD\r\n'
VERSION = 2
_PREFIX = struct.Struct('<8s5I')
_CHECKSUM = struct.Struct('<I')
_PREFIX_SIZE = _PREFIX.size + _CHECKSUM.size
_ALIGNMENT = 64

_Path = str | os.PathLike[str]


class Contents(NamedTuple):
  """Header of a file, and position and number of its records."""

  header: dict[str, Any]
  offset: int  # Position of the first record.
  num_records: int  # Number of whole records.
  num_written: int  # Number written with the header; 0: not known.
  num_extra_bytes: int  # Bytes of a partial record at the end.


def encode_header(header: dict[str, Any]) -> bytes:
  """The header as JSON that anyone can read.

  Numbers and arrays of numpy become Python's. Numbers that JSON cannot write
  become 'inf', '-inf' and 'nan'.
  """
  if not isinstance(header, dict):
    raise ValueError(f'header must be a dict, got {header!r}.')
  try:
    return json.dumps(_to_plain(header), allow_nan=False).encode()
  except (TypeError, ValueError) as error:
    raise ValueError(f'header must be writable as JSON: {error}.') from None


def is_same_header(header: dict[str, Any], other: dict[str, Any]) -> bool:
  """Whether two headers are equal, whatever the order of their keys."""
  # The first round makes all keys strings, so that they can be sorted.
  texts = [
    json.dumps(json.loads(encode_header(each)), sort_keys=True)
    for each in (header, other)
  ]
  return texts[0] == texts[1]


def write_file(
  path: _Path,
  header: dict[str, Any],
  records: np.ndarray,
  sync: bool = True,
) -> None:
  """Writes a trace under another name, then gives it its own.

  Args:
    path: Path of the file.
    header: JSON-serialisable header.
    records: All records so far.
    sync: Whether to wait for the disk.
  """
  path = os.fspath(path)
  text = encode_header(header)
  text += b' ' * (-(_PREFIX_SIZE + len(text)) % _ALIGNMENT)
  prefix = _PREFIX.pack(
    MAGIC,
    VERSION,
    records.dtype.itemsize,
    len(text),
    zlib.crc32(text),
    len(records) if len(records) < 1 << 32 else 0,
  )
  part = f'{path}.{secrets.token_hex(4)}.part'
  try:
    with open(part, 'xb') as file:
      file.write(prefix + _CHECKSUM.pack(zlib.crc32(prefix)) + text)
      file.write(np.ascontiguousarray(records).view(np.uint8).data)
      if sync:  # Otherwise, after a power cut, the named file could be empty.
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
  except BaseException:
    if os.path.exists(part):
      os.remove(part)
    raise


def read_file(
  path: _Path, allow_truncated: bool
) -> tuple[np.ndarray, dict[str, Any]]:
  """The records, memory-mapped for reading, and the header."""
  path = os.fspath(path)
  with _open(path) as file:
    contents = _inspect(file, path)
    if contents.num_extra_bytes and not allow_truncated:
      raise _schema.TraceError(
        f'{path!r} is truncated: {contents.num_records} whole records and '
        f'{contents.num_extra_bytes} of the {_schema.RECORD.itemsize} bytes of '
        'another. allow_truncated=True reads the whole ones.'
      )
    if contents.num_records < contents.num_written and not allow_truncated:
      raise _schema.TraceError(
        f'{path!r} is truncated: {contents.num_records} of its '
        f'{contents.num_written} records are there. allow_truncated=True reads '
        'these.'
      )
    if not contents.num_records:  # An empty range cannot be mapped.
      return np.zeros(0, _schema.RECORD), contents.header
    records = np.memmap(
      file,
      _schema.RECORD,
      mode='r',
      offset=contents.offset,
      shape=(contents.num_records,),
    )
  return records, contents.header


def inspect_file(path: str) -> Contents:
  """Contents of a file now; raises a TraceError if it is not a trace."""
  with _open(path) as file:
    return _inspect(file, path)


def _open(path: str) -> BinaryIO:
  """Opens a file for reading; raises a TraceError if there is none."""
  try:
    return open(path, 'rb')
  except FileNotFoundError:
    raise _schema.TraceError(f'There is no trace {path!r}.') from None
  except NotADirectoryError:
    raise _schema.TraceError(
      f'There is no trace {path!r}: a part of that path is a file.'
    ) from None
  except IsADirectoryError:
    raise _schema.TraceError(f'{path!r} is not a trace but a folder.') from None


def _inspect(file: BinaryIO, path: str) -> Contents:
  """Contents of an open file now."""
  header, offset, num_written = _read_header(file, path)
  size = os.fstat(file.fileno()).st_size
  num_records, num_extra = divmod(size - offset, _schema.RECORD.itemsize)
  return Contents(header, offset, num_records, num_written, num_extra)


def _read_header(file: BinaryIO, path: str) -> tuple[dict[str, Any], int, int]:
  """Header of an open file, position of the first record, and `num_written`."""
  prefix = file.read(_PREFIX_SIZE)
  if not prefix:
    raise _schema.TraceError(f'{path!r} is empty.')
  if not MAGIC.startswith(prefix[: len(MAGIC)]):
    raise _schema.TraceError(
      f'{path!r} is not a trace: it begins with {prefix[: len(MAGIC)]!r}, not '
      f'with {MAGIC!r}.'
    )
  # The version is checked first: after it, other versions may differ.
  version = int.from_bytes(prefix[8:12], 'little')
  if len(prefix) >= 12 and version != VERSION:
    raise _schema.TraceError(
      f'{path!r} is a trace of version {version}, and this jasgd reads version '
      f'{VERSION}: run the training again, or use the jasgd that wrote it.'
    )
  if len(prefix) < _PREFIX_SIZE:
    raise _schema.TraceError(
      f'{path!r} is truncated in its header: {len(prefix)} of the first '
      f'{_PREFIX_SIZE} bytes are there.'
    )
  _, _, record_size, size, checksum, num_written = _PREFIX.unpack_from(prefix)
  (prefix_checksum,) = _CHECKSUM.unpack_from(prefix, _PREFIX.size)
  if zlib.crc32(prefix[: _PREFIX.size]) != prefix_checksum:
    raise _schema.TraceError(f'The header of {path!r} is damaged.')
  if record_size != _schema.RECORD.itemsize:
    raise _schema.TraceError(
      f'{path!r} has records of {record_size} bytes; those of version '
      f'{VERSION} have {_schema.RECORD.itemsize}.'
    )
  text = file.read(size)
  if len(text) < size:
    raise _schema.TraceError(
      f'{path!r} is truncated in its header: {len(text)} of {size} bytes of '
      'JSON are there.'
    )
  if zlib.crc32(text) != checksum:
    raise _schema.TraceError(f'The header of {path!r} is damaged.')
  return json.loads(text), _PREFIX_SIZE + size, num_written


def _to_plain(value: Any) -> Any:
  """Converts a value of numpy to one that JSON can hold."""
  if isinstance(value, (np.generic, np.ndarray)):
    value = value.tolist()
  if isinstance(value, dict):
    return {key: _to_plain(entry) for key, entry in value.items()}
  if isinstance(value, (list, tuple)):
    return [_to_plain(entry) for entry in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value
