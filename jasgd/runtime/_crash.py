"""Places where a test may kill a process, to see that nothing is lost."""

from collections.abc import Callable
import os
import signal

# 'updated:17' kills this process the 17th time that it has updated;
# 'updated:17:learner' kills the learner whose message is being handled.
VARIABLE = 'JASGD_CRASH'

POINTS = (
  'received',
  'accumulated',
  'updated',
  'recorded',
  'published',
  'replied',
  'checkpoint_begun',
  'checkpoint_committed',
)


class CrashPoints:
  """Counts how often each point was passed, and kills at the chosen one.

  Args:
    text: Where, as in the environment's variable; '': nowhere.

  Raises:
    ValueError: if there is no such point.
  """

  def __init__(self, text: str | None = None) -> None:
    text = os.environ.get(VARIABLE, '') if text is None else text
    self.is_armed = bool(text)
    point, count, victim = (*text.split(':'), '', '', '')[:3]
    if text and (point not in POINTS or not count.isdecimal()):
      raise ValueError(
        f'{VARIABLE} must be POINT:COUNT or POINT:COUNT:learner, with a point '
        f'of {", ".join(POINTS)}, got {text!r}.'
      )
    self._point = point
    self._left = int(count or 0)
    self._spares_me = victim == 'learner'

  def disarm(self) -> None:
    """Kills nobody from now on."""
    self.is_armed = False
    self._left = 0

  def reach(self, point: str, find_learner: Callable[[], int]) -> None:
    """Notes that a point was reached; `find_learner` gives a process's id."""
    if point != self._point:
      return
    self._left -= 1
    if self._left == 0:
      victim = find_learner() if self._spares_me else os.getpid()
      if victim > 0:  # Or it is not known.
        os.kill(victim, signal.SIGKILL)
