"""Arrow Flight, the server's side: a wire between processes and hosts."""

from collections.abc import Callable
import functools
import hmac
import threading
from typing import Any, NoReturn

from pyarrow import flight

from jasgd.runtime import _buffers
from jasgd.runtime import _flight_channel
from jasgd.runtime import _flight_guard
from jasgd.runtime import _flight_security
from jasgd.runtime import _flight_sockets
from jasgd.runtime import _flight_stream
from jasgd.runtime import _inbox
from jasgd.runtime import _messages
from jasgd.runtime import _wire

_METHODS = (flight.FlightMethod.DO_EXCHANGE, flight.FlightMethod.DO_ACTION)
# Seconds after which a socket that says nothing is cut off.
_GRACE = 0.5
# Seconds after which a server that does not end is an error.
_END = 10.0


class FlightListener(_wire.Listener):
  """Where clients come over Arrow Flight.

  gRPC keeps one message, which is one batch, in memory before it shows it: what
  is refused unread is what follows the first batch.

  Args:
    inbox: Where events go.
    payload_size: In bytes.
    host: Where to listen. What others can reach demands a token.
    port: 0 takes a free one.
    token: What clients must know. It is never shown.
    tls: For mutual TLS.
    max_channels: How many clients there may be at a time; fewer if the system
      does not allow as many open files.
    max_strangers: How many connections there may be besides, without a call
      that had the token. The oldest are cut first.
    patience: Seconds after which a connection without an exchange is cut.

  Raises:
    ValueError: for a host that is not loopback without a token, or a token that
      can not travel in a header.
    OSError: if the port is taken.
  """

  def __init__(
    self,
    inbox: _inbox.Inbox,
    payload_size: int,
    *,
    host: str = '127.0.0.1',
    port: int = 0,
    token: str | None = None,
    tls: _flight_security.Tls | None = None,
    max_channels: int = 1024,
    max_strangers: int = 64,
    patience: float = 20.0,
  ) -> None:
    if token is None and not _flight_security.is_loopback(host):
      raise ValueError(
        f'A server that listens on {host!r} must have a token, as others than '
        'this machine can reach it; only loopback needs none.'
      )
    self._inbox = inbox
    self._payload_size = payload_size
    self._max_channels = _flight_guard.make_room(max_channels, max_strangers)
    self._lock = threading.Lock()
    self._channels: set[_flight_channel.FlightChannel] = set()
    self._is_closed = False
    self._guard: _flight_guard.ConnectionGuard | None = None
    self._batches = _flight_stream.BatchCache()
    options: dict[str, Any] = {} if tls is None else tls.make_server_options()
    # Flight does not tell whose call it is before it is let in.
    gate = _Gate(token, functools.partial(self.count_refused, 'unknown'))
    options['middleware'] = {'gate': gate}
    scheme = 'grpc+tcp' if tls is None else 'grpc+tls'
    place = f'{scheme}://[{host}]' if ':' in host else f'{scheme}://{host}'
    if port:
      _flight_sockets.check_port(host, port)
    try:
      self._server = _Server(f'{place}:{port}', self, **options)
    except _flight_stream.STREAM_ERRORS as error:
      raise OSError(f'Can not listen on {place}:{port}: {error}') from error
    self.address = f'{place}:{self._server.port}'
    self._guard = _flight_guard.ConnectionGuard(
      self._server.port,
      find_served=self._find_served,
      on_cut=self.count_refused,
      max_strangers=max_strangers,
      patience=patience,
    )

  def close(self) -> None:
    """Hangs up on everybody, and ends all its threads. Twice is no error."""
    with self._lock:
      if self._is_closed:
        return
      self._is_closed = True
      channels = list(self._channels)
    assert self._guard is not None  # It was made when this was.
    self._guard.close()
    for channel in channels:
      channel.close()
    # It waits for each call to end.
    ending = threading.Thread(target=self._server.shutdown, daemon=True)
    ending.start()
    for channel in channels:
      channel.join()
    ending.join(_GRACE)
    for _ in range(int(_END / _GRACE)):
      if not ending.is_alive():
        return
      # Strangers, who came as far as a socket.
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

  def admit(
    self, context: Any, reader: Any, writer: Any
  ) -> _flight_channel.FlightChannel:
    """Takes a client in, with its exchange.

    Raises:
      FlightUnavailableError: if there are too many, or this is closed.
    """
    channel = _flight_channel.FlightChannel(
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

  def dismiss(self, channel: _flight_channel.FlightChannel) -> None:
    """Forgets a client whose exchange has ended."""
    with self._lock:
      self._channels.discard(channel)

  def count_refused(self, peer: str, reason: str, text: str) -> None:
    """Has a call counted that never became a channel."""
    error = _messages.MessageError(reason, text)
    self._inbox.put(_wire.Event(_Stranger(peer), error=error))

  def _cut(self, peer: str | None) -> None:
    end = f':{self._server.port}'
    _flight_sockets.cut_connections(
      lambda ends: ends.here.endswith(end) and peer in (None, ends.there)
    )


class _Stranger(_wire.Channel):
  """Someone whose call was refused, and who hears nothing more."""

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
    token: What callers must know; None if they need not know anything.
    on_refused: Called with a word and a text for each call that is refused.
  """

  def __init__(
    self, token: str | None, on_refused: Callable[[str, str], None]
  ) -> None:
    self._expected = (
      None if token is None else _flight_security.make_bearer(token)
    )
    self._on_refused = on_refused

  def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
    """Raises an error of Flight if the call is not to be."""
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
  """What gRPC calls: one exchange, and nothing else."""

  def __init__(
    self, location: str, listener: FlightListener, **options: Any
  ) -> None:
    self._listener = listener  # Calls may come before the next line ends.
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
    """Tells a client that it may come."""
    self._listener.recognize(context.peer())
    if action.type != _flight_stream.READY:
      self._refuse(context, 'action', repr(action.type))
    return []

  def _refuse(self, context: Any, what: str, name: str) -> NoReturn:
    text = f'There is no {what} {name[:100]} here.'
    self._listener.count_refused(context.peer(), 'verb', text)
    raise flight.FlightServerError(text)
