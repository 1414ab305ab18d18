"""Arrow Flight, the client's side."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import threading
import time
from typing import Any

import numpy as np
from pyarrow import flight

from jasgd.runtime import _buffers
from jasgd.runtime import _flight_security
from jasgd.runtime import _flight_sockets
from jasgd.runtime import _flight_stream
from jasgd.runtime import _messages
from jasgd.runtime import _watchdog
from jasgd.runtime import _wire

_OPTIONS = (
  # The proxy is for the web, and may see nothing of this.
  ('grpc.enable_http_proxy', 0),
  # A connection of one's own, which the server can cut.
  ('grpc.use_local_subchannel_pool', 1),
)
# So that each knows which socket is its own.
_ONE_BY_ONE = threading.Lock()


def connect_flight(
  address: str,
  payload_size: int,
  *,
  token: str | None = None,
  tls: _flight_security.Tls | None = None,
  deadline: float,
  with_checksum: bool = False,
) -> _wire.Connection:
  """Connects to a `FlightListener`.

  Args:
    address: The listener's.
    payload_size: In bytes.
    token: The listener's. It is never shown.
    tls: For mutual TLS.
    deadline: Seconds within which the server must say that one may come.
    with_checksum: Whether payloads are sent with one.

  Returns:
    The connection.

  Raises:
    WireError: if there is no server, or it is silent.
    RefusedError: if the token is missing or wrong.
    ValueError: if the address is none, or needs `tls` or must not have it.
  """
  scheme = 'grpc+tcp://' if tls is None else 'grpc+tls://'
  if not address.startswith(scheme):
    raise ValueError(
      f'An address {"without" if tls is None else "with"} TLS begins with '
      f'{scheme!r}, got {address!r}.'
    )
  headers = []
  if token is not None:
    headers.append((b'authorization', _flight_security.make_bearer(token)))
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
  """Writer and reader of an exchange."""
  try:
    # The stream itself must have no time-out: it would end a healthy one.
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
  """What an error of Flight says, without what gRPC has to add.

  Most of it is the server's own text, and is cleaned like that of a message.
  """
  text = str(error).split('. gRPC client debug context')[0]
  text = text.split('. Detail: ')[0].rstrip('.') or 'it hung up'
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
    # The last payload and the one before it; made when they are needed.
    self._incoming: list[np.ndarray] = []
    self._has_begun = False
    self._is_closed = False
    self._is_written = True  # The last request, and all of it.
    self._watchdog = _watchdog.Watchdog(cancel)

  @property
  def outgoing(self) -> np.ndarray:
    """Bytes, aligned, to write a payload into before it is sent."""
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
      self._watchdog.rest()
    return answer

  @contextlib.contextmanager
  def _translate(self, deadline: float) -> Iterator[None]:
    """Says what went wrong with the stream as all wires do."""
    try:
      yield
    except (
      EOFError,
      _messages.MessageError,
      *_flight_stream.STREAM_ERRORS,
    ) as error:
      kind = _wire.WireError
      if self._watchdog.has_barked:
        text = f'was silent for {deadline:g} seconds'
      else:
        text = f'is gone: {_shorten(error)}'
        # One that is killed does not end the stream as it should be ended.
        if isinstance(error, EOFError) or not self._is_written:
          kind = _wire.UntakenError
      raise kind(f'The server at {self._address} {text}.') from error

  def close(self) -> None:
    """Hangs up. Twice is no error."""
    if self._is_closed:
      return
    self._is_closed = True
    self._watchdog.close()
    self._reader.cancel()
    with contextlib.suppress(*_flight_stream.STREAM_ERRORS):
      self._writer.close()  # It says that the call was cancelled, just now.
    self._client.close()
    # The socket is open for as long as anything refers to these.
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
        self._watchdog.renew,
      )
      self._is_written = True
    except _flight_stream.STREAM_ERRORS:
      if self._watchdog.has_barked:
        raise
      # A server that cut us off may have said why, which is read next.

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
    """The next of the stream."""
    try:
      chunk = self._reader.read_chunk()
    except StopIteration:  # Which must not pass through a generator.
      raise EOFError from None
    self._watchdog.renew()
    return chunk

  def _get_buffer(self) -> np.ndarray:
    """The buffer whose payload is the older one of two."""
    if len(self._incoming) < 2:
      self._incoming.append(_buffers.make_aligned(self._payload_size))
    else:
      self._incoming.reverse()
    return self._incoming[-1]
