"""Crash points: places where a test may kill a process. Only tests use them.

A process has crash points only if the variable is set in its environment;
otherwise passing a point costs a comparison with None.
"""

from collections.abc import Callable
import os
import signal

# 'updated:17' kills the server the 17th time that it passes 'updated';
# 'updated:17:learner' kills the learner whose message is being handled then;
# 'computing:17:learner-1' kills the process of that name when it passes
# 'computing' for the 17th time.
VARIABLE = 'JASGD_CRASH'

# Points of a server.
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
# Points of a learner.
LEARNER_POINTS = (
  'computing',  # In a gradient; nothing of it has been sent.
  'writing',  # Half of a gradient is in the buffer of outgoing messages.
  'sending',  # Part of a gradient was sent, in a stream of several chunks.
)


class CrashPoints:
  """Counts how often a point is passed, and kills at the chosen count.

  Args:
    text: Point, count and victim, as in the environment variable.
    find_victim: Function that gives the process id of the victim; 0 if it is
      not known.

  Raises:
    ValueError: if there is no such point.
  """

  def __init__(self, text: str, find_victim: Callable[[], int]) -> None:
    point, count, victim = (*text.split(':'), '', '', '')[:3]
    is_own = victim not in ('', 'learner')
    points = LEARNER_POINTS if is_own else POINTS
    if point not in points or not count.isdecimal():
      raise ValueError(
        f'{VARIABLE} must be POINT:COUNT or POINT:COUNT:learner, with a point '
        f'of {", ".join(POINTS)}; or POINT:COUNT:PROCESS, with a point of '
        f'{", ".join(LEARNER_POINTS)}; got {text!r}.'
      )
    self._point = point
    self._left = int(count)
    self._find_victim = find_victim

  def maybe_crash(
    self, point: str, prepare: Callable[[], object] | None = None
  ) -> None:
    """Passes a point; at the chosen count of the chosen point, kills.

    Args:
      point: Name of the point.
      prepare: Function called just before the kill.
    """
    if point != self._point:
      return
    self._left -= 1
    if self._left == 0:
      if prepare is not None:
        prepare()
      victim = self._find_victim()
      if victim > 0:  # 0: it is not known.
        os.kill(victim, signal.SIGKILL)


def make_crash_points(find_learner: Callable[[], int]) -> CrashPoints | None:
  """Crash points of a server; None: the environment asks for none.

  Args:
    find_learner: Function that gives the process id of the learner whose
      message is being handled; 0 if it is not known.

  Returns:
    The crash points, or None.
  """
  text = os.environ.get(VARIABLE, '')
  victim = text.split(':')[2:]
  if not text or victim not in ([], ['learner']):
    return None
  return CrashPoints(text, find_learner if victim else os.getpid)


# Crash points of this process, if it is not a server.
_own: CrashPoints | None = None


def start_process(name: str) -> None:
  """Sets crash points if the environment asks to kill the process `name`."""
  global _own
  text = os.environ.get(VARIABLE, '')
  if text.split(':')[2:] == [name]:
    _own = CrashPoints(text, os.getpid)


def maybe_crash(
  point: str, prepare: Callable[[], object] | None = None
) -> None:
  """Passes a point of this process; see `CrashPoints.maybe_crash`."""
  if _own is not None:
    _own.maybe_crash(point, prepare)
