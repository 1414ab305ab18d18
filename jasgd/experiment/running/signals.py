"""Ctrl-C and SIGTERM, as a request to end in good order."""

from collections.abc import Iterator
import contextlib
import signal
import threading
from types import FrameType


@contextlib.contextmanager
def take_signals(
  stopped: threading.Event, *, is_once: bool = False
) -> Iterator[None]:
  """Sets an event when Ctrl-C or SIGTERM arrives, instead of ending.

  Only the main thread can take signals: in other threads it does nothing.

  Args:
    stopped: The event.
    is_once: Whether a second signal raises a KeyboardInterrupt, at once.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def handle(number: int, frame: FrameType | None) -> None:
    del number, frame
    if is_once and stopped.is_set():
      raise KeyboardInterrupt
    stopped.set()

  handlers = {
    number: signal.signal(number, handle)
    for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    yield
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
