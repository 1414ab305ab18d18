"""Child processes: spawned, never forked, and never left behind.

A child gets its job as a line of JSON on its standard input. It ends when that
input ends, so it does not outlive its parent, even if the parent is killed.
Secrets are passed this way too, or in files, and appear in no list of
processes.
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

from jasgd.runtime import _crash
from jasgd.runtime.nodes import _group

_log = logging.getLogger(__name__)

# Number of threads that XLA uses; on a CPU, bits depend on it.
THREADS_VARIABLE = 'NPROC'

# Module name of the main script, in its children.
_SCRIPT = '__jasgd_script__'


# Freed memory stays with the process: fresh pages for large messages cost more
# than the copy into them.
CHILD_VARIABLES = {
  'MALLOC_TRIM_THRESHOLD_': '1000000000',
  'MALLOC_MMAP_THRESHOLD_': '33554432',
}


class Child:
  """A child process of this process.

  Args:
    name: Name of the process, in messages and on its command line.
    target: Function that it calls: 'module:function'. The function takes
      `stopped`, an event that is set when it is to end, and the arguments.
    arguments: Arguments, JSON-serialisable.
    num_threads: Threads that XLA uses there; None: as in this process.
    log: File for its standard error; None: the standard error of this process.
    environment: Further environment variables.
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
    # The child can import the same modules as this process.
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
    except BrokenPipeError:  # It is dead already; `code` says so.
      _log.warning('%s ended while it was started.', name)

  @property
  def pid(self) -> int:
    """Process id."""
    return self._process.pid

  @property
  def code(self) -> int | None:
    """Exit code; None while it runs."""
    return self._process.poll()

  def stop(self) -> None:
    """Asks it to save and end, by closing its input."""
    assert self._process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # The process has ended.
      self._process.stdin.close()

  def wait(self, timeout: float) -> int | None:
    """Waits for its end; gives the exit code, or None if it still runs."""
    try:
      return self._process.wait(timeout)
    except subprocess.TimeoutExpired:
      return None

  def end(self, timeout: float) -> int:
    """Makes sure that it ends: asks, and kills it after `timeout` seconds."""
    self.stop()
    code = self.wait(timeout)
    if code is None:
      if timeout > 0:
        _log.warning(
          '%s did not end within %g s and is killed.', self.name, timeout
        )
      os.kill(self.pid, signal.SIGKILL)
      code = self._process.wait()
    return code

  def read_log(self) -> str:
    """Last line of its log, and the path of the log."""
    if self.log is None or not self.log.exists():
      return ''
    lines = self.log.read_text(errors='replace').splitlines()[-1:]
    return '\n'.join([*lines, f'(The log is {os.fspath(self.log)!r}.)'])


def name_function(function: Callable[..., Any]) -> str:
  """Name by which another process can import a function.

  Args:
    function: Function of a module, or of the main script.

  Returns:
    'module:function', or 'file.py:function' for one of the main script.

  Raises:
    ValueError: if it has no such name, like a lambda or a closure.
  """
  module, name = function.__module__, function.__qualname__
  if '<' in name or '.' in name:
    raise ValueError(
      'Other processes import the function by its name, so it must be defined '
      f'at the top level of a module, got {module}.{name}. Threads can run any '
      'function: processes=False.'
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
  """Inverse of `name_function`.

  Args:
    name: Name of a function.

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
  """Makes jax compute in the calling thread, on a CPU.

  By default jax hands each call to another thread, which must be woken first:
  if all cores are busy, that takes longer than a small update. Call it before
  the first computation of a process.
  """
  jax.config.update('jax_cpu_enable_async_dispatch', False)


def run_child() -> None:
  """Main function of a child: reads its job, and does it."""
  compute_in_place()
  logging.basicConfig(
    level=logging.INFO, format='%(asctime)s %(levelname).1s %(message)s'
  )
  for noisy in ('jax', 'absl', 'orbax'):
    logging.getLogger(noisy).setLevel(logging.WARNING)
  _crash.start_process(sys.argv[1])
  job = json.loads(_read_line())
  stopped = threading.Event()
  threading.Thread(target=_watch_input, args=(stopped,), daemon=True).start()
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stopped.set())
  try:
    find_function(job['target'])(stopped=stopped, **job['arguments'])
  except (OSError, ValueError) as error:  # A user can mend these.
    _log.error('%s: %s', type(error).__name__, error)
    _exit(1)
  except _group.GroupError as error:
    _log.error('%s', error)
    _exit(_group.GROUP_LOST)
  except Exception:
    _log.exception('The process failed.')
    _exit(1)


def _exit(code: int) -> None:
  """Ends this process after a failure."""
  if jax.distributed.is_initialized():
    # Without the exit handlers of jax: these would wait for the other
    # processes, one of which may be lost.
    os._exit(code)
  sys.exit(code)


def _read_line() -> bytes:
  """First line of the input."""
  # Not by sys.stdin: a daemon thread that waits in it would block the exit.
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
