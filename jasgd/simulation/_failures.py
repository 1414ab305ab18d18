"""Learners that die, and come back."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jasgd.simulation import _times


class Failure(NamedTuple):
  """A learner is gone from `time` until `until` (infinity: for good)."""

  time: float
  learner: int
  until: float = np.inf


def draw_failures(
  num_learners: int,
  horizon: float,
  mean_time_between: float,
  mean_down_time: float,
  seed: int = 0,
) -> list[Failure]:
  """Random failures up to `horizon`, exponential in both times.

  Args:
    num_learners: Number of learners.
    horizon: Until when learners may die.
    mean_time_between: Mean time for which a learner is up.
    mean_down_time: Mean time for which it is then gone.
    seed: Of the generator.

  Returns:
    The failures, in order of time.

  Examples:
    >>> from jasgd import simulation
    >>> len(simulation.draw_failures(10, 100.0, 50.0, 5.0)) > 5
    True
  """
  for name, value in (
    ('horizon', horizon),
    ('mean_time_between', mean_time_between),
    ('mean_down_time', mean_down_time),
  ):
    if not 0 < value < np.inf:
      raise ValueError(f'{name} must be finite and above 0, got {value}.')
  failures = []
  for learner in range(num_learners):
    generator = _times.make_generator(seed, _times.FAILURES, learner)
    time = generator.exponential(mean_time_between)
    while time < horizon:
      until = time + generator.exponential(mean_down_time)
      failures.append(Failure(time, learner, until))
      time = until + generator.exponential(mean_time_between)
  return sorted(failures)


def check_failures(failures: Sequence[Failure], num_learners: int) -> None:
  """Raises a ValueError for failures that cannot be."""
  up_since = dict.fromkeys(range(num_learners), 0.0)
  for time, learner, until in sorted(failures):
    if learner not in up_since:
      raise ValueError(
        f'A failure names learner {learner}, but there are {num_learners}.'
      )
    if not up_since[learner] <= time < until:
      raise ValueError(
        f'Learner {learner} cannot fail from {time} to {until}: it is up from '
        f'{up_since[learner]} on.'
      )
    up_since[learner] = until
