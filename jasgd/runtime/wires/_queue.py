"""The wire between threads of one process: a queue; nothing is copied.

Payloads are passed by reference: the server reads the client's own buffer, and
the client reads the snapshot that it leases.
"""

from collections.abc import Callable
import dataclasses
import os
import queue
import threading

import numpy as np

from jasgd.runtime.wires import _buffers
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire


class QueueListener(_wire.Listener):
  """Accepts threads of this process.

  Args:
    inbox: Inbox of requests.
    payload_size: Bytes of every payload.
  """

  def __init__(self, inbox: _wire.Inbox, payload_size: int) -> None:
    self.address = 'queue:'
    self._inbox = inbox
    self._payload_size = payload_size
    self._lock = threading.Lock()
    self._channels: set[_QueueChannel] = set()
    self._is_closed = False

  def connect(self) -> _wire.Connection:
    """Makes a connection, from any thread.

    Raises:
      WireError: if the listener is closed.
    """
    channel = _QueueChannel(self._inbox, self._forget)
    with self._lock:
      if self._is_closed:
        raise _wire.WireError('The server is closed.')
      self._channels.add(channel)
    return _QueueConnection(channel, self._payload_size)

  def close(self) -> None:
    """Disconnects all clients. Twice is no error."""
    with self._lock:
      self._is_closed = True
      channels = list(self._channels)
    for channel in channels:
      channel.close()

  def _forget(self, channel: '_QueueChannel') -> None:
    """Removes a closed channel."""
    with self._lock:
      self._channels.discard(channel)


class _QueueChannel(_wire.Channel):
  """A channel that both sides use; the server calls `send` and `close`."""

  def __init__(
    self,
    inbox: _wire.Inbox,
    forget: Callable[['_QueueChannel'], None],
  ) -> None:
    self.name = f'queue, {threading.current_thread().name}'
    self.pid = os.getpid()
    # Answers for the client; None: there will be no more.
    self.answers: queue.SimpleQueue[_messages.Message | None] = (
      queue.SimpleQueue()
    )
    self._inbox = inbox
    self._forget = forget
    self._lock = threading.Lock()
    self._is_closed = False

  def send(
    self,
    message: _messages.Message,
    snapshot: _buffers.Buffer | None = None,
  ) -> None:
    if not self._is_closed:
      payload = None if snapshot is None else _view_readonly(snapshot.array)
      self.answers.put(dataclasses.replace(message, payload=payload))

  def close(self) -> None:
    self._end(tells_server=False)

  def receive(self, message: _messages.Message) -> bool:
    """Takes a client's request; False if the server has disconnected."""
    with self._lock:  # No event may follow the server's `close`.
      if not self._is_closed:
        self._inbox.put(_wire.Event(self, message))
      return not self._is_closed

  def leave(self) -> None:
    """Disconnects the client, and tells the server unless it did so before."""
    self._end(tells_server=True)

  def _end(self, tells_server: bool) -> None:
    """Closes the channel; only the first call has an effect."""
    with self._lock:
      if self._is_closed:
        return
      self._is_closed = True
      if tells_server:
        self._inbox.put(_wire.Event(self))
    self.answers.put(None)
    self._forget(self)


class _QueueConnection(_wire.Connection):
  """A client's side of a channel."""

  def __init__(self, channel: _QueueChannel, payload_size: int) -> None:
    self._channel = channel
    self._outgoing = _buffers.make_aligned(payload_size)
    self._sent = _view_readonly(self._outgoing)

  @property
  def outgoing(self) -> np.ndarray:
    return self._outgoing

  def _send(
    self, message: _messages.Message, has_payload: bool, deadline: float
  ) -> None:
    del deadline  # A queue takes a message at once.
    payload = self._sent if has_payload else None
    if not self._channel.receive(dataclasses.replace(message, payload=payload)):
      raise _wire.UntakenError('The connection is closed.')

  def close(self) -> None:
    self._channel.leave()

  def _receive(self, deadline: float) -> _messages.Message:
    try:
      answer = self._channel.answers.get(timeout=deadline)
    except queue.Empty:
      raise _wire.WireError(
        f'The server said nothing within {deadline:g} s.'
      ) from None
    if answer is None:
      raise _wire.WireError('The server has closed the connection.')
    return answer


def _view_readonly(array: np.ndarray) -> np.ndarray:
  """A read-only view of the same bytes."""
  view = array.view()
  view.flags.writeable = False
  return view
