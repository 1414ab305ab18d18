"""Ctrl-C and SIGTERM, as a request for a good end."""

from collections.abc import Iterator
import contextlib
import signal
import threading
from types import FrameType


@contextlib.contextmanager
def take_signals(
  stopped: threading.Event, *, is_once: bool = False
) -> Iterator[None]:
  """Sets an event where Ctrl-C or SIGTERM would end the process.

  Only the main thread can: in others it does nothing.

  Args:
    stopped: The event.
    is_once: Whether a second one raises a KeyboardInterrupt, at once.
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
