"""Kills processes of real runs at random, and sees that nothing is lost.

Each round trains with a server and learners as processes, kills one of them at
a random point, lets the run come back and end, and replays it: the weights must
be the same, bit for bit, and every gradient counted once.
"""

import io
import os
import random
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np

from jasgd import experiment
from jasgd import protocols
from jasgd import runtime
from jasgd import traces

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


class Fault(NamedTuple):
  """Who is killed when, and in which run."""

  protocol: str
  optimizer: str
  wire: str
  point: str  # One of `runtime.CRASH_POINTS`.
  count: int  # The how manieth time that it is reached.
  victim: str  # One of `VICTIMS`.
  task: str = 'logistic'

  @property
  def variable(self) -> str:
    """As the environment's variable says it."""
    suffix = ':learner' if self.victim == 'learner' else ''
    return f'{self.point}:{self.count}{suffix}'


class Outcome(NamedTuple):
  """How a run with a fault ended."""

  num_restarts: int
  num_left: int  # Learners that left before the end.
  num_void: int  # Gradients that were lost with the server.
  num_twice: int  # Gradients that were applied more than once.
  clock: int
  is_same: bool  # Whether replay has the same bits.

  @property
  def has_happened(self) -> bool:
    """Whether anybody died: a random point may never be reached."""
    return bool(self.num_restarts or self.num_left)

  @property
  def is_good(self) -> bool:
    """Whether the run ended as if nothing had been."""
    return self.is_same and not self.num_twice and self.clock == NUM_UPDATES


def make_config(fault: Fault) -> experiment.TrainingConfig:
  """A short run, with a checkpoint as often as can be."""
  optimizer = experiment.OptimizerConfig(
    **OPTIMIZERS[fault.optimizer], policy='inverse'
  )
  return experiment.TrainingConfig(
    task=experiment.TaskConfig(**TASKS[fault.task]),
    optimizer=optimizer,
    protocol=experiment.ProtocolConfig(
      num_learners=NUM_LEARNERS, **PROTOCOLS[fault.protocol]
    ),
    runtime=experiment.RuntimeConfig(
      mode='local', wire=fault.wire, checkpoint_seconds=0.05, eval_every=1000
    ),
    # As many as here, so that it can be replayed here.
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
    fault: What happens.
    workdir: An empty folder.

  Returns:
    How it ended.
  """
  config = make_config(fault)
  os.environ[runtime.CRASH_VARIABLE] = fault.variable
  try:
    experiment.run_server(
      config, workdir, num_learners=NUM_LEARNERS, stream=io.StringIO()
    )
  finally:
    del os.environ[runtime.CRASH_VARIABLE]
  found = experiment.verify(workdir, stream=io.StringIO())
  trace = traces.Trace.load(f'{workdir}/trace')
  kinds = trace.records['kind']
  applied = np.stack([trace.learner, trace.step])[
    :, trace.fate == protocols.Fate.APPLIED
  ]
  before_end = np.cumsum(kinds == traces.Kind.END) == 0
  return Outcome(
    num_restarts=int(np.count_nonzero(kinds == traces.Kind.RESTART)),
    num_left=int(np.count_nonzero((kinds == traces.Kind.LEAVE) & before_end)),
    num_void=int(
      np.count_nonzero(trace.is_void & (kinds == traces.Kind.GRADIENT))
    ),
    num_twice=applied.shape[1] - len(np.unique(applied, axis=1).T),
    clock=found.clock,
    is_same=found.is_same,
  )


def draw_fault(rng: random.Random) -> Fault:
  """Anything, anywhere."""
  point = rng.choice(runtime.CRASH_POINTS)
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


def run(quick: bool = False, rounds: int = 20, seed: int = 0) -> None:
  """Draws faults, and prints how each run ended."""
  rng = random.Random(seed)
  rounds = 2 if quick else rounds
  num_good = num_happened = 0
  print(
    f'{"":5} {"task":9} {"protocol":13} {"optimizer":10} {"wire":7} '
    f'{"killed":8} '
    f'{"at":24} {"restarts":>8} {"left":>5} {"void":>5} {"seconds":>8}'
  )
  for number in range(1, rounds + 1):
    fault = draw_fault(rng)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
      outcome = run_fault(fault, folder)
    num_good += outcome.is_good
    num_happened += outcome.has_happened
    where = f'{fault.point}:{fault.count}'
    print(
      f'{number:5} {fault.task:9} {fault.protocol:13} {fault.optimizer:10} '
      f'{fault.wire:7} {fault.victim:8} {where:24} {outcome.num_restarts:8} '
      f'{outcome.num_left:5} {outcome.num_void:5} '
      f'{time.monotonic() - begin:8.1f}'
      f'{"" if outcome.is_good else f"  BAD: {outcome}"}',
      flush=True,
    )
  print(
    f'{num_good} of {rounds} runs ended well and replay to the same bits; in '
    f'{num_happened} of them somebody was killed.'
  )
  if num_good < rounds:
    raise SystemExit(1)
