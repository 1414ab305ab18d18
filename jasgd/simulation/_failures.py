"""Learners that die, and come back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jasgd import protocols
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
    seed: Of numpy's generator; as with the times of learners, the same seed
      gives the same failures on every machine, but for another numpy.

  Returns:
    The failures, in order of time.

  Raises:
    ValueError: if an argument makes no sense.

  Examples:
    >>> from jasgd import simulation
    >>> len(simulation.draw_failures(10, 100.0, 50.0, 5.0)) > 5
    True
  """
  protocols.check_count('num_learners', num_learners, 1)
  _times.check_seed(seed)
  _times.check_positive('horizon', horizon)
  _times.check_positive('mean_time_between', mean_time_between)
  _times.check_positive('mean_down_time', mean_down_time)
  failures = []
  for learner in range(num_learners):
    generator = _times.make_generator(seed, _times.FAILURES, learner)
    time = generator.exponential(mean_time_between)
    while time < horizon:
      until = time + generator.exponential(mean_down_time)
      failures.append(Failure(time, learner, until))
      time = until + generator.exponential(mean_time_between)
  return sorted(failures)


def read_failures(failures: Sequence[Any], num_learners: int) -> list[Failure]:
  """The failures in order of time; a ValueError for what cannot be."""
  read = sorted(map(_read_failure, failures))
  up_since = dict.fromkeys(range(num_learners), 0.0)
  for time, learner, until in read:
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
  return read


def _read_failure(failure: Any) -> Failure:
  """A failure as it was given, or as a tuple with or without an end."""
  if not isinstance(failure, tuple) or not 2 <= len(failure) <= 3:
    raise ValueError(
      f'A failure is given as (time, learner, until), got {failure!r}.'
    )
  time, learner, until = Failure(*failure)
  return Failure(
    protocols.check_number('time of a failure', time),
    protocols.check_count('learner of a failure', learner, 0),
    protocols.check_number('until of a failure', until),
  )
