"""Many active learners on one server: is each served, and does memory stay?

  python -m launch.benchmarks.server_crowd server memory WORK SECONDS
  python -m launch.benchmarks.server_crowd learners memory FIRST LAST WORK

The parent, `measure`, starts them. Learners are threads of a few processes,
each with a connection of its own, and check every answer.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time as clocks
from typing import Any

from jasgd import runtime
from jasgd import workdir as workdirs
from launch.benchmarks import server_jasgd
from launch.benchmarks import server_peers
from launch.benchmarks import server_work
from launch.benchmarks import workers

NUM_LEARNERS = 64
NUM_PARAMETERS = 1000
_PER_PROCESS = 8
# Per learner: more than can be made, and as many as can be checked.
_NUM_ROUNDS = 200_000
# What learners may take to come and to go, in seconds.
_SLACK = 120.0


def measure(
  wire: str, seconds: float, num_learners: int = NUM_LEARNERS
) -> dict[str, float]:
  """Runs a server with many learners for a while.

  Args:
    wire: 'memory' or 'flight'.
    seconds: How long they are served.
    num_learners: How many.

  Returns:
    `updates_per_second`; `least` and `most` gradients of a learner that were
    applied; `memory_growth`, the server's memory at the end by that after a
    quarter of the time; `num_refused` messages and `num_errors` in answers.

  Raises:
    WorkerError: if a process failed.
  """
  with tempfile.TemporaryDirectory() as folder:
    # The time is what ends it.
    work = server_work.Work(
      NUM_PARAMETERS, num_learners, _NUM_ROUNDS, folder, seconds + _SLACK
    )
    server_work.check_work(work)
    line = json.dumps(work._asdict())
    module = [sys.executable, '-m', 'launch.benchmarks.server_crowd']
    commands = [[*module, 'server', wire, str(seconds), line]] + [
      [*module, 'learners', wire, str(first), str(last), line]
      for first, last in _split(num_learners)
    ]
    server_peers.run_commands(
      f'a crowd over {wire}',
      contextlib.nullcontext(
        list(map(server_peers.make_own_command, commands))
      ),
      work.timeout,
    )
    reports = [
      json.loads(path.read_text())
      for path in pathlib.Path(folder).glob('learner-*.json')
    ]
    if len(reports) != num_learners:
      raise workers.WorkerError(
        f'{num_learners} learners must report, got {len(reports)}.'
      )
    server = json.loads((pathlib.Path(folder) / 'server.json').read_text())
    num_errors = sum(report['num_errors'] for report in reports)
    return {**server, 'num_errors': num_errors}


def _split(num_learners: int) -> list[tuple[int, int]]:
  """The learners of each process: from, and up to."""
  return [
    (first, min(first + _PER_PROCESS, num_learners + 1))
    for first in range(1, num_learners + 1, _PER_PROCESS)
  ]


class _Watch:
  """Looks at the server from its own loop."""

  def __init__(self, seconds: float, stopped: threading.Event) -> None:
    self._seconds = seconds
    self._stopped = stopped
    self._begin = 0.0
    self.early_memory = 0
    self.begin: dict[str, Any] = {}
    self.end: dict[str, Any] = {}

  def look(self, server: runtime.Server) -> None:
    """Begins with the first update, and ends when the time is over."""
    time = clocks.monotonic()
    if not self.begin:
      if server.clock:
        self.begin, self._begin = server.describe(), time
      return
    if not self.early_memory and time - self._begin > self._seconds / 4:
      self.early_memory = _measure_memory()
    if not self.end and time - self._begin > self._seconds:
      self.end = server.describe()
      self.end['memory'] = _measure_memory()
      self._stopped.set()


def serve(work: server_work.Work, wire: str, seconds: float) -> dict[str, Any]:
  """Serves for a while; gives what was measured."""
  stopped = threading.Event()
  watch = _Watch(seconds, stopped)
  runtime.serve(
    server_jasgd.make_settings(work),
    workdirs.Workdir(f'{work.folder}/run'),
    runtime.Place(wires=(wire,)),
    stopped=stopped,
    on_step=watch.look,
  )
  begin, end = watch.begin, watch.end
  served = [book['num_applied'] for book in end['learners'].values()]
  refused = {
    reason: count
    for reason, count in end['counts'].items()
    if reason != 'accepted'
  }
  return {
    'updates_per_second': (end['clock'] - begin['clock'])
    / (end['time'] - begin['time']),
    'least': min(served),
    'most': max(served),
    'memory_growth': end['memory'] / watch.early_memory,
    'num_refused': sum(refused.values()),
  }


def _measure_memory() -> int:
  """Bytes of this process that are in memory."""
  text = pathlib.Path('/proc/self/statm').read_text()
  return int(text.split()[1]) * os.sysconf('SC_PAGE_SIZE')


def learn(work: server_work.Work, wire: str, numbers: range) -> None:
  """Some learners, as threads."""
  threads = [
    threading.Thread(
      target=server_jasgd.learn,
      args=(work, server_jasgd.connect(work, wire), number),
    )
    for number in numbers
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()


def print_crowd(seconds: float) -> list[str]:
  """Measures both wires, prints, and gives what is wrong."""
  print(f'\n{NUM_LEARNERS} learners of {NUM_PARAMETERS} parameters')
  problems = []
  for wire in ('memory', 'flight'):
    try:
      found = measure(wire, seconds)
    except (workers.WorkerError, subprocess.SubprocessError) as error:
      problems.append(f'A crowd over {wire} failed: {error}')
      continue
    print(
      f'our {wire}: {found["updates_per_second"]:.0f} updates/s for '
      f'{seconds:g} s, least served {found["least"]}, most '
      f'{found["most"]} ({found["least"] / found["most"]:.2f}), memory '
      f'x {found["memory_growth"]:.3f}, {found["num_refused"]} refused, '
      f'{found["num_errors"]} wrong',
      flush=True,
    )
    problems += find_problems(wire, found)
  return problems


def find_problems(wire: str, found: dict[str, float]) -> list[str]:
  """What must not be in a crowd."""
  rules = {
    f'{found["num_refused"]} messages were refused': not found['num_refused'],
    f'{found["num_errors"]} answers were wrong': not found['num_errors'],
    f'memory grew to {found["memory_growth"]:.3f} times itself': (
      found['memory_growth'] < 1.1
    ),
    f'the least served got {found["least"]} and the most {found["most"]}': (
      2 * found['least'] >= found['most']
    ),
  }
  return [
    f'In a crowd over {wire} {rule}.'
    for rule, holds in rules.items()
    if not holds
  ]


def main(role: str, wire: str, *words: str) -> None:
  """Does what the parent asks for."""
  work = server_work.start_process(words[-1])
  runtime.compute_in_place()
  if role == 'server':
    report = serve(work, wire, float(words[0]))
    server_work.write_report(work, 'server', report)
  else:
    learn(work, wire, range(int(words[0]), int(words[1])))


if __name__ == '__main__':
  main(*sys.argv[1:])
