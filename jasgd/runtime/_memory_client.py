"""The wire between processes of one host: shared memory, the client's side."""

import os
import socket
import struct

import numpy as np

from jasgd.runtime import _buffers
from jasgd.runtime import _memory_wire
from jasgd.runtime import _messages
from jasgd.runtime import _wire

_TIME = struct.Struct('@ll')  # The kernel's timeval.
_FD = struct.Struct('@i')
_FD_SPACE = socket.CMSG_LEN(_FD.size)  # Room for one, and not for two.


def connect_memory(
  address: str,
  payload_size: int,
  deadline: float,
  *,
  with_checksum: bool = False,
) -> _wire.Connection:
  """Connects to a `MemoryListener` of the same user on the same host.

  Args:
    address: Its address.
    payload_size: Bytes of every payload.
    deadline: Seconds within which the server must let the client in.
    with_checksum: Whether what is sent has a checksum of its payload, which the
      server verifies.

  Returns:
    The connection.

  Raises:
    ValueError: if that is no such address.
    WireError: if there is no server of this user, or it is silent.
    RefusedError: if the server has payloads of another size, or lets nobody in.
  """
  if not address.startswith(_memory_wire.SCHEME):
    raise ValueError(
      f'An address of shared memory begins with {_memory_wire.SCHEME!r}, '
      f'got {address!r}.'
    )
  connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  connection = _MemoryConnection(connected, payload_size, with_checksum)
  try:
    connection.join('\0' + address[len(_memory_wire.SCHEME) :], deadline)
  except BaseException:
    connection.close()
    raise
  return connection


class _MemoryConnection(_wire.Connection):
  """A client with a socket, and with the server's memory."""

  def __init__(
    self, connected: socket.socket, payload_size: int, with_checksum: bool
  ) -> None:
    self._socket = connected
    self._payload_size = payload_size
    self._with_checksum = with_checksum
    self._deadline = 0.0
    self._buffers: dict[int, np.ndarray] = {}  # By the server's number.
    self._packet = memoryview(
      bytearray(_memory_wire.PREFIX.size + _memory_wire.MAX_PACKET)
    )

  def join(self, name: str, deadline: float) -> None:
    """Lets the server give this client its memory."""
    self._set_deadline(deadline)
    try:
      self._socket.connect(name)
    except OSError as error:
      raise _wire.WireError(f'There is no server: {error}.') from error
    _, uid = _memory_wire.read_credentials(self._socket)
    if uid != os.geteuid():  # The name of a server that is gone may be reused.
      raise _wire.WireError(
        f'The server is of user {uid}, this client of {os.geteuid()}.'
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
    return self._buffers[_memory_wire.OUTGOING]

  def close(self) -> None:
    self._socket.close()

  def _set_deadline(self, deadline: float) -> None:
    """Lets the kernel keep the time, so that a wait is one call of it.

    A signal that is handled meanwhile lets it begin anew.
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
    del deadline  # The kernel knows it since the request was sent.
    try:
      size, ancillary, _, _ = self._socket.recvmsg_into(
        [self._packet], _FD_SPACE, socket.MSG_CMSG_CLOEXEC
      )
    except BlockingIOError as error:
      raise _wire.WireError(
        f'The server said nothing within {self._deadline:g} s.'
      ) from error
    except ConnectionResetError as error:
      # So the kernel says that what we sent was never read.
      raise _wire.UntakenError(f'The server is gone: {error}.') from error
    except OSError as error:
      raise _wire.WireError(f'The server is gone: {error}.') from error
    if not size and not ancillary:
      raise _wire.WireError('The server has closed the connection.')
    fd = _FD.unpack(ancillary[0][2])[0] if ancillary else -1
    try:
      return self._decode(self._packet[:size], fd)
    except (OSError, ValueError, struct.error) as error:
      raise _wire.WireError(
        f'What the server said can not be understood: {error}'
      ) from error
    finally:
      if fd >= 0:
        os.close(fd)

  def _decode(self, packet: memoryview, fd: int) -> _messages.Message:
    """The message in a packet; its payload is in a buffer that is mapped."""
    (index,) = _memory_wire.PREFIX.unpack_from(packet)
    message, payload_size = _messages.decode_message(
      packet[_memory_wire.PREFIX.size :]
    )
    if index != _memory_wire.NO_PAYLOAD:
      if fd >= 0:
        self._buffers[index] = _buffers.map_shared(
          fd, payload_size, is_writable=index == _memory_wire.OUTGOING
        )
      elif index not in self._buffers:  # None came, or none could be taken.
        raise ValueError(f'there is no file descriptor of buffer {index}.')
      message.payload = self._buffers[index]
    return message
