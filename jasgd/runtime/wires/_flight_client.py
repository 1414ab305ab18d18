"""Arrow Flight, the client's side: a wire between hosts."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import math
import threading
import time
from typing import Any

import numpy as np
from pyarrow import flight

from jasgd.runtime import _crash
from jasgd.runtime.wires import _buffers
from jasgd.runtime.wires import _flight_sockets
from jasgd.runtime.wires import _flight_stream
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _security
from jasgd.runtime.wires import _wire

_OPTIONS = (
  # HTTP proxies must not see this traffic.
  ('grpc.enable_http_proxy', 0),
  # A connection for each client, which the server can cut.
  ('grpc.use_local_subchannel_pool', 1),
)
# One client connects at a time, so that each can find its own socket.
_ONE_BY_ONE = threading.Lock()
# Seconds to wait for the end of the watchdog thread.
_END = 10.0
# Seconds that a watchdog sleeps at most.
_SLEEP = 60.0


def connect_flight(
  address: str,
  payload_size: int,
  *,
  token: str | None = None,
  tls: _security.Tls | None = None,
  deadline: float,
  with_checksum: bool = False,
) -> _wire.Connection:
  """Connects to a `FlightListener`.

  Args:
    address: Address of the listener.
    payload_size: Bytes of every payload.
    token: Token of the listener. It is never shown.
    tls: Certificates for mutual TLS.
    deadline: Seconds within which the server must accept the client.
    with_checksum: Whether requests have a checksum of their payload.

  Returns:
    The connection.

  Raises:
    WireError: if there is no server, or it is silent.
    RefusedError: if the token is missing or wrong.
    ValueError: if the address is malformed, or does not fit `tls`.
  """
  scheme = 'grpc+tcp://' if tls is None else 'grpc+tls://'
  if not address.startswith(scheme):
    raise ValueError(
      f'An address {"without" if tls is None else "with"} TLS begins with '
      f'{scheme!r}, got {address!r}.'
    )
  headers = []
  if token is not None:
    headers.append((b'authorization', _security.make_bearer(token)))
  start = time.monotonic()
  if not _ONE_BY_ONE.acquire(timeout=deadline):
    raise _wire.WireError('Another thread is still connecting.')
  try:
    end = address[address.rindex(':') :]
    others = _flight_sockets.find_connections(
      lambda ends: ends.there.endswith(end)
    )
    client = flight.FlightClient(
      address,
      generic_options=list(_OPTIONS),
      **({} if tls is None else tls.make_client_options()),
    )
    left = max(0.001, start + deadline - time.monotonic())
    writer, reader = _open(address, client, headers, left)
    own = _flight_sockets.find_connections(
      lambda ends: ends.there.endswith(end) and ends not in others
    )
  finally:
    _ONE_BY_ONE.release()

  def cancel() -> None:
    reader.cancel()
    _flight_sockets.cut_connections(lambda ends: ends in own)

  return _FlightConnection(
    address, client, writer, reader, cancel, payload_size, with_checksum
  )


def _open(
  address: str, client: Any, headers: list[tuple[bytes, bytes]], deadline: float
) -> tuple[Any, Any]:
  """Opens an exchange; gives its writer and reader."""
  try:
    # Only this action has a time-out: that of a stream would end a healthy one.
    bounded = flight.FlightCallOptions(timeout=deadline, headers=headers)
    list(client.do_action(flight.Action(_flight_stream.READY, b''), bounded))
    return client.do_exchange(
      flight.FlightDescriptor.for_command(_flight_stream.COMMAND),
      flight.FlightCallOptions(headers=headers),
    )
  except flight.FlightUnauthenticatedError:
    client.close()
    raise _wire.RefusedError(
      f'The server at {address} refused the token, or wants one.'
    ) from None
  except _flight_stream.STREAM_ERRORS as error:
    client.close()
    raise _wire.WireError(
      f'There is no server at {address}: {_shorten(error)}'
    ) from error


def _shorten(error: BaseException) -> str:
  """Text of an error of Flight, without the additions of gRPC.

  Most of it was sent by the server, and is cleaned like the text of a message.
  """
  text = str(error).split('. gRPC client debug context')[0]
  text = text.split('. Detail: ')[0].rstrip('.') or 'it disconnected'
  return _messages.clean_text(text)


class _FlightConnection(_wire.Connection):
  """One open exchange."""

  def __init__(
    self,
    address: str,
    client: Any,
    writer: Any,
    reader: Any,
    cancel: Callable[[], None],
    payload_size: int,
    with_checksum: bool,
  ) -> None:
    self._address = address
    self._client: Any = client
    self._writer: Any = writer
    self._reader: Any = reader
    self._payload_size = payload_size
    self._with_checksum = with_checksum
    self._outgoing = _buffers.make_aligned(payload_size)
    self._batches = _flight_stream.make_batches(self._outgoing)
    # Buffers of the last payload and of the one before it.
    self._incoming: list[np.ndarray] = []
    self._has_begun = False
    self._is_closed = False
    self._is_written = True  # Whether the last request was sent completely.
    self._watchdog = Watchdog(cancel)

  @property
  def outgoing(self) -> np.ndarray:
    """Aligned bytes, to write a payload into before it is sent."""
    return self._outgoing

  def _send(
    self, message: _messages.Message, has_payload: bool, deadline: float
  ) -> None:
    if self._is_closed:
      raise _wire.UntakenError(f'The connection to {self._address} is closed.')
    message = dataclasses.replace(
      message, payload=self._outgoing if has_payload else None
    )
    head = _messages.encode_message(message, self._with_checksum)
    self._watchdog.watch(deadline)
    with self._translate(deadline):
      self._write(head, has_payload)

  def _receive(self, deadline: float) -> _messages.Message:
    with self._translate(deadline):
      answer = self._read()
    if answer.verb != _messages.Verb.WAIT:
      self._watchdog.pause()
    return answer

  @contextlib.contextmanager
  def _translate(self, deadline: float) -> Iterator[None]:
    """Turns errors of the stream into those of all wires."""
    try:
      yield
    except (
      EOFError,
      _messages.MessageError,
      *_flight_stream.STREAM_ERRORS,
    ) as error:
      kind = _wire.WireError
      if self._watchdog.has_expired:
        text = f'was silent for {deadline:g} seconds'
      else:
        text = f'is gone: {_shorten(error)}'
        # The request was not handled if it was not sent completely, or if the
        # server has ended its stream properly. A killed server does not do so.
        if isinstance(error, EOFError) or not self._is_written:
          kind = _wire.UntakenError
      raise kind(f'The server at {self._address} {text}.') from error

  def close(self) -> None:
    """Disconnects. Twice is no error."""
    if self._is_closed:
      return
    self._is_closed = True
    self._watchdog.close()
    self._reader.cancel()
    with contextlib.suppress(*_flight_stream.STREAM_ERRORS):
      self._writer.close()  # Raises an error, as the call is cancelled.
    self._client.close()
    # The socket stays open for as long as these objects exist.
    self._client = self._writer = self._reader = None

  def _write(self, head: bytes, has_payload: bool) -> None:
    """Sends a request."""
    self._is_written = False
    try:
      if not self._has_begun:
        self._has_begun = True
        self._writer.begin(_flight_stream.SCHEMA)
      _flight_stream.write_message(
        self._writer,
        head,
        self._batches if has_payload else [],
        self._note_chunk,
      )
      self._is_written = True
    except _flight_stream.STREAM_ERRORS:
      if self._watchdog.has_expired:
        raise
      # A server that disconnects may have said why, which is read next.

  def _note_chunk(self) -> None:
    """Notes that a part of a request was sent, but not the last one."""
    self._watchdog.renew()
    _crash.maybe_crash('sending')

  def _read(self) -> _messages.Message:
    """Reads a message, with its payload."""
    chunk = self._read_chunk()
    if chunk.app_metadata is None:
      raise _messages.MessageError('garbage', 'An answer had no head.')
    head = memoryview(chunk.app_metadata)
    answer, size = _messages.decode_message(head)
    if size not in (0, self._payload_size):
      raise _messages.MessageError(
        'size',
        f'A payload must have {self._payload_size} bytes, got {size}.',
      )
    if size:
      into = self._get_buffer()
      _flight_stream.read_payload(self._read_chunk, chunk.data, into)
      answer.payload = into.view()
      answer.payload.flags.writeable = False
      _messages.check_payload(head, answer.payload)
    return answer

  def _read_chunk(self) -> Any:
    """Next chunk of the stream."""
    try:
      chunk = self._reader.read_chunk()
    except StopIteration:  # It must not pass through a generator.
      raise EOFError from None
    self._watchdog.renew()
    return chunk

  def _get_buffer(self) -> np.ndarray:
    """The buffer with the older one of two payloads."""
    if len(self._incoming) < 2:
      self._incoming.append(_buffers.make_aligned(self._payload_size))
    else:
      self._incoming.reverse()
    return self._incoming[-1]


class Watchdog:
  """A thread that cancels a call after a time without progress.

  Attributes:
    has_expired: Whether it has cancelled the call.
  """

  def __init__(self, cancel: Callable[[], None]) -> None:
    self.has_expired = False
    self._cancel = cancel
    self._deadline = 0.0
    self._due = math.inf
    self._wakes = math.inf
    self._is_closed = False
    self._condition = threading.Condition(threading.Lock())
    self._thread = threading.Thread(
      target=self._run, name='jasgd-watchdog', daemon=True
    )
    self._thread.start()

  def watch(self, deadline: float) -> None:
    """Starts: there must be progress within `deadline` seconds."""
    self._deadline = deadline
    with self._condition:
      self._due = time.monotonic() + deadline
      # A thread that wakes earlier than needed sleeps again by itself.
      if self._due < self._wakes:
        self._condition.notify()

  def renew(self) -> None:
    """Notes progress."""
    self._due = time.monotonic() + self._deadline

  def pause(self) -> None:
    """Stops watching, until the next `watch`."""
    self._due = math.inf

  def close(self) -> None:
    """Ends the thread."""
    with self._condition:
      self._is_closed = True
      self._condition.notify()
    self._thread.join(_END)

  def _run(self) -> None:
    with self._condition:
      while not self._is_closed:
        now = time.monotonic()
        if self._due <= now:
          self.has_expired = True
          break
        self._wakes = min(self._due, now + _SLEEP)
        self._condition.wait(self._wakes - now)
    if self.has_expired:
      self._cancel()
    del self._cancel  # It would keep the stream alive.
