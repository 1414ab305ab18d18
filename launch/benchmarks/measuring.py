"""Measurements in turns, their ratios, and goals.

Programs that are compared run in turns, so that all of them meet the same
machine: a ratio within a round can be compared between machines, and a number
of seconds cannot.
"""

from collections.abc import Callable, Mapping, Sequence
import random
import statistics
from typing import TypeVar

Key = TypeVar('Key')
Result = TypeVar('Result')


def run_in_turns(
  programs: Mapping[Key, Callable[[], Result]],
  num_rounds: int,
  num_warm_up: int = 0,
) -> dict[Key, list[Result]]:
  """Runs each program once per round, in an order that differs by round.

  Args:
    programs: Name -> function to call. Processes that run the same programs
      together get the same order.
    num_rounds: Number of rounds whose results are returned.
    num_warm_up: Number of rounds before those.

  Returns:
    Name -> results of the rounds, with the names in the order of `programs`.
  """
  rng = random.Random(0)
  results: dict[Key, list[Result]] = {name: [] for name in programs}
  for number in range(num_warm_up + num_rounds):
    for name in rng.sample([*programs], len(programs)):
      result = programs[name]()
      if number >= num_warm_up:
        results[name].append(result)
  return results


def get_ratio(values: Sequence[float], base: Sequence[float]) -> float:
  """The median over the rounds of the ratio within a round."""
  return statistics.median(
    value / other for value, other in zip(values, base, strict=True)
  )


def is_met(
  value: float, *, at_least: float | None = None, at_most: float | None = None
) -> bool:
  """Whether a value, as precise as it is printed, reaches its goal.

  Args:
    value: Usually a ratio. It is rounded to two digits: the third is noise.
    at_least: The lower limit, if there is one.
    at_most: The upper limit, if there is one.

  Returns:
    True if the goal is met.
  """
  value = round(value, 2)
  return (at_least is None or value >= at_least) and (
    at_most is None or value <= at_most
  )


def say_met(is_goal_met: bool) -> str:
  """The word of a goal: 'met' or 'missed'."""
  return 'met' if is_goal_met else 'missed'
