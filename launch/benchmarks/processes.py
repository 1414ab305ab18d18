"""Processes of the suites: starting them, asking them, answering in them.

A worker is a process that the suite starts. It writes answers to its stdout, a
JSON object in a line each, and lives at most until its stdin is closed or its
time is over. Only the standard library is imported here, because some workers
run in environments without jax.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent.parent

# Requirements of the environments of peers. The first one names the
# environment: `.venv-torch`.
TORCH = ('torch==2.13.0', 'numpy')
MPI = ('mpi4py==4.1.2', 'numpy')

# Seconds that a worker may take to end after its stdin is closed, and the same
# again after SIGTERM.
_PATIENCE = 5.0
_INSTALL_SECONDS = 1800


class WorkerError(Exception):
  """A worker failed, or did not answer in time."""


class Worker:
  """A child process that answers; a context manager that ends it.

  Args:
    command: Program and arguments; it runs at the checkout's root, as the
      leader of a process group.
    variables: Environment variables besides those of this process.
  """

  def __init__(
    self, command: Sequence[str], variables: Mapping[str, str]
  ) -> None:
    self._name = ' '.join(command[2:4])  # The module, and its first argument.
    # A file, because a pipe that is not read would fill up and block.
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115
    self._process = subprocess.Popen(
      command,
      cwd=ROOT,
      env={**os.environ, **variables},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      start_new_session=True,
    )

  def send(self, question: str) -> None:
    """Sends a line; `read` waits for the answer."""
    assert self._process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # `read` raises in that case.
      self._process.stdin.write(f'{question}\n'.encode())
      self._process.stdin.flush()

  def close_stdin(self) -> None:
    """Tells the worker that there are no more questions."""
    assert self._process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()

  def read(self, timeout: float) -> dict[str, Any]:
    """Waits for an answer.

    Args:
      timeout: Seconds; a worker that takes longer is killed.

    Returns:
      The JSON object of the answer.

    Raises:
      WorkerError: if the worker ended without an answer, or was too slow.
    """
    assert self._process.stdout is not None
    with self._kill_after(timeout):
      line = self._process.stdout.readline()
    if not line:
      raise self._make_error()
    return json.loads(line)

  def read_all(self, timeout: float) -> list[dict[str, Any]]:
    """Waits for the end of the worker, and returns all its answers.

    Args:
      timeout: Seconds; a worker that takes longer is killed.

    Returns:
      The JSON objects of the answers.

    Raises:
      WorkerError: if the worker failed, or was too slow.
    """
    assert self._process.stdout is not None
    with self._kill_after(timeout):
      lines = self._process.stdout.readlines()
      code = self._process.wait()
    if code:
      raise self._make_error()
    return [json.loads(line) for line in lines]

  def __enter__(self) -> 'Worker':
    return self

  def __exit__(self, *error: object) -> None:
    assert self._process.stdout is not None
    self.close_stdin()
    # After an error the worker may be busy for long: do not wait for it.
    if any(error) or not self._has_ended():
      self._signal(signal.SIGTERM)
      if not self._has_ended():
        self._signal(signal.SIGKILL)
        self._process.wait()
    self._process.stdout.close()
    self._errors.close()

  @contextlib.contextmanager
  def _kill_after(self, timeout: float) -> Iterator[None]:
    """Kills the worker if the block takes longer, which ends the block."""
    timer = threading.Timer(timeout, self._signal, [signal.SIGKILL])
    timer.start()
    try:
      yield
    finally:
      timer.cancel()

  def _make_error(self) -> WorkerError:
    """An error with the end of what the worker wrote to stderr."""
    code = self._process.wait()
    self._errors.seek(0)
    said = self._errors.read()[-2000:].decode(errors='replace').strip()
    killed = ' (it was killed, or took too long)' if code == -9 else ''
    return WorkerError(f'{self._name} returned {code}{killed}. {said}')

  def _has_ended(self) -> bool:
    try:
      self._process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
      return False
    return True

  def _signal(self, number: int) -> None:
    """Sends a signal to the worker and to the processes that it started."""
    # The worker was not waited for yet, so its number was not given to another.
    if self._process.poll() is None:
      os.killpg(self._process.pid, number)


@contextlib.contextmanager
def start_workers(
  commands: Sequence[Sequence[str]], variables: Mapping[str, str]
) -> Iterator[list[Worker]]:
  """Starts a worker for each command, and ends all of them."""
  with contextlib.ExitStack() as stack:
    workers = [
      stack.enter_context(Worker(command, variables)) for command in commands
    ]
    yield workers
    # All at once, because processes of a group end together.
    for worker in workers:
      worker.close_stdin()


def ask_all(
  workers: Sequence[Worker], question: str, timeout: float
) -> list[dict[str, Any]]:
  """Asks all workers at once, and returns their answers."""
  for worker in workers:
    worker.send(question)
  return [worker.read(timeout) for worker in workers]


class Answers:
  """The worker's side: writes answers to the parent.

  It takes stdout for answers alone. Text that libraries print (gloo does) goes
  to stderr from then on.
  """

  def __init__(self) -> None:
    sys.stdout.flush()
    self._file = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)

  def send(self, answer: Mapping[str, Any]) -> None:
    """Writes an answer, in one piece: several processes may share stdout."""
    self._file.write(json.dumps(answer) + '\n')
    self._file.flush()


def count_cores() -> int:
  """Number of cores that this process may use."""
  return len(os.sched_getaffinity(0))


def pin(num_threads: int) -> None:
  """Keeps this process on some cores, the same ones for every worker."""
  cores = sorted(os.sched_getaffinity(0))[-num_threads:]
  os.sched_setaffinity(0, cores)


def limit_threads(num_threads: int) -> dict[str, str]:
  """Variables that limit XLA and PyTorch to some threads of a CPU."""
  is_parallel = 'false' if num_threads == 1 else 'true'
  return {
    'JAX_PLATFORMS': 'cpu',
    'NPROC': str(num_threads),
    'OMP_NUM_THREADS': str(num_threads),
    'XLA_FLAGS': f'--xla_cpu_multi_thread_eigen={is_parallel}',
  }


def find_python(
  requirements: tuple[str, ...],
  *,
  may_install: bool,
  root: pathlib.Path = ROOT,
) -> str | None:
  """Finds, or installs, the environment of a peer.

  Args:
    requirements: Such as `TORCH`.
    may_install: Whether a missing environment is installed, which takes
      minutes.
    root: Folder of the environment.

  Returns:
    The path of the interpreter; None, after printing the reason, if there is
    none.
  """
  package, _, version = requirements[0].partition('==')
  folder = root / f'.venv-{package}'
  python = folder / 'bin' / 'python'
  check = (
    f'from importlib import metadata\nimport numpy, {package}\n'
    f'version = metadata.version({package!r}).split("+")[0]\n'
    f'raise SystemExit(version != {version!r})'
  )
  if python.exists() and not _run(python, '-c', check):
    return str(python)
  problem = (
    f'it is not installed in {folder.name}, and --quick installs nothing'
  )
  if may_install:
    print(
      f'Installing {" ".join(requirements)} into {folder.name}.', flush=True
    )
    problem = _run(sys.executable, '-m', 'venv', folder) or _run(
      python, '-m', 'pip', 'install', '--quiet', *requirements
    )
  if problem:
    print(f'There is no {package} to compare with: {problem}.', flush=True)
    return None
  return str(python)


def _run(*command: str | pathlib.Path) -> str:
  """Runs a command; returns a description of its failure, or ''."""
  words = list(map(str, command))
  try:
    done = subprocess.run(
      words, timeout=_INSTALL_SECONDS, capture_output=True, text=True
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    return str(error)
  said = (done.stderr or done.stdout).strip()[-500:]
  failed = f'{" ".join(words)} returned {done.returncode}. {said}'
  return failed if done.returncode else ''
