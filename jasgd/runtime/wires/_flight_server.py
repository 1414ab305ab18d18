"""Arrow Flight, the server's side: a wire between hosts.

Each client has one open exchange, and Flight gives it a thread. The thread
reads a request, puts it into the inbox, waits for the owner's answer, writes it
from the snapshot's own memory, and reads on.
"""

from collections.abc import Callable
import dataclasses
import functools
import hmac
import queue
import threading
import time
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from pyarrow import flight

from jasgd.runtime.wires import _buffers
from jasgd.runtime.wires import _flight_sockets
from jasgd.runtime.wires import _flight_stream
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _security
from jasgd.runtime.wires import _wire

_METHODS = (flight.FlightMethod.DO_EXCHANGE, flight.FlightMethod.DO_ACTION)
# Seconds that a client has to disconnect, once the server has.
_GRACE = 0.5
# Seconds after which a server, or a call, that does not end is an error.
_END = 10.0
# Seconds after which a waiting thread checks whether its client is connected.
_LOOK = 1.0
# Seconds that a client has to take another batch of an answer.
_PATIENCE = 5.0


class FlightListener(_wire.Listener):
  """Accepts clients over Arrow Flight.

  gRPC reads a whole batch before it hands it over, so the first batch of a
  refused message has been read, and all others have not.

  Args:
    inbox: Inbox of events.
    payload_size: Bytes of every payload.
    host: Name or IP address to listen at; any but loopback needs a token.
    port: Port; 0: any free one.
    token: Token that clients must have. It is never shown.
    tls: Certificates for mutual TLS.
    max_channels: Largest number of clients at a time; fewer if the system does
      not allow as many open files.
    max_strangers: Largest number of further connections, without a call that
      had the token. The oldest are cut first.
    patience: Seconds after which a connection without an exchange is cut.

  Raises:
    ValueError: for a host that is not loopback without a token, or a token that
      cannot be sent in a header.
    OSError: if the port is taken.
  """

  def __init__(
    self,
    inbox: _wire.Inbox,
    payload_size: int,
    *,
    host: str = '127.0.0.1',
    port: int = 0,
    token: str | None = None,
    tls: _security.Tls | None = None,
    max_channels: int = 1024,
    max_strangers: int = 64,
    patience: float = 20.0,
  ) -> None:
    if token is None and not _security.is_loopback(host):
      raise ValueError(
        f'A server that listens on {host!r} must have a token, as other '
        'machines can reach it; only loopback needs none.'
      )
    self._inbox = inbox
    self._payload_size = payload_size
    self._max_channels = _flight_sockets.make_room(max_channels, max_strangers)
    self._lock = threading.Lock()
    self._channels: set[_FlightChannel] = set()
    self._is_closed = False
    self._guard: _flight_sockets.ConnectionGuard | None = None
    self._batches = _flight_stream.BatchCache()
    options: dict[str, Any] = {} if tls is None else tls.make_server_options()
    # Flight does not tell the peer of a call before it is accepted.
    gate = _Gate(token, functools.partial(self.count_refused, 'unknown'))
    options['middleware'] = {'gate': gate}
    scheme = 'grpc+tcp' if tls is None else 'grpc+tls'
    place = f'{scheme}://[{host}]' if ':' in host else f'{scheme}://{host}'
    if port:
      _flight_sockets.check_port(host, port)
    try:
      self._server = _Server(f'{place}:{port}', self, **options)
    except _flight_stream.STREAM_ERRORS as error:
      raise OSError(f'Cannot listen on {place}:{port}: {error}') from error
    self.address = f'{place}:{self._server.port}'
    self._guard = _flight_sockets.ConnectionGuard(
      self._server.port,
      find_served=self._find_served,
      on_cut=self.count_refused,
      max_strangers=max_strangers,
      patience=patience,
    )

  def close(self) -> None:
    """Disconnects all clients, and ends all threads. Twice is no error."""
    with self._lock:
      if self._is_closed:
        return
      self._is_closed = True
      channels = list(self._channels)
    assert self._guard is not None  # `__init__` has made it.
    self._guard.close()
    for channel in channels:
      channel.close()
    # `shutdown` waits for each call to end.
    ending = threading.Thread(target=self._server.shutdown, daemon=True)
    ending.start()
    for channel in channels:
      channel.join()
    ending.join(_GRACE)
    for _ in range(int(_END / _GRACE)):
      if not ending.is_alive():
        return
      # The sockets that are left belong to strangers without an exchange.
      self._cut(None)
      ending.join(_GRACE)
    raise TimeoutError(f'The server at {self.address} did not end.')

  def recognize(self, peer: str) -> None:
    """Notes that a call of a peer had the token."""
    if self._guard is not None:  # Calls may come before it is made.
      self._guard.recognize(peer)

  def _find_served(self) -> set[str]:
    """The peers that have an open exchange."""
    with self._lock:
      return {channel.peer for channel in self._channels}

  def admit(self, context: Any, reader: Any, writer: Any) -> '_FlightChannel':
    """Accepts a client, with its exchange.

    Raises:
      FlightUnavailableError: if there are too many, or this is closed.
    """
    channel = _FlightChannel(
      context,
      reader,
      writer,
      self._payload_size,
      put=self._inbox.put,
      cut=self._cut,
      batches=self._batches,
    )
    with self._lock:
      if self._is_closed:
        raise flight.FlightUnavailableError('The server is closed.')
      is_full = len(self._channels) >= self._max_channels
      if not is_full:
        self._channels.add(channel)
    if is_full:
      text = f'There are {self._max_channels} clients already.'
      self.count_refused(context.peer(), 'crowded', text)
      raise flight.FlightUnavailableError(text)
    return channel

  def dismiss(self, channel: '_FlightChannel') -> None:
    """Removes a client whose exchange has ended."""
    with self._lock:
      self._channels.discard(channel)

  def count_refused(self, peer: str, reason: str, text: str) -> None:
    """Lets the owner count a call that never became a channel."""
    error = _messages.MessageError(reason, text)
    self._inbox.put(_wire.Event(_Stranger(peer), error=error))

  def _cut(self, peer: str | None) -> None:
    end = f':{self._server.port}'
    _flight_sockets.cut_connections(
      lambda ends: ends.here.endswith(end) and peer in (None, ends.there)
    )


class _Stranger(_wire.Channel):
  """Channel of a refused call, to which nothing can be sent."""

  def __init__(self, peer: str) -> None:
    self.name = f'flight {peer}'

  def send(
    self,
    message: _messages.Message,
    snapshot: _buffers.Buffer | None = None,
  ) -> None:
    del message, snapshot

  def close(self) -> None:
    pass


class _Gate(flight.ServerMiddlewareFactory):
  """Refuses calls before anything of them is read.

  Args:
    token: Token that calls must have; None: calls need no token.
    on_refused: Function called with reason and text for each refused call.
  """

  def __init__(
    self, token: str | None, on_refused: Callable[[str, str], None]
  ) -> None:
    self._expected = None if token is None else _security.make_bearer(token)
    self._on_refused = on_refused

  def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
    """Raises an error of Flight if the call is refused."""
    if self._expected is not None and not self._is_right(headers):
      text = 'The token is missing or wrong.'
      self._on_refused('token', text)
      raise flight.FlightUnauthenticatedError(text)
    if info.method not in _METHODS:
      text = f'This server only does exchanges, no {info.method.name.lower()}.'
      self._on_refused('verb', text)
      raise flight.FlightServerError(text)

  def _is_right(self, headers: dict[str, list[str]]) -> bool:
    values = headers.get('authorization', [])
    given = values[0].encode(errors='replace') if len(values) == 1 else b''
    return hmac.compare_digest(given, self._expected or b'')


class _Server(flight.FlightServerBase):
  """Handlers of gRPC: one exchange, and an action to ask for it."""

  def __init__(
    self, location: str, listener: FlightListener, **options: Any
  ) -> None:
    self._listener = listener  # Calls may come before the next line returns.
    super().__init__(location, **options)

  def do_exchange(
    self, context: Any, descriptor: Any, reader: Any, writer: Any
  ) -> None:
    """Serves a client, for as long as it stays."""
    if descriptor.command != _flight_stream.COMMAND:
      self._refuse(context, 'exchange', repr(descriptor.command))
    channel = self._listener.admit(context, reader, writer)
    try:
      channel.serve()
    finally:
      self._listener.dismiss(channel)

  def do_action(self, context: Any, action: Any) -> list[Any]:
    """Tells a client that it may connect."""
    self._listener.recognize(context.peer())
    if action.type != _flight_stream.READY:
      self._refuse(context, 'action', repr(action.type))
    return []

  def _refuse(self, context: Any, what: str, name: str) -> NoReturn:
    text = f'There is no {what} {name[:100]} here.'
    self._listener.count_refused(context.peer(), 'verb', text)
    raise flight.FlightServerError(text)


class _FlightChannel(_wire.Channel):
  """A client's exchange. `serve` is its thread's work.

  Args:
    context: Context of the call.
    reader: Reader of the client's messages.
    writer: Writer of answers.
    payload_size: Bytes of every payload.
    put: Function that puts an event into the inbox.
    cut: Function that cuts the connections of a peer.
    batches: Cache of the batches of snapshots.

  Attributes:
    peer: Client's end of the connection, as gRPC writes it.
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
    # Guards `_is_closed`: no event may follow a `close`, or the last event.
    self._lock = threading.Lock()
    self._is_closed = False
    self._ending: threading.Thread | None = None
    self._has_ended = threading.Event()
    self._num_written = 0
    self._is_writing = False
    self._payload: np.ndarray | None = None
    # Bytes of a refused message that may still come, and the reason for the
    # refusal.
    self._drain = 0
    self._refusal = ''

  def send(
    self,
    message: _messages.Message,
    snapshot: _buffers.Buffer | None = None,
  ) -> None:
    """Sends an answer: hands it to the channel's thread."""
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
    """Disconnects once all answers are sent. No event follows; repeatable."""
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
      self._ending.join()  # Each wait of this thread has a time-out.

  def _end(self) -> None:
    """Cuts the connection if the client neither reads nor disconnects."""
    before = None
    while (now := (self._is_writing, self._num_written)) != before:
      before = now
      if self._has_ended.wait(_PATIENCE if self._is_writing else _GRACE):
        return
    self._cut(self.peer)
    self._has_ended.wait(_END)

  def serve(self) -> None:
    """Reads requests and writes answers until either side disconnects."""
    try:
      self._writer.begin(_flight_stream.SCHEMA)
      while self._receive() and self._answer():
        pass
    except _CutOffError:
      raise  # The client gets this error, if it still writes.
    except (StopIteration, *_flight_stream.STREAM_ERRORS):
      pass  # The client is gone; `finally` tells the owner.
    finally:
      self._put()
      self._has_ended.set()

  def _put(
    self,
    message: _messages.Message | None = None,
    error: _messages.MessageError | None = None,
  ) -> bool:
    """Puts an event into the inbox, unless the server has disconnected."""
    with self._lock:
      if self._is_closed:
        return False
      self._is_closed = message is None and error is None
      self._put_event(_wire.Event(self, message, error))
      return True

  def _receive(self) -> bool:
    """Puts the next good message into the inbox. False: the exchange ends."""
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
    """Tells the client and the owner that a message was bad."""
    self._refusal = str(error)
    refusal = _messages.Message(_messages.Verb.REFUSED, text=self._refusal)
    if not self._put(error=error):
      return False
    self._writer.write_metadata(_messages.encode_message(refusal))
    return True

  def _read(self) -> _messages.Message:
    """Reads the next message, with its payload.

    Raises:
      MessageError: if it is bad.
      _CutOffError: if the client goes on sending a refused message.
    """
    chunk = self._read_chunk()
    while chunk.app_metadata is None:  # The rest of a refused message.
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
    """Next chunk of the stream; raises a _BrokenError if it is malformed."""
    try:
      return self._reader.read_chunk()
    except _flight_stream.STREAM_ERRORS as error:
      if self._context.is_cancelled():
        raise
      raise _BrokenError(
        'garbage', f'The stream is malformed: {error}'
      ) from None

  def _read_payload(self, first: pa.RecordBatch | None) -> np.ndarray:
    """Reads a whole payload into the buffer of this client."""
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
    """Writes the owner's messages up to an answer. False: the exchange ends."""
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
  """A bad message after which the beginning of the next one is unknown."""


class _CutOffError(flight.FlightServerError):
  """The server ends the exchange, for the reason in the text."""
