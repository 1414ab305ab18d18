"""Crash points: places where a test may kill a process. Not for users.

A server has crash points only if the variable is set in its environment;
otherwise its `CrashPoints` is None, and passing a point costs nothing.
"""

from collections.abc import Callable
import os
import signal

# 'updated:17' kills the server the 17th time that it passes 'updated';
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
  """Counts how often a point is passed, and kills at the chosen count.

  Args:
    text: Point, count and victim, as in the environment variable.
    find_learner: Gives the process id of the learner whose message is being
      handled; 0 if it is not known.

  Raises:
    ValueError: if there is no such point.
  """

  def __init__(self, text: str, find_learner: Callable[[], int]) -> None:
    point, count, victim = (*text.split(':'), '', '', '')[:3]
    if point not in POINTS or not count.isdecimal():
      raise ValueError(
        f'{VARIABLE} must be POINT:COUNT or POINT:COUNT:learner, with a point '
        f'of {", ".join(POINTS)}, got {text!r}.'
      )
    self._point = point
    self._left = int(count)
    self._kills_learner = victim == 'learner'
    self._find_learner = find_learner

  def maybe_crash(self, point: str) -> None:
    """Passes a point; at the chosen count of the chosen point, kills."""
    if point != self._point:
      return
    self._left -= 1
    if self._left == 0:
      victim = self._find_learner() if self._kills_learner else os.getpid()
      if victim > 0:  # 0: it is not known.
        os.kill(victim, signal.SIGKILL)


def make_crash_points(find_learner: Callable[[], int]) -> CrashPoints | None:
  """Crash points that the environment asks for; None: it asks for none."""
  text = os.environ.get(VARIABLE, '')
  return CrashPoints(text, find_learner) if text else None
