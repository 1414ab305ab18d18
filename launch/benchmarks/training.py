"""How fast the engine trains, against PyTorch and against plain SGD.

PyTorch is eager and delays gradients by a queue around its optimizer. Both
sides gather random batches of random images from memory. They run in turns, in
processes of their own, held to the same cores: one, then all. Numbers are the
best of some rounds. Goals are judged by CPU time with one thread, which is the
time on the wall if nothing else runs, and hardly changes if something does; and
by the wall with all threads, where CPU time cannot show how well they share.

Columns: the number of threads; network, batch, and way of training (a constant
delay; `async`, a trace of 128 learners; plain SGD as a compiled loop, `scan`,
or as compiled steps, `steps`); images per second; CPU time per image; the ratio
to PyTorch in both (above 1: ours is faster); seconds that our side compiles;
and the most memory that each process held while the case began, which includes
what the cases before it left behind.
"""

from collections.abc import Iterator
import contextlib
import os
import sys
from typing import Any, NamedTuple

from launch.benchmarks import environments
from launch.benchmarks import training_cases as cases
from launch.benchmarks import training_goals as goals
from launch.benchmarks import workers

# A compilation is part of it.
_TIMEOUT = 300.0

# Of the steps of plain SGD, and of learners that do not wait.
_OWN_WAYS = (cases.SCAN, cases.STEPS, cases.ASYNC)

# In what order the sides take turns, and the program of each.
_PROGRAMS = {
  goals.TORCH: 'launch.benchmarks.training_torch',
  goals.OURS: 'launch.benchmarks.training_jax',
}


class Group(NamedTuple):
  """Cases that are measured in turns: all ways to train at one batch."""

  model: str
  batch: int
  delays: tuple[int, ...]
  own_ways: tuple[str, ...] = ()

  def list_turns(self, sides: list[str]) -> list[tuple[str, cases.Case]]:
    """Who runs what, in the order of a round."""
    ways = [str(delay) for delay in self.delays]
    turns = [
      (side, cases.Case(self.model, self.batch, way))
      for way in ways
      for side in sides
    ]
    return turns + [
      (goals.OURS, cases.Case(self.model, self.batch, way))
      for way in self.own_ways
    ]


GROUPS = (
  Group('lenet', 16, (0, 32, 256), _OWN_WAYS),
  Group('lenet', 32, (0, 32, 256)),
  Group('lenet', 64, (0, 32, 256), _OWN_WAYS),
  Group('lenet', 128, (0, 32, 256)),
  Group('lenet', 256, (0, 32, 256)),
  Group('lenet', 1024, (0, 32, 256)),
  Group('a1', 32, (0, 256), _OWN_WAYS),
  Group('a1', 128, (0,)),
  Group('resnet20', 32, (0,), (cases.SCAN, cases.STEPS)),
  Group('resnet20', 128, (0,)),
)
QUICK_GROUPS = (Group('lenet', 16, (0, 32), (cases.SCAN,)),)

NUM_ROUNDS = 5
NUM_QUICK_ROUNDS = 2


def make_environment(num_threads: int) -> dict[str, str]:
  """Variables that hold either side to some threads, set before it starts."""
  is_parallel = 'false' if num_threads == 1 else 'true'
  return {
    'JAX_PLATFORMS': 'cpu',
    'NPROC': str(num_threads),
    'OMP_NUM_THREADS': str(num_threads),
    'XLA_FLAGS': f'--xla_cpu_multi_thread_eigen={is_parallel}',
  }


def count_cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


@contextlib.contextmanager
def start_workers(
  pythons: dict[str, str], num_threads: int
) -> Iterator[dict[str, workers.Worker]]:
  """A worker for each side, by the interpreters given; ended whatever happens.

  Args:
    pythons: Side -> the interpreter that it runs in.
    num_threads: That each may use.

  Yields:
    Side -> worker.
  """
  with contextlib.ExitStack() as stack:
    yield {
      side: stack.enter_context(
        workers.Worker(
          f'{side} with {num_threads} threads',
          [pythons[side], '-m', program, str(num_threads)],
          make_environment(num_threads),
        )
      )
      for side, program in _PROGRAMS.items()
      if side in pythons
    }


def merge(answers: list[dict[str, Any]]) -> goals.Result:
  """The best of the rounds of a case."""
  return goals.Result(
    max(answer['images_per_second'] for answer in answers),
    min(answer['cpu_us_per_image'] for answer in answers),
    answers[0]['compile_seconds'],
    answers[0]['peak_mb'],
    answers[0]['num_params'],
  )


def measure_group(
  group: Group, staff: dict[str, workers.Worker], num_rounds: int
) -> dict[tuple[str, cases.Case], goals.Result]:
  """Measures the cases of a group in turns.

  Args:
    group: What to measure.
    staff: Side -> its worker.
    num_rounds: Turns for each case.

  Returns:
    The results.

  Raises:
    WorkerError: if a worker failed.
    ValueError: if the sides do not train the same network.
  """
  turns = group.list_turns([*staff])
  answers: dict[tuple[str, cases.Case], list[dict[str, Any]]]
  answers = {turn: [] for turn in turns}
  # The round that compiles does not count: it also blurs its neighbours.
  for number in range(num_rounds + 1):
    for side, case in turns:
      answer = staff[side].ask(case.line, _TIMEOUT)
      if number:
        answers[side, case].append(answer)
  results = {turn: merge(rounds) for turn, rounds in answers.items()}
  sizes = {result.num_params for result in results.values()}
  if len(sizes) > 1:
    raise ValueError(
      f'All sides must train the same {group.model}, got numbers of weights '
      f'{sorted(sizes)}.'
    )
  return results


def print_header() -> None:
  """The names of the columns."""
  print(
    f'\n{"":22} {"images / s":>15} {"CPU us / image":>15} {"x PyTorch":>11} '
    f'{"compile":>7} {"peak MB":>11}\n'
    f'{"thr":3} {"network":8} {"batch":>4} {"way":>5}'
    f'{"torch":>8} {"jasgd":>7} {"torch":>7} {"jasgd":>7} '
    f'{"wall":>5} {"CPU":>5} {"s":>7} {"torch":>5} {"jasgd":>5}'
  )


def print_row(
  num_threads: int,
  case: cases.Case,
  ours: goals.Result,
  torch: goals.Result | None,
) -> None:
  """A line of the table."""
  if torch is None:
    speed = cpu = wall_ratio = cpu_ratio = peak = '-'
  else:
    ratio = goals.get_speedup(ours, torch)
    speed = f'{torch.images_per_second:.0f}'
    cpu = f'{torch.cpu_us_per_image:.1f}'
    wall_ratio, cpu_ratio = f'{ratio.wall:.2f}', f'{ratio.cpu:.2f}'
    peak = f'{torch.peak_mb:.0f}'
  print(
    f'{num_threads:<3} {case.model:8} {case.batch:5} {case.way:>5} '
    f'{speed:>7} {ours.images_per_second:7.0f} '
    f'{cpu:>7} {ours.cpu_us_per_image:7.1f} {wall_ratio:>5} {cpu_ratio:>5} '
    f'{ours.compile_seconds:7.1f} {peak:>5} {ours.peak_mb:5.0f}',
    flush=True,
  )


def run(quick: bool) -> None:
  """Prints a table, and a line for each goal."""
  print(__doc__)
  groups = QUICK_GROUPS if quick else GROUPS
  pythons = {goals.OURS: sys.executable}
  if not quick:
    torch_python = environments.find_python(environments.TORCH)
    if torch_python:
      pythons[goals.TORCH] = torch_python
  verdicts = []
  for num_threads in sorted({1} if quick else {1, count_cores()}):
    results: dict[tuple[str, cases.Case], goals.Result] = {}
    print_header()
    with start_workers(pythons, num_threads) as staff:
      for group in groups:
        measured = measure_group(
          group, staff, NUM_QUICK_ROUNDS if quick else NUM_ROUNDS
        )
        results |= measured
        for (side, case), result in measured.items():
          if side == goals.OURS:
            torch = measured.get((goals.TORCH, case))
            print_row(num_threads, case, result, torch)
    clock = 'cpu' if num_threads == 1 else 'wall'
    verdicts += [
      f'{num_threads:<3} {goals.judge(goal, results, clock)}'
      for goal in goals.GOALS
    ]
    if num_threads == 1:
      print(f'\nOf its core a worker had {goals.get_share(results):.0%}.')
  print('\nGoals, by the number of threads; in brackets the worst case')
  print('\n'.join(verdicts), flush=True)
