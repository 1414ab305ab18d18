"""The wire between processes of one host: shared memory.

Only heads and texts are sent, over a unix socket that keeps the boundaries of
messages. Payloads stay in memfds that the server makes: one per client, to
which it writes its gradients, and the snapshots, which it can only read. A
client gets the file descriptor of a snapshot's buffer with the first answer
that uses it, and only its number with later ones. Only messages change which
side may touch a buffer.

Neither the socket nor the memory has a name in a file system: the kernel frees
them when the processes end, however they end.
"""

from collections.abc import Iterable
import errno
import logging
import os
import secrets
import select
import socket
import struct

import numpy as np

from jasgd.runtime.wires import _buffers
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

_log = logging.getLogger(__name__)

_SCHEME = 'memory:@'
# A message of the server begins with the number of the buffer that has its
# payload. The first message with this number carries the file descriptor.
_PREFIX = struct.Struct('<i')
_NO_PAYLOAD = -1
# The buffer that the client writes to; the server's first message carries it.
_OUTGOING = -2
_MAX_PACKET = _messages.HEAD_SIZE + _messages.MAX_TEXT
_CREDENTIALS = struct.Struct('=iII')
_TIME = struct.Struct('@ll')  # The kernel's timeval.
_FD = struct.Struct('@i')
_FD_SPACE = socket.CMSG_LEN(_FD.size)  # Space for exactly one.


def _read_credentials(connected: socket.socket) -> tuple[int, int]:
  """Process id and user id of the other end, from the kernel."""
  pid, uid, _ = _CREDENTIALS.unpack(
    connected.getsockopt(
      socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
  )
  return pid, uid


class MemoryListener(_wire.Listener):
  """Accepts processes of the same user on this host.

  The owner's thread calls all methods and callbacks.

  Args:
    inbox: Inbox of requests.
    payload_size: Bytes of every payload.
    max_channels: Largest number of clients at a time.
  """

  def __init__(
    self,
    inbox: _wire.Inbox,
    payload_size: int,
    *,
    max_channels: int = 4096,
  ) -> None:
    name = f'jasgd-{secrets.token_hex(16)}'
    self.address = _SCHEME + name
    self.inbox = inbox
    self.payload_size = payload_size
    self.channels: set[_MemoryChannel] = set()
    # One byte more than is allowed, to see when a message is too long.
    self.packet = memoryview(bytearray(_MAX_PACKET + 1))
    self._max_channels = max_channels
    self._spare_fd = os.open(os.devnull, os.O_RDONLY)
    self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self._socket.setblocking(False)
    self._socket.bind('\0' + name)  # Abstract: in no file system.
    self._socket.listen(socket.SOMAXCONN)
    inbox.watch(self._socket.fileno(), self._accept)

  def close(self) -> None:
    """Disconnects all clients. Twice is no error."""
    if self._spare_fd >= 0:
      self.inbox.unwatch(self._socket.fileno())
      self._socket.close()
      if self._spare_fd >= 0:
        os.close(self._spare_fd)
        self._spare_fd = -1
      for channel in list(self.channels):
        channel.close()

  def _accept(self) -> Iterable[_wire.Event]:
    """Accepts the next client, or tells it why not."""
    try:
      accepted, _ = self._socket.accept()
    except (BlockingIOError, ConnectionError):
      return ()
    except OSError as error:
      if error.errno != errno.EMFILE:  # The machine has no resources left.
        _log.warning('A client could not be accepted: %s.', error)
        return ()
      return self._turn_away(error)
    channel = _MemoryChannel(self, accepted)
    try:
      self._check(channel)
      channel.greet()
    except _messages.MessageError as error:
      return channel.expel(error)
    except OSError as error:  # No memory, or no file descriptor.
      return channel.expel(_messages.MessageError('crowded', str(error)))
    return ()

  def _check(self, channel: '_MemoryChannel') -> None:
    """Raises a MessageError if the client is not accepted."""
    if channel.uid != os.geteuid():
      raise _messages.MessageError(
        'credentials',
        f'The server belongs to user {os.geteuid()}, the client to user '
        f'{channel.uid}.',
      )
    if len(self.channels) >= self._max_channels:
      raise _messages.MessageError(
        'crowded',
        f'There are {self._max_channels} clients already, the most allowed.',
      )

  def _turn_away(self, error: OSError) -> Iterable[_wire.Event]:
    """Refuses a client for which there is no file descriptor.

    A client that stays in the queue of the socket would wake the server again
    and again. The spare descriptor is closed to accept the client.
    """
    if self._spare_fd >= 0:
      os.close(self._spare_fd)
      self._spare_fd = -1
    try:
      channel = _MemoryChannel(self, self._socket.accept()[0])
      events = channel.expel(_messages.MessageError('crowded', str(error)))
      self._spare_fd = os.open(os.devnull, os.O_RDONLY)
      return events
    except OSError as another:  # Another thread took the spare descriptor.
      _log.warning('A client could not be refused: %s.', another)
      return ()


class _MemoryChannel(_wire.Channel):
  """A client's socket, and the memory that it writes to."""

  def __init__(self, listener: MemoryListener, accepted: socket.socket) -> None:
    accepted.setblocking(False)
    self.pid, self.uid = _read_credentials(accepted)
    self.name = f'memory, process {self.pid}'
    self._listener = listener
    self._socket = accepted
    self._sent: set[int] = set()  # Buffers that the client has mapped.
    self._is_closed = False

  def greet(self) -> None:
    """Accepts the client: gives it the memory to write to.

    Raises:
      OSError: if there is no memory, or no file descriptor.
    """
    fd, array = _buffers.make_shared(
      self._listener.payload_size, is_sealed=False
    )
    self._gradient = array.view()
    self._gradient.flags.writeable = False
    greeting = _messages.Message(_messages.Verb.ANSWER, payload=array)
    try:
      is_sent = self._transmit(_OUTGOING, greeting, fd)
    finally:
      os.close(fd)
    if is_sent:
      self._listener.channels.add(self)
      self._listener.inbox.watch(self._socket.fileno(), self._receive)

  def expel(self, error: _messages.MessageError) -> Iterable[_wire.Event]:
    """Tells the client why it is not accepted, and disconnects."""
    events = self._refuse(error)[:1]  # Without the event that it is gone.
    self.close()
    return events

  def send(
    self,
    message: _messages.Message,
    snapshot: _buffers.Buffer | None = None,
  ) -> None:
    if self._is_closed:
      return
    if snapshot is None:
      message.payload = None
      is_sent = self._transmit(_NO_PAYLOAD, message)
    else:
      message.payload = snapshot.array
      is_sent = self._transmit(snapshot.index, message, self._pick_fd(snapshot))
    if not is_sent:
      self._listener.inbox.put(_wire.Event(self))

  def close(self) -> None:
    if not self._is_closed:
      self._is_closed = True
      self._listener.channels.discard(self)
      self._listener.inbox.unwatch(self._socket.fileno())
      self._socket.close()

  def _pick_fd(self, snapshot: _buffers.Buffer) -> int:
    """The file descriptor to send; -1 if the client has it already."""
    if snapshot.index in self._sent:
      return -1
    size = self._listener.payload_size
    if snapshot.fd < 0 or snapshot.array.nbytes != size:
      raise ValueError(
        f'A snapshot must be shared and have {size} bytes, got '
        f'{snapshot.array.nbytes} bytes and file descriptor {snapshot.fd}.'
      )
    self._sent.add(snapshot.index)
    return snapshot.fd

  def _transmit(
    self, index: int, message: _messages.Message, fd: int = -1
  ) -> bool:
    """Sends; closes and gives False if the client is gone or does not read."""
    data = _PREFIX.pack(index) + _messages.encode_message(message)
    try:
      if fd < 0:
        self._socket.send(data)
      else:
        socket.send_fds(self._socket, [data], [fd])
    except OSError:  # A full socket: the server must not wait for a client.
      self.close()
      return False
    return True

  def _receive(self) -> Iterable[_wire.Event]:
    """Receives one message."""
    packet = self._listener.packet
    try:
      size = self._socket.recv_into(packet)
    except BlockingIOError:
      return ()
    except OSError:  # The client left without having read everything.
      size = 0
    if not size and self._has_left():
      self.close()
      return (_wire.Event(self),)
    try:
      return (_wire.Event(self, self._decode(packet[:size])),)
    except _messages.MessageError as error:
      return self._refuse(error)

  def _decode(self, data: memoryview) -> _messages.Message:
    """The message with its payload; raises a MessageError if it is bad."""
    if len(data) > _MAX_PACKET:
      raise _messages.MessageError(
        'oversized', f'A message must have at most {_MAX_PACKET} bytes.'
      )
    message, payload_size = _messages.decode_message(data)
    if payload_size:
      if payload_size != self._listener.payload_size:
        raise _messages.MessageError(
          'size',
          f'A payload must have {self._listener.payload_size} bytes, '
          f'got {payload_size}.',
        )
      _messages.check_payload(data, self._gradient)
      message.payload = self._gradient
    return message

  def _refuse(self, error: _messages.MessageError) -> tuple[_wire.Event, ...]:
    """Tells the client and the server that a message was bad."""
    answer = _messages.Message(_messages.Verb.REFUSED, text=str(error))
    if self._transmit(_NO_PAYLOAD, answer):
      return (_wire.Event(self, error=error),)
    return (_wire.Event(self, error=error), _wire.Event(self))

  def _has_left(self) -> bool:
    """Whether the client is gone; if not, it has sent an empty message."""
    poll = select.poll()
    poll.register(self._socket, select.POLLRDHUP)
    return bool(poll.poll(0))


def connect_memory(
  address: str,
  payload_size: int,
  deadline: float,
  *,
  with_checksum: bool = False,
) -> _wire.Connection:
  """Connects to a `MemoryListener` of the same user on the same host.

  Args:
    address: Address of the listener.
    payload_size: Bytes of every payload.
    deadline: Seconds within which the server must accept the client.
    with_checksum: Whether requests have a checksum of their payload.

  Returns:
    The connection.

  Raises:
    ValueError: if that is no address of shared memory.
    WireError: if there is no server of this user, or it is silent.
    RefusedError: if the server has payloads of another size, or is full.
  """
  if not address.startswith(_SCHEME):
    raise ValueError(
      f'An address of shared memory begins with {_SCHEME!r}, got {address!r}.'
    )
  connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  connection = _MemoryConnection(connected, payload_size, with_checksum)
  try:
    connection.join('\0' + address[len(_SCHEME) :], deadline)
  except BaseException:
    connection.close()
    raise
  return connection


class _MemoryConnection(_wire.Connection):
  """A client's socket, and the server's memory that it has mapped."""

  def __init__(
    self, connected: socket.socket, payload_size: int, with_checksum: bool
  ) -> None:
    self._socket = connected
    self._payload_size = payload_size
    self._with_checksum = with_checksum
    self._deadline = 0.0
    self._buffers: dict[int, np.ndarray] = {}  # By the server's numbers.
    self._packet = memoryview(bytearray(_PREFIX.size + _MAX_PACKET))

  def join(self, name: str, deadline: float) -> None:
    """Connects, and maps the memory to write to."""
    self._set_deadline(deadline)
    try:
      self._socket.connect(name)
    except OSError as error:
      address = _SCHEME + name[1:]
      raise _wire.WireError(
        f'There is no server at {address}: {error}.'
      ) from error
    _, uid = _read_credentials(self._socket)
    # Another user may have taken the name of a dead server.
    if uid != os.geteuid():
      raise _wire.WireError(
        f'The server belongs to user {uid}, this client to user {os.geteuid()}.'
      )
    greeting = self._receive(deadline)
    if greeting.verb == _messages.Verb.REFUSED:
      raise _wire.RefusedError(greeting.text)
    size = 0 if greeting.payload is None else greeting.payload.nbytes
    if size != self._payload_size:
      raise _wire.RefusedError(
        f'The server has payloads of {size} bytes, this client '
        f'of {self._payload_size}.'
      )

  @property
  def outgoing(self) -> np.ndarray:
    return self._buffers[_OUTGOING]

  def close(self) -> None:
    self._socket.close()

  def _set_deadline(self, deadline: float) -> None:
    """Sets the time-out of the socket, so that a wait is one system call.

    If a signal is handled meanwhile, the time-out starts again.
    """
    if deadline != self._deadline:
      seconds, rest = divmod(max(round(deadline * 1e6), 1), 1_000_000)
      value = _TIME.pack(seconds, rest)
      for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)
      self._deadline = deadline

  def _send(
    self, message: _messages.Message, has_payload: bool, deadline: float
  ) -> None:
    message.payload = self.outgoing if has_payload else None
    data = _messages.encode_message(message, self._with_checksum)
    try:
      self._set_deadline(deadline)
      self._socket.send(data)
    except OSError as error:  # A packet goes as a whole, or not at all.
      raise _wire.UntakenError(f'The server is gone: {error}.') from error

  def _receive(self, deadline: float) -> _messages.Message:
    del deadline  # `_send` has set it as the time-out of the socket.
    try:
      size, ancillary, _, _ = self._socket.recvmsg_into(
        [self._packet], _FD_SPACE, socket.MSG_CMSG_CLOEXEC
      )
    except BlockingIOError as error:
      raise _wire.WireError(
        f'The server said nothing within {self._deadline:g} s.'
      ) from error
    except ConnectionResetError as error:
      # The kernel raises this if the server never read the request.
      raise _wire.UntakenError(f'The server is gone: {error}.') from error
    except OSError as error:
      raise _wire.WireError(f'The server is gone: {error}.') from error
    if not size and not ancillary:
      raise _wire.WireError('The server has closed the connection.')
    fd = _FD.unpack(ancillary[0][2])[0] if ancillary else -1
    try:
      return self._decode(self._packet[:size], fd)
    except (OSError, ValueError, struct.error) as error:
      raise _wire.WireError(f'The server sent garbage: {error}') from error
    finally:
      if fd >= 0:
        os.close(fd)

  def _decode(self, packet: memoryview, fd: int) -> _messages.Message:
    """The message in a packet; its payload is a mapped buffer."""
    (index,) = _PREFIX.unpack_from(packet)
    message, payload_size = _messages.decode_message(packet[_PREFIX.size :])
    if index != _NO_PAYLOAD:
      if fd >= 0:
        self._buffers[index] = _buffers.map_shared(
          fd, payload_size, is_writable=index == _OUTGOING
        )
      elif index not in self._buffers:  # It was not sent, or not received.
        raise ValueError(f'there is no file descriptor of buffer {index}.')
      message.payload = self._buffers[index]
    return message
