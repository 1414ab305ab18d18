"""How fast the engine trains, against PyTorch and against plain SGD.

PyTorch is eager and delays gradients by a queue around its optimizer. Both
sides gather random batches of random images from memory. They run in turns, in
processes of their own, held to the same cores: one, then all. Numbers are the
best of some rounds. With one thread, goals are judged by CPU time: it equals
the elapsed time if nothing else runs, and hardly changes if something does.
With all threads, they are judged by elapsed time ("wall"), because CPU time
cannot show how well threads share the work.

Columns: the number of threads; network, batch, and way of training (a constant
delay; `async`, a trace of 128 learners; plain SGD as a compiled loop, `scan`,
or as compiled steps, `steps`); images per second; CPU time per image; the ratio
to PyTorch in both (above 1: ours is faster); seconds that our side compiles;
and the largest memory of each process while the case began, which includes
memory that earlier cases have not released.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import itertools
import math
import statistics
import sys
import time
from typing import NamedTuple, Protocol

import numpy as np

from launch.benchmarks import measuring
from launch.benchmarks import processes

OURS, TORCH = 'jasgd', 'torch'
_TIMEOUT = 300.0  # Seconds of a turn, with its compilation.

NUM_EXAMPLES = 8192
NUM_CLASSES = 10
# A small rate: the loss of every network must stay finite at a delay of 256.
RATE = 1e-4
MOMENTUM = 0.9

# Ways that only our side has: plain SGD as one compiled loop, or as repeated
# calls of a compiled step; and asynchronous learners.
SCAN, STEPS, ASYNC = 'scan', 'steps', 'async'
NUM_ASYNC_LEARNERS = 128

SHAPES = {'lenet': (28, 28, 1), 'a1': (32, 32, 3), 'resnet20': (32, 32, 3)}
IMAGES_PER_TURN = {'lenet': 4096, 'a1': 512, 'resnet20': 256}

# Network, batch, delays of both sides, and ways of our side. The cases of a
# group are measured in turns.
GROUPS = (
  ('lenet', 16, (0, 32, 256), (SCAN, STEPS, ASYNC)),
  ('lenet', 32, (0, 32, 256), ()),
  ('lenet', 64, (0, 32, 256), (SCAN, STEPS, ASYNC)),
  ('lenet', 128, (0, 32, 256), ()),
  ('lenet', 256, (0, 32, 256), ()),
  ('lenet', 1024, (0, 32, 256), ()),
  ('a1', 32, (0, 256), (SCAN, STEPS, ASYNC)),
  ('a1', 128, (0,), ()),
  ('resnet20', 32, (0,), (SCAN, STEPS)),
  ('resnet20', 128, (0,), ()),
)
QUICK_GROUPS = (('lenet', 16, (0,), (SCAN,)),)


class Case(NamedTuple):
  """A program to measure; workers are asked for it by a line."""

  model: str
  batch: int
  way: str  # A constant delay, such as '32', or SCAN, STEPS or ASYNC.

  @property
  def line(self) -> str:
    """The question to a worker, such as 'lenet 64 32'."""
    return f'{self.model} {self.batch} {self.way}'

  @property
  def num_steps(self) -> int:
    """Steps per turn; at least 2, as a loop of one step would not be a loop."""
    return max(2, IMAGES_PER_TURN[self.model] // self.batch)


class Result(NamedTuple):
  """The measurements of a case, at its best."""

  images_per_second: float
  cpu_us_per_image: float
  compile_seconds: float
  peak_mb: float
  num_params: int


# (side, case) -> its result, all with the same number of threads.
Results = Mapping[tuple[str, Case], Result]


class Ratio(NamedTuple):
  """How many times faster one result is than another, by both clocks."""

  wall: float
  cpu: float


def get_speedup(result: Result, base: Result) -> Ratio:
  """How many times faster a result is than its base."""
  return Ratio(
    result.images_per_second / base.images_per_second,
    base.cpu_us_per_image / result.cpu_us_per_image,
  )


def compare_sides(
  results: Results, model: str, max_batch: int
) -> dict[str, Ratio]:
  """Ratio of our speed to that of PyTorch, in all cases of a network."""
  return {
    case.line: get_speedup(results[OURS, case], torch)
    for (side, case), torch in results.items()
    if side == TORCH and case.model == model and case.batch <= max_batch
  }


def compare_ways(results: Results, way: str, base: str) -> dict[str, Ratio]:
  """Ratio of the cost of one way to that of another, on our side."""
  return {
    case.line: get_speedup(results[OURS, case._replace(way=base)], result)
    for (side, case), result in results.items()
    if side == OURS
    and case.way == way
    and (OURS, case._replace(way=base)) in results
  }


# Network -> least speed over PyTorch, up to which batch, and a title.
SPEED_GOALS = {
  'lenet': (2.0, 256, 'LeNet-5, batch up to 256'),
  'a1': (1.2, 1024, "A1's CIFAR-10 network"),
  'resnet20': (1.0, 1024, 'ResNet-20'),
}
# (way, base) -> the highest cost of the way over that of its base, and a title.
COST_GOALS = {
  ('256', '0'): (1.15, 'delay 256 over delay 0'),
  (ASYNC, SCAN): (
    1.1,
    f'{NUM_ASYNC_LEARNERS} asynchronous learners over plain SGD',
  ),
  (SCAN, STEPS): (1.0, 'a loop over separate jitted steps'),
}


def judge(results: Results, clock: str) -> list[str]:
  """Decides for each goal whether its worst case meets it.

  Args:
    results: Results with one number of threads.
    clock: The field of `Ratio` to judge by.

  Returns:
    A line for each goal.
  """
  lines = []
  for model, (limit, max_batch, title) in SPEED_GOALS.items():
    ratios = compare_sides(results, model, max_batch)
    worst = min(
      ratios.items(), key=lambda item: getattr(item[1], clock), default=None
    )
    wish = f'>= {limit:<4} speed over PyTorch, {title}'
    lines.append(_judge_worst(worst, clock, wish, at_least=limit))
  for (way, base), (limit, title) in COST_GOALS.items():
    ratios = compare_ways(results, way, base)
    worst = max(
      ratios.items(), key=lambda item: getattr(item[1], clock), default=None
    )
    wish = f'<= {limit:<4} cost of {title}'
    lines.append(_judge_worst(worst, clock, wish, at_most=limit))
  return lines


def _judge_worst(
  worst: tuple[str, Ratio] | None, clock: str, wish: str, **limit: float
) -> str:
  """A line about the worst case of a goal, if any was measured."""
  if worst is None:
    return f'not measured              {wish}'
  name, ratio = worst
  word = measuring.say_met(measuring.is_met(getattr(ratio, clock), **limit))
  return (
    f'{word:6} wall {ratio.wall:5.2f} CPU {ratio.cpu:5.2f}  {wish} ({name})'
  )


@contextlib.contextmanager
def start_sides(
  pythons: Mapping[str, str], num_threads: int
) -> Iterator[dict[str, processes.Worker]]:
  """Starts a worker for each side, in the interpreter of that side."""
  modules = {OURS: 'training_jax', TORCH: 'training_torch'}
  commands = [
    [python, '-m', f'launch.benchmarks.{modules[side]}', str(num_threads)]
    for side, python in pythons.items()
  ]
  variables = processes.limit_threads(num_threads)
  with processes.start_workers(commands, variables) as workers:
    yield dict(zip(pythons, workers, strict=True))


def measure_group(
  model: str,
  batch: int,
  delays: tuple[int, ...],
  own_ways: tuple[str, ...],
  workers: Mapping[str, processes.Worker],
  num_rounds: int,
) -> dict[tuple[str, Case], Result]:
  """Measures the cases of a group in turns.

  Raises:
    WorkerError: if a worker failed.
    ValueError: if the sides do not train the same network.
  """
  cases = [(side, str(delay)) for delay in delays for side in workers]
  cases += [(OURS, way) for way in own_ways]
  programs = {
    (side, case := Case(model, batch, way)): functools.partial(
      processes.ask_all, [workers[side]], case.line, _TIMEOUT
    )
    for side, way in cases
  }
  # The round that compiles does not count: compiling also slows other programs.
  rounds = measuring.run_in_turns(programs, num_rounds, num_warm_up=1)
  results = {
    key: Result(
      max(answer['images_per_second'] for (answer,) in answers),
      min(answer['cpu_us_per_image'] for (answer,) in answers),
      *(
        answers[0][0][name]
        for name in ('compile_seconds', 'peak_mb', 'num_params')
      ),
    )
    for key, answers in rounds.items()
  }
  sizes = {result.num_params for result in results.values()}
  if len(sizes) > 1:
    raise ValueError(
      f'All sides must train the same {model}, got numbers of weights '
      f'{sorted(sizes)}.'
    )
  return results


def print_row(
  num_threads: int, case: Case, ours: Result, torch: Result | None
) -> None:
  """Prints a line of the table."""
  cells = ['-'] * 5
  if torch is not None:
    wall, cpu = get_speedup(ours, torch)
    cells = [
      f'{torch.images_per_second:.0f}',
      f'{torch.cpu_us_per_image:.1f}',
      f'{wall:.2f}',
      f'{cpu:.2f}',
      f'{torch.peak_mb:.0f}',
    ]
  print(
    f'{num_threads:<3} {case.model:8} {case.batch:5} {case.way:>5} '
    f'{cells[0]:>7} {ours.images_per_second:7.0f} '
    f'{cells[1]:>7} {ours.cpu_us_per_image:7.1f} {cells[2]:>5} {cells[3]:>5} '
    f'{ours.compile_seconds:7.1f} {cells[4]:>5} {ours.peak_mb:5.0f}',
    flush=True,
  )


def run(quick: bool) -> None:
  """Prints a table, and a line for each goal."""
  print(__doc__)
  pythons = {OURS: sys.executable}
  torch_python = processes.find_python(processes.TORCH, may_install=not quick)
  if torch_python:
    pythons = {TORCH: torch_python, **pythons}
  verdicts = []
  for num_threads in sorted({1} if quick else {1, processes.count_cores()}):
    results: dict[tuple[str, Case], Result] = {}
    print(
      f'\n{"":22} {"images / s":>15} {"CPU us / image":>15} {"x PyTorch":>11} '
      f'{"compile":>7} {"peak MB":>11}\n'
      f'{"thr":3} {"network":8} {"batch":>4} {"way":>5}'
      f'{"torch":>8} {"jasgd":>7} {"torch":>7} {"jasgd":>7} '
      f'{"wall":>5} {"CPU":>5} {"s":>7} {"torch":>5} {"jasgd":>5}'
    )
    with start_sides(pythons, num_threads) as workers:
      for group in QUICK_GROUPS if quick else GROUPS:
        found = measure_group(*group, workers, 1 if quick else 5)
        for (side, case), result in found.items():
          if side == OURS:
            print_row(num_threads, case, result, found.get((TORCH, case)))
        results |= found
    lines = judge(results, 'cpu' if num_threads == 1 else 'wall')
    verdicts += [f'{num_threads:<3} {line}' for line in lines]
    if num_threads == 1:
      # CPU time over wall time: 1 where nothing else ran.
      share = statistics.median(
        result.images_per_second * result.cpu_us_per_image / 1e6
        for result in results.values()
      )
      print(f'\nA worker had {share:.0%} of its core.')
  print('\nGoals, by the number of threads; in brackets the worst case')
  print('\n'.join(verdicts), flush=True)


# Below: the side of the workers.


class Program(Protocol):
  """Training that goes on turn by turn."""

  num_params: int

  def advance(self) -> float:
    """Trains for one turn to its end; returns the last loss."""
    ...


def make_examples(model: str) -> dict[str, np.ndarray]:
  """Random images, as bytes [n, height, width, channels], and their labels."""
  rng = np.random.default_rng(0)
  shape = (NUM_EXAMPLES, *SHAPES[model])
  return {
    'image': rng.integers(0, 256, shape, np.uint8),
    'label': rng.integers(0, NUM_CLASSES, NUM_EXAMPLES, np.int32),
  }


def serve(num_threads: int, make_program: Callable[[Case], Program]) -> None:
  """Answers each line of stdin with the measurements of one turn.

  The programs of one model and batch are kept, and run in turns. The first time
  that a case is asked for, it is built and run twice: `compile_seconds` is what
  the first turn takes beyond the second, and `peak_mb` the most memory that the
  process held meanwhile.

  Raises:
    FloatingPointError: if a loss is not finite, because such numbers have a
      speed of their own.
  """
  processes.pin(num_threads)
  answers = processes.Answers()
  for (model, batch), lines in itertools.groupby(
    map(str.split, sys.stdin), lambda words: words[:2]
  ):
    programs: dict[str, tuple[Program, dict[str, float]]] = {}
    for *_, way in lines:
      case = Case(model, int(batch), way)
      if way not in programs:
        with open('/proc/self/clear_refs', 'w') as file:
          file.write('5')  # Resets the peak of memory.
        program = make_program(case)
        first, second = (_time_turn(program, case) for _ in range(2))
        programs[way] = (
          program,
          {
            'compile_seconds': max(0.0, first['seconds'] - second['seconds']),
            'peak_mb': _read_peak() / 1e6,
            'num_params': program.num_params,
          },
        )
      program, start = programs[way]
      answers.send({**_time_turn(program, case), **start})


def _time_turn(program: Program, case: Case) -> dict[str, float]:
  """The speed of one turn, by elapsed time and by CPU time."""
  wall, cpu = time.perf_counter(), time.process_time()
  loss = program.advance()
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  if not math.isfinite(loss):
    raise FloatingPointError(f'The loss must stay finite, got {loss}.')
  num_images = case.num_steps * case.batch
  return {
    'seconds': wall,
    'images_per_second': num_images / wall,
    'cpu_us_per_image': 1e6 * cpu / num_images,
  }


def _read_peak() -> int:
  """Largest number of bytes that this process has held."""
  with open('/proc/self/status') as file:
    fields = dict(line.split(':', 1) for line in file)
  return 1024 * int(fields['VmHWM'].split()[0])
