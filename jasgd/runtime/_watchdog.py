"""A time-out for what can not have one of its own."""

from collections.abc import Callable
import math
import threading
import time

# Seconds after which a thread that should have ended is waited for no longer.
_END = 10.0
# Seconds that a watchdog sleeps at most.
_SLEEP = 60.0


class Watchdog:
  """A thread that cancels a call when nothing came for too long.

  Attributes:
    has_barked: Whether it did.
  """

  def __init__(self, cancel: Callable[[], None]) -> None:
    self.has_barked = False
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
    """From now on something must come within `deadline` seconds."""
    self._deadline = deadline
    with self._condition:
      self._due = time.monotonic() + deadline
      if self._due < self._wakes:  # Else it wakes too early, and sleeps on.
        self._condition.notify()

  def renew(self) -> None:
    """Something came."""
    self._due = time.monotonic() + self._deadline

  def rest(self) -> None:
    """Nothing needs to come."""
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
          self.has_barked = True
          break
        self._wakes = min(self._due, now + _SLEEP)
        self._condition.wait(self._wakes - now)
    if self.has_barked:
      self._cancel()
    del self._cancel  # It keeps the stream.
