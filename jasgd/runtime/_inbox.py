"""What the server's owner thread waits on."""

import collections
from collections.abc import Callable, Iterable
import os
import select
import threading
import time
from typing import Any


class Inbox:
  """Events from everywhere, for one thread that takes them out.

  Threads of other wires `put` events in. Sockets that the owner reads itself
  are watched: when one is readable its callback gives the events, so that
  nothing is handed from thread to thread on the way that must be fast.
  """

  def __init__(self) -> None:
    self._events: collections.deque[Any] = collections.deque()
    self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    self._poll = select.epoll()
    self._poll.register(self._wake, select.EPOLLIN)
    self._callbacks: dict[int, Callable[[], Iterable[Any]]] = {}
    # Of `_wake`, while it is ours. A handler of signals may `put`, too.
    self._lock = threading.RLock()
    self._is_closed = False

  def put(self, event: Any) -> None:
    """Adds an event, from any thread. After `close` it goes nowhere."""
    with self._lock:  # Once closed, its number may be someone else's file.
      if not self._is_closed:
        self._events.append(event)
        os.eventfd_write(self._wake, 1)

  def watch(self, fd: int, callback: Callable[[], Iterable[Any]]) -> None:
    """Calls back, in the owner's thread, whenever a socket is readable."""
    self._callbacks[fd] = callback
    self._poll.register(fd, select.EPOLLIN)

  def unwatch(self, fd: int) -> None:
    """Forgets a socket, which is still open. Twice is no error."""
    if self._callbacks.pop(fd, None) is not None and not self._is_closed:
      self._poll.unregister(fd)

  def get(self, timeout: float) -> Any | None:
    """The next event; None if there was none within `timeout` seconds."""
    if not self._events:
      deadline = time.monotonic() + timeout
      self._collect(timeout)
      # Not all that wakes is an event: a socket may have had none to give.
      while not self._events and (left := deadline - time.monotonic()) > 0:
        self._collect(left)
    return self._events.popleft() if self._events else None

  def _collect(self, timeout: float) -> None:
    """Waits until something is there, and takes in what is."""
    for fd, _ in self._poll.poll(max(timeout, 0)):  # Below 0 is for ever.
      if fd == self._wake:
        os.eventfd_read(fd)
      elif fd in self._callbacks:  # An earlier one may have unwatched it.
        self._events.extend(self._callbacks[fd]())

  def __len__(self) -> int:
    """Events that can be had without waiting."""
    return len(self._events)

  def close(self) -> None:
    """Gives the file descriptors back. Twice is no error."""
    with self._lock:
      if not self._is_closed:
        self._is_closed = True
        self._poll.close()
        os.close(self._wake)
