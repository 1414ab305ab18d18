"""Arrow Flight, a client as the server sees it.

Each client has one open exchange, and Flight gives it a thread. That thread
reads a request, puts it into the inbox, waits for what the owner sends, writes
it from the snapshot's own memory, and reads on.
"""

from collections.abc import Callable
import dataclasses
import queue
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from jasgd.runtime import _buffers
from jasgd.runtime import _flight_stream
from jasgd.runtime import _messages
from jasgd.runtime import _wire

# Seconds after which a waiting thread looks whether its client is still there.
_LOOK = 1.0
# Seconds that a client has to go by itself, once the server hung up.
_GRACE = 0.5
# Seconds that it has to take another batch of what was sent before.
_PATIENCE = 5.0
# Seconds after which an exchange whose connection was cut must have ended.
_END = 10.0


class FlightChannel(_wire.Channel):
  """A client's exchange. `serve` is its thread's work.

  Args:
    context: Of the call.
    reader: What the client says.
    writer: What it hears.
    payload_size: In bytes.
    put: Takes events.
    cut: Breaks the connections of a peer.
    batches: Of snapshots.

  Attributes:
    peer: The client's end of the connection, as gRPC writes it.
  """

  def __init__(
    self,
    context: Any,
    reader: Any,
    writer: Any,
    payload_size: int,
    *,
    put: Callable[[_wire.Event], None],
    cut: Callable[[str], None],
    batches: _flight_stream.BatchCache,
  ) -> None:
    self._context = context
    self._reader = reader
    self._writer = writer
    self._payload_size = payload_size
    self._put_event = put
    self._cut = cut
    self._batches = batches
    self.peer = context.peer()
    self.name = f'flight {self.peer}'
    self._outbox: queue.SimpleQueue[
      tuple[bytes, list[pa.RecordBatch], bool] | None
    ] = queue.SimpleQueue()
    # Guards that nothing follows a `close`, nor the event that it is gone.
    self._lock = threading.Lock()
    self._is_closed = False
    self._ending: threading.Thread | None = None
    self._has_ended = threading.Event()
    self._num_written = 0
    self._is_writing = False
    self._payload: np.ndarray | None = None
    # How much more of a refused message may come, and why it was refused.
    self._drain = 0
    self._refusal = ''

  def send(
    self,
    message: _messages.Message,
    snapshot: _buffers.Buffer | None = None,
  ) -> None:
    """Answers: hands it to the channel's thread."""
    batches = []
    if snapshot is None:
      message = dataclasses.replace(message, payload=None)
    else:
      message = dataclasses.replace(message, payload=snapshot.array)
      batches = self._batches.get(snapshot)
    head = _messages.encode_message(message)
    is_last = message.verb != _messages.Verb.WAIT
    self._outbox.put((head, batches, is_last))

  def close(self) -> None:
    """Hangs up, after what was sent. Twice is no error; no event follows."""
    with self._lock:
      if self._is_closed:
        return
      self._is_closed = True
      self._outbox.put(None)
    self._ending = threading.Thread(target=self._end, daemon=True)
    self._ending.start()

  def join(self) -> None:
    """Waits, after `close`, until the exchange has ended."""
    if self._ending is not None:
      self._ending.join()  # Each of its waits has a time-out.

  def _end(self) -> None:
    """Cuts the client off if it does not take what was sent, or go."""
    before = None
    while (now := (self._is_writing, self._num_written)) != before:
      before = now
      if self._has_ended.wait(_PATIENCE if self._is_writing else _GRACE):
        return
    self._cut(self.peer)
    self._has_ended.wait(_END)

  def serve(self) -> None:
    """Reads requests and writes answers until either side goes."""
    try:
      self._writer.begin(_flight_stream.SCHEMA)
      while self._receive() and self._answer():
        pass
    except _CutOffError:
      raise  # The client hears it, if it still writes.
    except (StopIteration, *_flight_stream.STREAM_ERRORS):
      pass  # The client is gone, which `finally` tells.
    finally:
      self._put()
      self._has_ended.set()

  def _put(
    self,
    message: _messages.Message | None = None,
    error: _messages.MessageError | None = None,
  ) -> bool:
    """Puts an event into the inbox, unless the server hung up."""
    with self._lock:
      if self._is_closed:
        return False
      self._is_closed = message is None and error is None
      self._put_event(_wire.Event(self, message, error))
      return True

  def _receive(self) -> bool:
    """Passes the next good message on. False if the exchange is to end."""
    while not self._is_closed:
      try:
        message = self._read()
      except _BrokenError as error:
        self._refuse(error)
        raise _CutOffError(self._refusal) from None
      except _messages.MessageError as error:
        if not self._refuse(error):
          return False
      else:
        return self._put(message)
    return False

  def _refuse(self, error: _messages.MessageError) -> bool:
    """Tells both sides that a message was no good."""
    self._refusal = str(error)
    refusal = _messages.Message(_messages.Verb.REFUSED, text=self._refusal)
    if not self._put(error=error):
      return False
    self._writer.write_metadata(_messages.encode_message(refusal))
    return True

  def _read(self) -> _messages.Message:
    """The next message, whole.

    Raises:
      MessageError: if it is no good.
      _CutOffError: if the client goes on with what was refused.
    """
    chunk = self._read_chunk()
    while chunk.app_metadata is None:  # What belongs to a refused message.
      if chunk.data is None or not self._drain:
        raise _BrokenError('garbage', 'A batch came without a head.')
      self._drain -= chunk.data.nbytes
      if self._drain <= 0:
        raise _CutOffError(self._refusal)
      chunk = self._read_chunk()
    size = self._payload_size
    if chunk.data is not None:  # More of it may follow.
      self._drain = size + _flight_stream.CHUNK
    head = memoryview(chunk.app_metadata)
    message, declared = _messages.decode_message(head)
    if declared not in (0, size):
      raise _messages.MessageError(
        'size', f'A payload must have {size} bytes, got {declared}.'
      )
    if declared:
      begin = time.perf_counter()
      message.payload = self._read_payload(chunk.data)
      message.copy_seconds = time.perf_counter() - begin
      _messages.check_payload(head, message.payload)
    elif chunk.data is not None:
      raise _BrokenError('size', 'A batch came where none was announced.')
    self._drain = 0
    return message

  def _read_chunk(self) -> Any:
    """The next of the stream; what is none of Flight's is broken."""
    try:
      return self._reader.read_chunk()
    except _flight_stream.STREAM_ERRORS as error:
      if self._context.is_cancelled():
        raise
      raise _BrokenError('garbage', f'That is no stream: {error}') from None

  def _read_payload(self, first: pa.RecordBatch | None) -> np.ndarray:
    """All of a payload, in the buffer that is kept for this client."""
    if self._payload is None:
      self._payload = _buffers.make_aligned(self._payload_size)
    try:
      _flight_stream.read_payload(self._read_chunk, first, self._payload)
    except _messages.MessageError as error:
      raise _BrokenError(error.reason, str(error)) from None
    return self._payload

  def _count_written(self) -> None:
    self._num_written += 1

  def _answer(self) -> bool:
    """Writes what the owner sends, up to an answer. False: it is to end."""
    while True:
      try:
        item = self._outbox.get(timeout=_LOOK)
      except queue.Empty:
        if self._context.is_cancelled():
          return False
        continue
      if item is None:
        return False
      head, batches, is_last = item
      self._is_writing = True
      _flight_stream.write_message(
        self._writer, head, batches, self._count_written
      )
      self._is_writing = False
      if is_last:
        return True


class _BrokenError(_messages.MessageError):
  """After this message, nobody knows where the next one begins."""


class _CutOffError(flight.FlightServerError):
  """The exchange ends, and this is why."""
