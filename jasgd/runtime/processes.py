"""Child processes: spawned, never forked, and never left behind.

A child is told what to do by a line of JSON on its standard input. It ends when
that input does: so it does not outlive its parent, however that ends. Secrets
go this way too, or in files, and are in no list of processes.
"""

from collections.abc import Callable
import contextlib
import importlib
import importlib.util
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

import jax

from jasgd.runtime import _group_losses

_log = logging.getLogger(__name__)

# XLA sees so many threads; on a CPU, bits depend on it.
THREADS_VARIABLE = 'NPROC'

# How a script that was started as such is called in its children.
_SCRIPT = '__jasgd_script__'


# Memory that is freed stays with the process, as fresh pages of large messages
# cost more than the copy into them.
CHILD_VARIABLES = {
  'MALLOC_TRIM_THRESHOLD_': '1000000000',
  'MALLOC_MMAP_THRESHOLD_': '33554432',
}


class Child:
  """A process that was started here.

  Args:
    name: For people, and for its log.
    target: What it calls: 'module:function'. The function takes `stopped`, an
      event that is set when it is to end, and the arguments.
    arguments: What JSON can say.
    num_threads: That XLA sees there; None: as here.
    log: Where its standard error goes; None: to ours.
    environment: More variables.
  """

  def __init__(
    self,
    name: str,
    target: str,
    arguments: dict[str, Any],
    *,
    num_threads: int | None = None,
    log: pathlib.Path | None = None,
    environment: dict[str, str] | None = None,
  ) -> None:
    self.name = name
    self.log = log
    variables = {**CHILD_VARIABLES, **os.environ, **(environment or {})}
    if num_threads is not None:
      variables[THREADS_VARIABLE] = str(num_threads)
      variables.setdefault('OMP_NUM_THREADS', str(num_threads))
    # What can be imported here can be imported there.
    paths = [os.path.abspath(path or os.curdir) for path in sys.path]
    variables['PYTHONPATH'] = os.pathsep.join(paths)
    with contextlib.ExitStack() as stack:
      stderr = None
      if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        stderr = stack.enter_context(open(log, 'ab'))
      self._process = subprocess.Popen(
        [sys.executable, '-m', 'jasgd.runtime.child', name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=variables,
        start_new_session=True,  # Ctrl-C is for the parent to handle.
      )
    job = json.dumps({'target': target, 'arguments': arguments})
    assert self._process.stdin is not None
    try:
      self._process.stdin.write(f'{job}\n'.encode())
      self._process.stdin.flush()
    except BrokenPipeError:  # It is dead already, which its code will tell.
      _log.warning('%s ended as it began.', name)

  @property
  def pid(self) -> int:
    """Its process id."""
    return self._process.pid

  @property
  def code(self) -> int | None:
    """Its exit code; None while it runs."""
    return self._process.poll()

  def stop(self) -> None:
    """Asks it to end in good order: its input ends."""
    assert self._process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It is gone, and its input.
      self._process.stdin.close()

  def wait(self, timeout: float) -> int | None:
    """Waits for its end; None if it did not come in time."""
    try:
      return self._process.wait(timeout)
    except subprocess.TimeoutExpired:
      return None

  def end(self, timeout: float) -> int:
    """Makes sure that it ends: asks, and kills it if that does not help."""
    self.stop()
    code = self.wait(timeout)
    if code is None:
      if timeout > 0:  # Or nobody expected it.
        _log.warning('%s did not end within %g s: killed.', self.name, timeout)
      os.kill(self.pid, signal.SIGKILL)
      code = self._process.wait()
    return code

  def read_log(self) -> str:
    """The end of its log, and where the rest is."""
    if self.log is None or not self.log.exists():
      return ''
    lines = self.log.read_text(errors='replace').splitlines()[-1:]
    return '\n'.join([*lines, f'(The log is {os.fspath(self.log)!r}.)'])


def name_function(function: Callable[..., Any]) -> str:
  """The name by which another process can import a function.

  Args:
    function: A function of a module, or of the script that runs.

  Returns:
    'module:function', or 'file.py:function' for one of the script.

  Raises:
    ValueError: if it has no such name: a lambda, a closure, one of a notebook.
  """
  module, name = function.__module__, function.__qualname__
  if '<' in name or '.' in name:
    raise ValueError(
      'Other processes import the function by its name, so it must be one of a '
      f'module, got {module}.{name}. Threads need no name: processes=False.'
    )
  if module != '__main__':
    return f'{module}:{name}'
  spec = getattr(sys.modules['__main__'], '__spec__', None)
  if spec is not None:  # It was started with -m.
    return f'{spec.name}:{name}'
  path = getattr(sys.modules['__main__'], '__file__', None)
  if path is None:
    raise ValueError(
      f'Other processes cannot import {name} from an interactive session: put '
      'it into a module, or use threads: processes=False.'
    )
  return f'{os.path.abspath(path)}:{name}'


def find_function(name: str) -> Callable[..., Any]:
  """The inverse of `name_function`.

  Args:
    name: What that gave.

  Returns:
    The function.
  """
  place, _, function = name.rpartition(':')
  if not place.endswith('.py'):
    return getattr(importlib.import_module(place), function)
  if _SCRIPT not in sys.modules:
    spec = importlib.util.spec_from_file_location(_SCRIPT, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT] = module
    spec.loader.exec_module(module)
  return getattr(sys.modules[_SCRIPT], function)


def compute_in_place() -> None:
  """Lets this process compute in the thread that asks for it, on a CPU.

  By default jax hands each call to another thread, which must be woken first:
  where all cores are busy, that takes longer than a small update. A process
  calls this before its first computation.
  """
  jax.config.update('jax_cpu_enable_async_dispatch', False)


def run_child() -> None:
  """What a child does: reads its job, and does it until its input ends."""
  compute_in_place()
  logging.basicConfig(
    level=logging.INFO, format='%(asctime)s %(levelname).1s %(message)s'
  )
  for noisy in ('jax', 'absl', 'orbax'):
    logging.getLogger(noisy).setLevel(logging.WARNING)
  job = json.loads(_read_line())
  stopped = threading.Event()
  threading.Thread(target=_watch_input, args=(stopped,), daemon=True).start()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stopped.set())
  try:
    find_function(job['target'])(stopped=stopped, **job['arguments'])
  except (OSError, ValueError) as error:  # Of the world, or of the user.
    _log.error('%s: %s', type(error).__name__, error)
    _exit(1)
  except _group_losses.GroupError as error:
    _log.error('%s', error)
    _exit(_group_losses.GROUP_LOST)
  except Exception:
    _log.exception('It failed.')
    _exit(1)


def _exit(code: int) -> None:
  """Ends this process, which has failed."""
  if jax.distributed.is_initialized():
    # At once: what usually ends a process would wait for all others, or for the
    # one that is lost, while nobody knows of it.
    os._exit(code)
  sys.exit(code)


def _read_line() -> bytes:
  """The first line of the input."""
  # Not by sys.stdin: a thread that waits in it could not be left behind.
  line = b''
  while not line.endswith(b'\n'):
    part = os.read(sys.stdin.fileno(), 1 << 16)
    if not part:
      break
    line += part
  return line


def _watch_input(stopped: threading.Event) -> None:
  """Waits for the end of the input."""
  while os.read(sys.stdin.fileno(), 4096):
    pass
  stopped.set()
