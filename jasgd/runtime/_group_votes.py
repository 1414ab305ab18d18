"""What the processes of a group agree on.

All tell each other the same numbers, and decide from them alike.
"""

from collections.abc import Callable, Iterable
import time
from typing import NamedTuple

import numpy as np

# Between two votes, in seconds; and in steps, if these are short.
_SECONDS = 0.5
_MAX_STEPS = 100
# Bytes of an address, at most.
_MAX_ADDRESS = 128
# More checkpoints than a node keeps.
_MAX_CHECKPOINTS = 8
# The largest number that can be told.
_MAX_NUMBER = 2**31 - 1


class Verdict(NamedTuple):
  """What a vote gave."""

  stopping: list[int]  # The nodes that were told to end: so do all.
  is_diverged: bool  # For anybody.
  is_due: bool  # Whether to save.
  num_steps: int  # Until the next vote.


class Votes:
  """One process of a group, which all call the same methods together.

  Args:
    tell_all: Tells all some numbers, and gives a row of each.
    get_time: In seconds.
  """

  def __init__(
    self,
    tell_all: Callable[[list[int]], np.ndarray],
    get_time: Callable[[], float] = time.monotonic,
  ) -> None:
    self._tell_all = tell_all
    self._get_time = get_time
    self._num_steps = 0  # Since the last vote, at `_voted_at`.
    self._voted_at = 0.0

  def agree_on_number(self, own: int) -> int:
    """The number of the next mean.

    Args:
      own: A number that is above all that this process has written down.

    Returns:
      One that nobody has: a mean that was lost is in the files of some only.
    """
    return int(self._tell_all([own]).max())

  def agree_on_step(self, own: Iterable[int]) -> int | None:
    """The last step that all have saved.

    Args:
      own: The steps of this process's checkpoints.

    Returns:
      The step, if there is one.
    """
    steps = sorted(own)[-_MAX_CHECKPOINTS:]
    padded = steps + [-1] * (_MAX_CHECKPOINTS - len(steps))
    rows = self._tell_all(padded).tolist()
    return max(set(steps).intersection(*rows), default=None)

  def exchange_addresses(self, own: str) -> list[str]:
    """Where all are.

    Args:
      own: Where this process is; '' if nowhere.

    Returns:
      The addresses of all processes.
    """
    text = own.encode()[:_MAX_ADDRESS].ljust(_MAX_ADDRESS, b'\0')
    rows = self._tell_all(list(text)).tolist()
    return [bytes(row).rstrip(b'\0').decode() for row in rows]

  def vote(
    self, *, is_stopping: bool, is_diverged: bool, is_due: bool
  ) -> Verdict:
    """Whether to save, or to stop, at this step; and when to ask again.

    That is soon, for whoever waits for the end, and not so often that steps
    which are short would take longer. How long they are is measured, by the
    slowest process; as the first ones are longer, it begins with every step.

    Args:
      is_stopping: Whether this process was told to end.
      is_diverged: Whether its loss is no number any more.
      is_due: Whether it is to save.

    Returns:
      What holds for all.
    """
    now = self._get_time()
    seconds = (now - self._voted_at) / max(1, self._num_steps)
    microseconds = min(int(1e6 * seconds), _MAX_NUMBER)
    own = [is_stopping, is_diverged, is_due, microseconds]
    votes = self._tell_all([int(each) for each in own])
    slowest = max(1, int(votes[:, 3].max())) / 1e6
    most = min(2 * self._num_steps, _MAX_STEPS)
    self._num_steps = max(1, min(int(_SECONDS / slowest), most))
    self._voted_at = now
    return Verdict(
      stopping=np.flatnonzero(votes[:, 0]).tolist(),
      is_diverged=bool(votes[:, 1].any()),
      is_due=bool(votes[:, 2].any()),
      num_steps=self._num_steps,
    )
