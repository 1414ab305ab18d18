"""A worker's side of a suite: measures whatever a line on stdin asks for.

A worker lives as long as its stdin is open, and answers each line with a line
of JSON. It keeps the programs of one model and batch, so that they can be
measured in turns without being compiled again. Nothing here needs jax or torch.
"""

from collections.abc import Callable, Iterator
import contextlib
import json
import math
import os
import resource
import signal
import sys
import time
from typing import Protocol, TextIO

from launch.benchmarks import training_cases


class Program(Protocol):
  """What is measured."""

  num_params: int

  def advance(self) -> float:
    """Trains for one turn to its end; gives the last loss."""
    ...


MakeProgram = Callable[[training_cases.Case], Program]


def run_worker(num_threads: int, make_program: MakeProgram) -> None:
  """Serves stdin until it is closed.

  Args:
    num_threads: How many cores this process may use.
    make_program: Builds what a case asks for.
  """
  # The parent ends its workers, whatever happens to it: by closing stdin.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  pin(num_threads)
  with _take_stdout() as answers:
    serve(sys.stdin, answers, make_program)


def pin(num_threads: int) -> None:
  """Keeps this process on some cores, the same ones for every worker."""
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))[-num_threads:]
    os.sched_setaffinity(0, cores)


def serve(lines: TextIO, answers: TextIO, make_program: MakeProgram) -> None:
  """Answers each line.

  The first time that a case is asked for it is built and run twice. What the
  first turn takes beyond the second is the answer's `compile_seconds`, and the
  most memory that the process held meanwhile its `peak_mb`.

  Args:
    lines: Cases, a line each.
    answers: Takes a JSON object in a line for each.
    make_program: Builds what a case asks for.

  Raises:
    FloatingPointError: if a loss is not finite: such numbers have a speed of
      their own.
  """
  programs: dict[training_cases.Case, Program] = {}
  starts: dict[training_cases.Case, dict[str, float]] = {}
  for line in lines:
    case = training_cases.parse_case(line)
    if any(held[:2] != case[:2] for held in programs):
      programs.clear()
      starts.clear()
    if case not in programs:
      programs[case], starts[case] = start(case, make_program)
    answer = {**measure(programs[case], case.num_images), **starts[case]}
    answers.write(json.dumps(answer) + '\n')
    answers.flush()


def start(
  case: training_cases.Case, make_program: MakeProgram
) -> tuple[Program, dict[str, float]]:
  """Builds a program and runs it for the first times."""
  reset_peak()
  program = make_program(case)
  seconds = []
  for _ in range(2):
    begin = time.perf_counter()
    program.advance()
    seconds.append(time.perf_counter() - begin)
  return program, {
    'compile_seconds': max(0.0, seconds[0] - seconds[1]),
    'peak_mb': get_peak() / 1e6,
    'num_params': program.num_params,
  }


def measure(program: Program, num_images: int) -> dict[str, float]:
  """The speed of one turn, by the clock on the wall and that of the CPU."""
  wall, cpu = time.perf_counter(), time.process_time()
  loss = program.advance()
  wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
  if not math.isfinite(loss):
    raise FloatingPointError(f'The loss must stay finite, got {loss}.')
  return {
    'images_per_second': num_images / wall,
    'cpu_us_per_image': 1e6 * cpu / num_images,
  }


def reset_peak() -> None:
  """Forgets the peak of memory so far, where the system lets us."""
  with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as file:
    file.write('5')


def get_peak() -> float:
  """The most bytes that this process held at once."""
  try:
    with open('/proc/self/status') as file:
      fields = dict(line.split(':', 1) for line in file)
    return 1024.0 * int(fields['VmHWM'].split()[0])
  except (OSError, KeyError):
    # Kilobytes, but bytes on a Mac.
    unit = 1 if sys.platform == 'darwin' else 1024
    return float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@contextlib.contextmanager
def _take_stdout() -> Iterator[TextIO]:
  """Stdout for answers alone: what libraries print goes to stderr."""
  sys.stdout.flush()
  with os.fdopen(os.dup(1), 'w') as answers:
    os.dup2(2, 1)
    yield answers
