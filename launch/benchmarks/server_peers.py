"""Starts those that the suite `server` compares with, and ends them.

A plain loop over unix sockets; one over MPI; and torch.distributed.rpc. Each is
a module, `peer_*.py`, that runs in processes of its own: a server and learners,
one thread each to compute with. They do the work of `server_work`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, IO, NamedTuple

from jasgd import runtime
from launch.benchmarks import environments
from launch.benchmarks import peer_unix
from launch.benchmarks import server_rounds
from launch.benchmarks import server_work
from launch.benchmarks import workers

# Seconds to end after a signal, and between looks at processes.
_PATIENCE = 5.0
_INTERVAL = 0.05


class Command(NamedTuple):
  """A process to start."""

  words: list[str]
  descriptors: tuple[int, ...] = ()  # Of open files that it inherits.
  variables: Mapping[str, str] = {}  # Of its environment.


Commands = contextlib.AbstractContextManager[list[Command]]


class Peer(NamedTuple):
  """Somebody to compare with."""

  # Interpreter, work, work as JSON -> what to start; held while it starts.
  prepare: Callable[[str, server_work.Work, str], Commands]
  requirements: tuple[str, ...] = ()  # Beyond what jasgd itself has.
  program: str = ''  # That must be on the machine.


@contextlib.contextmanager
def _prepare_unix(
  python: str, work: server_work.Work, line: str
) -> Iterator[list[Command]]:
  """A server and learners with an end of a pair of sockets each."""
  module = [python, '-m', 'launch.benchmarks.peer_unix']
  with contextlib.ExitStack() as stack:
    # Once all are started no end is open here: who dies is missed at once.
    pairs = [
      tuple(stack.enter_context(end).fileno() for end in peer_unix.make_pair())
      for _ in range(work.num_learners)
    ]
    ends = tuple(server_end for server_end, _ in pairs)
    joined = ','.join(map(str, ends))
    yield [Command([*module, 'server', joined, line], ends)] + [
      Command([*module, 'learner', str(number), str(end), line], (end,))
      for number, (_, end) in enumerate(pairs, 1)
    ]


@contextlib.contextmanager
def _prepare_mpi(
  python: str, work: server_work.Work, line: str
) -> Iterator[list[Command]]:
  """One command, that starts all ranks."""
  launcher = ['mpirun', '--allow-run-as-root', '--oversubscribe', '-n']
  module = [python, '-m', 'launch.benchmarks.peer_mpi', line]
  yield [Command([*launcher, str(1 + work.num_learners), *module])]


@contextlib.contextmanager
def _prepare_torch(
  python: str, work: server_work.Work, line: str
) -> Iterator[list[Command]]:
  """A command for each rank."""
  module = [python, '-m', 'launch.benchmarks.peer_torch']
  yield [
    Command([*module, str(rank), line]) for rank in range(1 + work.num_learners)
  ]


def make_own_command(words: list[str]) -> Command:
  """A process of ours, in the environment that `launch.train` gives it."""
  return Command(words, (), {**runtime.CHILD_VARIABLES, 'NPROC': '1'})


@contextlib.contextmanager
def _prepare_jasgd(
  wire: str, python: str, work: server_work.Work, line: str
) -> Iterator[list[Command]]:
  """Our own: a server and learners, or one process with threads."""
  module = [python, '-m', 'launch.benchmarks.server_jasgd']
  num_learners = 0 if wire == 'threads' else work.num_learners
  commands = [[*module, 'server', wire, line]] + [
    [*module, 'learner', wire, str(number), line]
    for number in range(1, 1 + num_learners)
  ]
  yield [make_own_command(words) for words in commands]


PEERS = {
  'unix': Peer(_prepare_unix),
  'mpi': Peer(_prepare_mpi, environments.MPI, 'mpirun'),
  'torch': Peer(_prepare_torch, environments.TORCH),
}
# Our server, over each of its wires.
OURS = {
  f'our {wire}': Peer(functools.partial(_prepare_jasgd, wire))
  for wire in ('memory', 'flight', 'threads')
}


def _find(name: str) -> Peer:
  return OURS[name] if name in OURS else PEERS[name]


def has_peer(name: str) -> bool:
  """Whether a peer can run as things are, with nothing installed for it."""
  peer = _find(name)
  if peer.program and not shutil.which(peer.program):
    return False
  return not peer.requirements or environments.has_packages(peer.requirements)


@functools.cache
def find_python(name: str) -> str | None:
  """The interpreter that a peer runs in, installed if need be.

  Args:
    name: One of `PEERS` or `OURS`.

  Returns:
    Its path; None, after saying why in a line, if the peer cannot run.
  """
  peer = _find(name)
  if peer.program and not shutil.which(peer.program):
    print(
      f'There is no {name} to compare with: {peer.program} is not on this '
      'machine.',
      flush=True,
    )
    return None
  if not peer.requirements:
    return sys.executable
  return environments.find_python(peer.requirements)


def list_peers() -> list[str]:
  """The peers that can run; says in a line each why others cannot."""
  return [name for name in PEERS if find_python(name)]


def make_case(
  name: str, num_parameters: int, num_learners: int
) -> server_rounds.Case:
  """A case for `server_rounds.measure`, of the usual length."""
  return server_rounds.make_long(
    functools.partial(run_peer, name, num_parameters, num_learners),
    server_rounds.NUM_ROUNDS[num_parameters],
  )


def run_peer(
  name: str,
  num_parameters: int,
  num_learners: int,
  num_rounds: int,
  timeout: float = 300.0,
) -> dict[str, float]:
  """Runs a peer once, in fresh processes that are gone afterwards.

  Args:
    name: One of `PEERS`.
    num_parameters: Of float32.
    num_learners: Processes beside the server.
    num_rounds: Per learner, on average; those that warm up come on top.
    timeout: Seconds for all of it.

  Returns:
    `updates_per_second`, `mean_staleness`, `max_staleness`, `cpu_per_update`
    (seconds of the server's process) and `seconds`, all from the first to the
    last update after the warm-up; `num_errors`, the answers that were wrong.

  Raises:
    ValueError: if there is nothing to do, or too much.
    WorkerError: if the peer is not there, failed, or was too slow.
  """
  python = find_python(name)
  if python is None:
    raise workers.WorkerError(f'{name} cannot run here.')
  with tempfile.TemporaryDirectory() as folder:
    work = server_work.Work(
      num_parameters, num_learners, num_rounds, folder, timeout
    )
    server_work.check_work(work)
    line = json.dumps(work._asdict())
    run_commands(name, _find(name).prepare(python, work, line), timeout)
    return _merge_reports(name, work)


def _merge_reports(name: str, work: server_work.Work) -> dict[str, float]:
  """What the server measured, and what the learners found wrong."""
  folder = pathlib.Path(work.folder)
  reports = [
    json.loads(path.read_text()) for path in folder.glob('learner-*.json')
  ]
  num_checked = sum(report['num_rounds'] for report in reports)
  if len(reports) != work.num_learners or num_checked < work.num_updates:
    raise workers.WorkerError(
      f'{name} must report on {work.num_updates} updates by '
      f'{work.num_learners} learners, got {num_checked} by {len(reports)}.'
    )
  server = json.loads((folder / 'server.json').read_text())
  num_errors = sum(report['num_errors'] for report in reports)
  return {**server, 'num_errors': num_errors}


def run_commands(name: str, commands: Commands, timeout: float) -> None:
  """Starts all processes, and waits until they are done."""
  deadline = time.monotonic() + timeout
  processes: list[subprocess.Popen[Any]] = []
  with tempfile.TemporaryFile() as said:
    try:
      with commands as listed:
        for command in listed:
          processes.append(_start(command, said))
      problem = _wait(processes, deadline)
    finally:
      end_groups(processes)
    if problem:
      said.seek(0)
      last = said.read()[-2000:].decode(errors='replace').strip()
      raise workers.WorkerError(f'{name} {problem}. {last}')


def _start(command: Command, said: IO[bytes]) -> subprocess.Popen[Any]:
  """Starts a process that leads a group of its own."""
  return subprocess.Popen(
    command.words,
    cwd=workers.ROOT,
    env={**os.environ, 'OMP_NUM_THREADS': '1', **command.variables},
    stdin=subprocess.DEVNULL,
    stdout=said,
    stderr=said,
    pass_fds=command.descriptors,
    start_new_session=True,
  )


def _wait(processes: Sequence[subprocess.Popen[Any]], deadline: float) -> str:
  """Waits for all to end well; gives what went wrong, or nothing."""
  while time.monotonic() < deadline:
    codes = [process.poll() for process in processes]
    if any(codes):
      return f'gave {[code for code in codes if code]}'
    if None not in codes:
      return ''
    time.sleep(_INTERVAL)
  return 'did not end in time'


def end_groups(processes: Sequence[subprocess.Popen[Any]]) -> None:
  """Ends those that still run, and their groups: SIGTERM, then SIGKILL."""
  for number in (signal.SIGTERM, signal.SIGKILL):
    running = [process for process in processes if process.poll() is None]
    for process in running:
      # Not yet waited for: the group is still this one.
      os.killpg(process.pid, number)
    deadline = time.monotonic() + _PATIENCE
    for process in running:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
