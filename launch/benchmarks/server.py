"""How many updates a server makes per second, against other servers of weights.

For each size: a raw loop over unix sockets, an MPI loop over shared memory,
torch RPC, and our server over each of its wires; each in fresh processes, in
turns, six rounds, medians. Every learner checks every weight of every answer.

Columns: updates per second, with the lowest and the highest of the rounds; the
ratio to each peer; mean staleness, and the highest of any round; CPU time of
the server per update; wrong answers, in the worst round. Below: the shares of
our server's time; the share of this machine's memory bandwidth that the update
reaches; and a crowd of learners, all of which must be served about as often.
"""

from collections.abc import Mapping, Sequence
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
from typing import Any

from jasgd import runtime
from launch.benchmarks import measuring
from launch.benchmarks import processes
from launch.benchmarks import server_peers
from launch.benchmarks import server_worker

PEERS = ('unix', 'mpi', 'torch')
OURS = ('our memory', 'our flight', 'our threads')

# Parameters -> rounds of a learner; more if they take less than `_MIN_SECONDS`.
SIZES = {60_000: 200, 1_000_000: 80, 10_000_000: 12, 25_000_000: 6}
_MIN_SECONDS = 0.5
_NUM_ROUNDS = 6
_TIMEOUT = 300.0

# Parameters -> our wire -> (peer, how many times as fast), for 2 learners.
GOALS = {
  60_000: {'our memory': ('mpi', 0.5), 'our flight': ('torch', 1.0)},
  1_000_000: {'our memory': ('mpi', 1.0), 'our flight': ('torch', 1.0)},
  10_000_000: {'our memory': ('mpi', 1.0), 'our flight': ('torch', 1.0)},
}

_CROWD_PARAMETERS = 1000
_CROWD_PER_PROCESS = 8

# Name of a server -> the reports of its rounds.
Reports = Mapping[str, Sequence[Mapping[str, Any]]]


def find_pythons(quick: bool) -> dict[str, str]:
  """The servers that can run here, and the interpreter of each."""
  pythons = dict.fromkeys(('unix', *OURS), sys.executable)
  for name, requirements in (
    ('mpi', processes.MPI),
    ('torch', processes.TORCH),
  ):
    if name == 'mpi' and not shutil.which('mpirun'):
      print('There is no mpi to compare with: mpirun is not installed.')
      continue
    python = processes.find_python(requirements, may_install=not quick)
    if python is not None:
      pythons[name] = python
  return {name: pythons[name] for name in (*PEERS, *OURS) if name in pythons}


def make_commands(
  name: str, python: str, work: server_peers.Work
) -> list[list[str]]:
  """The processes of a server and its learners."""
  line = json.dumps(work._asdict())
  ranks = [str(rank) for rank in range(1 + work.num_learners)]
  if name in OURS:
    wire = name.removeprefix('our ')
    module = [python, '-m', 'launch.benchmarks.server_worker', wire, line]
    if wire == 'threads':
      return [[*module, *ranks]]
    return [[*module, rank] for rank in ranks]
  module = [python, '-m', 'launch.benchmarks.server_peers', name, line]
  if name == 'mpi':
    launcher = ['mpirun', '--allow-run-as-root', '--oversubscribe']
    return [[*launcher, '-n', str(len(ranks)), *module]]
  return [[*module, rank] for rank in ranks]


def run_work(
  commands: Sequence[Sequence[str]], work: server_peers.Work
) -> dict[str, Any]:
  """Runs the processes of a server and its learners, to their end.

  Args:
    commands: The processes.
    work: Work that the processes were given.

  Returns:
    The report of the server, and `num_errors` of all learners.

  Raises:
    WorkerError: if a process failed, was too slow, or a report is missing.
  """
  # Our processes get the environment that `launch.train` gives them.
  variables = {
    **runtime.CHILD_VARIABLES, 'NPROC': '1', 'OMP_NUM_THREADS': '1',
  }  # fmt: skip
  with processes.start_workers(commands, variables) as workers:
    answers = [
      answer for worker in workers for answer in worker.read_all(work.timeout)
    ]
  learners = [answer for answer in answers if 'num_answers' in answer]
  servers = [answer for answer in answers if 'num_answers' not in answer]
  num_checked = sum(learner['num_answers'] for learner in learners)
  if (len(servers), len(learners)) != (1, work.num_learners) or (
    num_checked < work.num_updates and not work.seconds
  ):
    raise processes.WorkerError(
      f'{work.num_learners} learners must report on {work.num_updates} '
      f'updates, got {num_checked} answers of {len(learners)}.'
    )
  num_errors = sum(learner['num_errors'] for learner in learners)
  return {**servers[0], 'num_errors': num_errors}


class Case:
  """A server to measure; a call runs it once and returns its report.

  A run that is over too soon to be measured is done again with more rounds, and
  so is every later one. A server that failed once is not run again, and returns
  None.
  """

  def __init__(
    self,
    name: str,
    python: str,
    num_parameters: int,
    num_learners: int,
    min_seconds: float,
  ) -> None:
    self._name = name
    self._python = python
    self._num_parameters = num_parameters
    self._num_learners = num_learners
    self._min_seconds = min_seconds
    self._num_rounds = SIZES[num_parameters]
    self._has_failed = False

  def __call__(self) -> dict[str, Any] | None:
    """Runs the server, unless it has failed before."""
    if self._has_failed:
      return None
    try:
      while (report := self._run())['seconds'] < self._min_seconds:
        # A bit more than needed; otherwise noise could cause a second run.
        factor = 1.5 * self._min_seconds / report['seconds']
        self._num_rounds = math.ceil(factor * self._num_rounds)
    except processes.WorkerError as error:
      print(f'{self._name} is left out: {error}', flush=True)
      self._has_failed = True
      return None
    return report

  def _run(self) -> dict[str, Any]:
    num_learners = self._num_learners
    num_warm_up = num_learners * max(3, self._num_rounds // 10)
    with tempfile.TemporaryDirectory() as folder:
      work = server_peers.Work(
        self._num_parameters,
        num_learners,
        num_warm_up,
        num_warm_up + num_learners * self._num_rounds,
        folder,
        _TIMEOUT,
      )
      return run_work(make_commands(self._name, self._python, work), work)


def print_table(reports: Reports) -> None:
  """Prints a line for each server."""
  bases = ' '.join(f'{f"x {peer}":>8}' for peer in PEERS)
  print(
    f'{"":12} {"updates/s":>9} {"lowest":>8} {"highest":>8} {bases} '
    f'{"staleness":>9} {"max":>5} {"CPU ms":>8} {"wrong":>5}'
  )
  for name, rounds in reports.items():
    speeds = get_column(rounds, 'updates_per_second')
    ratios = ' '.join(
      f'{get_speedup(reports, name, peer):8.2f}'
      if peer in reports
      else '       -'
      for peer in PEERS
    )
    print(
      f'{name:12} {statistics.median(speeds):9.1f} {min(speeds):8.1f} '
      f'{max(speeds):8.1f} {ratios} '
      f'{statistics.median(get_column(rounds, "mean_staleness")):9.2f} '
      f'{max(get_column(rounds, "max_staleness")):5.0f} '
      f'{1e3 * statistics.median(get_column(rounds, "cpu_per_update")):8.3f} '
      # The maximum, because a median would hide a single round with errors.
      f'{max(get_column(rounds, "num_errors")):5.0f}',
      flush=True,
    )
  for name in OURS:
    if name in reports:
      shares = get_column(reports[name], 'shares')
      medians = (
        f'{key} {statistics.median(share[key] for share in shares):.0%}'
        for key in shares[0]
      )
      print(f'{name:12} {", ".join(medians)}')


def get_column(rounds: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
  """One number of every round."""
  return [report[key] for report in rounds]


def get_speedup(reports: Reports, name: str, base: str) -> float:
  """Ratio of the medians of updates per second."""
  mine, other = (
    statistics.median(get_column(reports[each], 'updates_per_second'))
    for each in (name, base)
  )
  return mine / other


def print_goals(num_parameters: int, reports: Reports) -> None:
  """Prints whether our wires reach their goals."""
  for name, (peer, goal) in GOALS.get(num_parameters, {}).items():
    if name in reports and peer in reports:
      ratio = get_speedup(reports, name, peer)
      word = measuring.say_met(measuring.is_met(ratio, at_least=goal))
      print(f'Goal: {name} is {goal} x {peer}: {word}, {ratio:.2f}', flush=True)


def find_problems(reports: Reports) -> list[str]:
  """Failures of our servers, and wrong weights of any server."""
  problems = [f'{name} did not run.' for name in OURS if name not in reports]
  for name, rounds in reports.items():
    num_errors = max(get_column(rounds, 'num_errors'))
    if num_errors:
      problems.append(f'{name} gave wrong weights, {num_errors} times.')
  return problems


def print_bandwidth(num_parameters: int) -> None:
  """Prints the update's share of the bandwidth of a triad."""
  programs = server_worker.make_programs(num_parameters)
  seconds = measuring.run_in_turns(programs, 8, num_warm_up=1)
  # a <- a + s b reads two arrays and writes one; the update reads gradient,
  # velocity and weights, and writes the last two.
  triad = 3 * 4 * num_parameters / min(seconds['triad'])
  update = 5 * 4 * num_parameters / min(seconds['update'])
  print(
    f'\nThe update of {num_parameters:,} parameters moves {update / 1e9:.1f} '
    f'GB/s, an in-place triad {triad / 1e9:.1f} GB/s: {update / triad:.0%}',
    flush=True,
  )


def run_crowd(wire: str, num_learners: int, seconds: float) -> dict[str, Any]:
  """The report of a server with many learners, threads of some processes."""
  with tempfile.TemporaryDirectory() as folder:
    work = server_peers.Work(
      _CROWD_PARAMETERS,
      num_learners,
      num_warm_up=1,
      num_updates=server_peers.MAX_UPDATES,
      folder=folder,
      timeout=seconds + 120.0,
      seconds=seconds,
    )
    line = json.dumps(work._asdict())
    module = [sys.executable, '-m', 'launch.benchmarks.server_worker']
    ranks = [str(rank) for rank in range(1, 1 + num_learners)]
    groups = [
      ranks[first : first + _CROWD_PER_PROCESS]
      for first in range(0, num_learners, _CROWD_PER_PROCESS)
    ]
    commands = [[*module, wire, line, *group] for group in (['0'], *groups)]
    return run_work(commands, work)


def print_crowd(num_learners: int, seconds: float) -> list[str]:
  """Measures a crowd over both wires, and returns the problems."""
  print(f'\n{num_learners} learners of {_CROWD_PARAMETERS} parameters')
  problems = []
  for wire in ('memory', 'flight'):
    try:
      report = run_crowd(wire, num_learners, seconds)
    except processes.WorkerError as error:
      problems.append(f'A crowd over {wire} failed: {error}')
      continue
    least, most = report['least_applied'], report['most_applied']
    print(
      f'our {wire}: {report["updates_per_second"]:.0f} updates/s for '
      f'{seconds:g} s, least served {least}, most {most} ({least / most:.2f}), '
      f'memory x {report["memory_growth"]:.3f}, {report["num_refused"]} '
      f'refused, {report["num_errors"]} wrong',
      flush=True,
    )
    problems += find_crowd_problems(wire, report)
  return problems


def find_crowd_problems(wire: str, report: Mapping[str, float]) -> list[str]:
  """Faults in the report of a crowd."""
  least, most = report['least_applied'], report['most_applied']
  growth = report['memory_growth']
  faults = {
    f'{report["num_refused"]} messages were refused': report['num_refused'],
    f'{report["num_errors"]} answers were wrong': report['num_errors'],
    f'memory grew to {growth:.3f} times its first size': growth >= 1.1,
    f'the least served got {least} and the most {most}': 2 * least < most,
  }
  return [
    f'In a crowd over {wire} {fault}.' for fault in faults if faults[fault]
  ]


def run(quick: bool) -> None:
  """Prints a table for each size and number of learners.

  A speed below its goal is printed, but is not an error: machines differ.

  Raises:
    SystemExit: if weights were wrong, ours did not run, or a crowd was served
      unfairly.
  """
  print(__doc__)
  problems: list[str] = []
  pythons = find_pythons(quick)
  sizes = [*SIZES][:1] if quick else SIZES
  for num_parameters, num_learners in itertools.product(
    sizes, (2,) if quick else (2, 4)
  ):
    cases = {
      name: Case(
        name,
        python,
        num_parameters,
        num_learners,
        0.0 if quick else _MIN_SECONDS,
      )
      for name, python in pythons.items()
    }
    rounds = measuring.run_in_turns(cases, 1 if quick else _NUM_ROUNDS)
    reports = {
      name: [report for report in found if report is not None]
      for name, found in rounds.items()
      if None not in found
    }
    print(f'\n{num_parameters:,} parameters, {num_learners} learners')
    print_table(reports)
    if num_learners == 2:
      print_goals(num_parameters, reports)
    problems += find_problems(reports)
  print_bandwidth(1_000_000 if quick else 25_000_000)
  problems += print_crowd(8 if quick else 64, 1.0 if quick else 60.0)
  if problems:
    raise SystemExit('\n'.join(problems))
