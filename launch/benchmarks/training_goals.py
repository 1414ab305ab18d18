"""What the suite `training` wants to see, and whether it did."""

from collections.abc import Callable, Mapping
import statistics
from typing import NamedTuple

from launch.benchmarks import training_cases as cases

OURS = 'jasgd'
TORCH = 'torch'


class Result(NamedTuple):
  """What was measured of a case, at its best."""

  images_per_second: float
  cpu_us_per_image: float
  compile_seconds: float
  peak_mb: float
  num_params: int


class Ratio(NamedTuple):
  """Of two results: by the clock on the wall and that of the CPU."""

  wall: float
  cpu: float


# (side, case) -> its result, all with the same number of threads.
Results = Mapping[tuple[str, cases.Case], Result]
Ratios = dict[str, Ratio]


def get_speedup(first: Result, second: Result) -> Ratio:
  """How many times faster the first is than the second."""
  return Ratio(
    first.images_per_second / second.images_per_second,
    second.cpu_us_per_image / first.cpu_us_per_image,
  )


def compare_sides(
  results: Results, model: str, max_batch: int | None = None
) -> Ratios:
  """The speed of ours over that of PyTorch, in all cases that both did."""
  return {
    case.line: get_speedup(result, results[TORCH, case])
    for (side, case), result in results.items()
    if side == OURS
    and case.model == model
    and (max_batch is None or case.batch <= max_batch)
    and (TORCH, case) in results
  }


def compare_ways(results: Results, way: str, base: str) -> Ratios:
  """The cost of a way over that of another, on our side."""
  return {
    case.line: get_speedup(results[OURS, case._replace(way=base)], result)
    for (side, case), result in results.items()
    if side == OURS
    and case.way == way
    and (OURS, case._replace(way=base)) in results
  }


class Goal(NamedTuple):
  """A limit for the worst of some ratios."""

  text: str
  limit: float
  is_minimum: bool
  list_ratios: Callable[[Results], Ratios]


GOALS = (
  Goal(
    'speed over PyTorch, LeNet-5, batch up to 256',
    2.0,
    True,
    lambda results: compare_sides(results, 'lenet', max_batch=256),
  ),
  Goal(
    "speed over PyTorch, A1's CIFAR-10 network",
    1.2,
    True,
    lambda results: compare_sides(results, 'a1'),
  ),
  Goal(
    'speed over PyTorch, ResNet-20',
    1.0,
    True,
    lambda results: compare_sides(results, 'resnet20'),
  ),
  Goal(
    'cost of delay 256 over delay 0',
    1.15,
    False,
    lambda results: compare_ways(results, '256', '0'),
  ),
  Goal(
    f'cost of {cases.NUM_ASYNC_LEARNERS} asynchronous learners over plain SGD',
    1.1,
    False,
    lambda results: compare_ways(results, cases.ASYNC, cases.SCAN),
  ),
  Goal(
    'cost of a loop over separate jitted steps',
    1.0,
    False,
    lambda results: compare_ways(results, cases.SCAN, cases.STEPS),
  ),
)


def judge(goal: Goal, results: Results, clock: str) -> str:
  """Says in a line whether a goal is met, and by what.

  Args:
    goal: What is wanted of the worst case.
    results: With one number of threads.
    clock: By which to judge, a field of `Ratio`.

  Returns:
    A line; it says so if nothing was measured that the goal is about.
  """
  sign = '>=' if goal.is_minimum else '<='
  wish = f'{sign} {goal.limit:<4} {goal.text}'
  ratios = goal.list_ratios(results)
  if not ratios:
    return f'not measured              {wish}'
  choose = min if goal.is_minimum else max
  worst = choose(ratios, key=lambda line: getattr(ratios[line], clock))
  # As precise as it is printed: the third digit is noise.
  value = round(getattr(ratios[worst], clock), 2)
  is_met = value >= goal.limit if goal.is_minimum else value <= goal.limit
  word = 'met' if is_met else 'missed'
  wall, cpu = ratios[worst]
  return f'{word:6} wall {wall:5.2f} CPU {cpu:5.2f}  {wish} ({worst})'


def get_share(results: Results) -> float:
  """How much of its core a worker had, in the median of the cases.

  Args:
    results: With one thread.

  Returns:
    CPU time over wall time: 1 where nothing else ran.
  """
  return statistics.median(
    result.images_per_second * result.cpu_us_per_image / 1e6
    for result in results.values()
  )
