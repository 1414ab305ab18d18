"""Measures cases in turns, so that all of them meet the same machine.

A case is anything that can be called and gives numbers by their names.
"""

from collections.abc import Callable, Mapping, Sequence
import math
import random
import statistics
from typing import NamedTuple

from launch.benchmarks import workers

# Parameters -> rounds of a learner, unless they are over too soon.
NUM_ROUNDS = {60_000: 200, 1_000_000: 80, 10_000_000: 12, 25_000_000: 6}
MIN_SECONDS = 0.5

# Whom the others are compared with.
BASES = ('mpi', 'torch', 'unix')

Case = Callable[[], Mapping[str, float]]


class Spread(NamedTuple):
  """Of a number, over the rounds."""

  median: float
  low: float
  high: float


# Case -> name of a number -> its spread.
Medians = dict[str, dict[str, Spread]]


def measure(
  cases: Mapping[str, Case], num_rounds: int = 6, seed: int = 0
) -> Medians:
  """Runs all cases in turns.

  Each round calls every case once, in an order of its own. A case that fails
  is left out from then on, and has no result: a line says why.

  Args:
    cases: Name -> case; all calls of a case give the same names.
    num_rounds: Calls of each case.
    seed: Of the orders.

  Returns:
    The median, the lowest and the highest of every number, by case, in the
    order of `cases`.

  Raises:
    ValueError: if there are no rounds.
  """
  if num_rounds < 1:
    raise ValueError(f'num_rounds must be at least 1, got {num_rounds}.')
  rng = random.Random(seed)
  results: dict[str, list[Mapping[str, float]]] = {name: [] for name in cases}
  for _ in range(num_rounds):
    for name in rng.sample([*results], len(results)):
      try:
        results[name].append(cases[name]())
      except workers.WorkerError as error:
        print(f'{name} is left out: {error}', flush=True)
        del results[name]
  return {name: _summarise(rounds) for name, rounds in results.items()}


def _summarise(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
  """The spread of each number."""
  columns = {key: [result[key] for result in rounds] for key in rounds[0]}
  return {
    key: Spread(statistics.median(values), min(values), max(values))
    for key, values in columns.items()
  }


def make_long(
  run: Callable[[int], Mapping[str, float]],
  num_rounds: int,
  min_seconds: float = MIN_SECONDS,
) -> Case:
  """A case that takes long enough to be measured.

  Args:
    run: Takes a number of rounds of a learner; what it gives has `seconds`.
    num_rounds: To begin with. A run that is over too soon is done again with
      more, and so is every later one.
    min_seconds: Of what is measured.

  Returns:
    The case.
  """

  def run_long() -> Mapping[str, float]:
    nonlocal num_rounds
    result = run(num_rounds)
    while result['seconds'] < min_seconds:
      # A bit more than needed, or noise would make it run twice each time.
      num_rounds = math.ceil(1.5 * num_rounds * min_seconds / result['seconds'])
      result = run(num_rounds)
    return result

  return run_long


def print_table(
  num_parameters: int,
  num_learners: int,
  medians: Medians,
  bases: Sequence[str] = BASES,
) -> None:
  """Prints the medians of all cases of a size.

  Columns: updates per second, with the lowest and the highest of the rounds;
  how many times as fast as each base; mean staleness, and the highest of any
  round; CPU time of the server per update; wrong answers, in the worst round.

  Args:
    num_parameters: Of the model.
    num_learners: That the server had.
    medians: From `measure`.
    bases: Cases that the others are compared with; `-` if they are not there.
  """
  ratios = ' '.join(f'{f"x {base}":>8}' for base in bases)
  print(f'\n{num_parameters:,} parameters, {num_learners} learners')
  print(
    f'{"":12} {"updates/s":>9} {"lowest":>8} {"highest":>8} {ratios} '
    f'{"staleness":>9} {"max":>5} {"CPU ms":>8} {"wrong":>5}'
  )
  for name, spreads in medians.items():
    speed = spreads['updates_per_second']
    ratios = ' '.join(
      f'{_format_ratio(speed, medians.get(base)):>8}' for base in bases
    )
    print(
      f'{name:12} {speed.median:9.1f} {speed.low:8.1f} {speed.high:8.1f} '
      f'{ratios} {spreads["mean_staleness"].median:9.2f} '
      f'{spreads["max_staleness"].high:5.0f} '
      f'{1e3 * spreads["cpu_per_update"].median:8.3f} '
      f'{spreads["num_errors"].high:5.0f}',
      flush=True,
    )


def _format_ratio(speed: Spread, base: Mapping[str, Spread] | None) -> str:
  """How many times as fast as a base, which may not be there."""
  if base is None:
    return '-'
  return f'{speed.median / base["updates_per_second"].median:.2f}'
