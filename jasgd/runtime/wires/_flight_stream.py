"""Messages on an Arrow Flight stream: heads as metadata, payloads as batches.

Head and text of a message are the `app_metadata` of its first batch, or stand
alone if there is no payload. The payload is one column of bytes, cut into
batches of `CHUNK` bytes, so that one is copied while the next one is sent.
Batches after the first have no metadata.
"""

from collections.abc import Callable
import threading
from typing import Any
import weakref

import numpy as np
import pyarrow as pa
from pyarrow import flight

from jasgd.runtime.wires import _buffers
from jasgd.runtime.wires import _messages

# Name of the only exchange.
COMMAND = b'jasgd'
# Action by which a client asks whether it may connect.
READY = 'jasgd.ready'
SCHEMA = pa.schema([pa.field('bytes', pa.uint8(), nullable=False)])
CHUNK = 4 << 20
# Errors of a stream that breaks, is cancelled, or is malformed.
STREAM_ERRORS = (pa.ArrowException, flight.FlightError, OSError)


def make_batches(array: np.ndarray) -> list[pa.RecordBatch]:
  """Batches over the memory of an array of bytes, without a copy."""
  buffer = pa.py_buffer(array)
  batches = []
  for start in range(0, array.nbytes, CHUNK):
    chunk = buffer.slice(start, min(CHUNK, array.nbytes - start))
    column = pa.Array.from_buffers(pa.uint8(), chunk.size, [None, chunk])
    batches.append(pa.RecordBatch.from_arrays([column], schema=SCHEMA))
  return batches


class BatchCache:
  """Batches over kept buffers, made once for each buffer."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._batches: weakref.WeakKeyDictionary[
      _buffers.Buffer, list[pa.RecordBatch]
    ] = weakref.WeakKeyDictionary()

  def get(self, buffer: _buffers.Buffer) -> list[pa.RecordBatch]:
    """Batches of a buffer."""
    with self._lock:
      batches = self._batches.get(buffer)
      if batches is None:
        batches = self._batches[buffer] = make_batches(buffer.array)
    return batches


def write_message(
  writer: Any,
  head: bytes,
  batches: list[pa.RecordBatch],
  on_chunk: Callable[[], None] | None = None,
) -> None:
  """Sends head, text and payload; `on_chunk` is called after each batch."""
  if not batches:
    writer.write_metadata(head)
    return
  writer.write_with_metadata(batches[0], head)
  for batch in batches[1:]:
    if on_chunk is not None:
      on_chunk()
    writer.write_batch(batch)


def read_payload(
  read_chunk: Callable[[], Any],
  first: pa.RecordBatch | None,
  into: np.ndarray,
) -> None:
  """Reads a whole payload into an array.

  Args:
    read_chunk: Function that gives the next chunk of the stream.
    first: Batch that came with the head.
    into: Array of as many bytes as the payload must have.

  Raises:
    MessageError: if the payload has another size or another type.
    StopIteration: if the stream ends before.
  """
  batch, done = first, 0
  while True:
    if batch is None:
      raise _messages.MessageError('truncated', _describe(done, into))
    data = _get_bytes(batch)
    end = done + data.nbytes
    if end > into.nbytes or end == done:
      raise _messages.MessageError('size', _describe(end, into))
    np.copyto(into[done:end], data)  # Releases the GIL.
    if end == into.nbytes:
      return
    chunk = read_chunk()
    if chunk.app_metadata is not None:  # The head of another message.
      raise _messages.MessageError('truncated', _describe(end, into))
    batch, done = chunk.data, end


def _describe(got: int, into: np.ndarray) -> str:
  return f'The payload must have {into.nbytes} bytes, got {got}.'


def _get_bytes(batch: pa.RecordBatch) -> np.ndarray:
  """The bytes of a batch, without a copy."""
  if not batch.schema.equals(SCHEMA):
    kinds = ', '.join(str(kind) for kind in batch.schema.types[:4])
    raise _messages.MessageError(
      'schema',
      f'A payload is one column of uint8 named {SCHEMA.names[0]!r} and never '
      f'null, got columns of [{kinds}].',
    )
  column = batch.column(0)
  try:
    column.validate()  # A client may send lengths that its buffers do not have.
    return column.to_numpy(zero_copy_only=True)
  except pa.ArrowInvalid as error:
    raise _messages.MessageError(
      'schema', f'The column of bytes is broken: {error}'
    ) from None
