"""Kills processes of real runs at random, and checks that nothing is lost.

Each round trains with a server and learners as processes, kills one of them at
a random point, lets the run recover and end, and replays it: the weights must
be the same, bit for bit, and every gradient counted once. `recovery` is the
seconds from the kill to the next applied push.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import io
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from jasgd import experiment
from jasgd import protocols
from jasgd import traces
from jasgd.runtime import _crash

PROTOCOLS: dict[str, dict[str, Any]] = {
  'asynchronous': {'name': 'asynchronous'},
  'softsync': {'name': 'softsync', 'n': 2},
  'hardsync': {'name': 'hardsync'},
  'ssp': {'name': 'ssp', 's': 1},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
  'momentum': {'name': 'sgd', 'rate': 0.05, 'momentum': 0.9},
  'adam': {'name': 'adam', 'rate': 0.003},
}
TASKS: dict[str, dict[str, Any]] = {
  'logistic': {'name': 'logistic', 'batch': 4},
  'mlp': {'name': 'digits', 'model': 'mlp', 'batch': 8},
}
VICTIMS = ('server', 'learner')
NUM_LEARNERS = 3
NUM_UPDATES = 100
_INTERVAL = 0.002  # Seconds between looks at processes and trace.


class Fault(NamedTuple):
  """Which process is killed when, and in which run."""

  protocol: str
  optimizer: str
  wire: str
  point: str  # One of `_crash.POINTS`.
  count: int  # Kill when the point is reached for this time.
  victim: str  # One of `VICTIMS`.
  task: str = 'logistic'

  @property
  def variable(self) -> str:
    """The text of `_crash.VARIABLE`."""
    suffix = ':learner' if self.victim == 'learner' else ''
    return f'{self.point}:{self.count}{suffix}'


class Outcome(NamedTuple):
  """How a run with a fault ended."""

  num_restarts: int
  num_left: int  # Learners that left before the end.
  num_void: int  # Gradients that were lost with the server's memory.
  num_twice: int  # Gradients that were applied more than once.
  clock: int
  is_same: bool  # Whether replay has the same bits.
  # Seconds from the kill to the next applied push; None if not seen.
  recovery: float | None

  @property
  def has_happened(self) -> bool:
    """Whether a process died: a random point may never be reached."""
    return bool(self.num_restarts or self.num_left)

  @property
  def is_good(self) -> bool:
    """Whether the run ended as one without a fault."""
    return self.is_same and not self.num_twice and self.clock == NUM_UPDATES


@contextlib.contextmanager
def time_recovery(workdir: str) -> Iterator[list[float]]:
  """Measures the seconds from a kill to the next applied push, meanwhile.

  The times in a trace do not count the seconds that the server was down, hence
  a clock of our own: a thread that looks for a killed child process, and then
  for a new applied gradient in the trace.

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

  def watch() -> None:
    if wait_until(_has_killed_child):
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


def _count_applied(workdir: str) -> int:
  """Applied gradients that were ever written, void ones included."""
  try:
    trace = traces.Trace.load(f'{workdir}/trace', allow_truncated=True)
  except traces.TraceError:
    return 0  # The server has not begun.
  is_gradient = trace.records['kind'] == traces.Kind.PUSH
  is_applied = trace.records['fate'] == protocols.Fate.APPLIED
  return int(np.count_nonzero(is_gradient & is_applied))


def _has_killed_child() -> bool:
  """Whether a child was killed and its parent, this process, has not waited."""
  try:
    # WNOWAIT leaves the child for the supervisor, which waits for it.
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
  except ChildProcessError:
    return False
  return found is not None and found.si_status == signal.SIGKILL


def make_config(fault: Fault) -> experiment.TrainingConfig:
  """A short run with frequent checkpoints."""
  optimizer = experiment.OptimizerConfig(
    **OPTIMIZERS[fault.optimizer], policy='inverse'
  )
  return experiment.TrainingConfig(
    task=experiment.TaskConfig(**TASKS[fault.task]),
    optimizer=optimizer,
    strategy=experiment.StrategyConfig(**PROTOCOLS[fault.protocol]),
    num_workers=NUM_LEARNERS,
    runtime=experiment.RuntimeConfig(
      mode='local', wire=fault.wire, checkpoint_seconds=0.05, eval_every=1000
    ),
    # As many threads as here: replay here must round in the same way.
    processes=experiment.ProcessConfig(
      num_threads=int(os.environ.get('NPROC') or os.cpu_count() or 1),
      min_seconds=(0.03,),
    ),
    deadlines=experiment.DeadlineConfig(rejoin=30.0, end=5.0),
    num_epochs=1000.0,
    num_updates=NUM_UPDATES,
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
    with time_recovery(workdir) as seconds:
      experiment.train_and_evaluate(config, workdir, stream=io.StringIO())
  finally:
    del os.environ[_crash.VARIABLE]
  found = experiment.verify(workdir, stream=io.StringIO())
  trace = traces.Trace.load(f'{workdir}/trace')
  kinds = trace.records['kind']
  applied = np.stack([trace.worker, trace.step])[
    :, trace.fate == protocols.Fate.APPLIED
  ]
  before_end = np.cumsum(kinds == traces.Kind.END) == 0
  return Outcome(
    num_restarts=int(np.count_nonzero(kinds == traces.Kind.RESTART)),
    num_left=int(np.count_nonzero((kinds == traces.Kind.LEAVE) & before_end)),
    num_void=int(np.count_nonzero(trace.is_void & (kinds == traces.Kind.PUSH))),
    num_twice=applied.shape[1] - len(np.unique(applied, axis=1).T),
    clock=found.clock,
    is_same=found.is_same,
    recovery=seconds[0] if seconds else None,
  )


def draw_fault(rng: random.Random) -> Fault:
  """Draws a kill of any process, at any point, in any run."""
  point = rng.choice(_crash.POINTS)
  is_rare = point.startswith('checkpoint')
  return Fault(
    protocol=rng.choice([*PROTOCOLS]),
    optimizer=rng.choice([*OPTIMIZERS]),
    wire=rng.choice(['memory', 'flight']),
    point=point,
    count=rng.randint(1, 4) if is_rare else rng.randint(1, NUM_UPDATES),
    victim=rng.choice(VICTIMS),
    task=rng.choice([*TASKS]),
  )


def describe_recovery(seconds: Mapping[str, Sequence[float]]) -> list[str]:
  """Lines with the median and the maximum for each victim.

  Args:
    seconds: Victim -> seconds from its kill to the next applied push.

  Returns:
    A line for each victim that was killed.
  """
  return [
    f'{victim} killed: {statistics.median(values):.2f} s to the next applied '
    f'push in the median of {len(values)}, at most {max(values):.2f} s.'
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
    f'{"":5} {"task":9} {"protocol":13} {"optimizer":10} {"wire":7} '
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
      f'{number:5} {fault.task:9} {fault.protocol:13} {fault.optimizer:10} '
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
