"""The interface of every wire, for servers and for their clients.

A client has one request under way at a time, and blocks until it is answered.
The server gets requests as events in its inbox, and answers through the channel
of the client, now or later. Wires know nothing of learners and versions.
"""

import abc
import collections
from collections.abc import Callable, Iterable
import os
import select
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from jasgd.runtime.wires import _buffers
from jasgd.runtime.wires import _messages


class WireError(ConnectionError):
  """The other side is gone, or was silent for too long."""


class UntakenError(WireError):
  """The other side is gone, and has certainly not handled the request."""


class RefusedError(ValueError):
  """The server refused a request; the text says why."""


class Channel(abc.ABC):
  """A client's connection, as the server sees it. It is hashable.

  Attributes:
    name: Name for people: the wire and its other end.
    pid: Process id of the client, if it is on this host and known; else 0.
  """

  name: str
  pid: int = 0

  @abc.abstractmethod
  def send(
    self,
    message: _messages.Message,
    snapshot: _buffers.Buffer | None = None,
  ) -> None:
    """Sends an answer. Never blocks; does nothing if the client is gone.

    Only the owner's thread calls it.

    Args:
      message: The answer; its own `payload` is ignored.
      snapshot: Weights, which the client leases: the server does not change
        them for as long as the client may use them.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Disconnects once all answers are sent. No event follows; repeatable."""


class Event(NamedTuple):
  """A message on a channel, an error, or the end of the channel.

  A bad message has only an `error`: the wire has refused it, and the server
  counts it. With neither message nor error, the client is gone, and no more
  events of this channel follow.
  """

  channel: Channel
  message: _messages.Message | None = None
  error: _messages.MessageError | None = None


class Listener(abc.ABC):
  """Accepts clients, and puts their requests into an inbox.

  A message with a payload of the wrong size is refused before the payload is
  read.

  Attributes:
    address: Address for clients.
  """

  address: str

  @abc.abstractmethod
  def close(self) -> None:
    """Disconnects all clients, and ends all threads. Twice is no error."""


class Connection(abc.ABC):
  """A client's side. It belongs to one thread at a time."""

  @property
  @abc.abstractmethod
  def outgoing(self) -> np.ndarray:
    """Aligned bytes, to write a payload into before it is sent.

    The client may write from the answer to one request until it sends the next.
    """

  @abc.abstractmethod
  def _send(
    self, message: _messages.Message, has_payload: bool, deadline: float
  ) -> None:
    """Sends a request.

    Raises:
      WireError: if the server is gone.
    """

  @abc.abstractmethod
  def _receive(self, deadline: float) -> _messages.Message:
    """Receives the next message of the server: a WAIT or an answer.

    Raises:
      WireError: if it is gone, silent, or sends garbage.
    """

  def request(
    self,
    message: _messages.Message,
    *,
    has_payload: bool = False,
    deadline: float,
    on_wait: Callable[[str], None] | None = None,
  ) -> _messages.Message:
    """Sends a request, and blocks until there is an answer other than WAIT.

    Args:
      message: The request.
      has_payload: Whether to send the bytes in `outgoing` with it.
      deadline: Seconds after which a server that sends nothing, not even a
        WAIT, counts as gone.
      on_wait: Function called with the text of each WAIT.

    Returns:
      The answer. Its payload, read-only and aligned, does not change until the
      second next answer with a payload: weights can be used while newer ones
      are fetched.

    Raises:
      WireError: if the server is gone, silent, or sends garbage. The connection
        is closed then.
      UntakenError: the same, if the server has certainly not handled the
        request, provided that it answers whatever it handles.
      RefusedError: if the answer is REFUSED.
    """
    try:
      self._send(message, has_payload, deadline)
      answer = self._receive(deadline)
      while answer.verb == _messages.Verb.WAIT:
        if on_wait is not None:
          on_wait(answer.text)
        answer = self._receive(deadline)
    except BaseException:
      # The answer may still come: no later request must take it for its own.
      self.close()
      raise
    if answer.verb == _messages.Verb.REFUSED:
      raise RefusedError(answer.text)
    return answer

  @abc.abstractmethod
  def close(self) -> None:
    """Disconnects. Twice is no error."""


class Inbox:
  """Events of all wires, for the owner's thread.

  Threads of some wires `put` events in. Sockets that the owner reads itself are
  watched: when one is readable, its callback gives the events, so that the fast
  wire hands nothing from thread to thread.
  """

  def __init__(self) -> None:
    self._events: collections.deque[Any] = collections.deque()
    self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    self._poll = select.epoll()
    self._poll.register(self._wake, select.EPOLLIN)
    self._callbacks: dict[int, Callable[[], Iterable[Any]]] = {}
    # Guards `_wake`. Reentrant, as a signal handler may `put`, too.
    self._lock = threading.RLock()
    self._is_closed = False

  def put(self, event: Any) -> None:
    """Adds an event, from any thread. After `close` it does nothing."""
    with self._lock:  # `close` must not free the descriptor during the write.
      if not self._is_closed:
        self._events.append(event)
        os.eventfd_write(self._wake, 1)

  def watch(self, fd: int, callback: Callable[[], Iterable[Any]]) -> None:
    """Calls `callback` in the owner's thread when a socket is readable."""
    self._callbacks[fd] = callback
    self._poll.register(fd, select.EPOLLIN)

  def unwatch(self, fd: int) -> None:
    """Ends the watch of a socket that is still open. Twice is no error."""
    if self._callbacks.pop(fd, None) is not None and not self._is_closed:
      self._poll.unregister(fd)

  def get(self, timeout: float) -> Any | None:
    """The next event; None if there was none within `timeout` seconds."""
    if not self._events:
      deadline = time.monotonic() + timeout
      self._collect(timeout)
      # A readable socket may have given no event.
      while not self._events and (left := deadline - time.monotonic()) > 0:
        self._collect(left)
    return self._events.popleft() if self._events else None

  def _collect(self, timeout: float) -> None:
    """Waits until a descriptor is readable, and takes its events."""
    for fd, _ in self._poll.poll(max(timeout, 0)):  # Below 0 means for ever.
      if fd == self._wake:
        os.eventfd_read(fd)
      elif fd in self._callbacks:  # An earlier callback may have unwatched it.
        self._events.extend(self._callbacks[fd]())

  def __len__(self) -> int:
    """Number of events that can be had without waiting."""
    return len(self._events)

  def close(self) -> None:
    """Closes the file descriptors. Twice is no error."""
    with self._lock:
      if not self._is_closed:
        self._is_closed = True
        self._poll.close()
        os.close(self._wake)


# Function of the bytes of a payload that connects to a server, or raises a
# WireError.
Connect = Callable[[int], Connection]
