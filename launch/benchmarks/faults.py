"""Kills processes of real runs at random, and checks that nothing is lost.

Each round trains with a server and learners, or with nodes, as processes, and
kills one of them: at a named point of the server or of a learner, or at a
random time. The run recovers and ends, and is replayed: the weights must be the
same, bit for bit, and every gradient and message counted once. `recovery` is
the seconds from the kill to the next applied push, or to the next mix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import io
import os
import pathlib
import random
import select
import signal
import statistics
import tempfile
import threading
import time
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jasgd import experiment
from jasgd import protocols
from jasgd import tasks
from jasgd import traces
from jasgd.runtime import _crash

PROTOCOLS: dict[str, dict[str, Any]] = {
  'asynchronous': {'name': 'asynchronous'},
  'softsync': {'name': 'softsync', 'n': 2},
  'hardsync': {'name': 'hardsync'},
  'ssp': {'name': 'ssp', 's': 1},
}
PEER_STRATEGIES: dict[str, dict[str, Any]] = {
  'pull': {'name': 'pull'},
  'push': {'name': 'push'},
  'push_sum': {'name': 'push_sum'},
  'elastic': {'name': 'elastic', 'rate': 0.2},
  'allreduce': {'name': 'allreduce', 'period': 2},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
  'momentum': {'name': 'sgd', 'rate': 0.05, 'momentum': 0.9},
  'adam': {'name': 'adam', 'rate': 0.003},
}
TASKS: dict[str, dict[str, Any]] = {
  'logistic': {'name': 'logistic', 'batch': 4},
  'mlp': {'name': 'digits', 'model': 'mlp', 'batch': 8},
}
# A task whose gradient is sent in two chunks: see `make_wide_task`.
WIDE: dict[str, Any] = {'name': f'{__name__}:make_wide_task', 'batch': 4}
VICTIMS = ('server', 'learner', 'node')
# Instead of the name of a point: the process is killed at a random time.
RANDOM = 'random'
NUM_WORKERS = 3
NUM_UPDATES = 100  # Updates of a server, or steps of each node.
_STEP_SECONDS = 0.03  # Least seconds of a gradient.
_INTERVAL = 0.002  # Seconds between looks at processes and trace.


class Fault(NamedTuple):
  """Which process is killed when, and in which run."""

  strategy: str  # In `PEER_STRATEGIES` if the victim is a node.
  optimizer: str
  wire: str
  point: str  # In `_crash.POINTS` or `_crash.LEARNER_POINTS`; or `RANDOM`.
  # Kill when the point is reached for the `count`-th time; at a random time:
  # when the trace has `count` records.
  count: int
  victim: str  # One of `VICTIMS`.
  task: str = 'logistic'  # 'wide' if the point is 'sending'.
  number: int = 0  # Number of the node, or of a learner that is killed itself.
  fraction: float = 0.0  # Random time: delay after the last record, in steps.

  @property
  def process(self) -> str:
    """Name of the process that is killed."""
    if self.victim == 'server':
      return self.victim
    return f'{self.victim}-{self.number}'

  @property
  def variable(self) -> str:
    """The text of `_crash.VARIABLE`; '' if no point is named."""
    if self.point == RANDOM:
      return ''
    if self.point in _crash.LEARNER_POINTS:
      return f'{self.point}:{self.count}:{self.process}'
    suffix = ':learner' if self.victim == 'learner' else ''
    return f'{self.point}:{self.count}{suffix}'


class Outcome(NamedTuple):
  """Outcome of a run with a fault."""

  num_restarts: int
  num_left: int  # Learners that left, or nodes that were lost, before the end.
  num_void: int  # Gradients that were lost with the server's memory.
  num_twice: int  # Gradients or messages that were applied more than once.
  num_missing: int  # Updates, or steps of the other nodes, that were not made.
  is_same: bool  # Whether replay has the same bits.
  # Seconds from the kill to the next applied push or mix; None if not seen.
  recovery: float | None

  @property
  def has_happened(self) -> bool:
    """Whether a process died: a random point may never be reached."""
    # A server that died before its first checkpoint leaves no restart.
    has_recovered = self.recovery is not None
    return bool(self.num_restarts or self.num_left or has_recovered)

  @property
  def is_good(self) -> bool:
    """Whether the run ended as one without a fault."""
    return self.is_same and not self.num_twice and not self.num_missing


def make_wide_task(batch: int) -> tasks.Task:
  """A small task with 1.2 million further weights.

  A gradient has 4.8 MB, so that Flight sends it in two chunks.

  Args:
    batch: Samples per gradient.

  Returns:
    The task.
  """
  small = tasks.make_task('logistic', batch=batch)

  def init(key: Any) -> Any:
    params, stats = small.init(key)
    return {'small': params, 'wide': jnp.ones(1_200_000)}, stats

  def loss(params: Any, stats: Any, batch: Any, key: Any) -> Any:
    found, stats = small.loss(params['small'], stats, batch, key)
    return found + 0.5 * jnp.mean(params['wide'] ** 2), stats

  def metrics(params: Any, stats: Any, batch: Any) -> Any:
    return small.metrics(params['small'], stats, batch)

  return dataclasses.replace(
    small, name='wide', init=init, loss=loss, metrics=metrics
  )


@contextlib.contextmanager
def time_recovery(workdir: str) -> Iterator[list[float]]:
  """Measures the seconds from a kill to the next applied push or mix.

  The times in a trace leave out the seconds in which the server was down. So a
  thread measures them: it waits until a child process has ended, and then until
  the trace has a new applied gradient or a new mix.

  Args:
    workdir: The folder of the run.

  Yields:
    A list that gets the seconds, once they are known.
  """
  seconds: list[float] = []
  stopped = threading.Event()

  def wait_until(condition: Callable[[], bool]) -> bool:
    while not stopped.wait(_INTERVAL):
      if condition():
        return True
    return False

  children = _Children()
  children.has_ended()  # Those that are there may be killed at once.

  def watch() -> None:
    if wait_until(children.has_ended):
      killed_at, num_before = time.monotonic(), _count_applied(workdir)
      if wait_until(lambda: _count_applied(workdir) > num_before):
        seconds.append(time.monotonic() - killed_at)

  thread = threading.Thread(target=watch)
  thread.start()
  try:
    yield seconds
  finally:
    stopped.set()
    thread.join()
    children.close()


def _load_records(workdir: str) -> np.ndarray:
  """All records that were ever written, void ones included."""
  try:
    trace = traces.Trace.load(f'{workdir}/trace', allow_truncated=True)
  except traces.TraceError:  # The server, or a node, has not begun.
    return traces.make_records(step=np.arange(0))
  return trace.records


def _count_applied(workdir: str) -> int:
  """Applied gradients and mixes that were ever written."""
  records = _load_records(workdir)
  kinds = records['kind']
  is_push = kinds == traces.Kind.PUSH
  is_applied = is_push & (records['fate'] == protocols.Fate.APPLIED)
  is_mix = np.isin(kinds, (traces.Kind.MIX, traces.Kind.MEAN))
  return int(np.count_nonzero(is_applied | is_mix))


@contextlib.contextmanager
def kill_at_random(fault: Fault, workdir: str) -> Iterator[None]:
  """Kills a child process at the random time of a fault, within the context.

  Args:
    fault: The fault; nothing is done if it has a named point.
    workdir: The folder of the run.

  Yields:
    Nothing.
  """
  stopped = threading.Event()

  def kill() -> None:
    while not stopped.wait(_INTERVAL):
      if len(_load_records(workdir)) < fault.count:
        continue
      stopped.wait(fault.fraction * _STEP_SECONDS)
      pid = _find_children().get(fault.process, 0)
      if pid and not stopped.is_set():
        os.kill(pid, signal.SIGKILL)
      return

  if fault.point != RANDOM:
    yield
    return
  thread = threading.Thread(target=kill)
  thread.start()
  try:
    yield
  finally:
    stopped.set()
    thread.join()


class _Children:
  """The members of a run, and whether one of them has ended.

  A handle shows that a process has ended even if the supervisor, which watches
  the same processes, has already waited for it.
  """

  def __init__(self) -> None:
    self._handles: dict[int, int] = {}

  def has_ended(self) -> bool:
    """Whether a child that was seen before has ended."""
    for pid in _find_children().values():
      if pid not in self._handles:
        with contextlib.suppress(ProcessLookupError):  # It has just ended.
          self._handles[pid] = os.pidfd_open(pid)
    return bool(select.select([*self._handles.values()], [], [], 0)[0])

  def close(self) -> None:
    """Closes all handles."""
    for handle in self._handles.values():
      os.close(handle)


def _find_children() -> dict[str, int]:
  """The process ids of the members of a run that this process has started."""
  found = {}
  for folder in pathlib.Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):  # It has just ended.
      # The name of the program, which is in brackets, may contain spaces.
      parent = int((folder / 'stat').read_text().rpartition(')')[2].split()[1])
      if parent != os.getpid():
        continue
      line = (folder / 'cmdline').read_bytes().split(b'\0')
      if line[2:3] == [b'jasgd.runtime.child']:
        found[line[3].decode()] = int(folder.name)
  return found


def make_config(fault: Fault) -> experiment.TrainingConfig:
  """A short run with frequent checkpoints."""
  is_peer = fault.victim == 'node'
  optimizer = experiment.OptimizerConfig(**OPTIMIZERS[fault.optimizer])
  if not is_peer:
    optimizer.policy = 'inverse'
  named = PEER_STRATEGIES if is_peer else PROTOCOLS
  deadlines = experiment.DeadlineConfig(rejoin=30.0, end=5.0)
  if is_peer:
    deadlines.step = 1.0
  return experiment.TrainingConfig(
    task=experiment.TaskConfig(
      **(WIDE if fault.task == 'wide' else TASKS[fault.task])
    ),
    optimizer=optimizer,
    strategy=experiment.StrategyConfig(**named[fault.strategy]),
    num_workers=NUM_WORKERS,
    runtime=experiment.RuntimeConfig(
      mode='local', wire=fault.wire, checkpoint_seconds=0.05, eval_every=1000
    ),
    # As many threads as here: replay here must round in the same way.
    processes=experiment.ProcessConfig(
      num_threads=int(os.environ.get('NPROC') or os.cpu_count() or 1),
      min_seconds=(_STEP_SECONDS,),
    ),
    deadlines=deadlines,
    num_epochs=1e6,
    num_updates=NUM_UPDATES * (NUM_WORKERS if is_peer else 1),
  )


def run_fault(fault: Fault, workdir: str) -> Outcome:
  """Trains with a fault, and replays.

  Args:
    fault: The fault.
    workdir: An empty folder.

  Returns:
    The outcome.
  """
  config = make_config(fault)
  os.environ[_crash.VARIABLE] = fault.variable
  try:
    with time_recovery(workdir) as seconds, kill_at_random(fault, workdir):
      result = _train(config, workdir)
  finally:
    del os.environ[_crash.VARIABLE]
  found = experiment.verify(workdir, stream=io.StringIO())
  trace = traces.Trace.load(f'{workdir}/trace')
  kinds = trace.records['kind']
  outcome = Outcome(
    num_restarts=int(np.count_nonzero(kinds == traces.Kind.RESTART)),
    num_left=len(result.lost),
    num_void=int(np.count_nonzero(trace.is_void & (kinds == traces.Kind.PUSH))),
    num_twice=0,
    num_missing=0,
    is_same=found.is_same,
    recovery=seconds[0] if seconds else None,
  )
  if fault.victim == 'node':
    return outcome._replace(
      num_twice=_count_mixed_twice(fault.strategy, trace),
      num_missing=_count_missing(trace, result.lost),
    )
  applied = np.stack([trace.worker, trace.step])[
    :, trace.fate == protocols.Fate.APPLIED
  ]
  before_end = np.cumsum(kinds == traces.Kind.END) == 0
  return outcome._replace(
    num_left=int(np.count_nonzero((kinds == traces.Kind.LEAVE) & before_end)),
    num_twice=_count_repeated(applied.T),
    num_missing=NUM_UPDATES - found.clock,
  )


def _train(
  config: experiment.TrainingConfig, workdir: str
) -> experiment.Result:
  """Trains to the end; an all-reduce that lost a node is started again."""
  try:
    return experiment.train_and_evaluate(config, workdir, stream=io.StringIO())
  except experiment.RunError:
    strategy: Any = config.make_strategy()
    if strategy.has_server or not strategy.is_collective:
      raise
  return experiment.train_and_evaluate(config, workdir, stream=io.StringIO())


def _count_repeated(rows: np.ndarray) -> int:
  return len(rows) - len(np.unique(rows, axis=0))


def _count_mixed_twice(strategy: str, trace: traces.Trace) -> int:
  """Messages that were mixed, or forces that moved the centre, twice."""
  records = trace.of_kind(traces.Kind.MOVE)
  if strategy in ('push', 'push_sum'):
    records = trace.of_kind(traces.Kind.MIX)
  keys = [records['source'], records['source_version']]
  return _count_repeated(np.stack(keys, axis=1))


def _count_missing(trace: traces.Trace, lost: Sequence[str]) -> int:
  """Steps that the nodes that were not lost have not made."""
  steps = trace.steps
  return sum(
    NUM_UPDATES - len(np.unique(steps['step'][steps['replica'] == node]))
    for node in range(NUM_WORKERS)
    if f'node-{node}' not in lost
  )


def draw_fault(rng: random.Random) -> Fault:
  """Draws a kill of any process, at any point or time, in any run."""
  victim = rng.choice(VICTIMS)
  points = {
    'server': (*_crash.POINTS, RANDOM),
    'learner': (*_crash.POINTS, *_crash.LEARNER_POINTS, RANDOM, RANDOM),
    'node': (RANDOM,),
  }
  point = rng.choice(points[victim])
  # Each learner passes its points less often than the server passes its own.
  last = NUM_UPDATES // 4 if point in _crash.LEARNER_POINTS else NUM_UPDATES
  if point.startswith('checkpoint'):
    last = 4
  elif victim == 'node':  # A record of each step and of each mix.
    last = NUM_UPDATES * NUM_WORKERS
  is_sending = point == 'sending'
  named = PEER_STRATEGIES if victim == 'node' else PROTOCOLS
  return Fault(
    strategy=rng.choice([*named]),
    optimizer=rng.choice([*OPTIMIZERS]),
    wire='flight' if is_sending else rng.choice(['memory', 'flight']),
    point=point,
    count=rng.randint(1, last),
    victim=victim,
    task='wide' if is_sending else rng.choice([*TASKS]),
    number=rng.randrange(NUM_WORKERS),
    fraction=rng.random(),
  )


def describe_recovery(seconds: Mapping[str, Sequence[float]]) -> list[str]:
  """Lines with the median and the maximum for each victim.

  Args:
    seconds: Victim -> seconds from its kill to the next applied push or mix.

  Returns:
    A line for each victim that was killed.
  """
  return [
    f'{victim} killed: {statistics.median(values):.2f} s to the next '
    f'{"mix" if victim == "node" else "applied push"} in the median of '
    f'{len(values)}, at most {max(values):.2f} s.'
    for victim, values in seconds.items()
    if values
  ]


def run(quick: bool, rounds: int, seed: int) -> None:
  """Draws faults, and prints how each run ended.

  Raises:
    SystemExit: if a run lost something, or counted it twice.
  """
  print(__doc__)
  rng = random.Random(seed)
  rounds = 1 if quick else rounds
  recoveries: dict[str, list[float]] = {victim: [] for victim in VICTIMS}
  num_good = num_happened = 0
  print(
    f'{"":5} {"task":9} {"strategy":13} {"optimizer":10} {"wire":7} '
    f'{"killed":8} {"at":24} {"restarts":>8} {"left":>5} {"void":>5} '
    f'{"recovery":>8} {"seconds":>8}'
  )
  for number in range(1, rounds + 1):
    fault = draw_fault(rng)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
      outcome = run_fault(fault, folder)
    num_good += outcome.is_good
    num_happened += outcome.has_happened
    recovery = '-'
    if outcome.recovery is not None:
      recoveries[fault.victim].append(outcome.recovery)
      recovery = f'{outcome.recovery:.2f}'
    print(
      f'{number:5} {fault.task:9} {fault.strategy:13} {fault.optimizer:10} '
      f'{fault.wire:7} {fault.victim:8} {f"{fault.point}:{fault.count}":24} '
      f'{outcome.num_restarts:8} {outcome.num_left:5} {outcome.num_void:5} '
      f'{recovery:>8} {time.monotonic() - begin:8.1f}'
      f'{"" if outcome.is_good else f"  BAD: {outcome}"}',
      flush=True,
    )
  print(
    f'{num_good} of {rounds} runs ended well and replay to the same bits; in '
    f'{num_happened} of them a process was killed.'
  )
  print('\n'.join(describe_recovery(recoveries)))
  if num_good < rounds:
    raise SystemExit(1)
