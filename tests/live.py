"""Real runs in real processes, all of which are sure to end.

Every process that a test starts inherits a variable of its environment, by
which the test finds it, and at the end kills whatever is left.
"""

from concurrent import futures
import contextlib
import io
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time

import jax

from jasgd import engine
from jasgd import experiment
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment.running import views

ROOT = pathlib.Path(__file__).parent.parent
PATIENCE = 120.0  # Seconds: never reached, unless something is broken.
# What this process has, so that runs can be replayed here.
NUM_THREADS = int(os.environ.get('NPROC') or os.cpu_count() or 1)
_MARK = 'JASGD_TEST_RUN'


class Processes:
  """The processes of one test: starts programs, and finds all of them."""

  def __init__(self, monkeypatch):
    self._mark = secrets.token_hex(8)
    self._programs = []
    monkeypatch.setenv(_MARK, self._mark)

  def start(self, module, *arguments, **environment):
    """Starts `python -m MODULE ARGUMENTS`."""
    return self.start_python('-m', module, *arguments, **environment)

  def start_python(self, *arguments, **environment):
    """Starts `python ARGUMENTS`."""
    program = Program(*arguments, **environment)
    self._programs.append(program)
    return program

  def find(self):
    """The command lines of all that run, by pid."""
    found = {}
    for folder in pathlib.Path('/proc').glob('[0-9]*'):
      with contextlib.suppress(OSError):  # It has just ended.
        pairs = (folder / 'environ').read_bytes().split(b'\0')
        if f'{_MARK}={self._mark}'.encode() in pairs:
          found[int(folder.name)] = (folder / 'cmdline').read_bytes()
    found.pop(os.getpid(), None)
    return found

  def find_children(self, name):
    """The pids of the children of that name, such as `learner-0`."""
    return [
      pid
      for pid, line in self.find().items()
      if line.split(b'\0')[2:4] == [b'jasgd.runtime.child', name.encode()]
    ]

  def end(self):
    """Kills what is left."""
    for pid in self.find():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for program in self._programs:
      program.close()


class Program:
  """A program that runs, and what it has said so far."""

  def __init__(self, *arguments, **environment):
    self._output = tempfile.TemporaryFile()  # noqa: SIM115  For long.
    self._process = subprocess.Popen(
      [sys.executable, *arguments],
      cwd=ROOT,
      stdin=subprocess.DEVNULL,
      stdout=self._output,
      stderr=subprocess.STDOUT,
      env={**os.environ, **environment},
    )
    self.pid = self._process.pid

  @property
  def output(self):
    """What it has said so far."""
    size = os.fstat(self._output.fileno()).st_size
    return os.pread(self._output.fileno(), size, 0).decode()

  @property
  def is_running(self):
    """Whether it has not ended yet."""
    return self._process.poll() is None

  def kill(self, number):
    """Sends it a signal."""
    self._process.send_signal(number)

  def wait(self, code=0):
    """Waits for its end, which must be this one; gives what it said."""
    found = self._process.wait(PATIENCE)
    assert found == code, self.output
    return self.output

  def close(self):
    """It was killed."""
    self._process.wait(PATIENCE)
    self._output.close()


def wait_until(condition, program=None, patience=PATIENCE):
  """Looks until a condition holds, and gives what it gave."""
  deadline = time.monotonic() + patience
  while not (value := condition()):
    assert time.monotonic() < deadline, program and program.output
    assert program is None or program.is_running, program.output
    time.sleep(0.01)  # Between two looks.
  return value


def catches(pid, number):
  """Whether a process has a handler for a signal."""
  status = pathlib.Path(f'/proc/{pid}/status').read_text()
  mask = int(re.search(r'SigCgt:\s*(\w+)', status)[1], 16)
  return bool(mask >> (number - 1) & 1)


def make_config(**parts):
  """A run that is computed in no time; parts as `TrainingConfig` has them.

  Of a part that is a dict, only what it says is changed.
  """
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='logistic', batch=4),
    optimizer=experiment.OptimizerConfig(
      rate=0.05, momentum=0.9, policy='inverse'
    ),
    strategy=experiment.StrategyConfig(name='asynchronous'),
    num_workers=2,
    runtime=experiment.RuntimeConfig(mode='local', eval_every=100),
    processes=experiment.ProcessConfig(
      num_threads=NUM_THREADS, min_seconds=(0.01,)
    ),
    num_epochs=1e6,
  )
  for name, value in parts.items():
    if not isinstance(value, dict):
      setattr(config, name, value)
      continue
    for field, entry in value.items():
      setattr(getattr(config, name), field, entry)
  return config


class Run:
  """Looks at a run from outside, now and then."""

  def __init__(self, workdir, config=None):
    self.folder = workdirs.Workdir(workdir)
    task = (config or make_config()).make_task()
    weights = jax.eval_shape(task.init, jax.random.key(0))
    self.layout = engine.make_layout(weights, 'float32')
    self._observer = views.Observer(
      self.layout, runtime.make_connect(self.folder)
    )

  def get_status(self):
    """How it stands; None if there is no server now."""
    try:
      return self._observer.get_status()
    except (runtime.WireError, runtime.RefusedError):
      return None
    finally:
      self._observer.close()

  def get_clock(self):
    """Updates made; -1 if there is no server now."""
    status = self.get_status()
    return -1 if status is None else status['clock']

  def stop(self):
    """Asks for a good end."""
    self._observer.stop('The test is over.')
    self._observer.close()

  def get_server_pid(self, incarnation=0):
    """The process of the server; None until that one is there."""
    try:
      said = workdirs.read_json(self.folder.server)
    except workdirs.WorkdirError:
      return None
    return said['pid'] if said['incarnation'] == incarnation else None

  def load_trace(self):
    """The trace so far."""
    return traces.Trace.load(self.folder.trace, allow_truncated=True)

  def go_on(self):
    """Goes on in this process, to the end."""
    config, _ = experiment.read_run(self.folder)
    return experiment.train_and_evaluate(
      config, self.folder, stream=io.StringIO()
    )

  def check_replay(self):
    """Replays it, which must give the same bits; gives the clock."""
    found = experiment.verify(self.folder, stream=io.StringIO())
    assert found.is_same, found
    return found.clock


@contextlib.contextmanager
def start_run(config, workdir, processes):
  """Runs a server and learners, and watches over them in a thread.

  Gives a `Run`, and a future of the result; leaving asks for a good end, if it
  has not ended yet.
  """
  run = Run(workdir, config)
  with futures.ThreadPoolExecutor(1) as executor:
    result = executor.submit(
      experiment.train_and_evaluate,
      config,
      workdir,
      stream=io.StringIO(),
    )
    try:
      yield run, result
      if not result.done():
        run.stop()
      result.result(PATIENCE)
    finally:  # Without its processes it gives up.
      while not result.done():
        processes.end()
        time.sleep(0.05)
