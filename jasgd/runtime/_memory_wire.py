"""The wire between processes of one host: shared memory, the server's side.

Only words travel, over a unix socket that keeps the boundaries of messages. The
payloads stay where they are, in memfds that the server makes: one per client,
which it writes its gradients to, and the snapshots, which it can only read. A
client gets the file descriptor of a snapshot's buffer the first time that it is
answered with it, and from then on only its number. Who may touch a buffer
changes with a message, and with nothing else.

Neither the socket nor the memory has a name in a file system: the kernel takes
them back from whoever ends, however it ends.
"""

from collections.abc import Iterable
import errno
import logging
import os
import secrets
import select
import socket
import struct

from jasgd.runtime import _buffers
from jasgd.runtime import _inbox
from jasgd.runtime import _messages
from jasgd.runtime import _wire

_log = logging.getLogger(__name__)

SCHEME = 'memory:@'
# What the server sends begins with the number of the buffer that the payload is
# in. The first time that it is named, its file descriptor comes along.
PREFIX = struct.Struct('<i')
NO_PAYLOAD = -1
OUTGOING = (
  -2
)  # What the client writes to; the server's first message brings it.
MAX_PACKET = _messages.HEAD_SIZE + _messages.MAX_TEXT
_CREDENTIALS = struct.Struct('=iII')


def read_credentials(connected: socket.socket) -> tuple[int, int]:
  """Process and user at the other end, as the kernel knows them."""
  pid, uid, _ = _CREDENTIALS.unpack(
    connected.getsockopt(
      socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
  )
  return pid, uid


class MemoryListener(_wire.Listener):
  """Lets processes of the same user on this host talk to the server.

  All of it runs in the owner's thread, which calls `close`, too.

  Args:
    inbox: Where requests go.
    payload_size: Bytes of every payload.
    max_channels: How many clients there may be at a time.
  """

  def __init__(
    self,
    inbox: _inbox.Inbox,
    payload_size: int,
    *,
    max_channels: int = 4096,
  ) -> None:
    name = f'jasgd-{secrets.token_hex(16)}'
    self.address = SCHEME + name
    self.inbox = inbox
    self.payload_size = payload_size
    self.channels: set[_MemoryChannel] = set()
    # One more than is allowed, so that one can see when there is too much.
    self.packet = memoryview(bytearray(MAX_PACKET + 1))
    self._max_channels = max_channels
    self._spare_fd = os.open(os.devnull, os.O_RDONLY)
    self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self._socket.setblocking(False)
    self._socket.bind('\0' + name)  # Abstract: it is in no file system.
    self._socket.listen(socket.SOMAXCONN)
    inbox.watch(self._socket.fileno(), self._accept)

  def close(self) -> None:
    """Hangs up on everybody. Twice is no error."""
    if self._spare_fd >= 0:
      self.inbox.unwatch(self._socket.fileno())
      self._socket.close()
      if self._spare_fd >= 0:
        os.close(self._spare_fd)
        self._spare_fd = -1
      for channel in list(self.channels):
        channel.close()

  def _accept(self) -> Iterable[_wire.Event]:
    """Lets the next client in, or tells it why not."""
    try:
      accepted, _ = self._socket.accept()
    except (BlockingIOError, ConnectionError):
      return ()
    except OSError as error:
      if error.errno != errno.EMFILE:  # The machine has none left: later.
        _log.warning('A client could not come in: %s.', error)
        return ()
      return self._turn_away(error)
    channel = _MemoryChannel(self, accepted)
    try:
      self._check(channel)
      channel.greet()
    except _messages.MessageError as error:
      return channel.expel(error)
    except OSError as error:  # There is no memory for it, or no descriptor.
      return channel.expel(_messages.MessageError('crowded', str(error)))
    return ()

  def _check(self, channel: '_MemoryChannel') -> None:
    """Raises a MessageError if the client may not come in."""
    if channel.uid != os.geteuid():
      raise _messages.MessageError(
        'credentials',
        f'The server is of user {os.geteuid()}, the client of {channel.uid}.',
      )
    if len(self.channels) >= self._max_channels:
      raise _messages.MessageError(
        'crowded',
        f'There are {self._max_channels} clients, and no more may be.',
      )

  def _turn_away(self, error: OSError) -> Iterable[_wire.Event]:
    """Refuses a client for which there is no file descriptor.

    Left where it is, it would wake the server for ever.
    """
    if self._spare_fd >= 0:
      os.close(self._spare_fd)
      self._spare_fd = -1
    try:
      channel = _MemoryChannel(self, self._socket.accept()[0])
      events = channel.expel(_messages.MessageError('crowded', str(error)))
      self._spare_fd = os.open(os.devnull, os.O_RDONLY)
      return events
    except OSError as another:  # Somebody was faster: at the next client.
      _log.warning('A client could not be turned away: %s.', another)
      return ()


class _MemoryChannel(_wire.Channel):
  """A client, its socket and the memory that it writes to."""

  def __init__(self, listener: MemoryListener, accepted: socket.socket) -> None:
    accepted.setblocking(False)
    self.pid, self.uid = read_credentials(accepted)
    self.name = f'memory, process {self.pid}'
    self._listener = listener
    self._socket = accepted
    self._sent: set[int] = set()  # Buffers that the client has.
    self._is_closed = False

  def greet(self) -> None:
    """Lets the client in: gives it the memory to write to.

    Raises:
      OSError: if there is none.
    """
    fd, array = _buffers.make_shared(
      self._listener.payload_size, is_sealed=False
    )
    self._gradient = array.view()
    self._gradient.flags.writeable = False
    greeting = _messages.Message(_messages.Verb.ANSWER, payload=array)
    try:
      is_sent = self._transmit(OUTGOING, greeting, fd)
    finally:
      os.close(fd)
    if is_sent:
      self._listener.channels.add(self)
      self._listener.inbox.watch(self._socket.fileno(), self._receive)

  def expel(self, error: _messages.MessageError) -> Iterable[_wire.Event]:
    """Tells the client why it may not come in."""
    events = self._refuse(error)[:1]  # That it is gone goes without saying.
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
      is_sent = self._transmit(NO_PAYLOAD, message)
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
    """The descriptor to send along: -1 if the client has it already."""
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
    """Sends; False, and closed, if the client is gone or does not read."""
    data = PREFIX.pack(index) + _messages.encode_message(message)
    try:
      if fd < 0:
        self._socket.send(data)
      else:
        socket.send_fds(self._socket, [data], [fd])
    except OSError:  # To wait for room would be to wait for this client.
      self.close()
      return False
    return True

  def _receive(self) -> Iterable[_wire.Event]:
    """Takes one message in."""
    packet = self._listener.packet
    try:
      size = self._socket.recv_into(packet)
    except BlockingIOError:
      return ()
    except OSError:  # It left without having read everything.
      size = 0
    if not size and self._has_left():
      self.close()
      return (_wire.Event(self),)
    try:
      return (_wire.Event(self, self._decode(packet[:size])),)
    except _messages.MessageError as error:
      return self._refuse(error)

  def _decode(self, data: memoryview) -> _messages.Message:
    """The message, with its payload; a MessageError if it is no good."""
    if len(data) > MAX_PACKET:
      raise _messages.MessageError(
        'oversized', f'A message must have at most {MAX_PACKET} bytes.'
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
    """Says that a message was no good, to the client and to the server."""
    answer = _messages.Message(_messages.Verb.REFUSED, text=str(error))
    if self._transmit(NO_PAYLOAD, answer):
      return (_wire.Event(self, error=error),)
    return (_wire.Event(self, error=error), _wire.Event(self))

  def _has_left(self) -> bool:
    """Whether nothing came because the client is gone: it may be a message."""
    poll = select.poll()
    poll.register(self._socket, select.POLLRDHUP)
    return bool(poll.poll(0))
