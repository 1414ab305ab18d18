"""SIGKILL of each kind of process, at points and at random times.

Nothing is counted twice, and the replay of each run has the same bits.
"""

import os
import random

import pytest

from jasgd.runtime import _crash
from launch.benchmarks import faults

# How often a point is reached until the kill: after the run has begun, and well
# before it is over. There are few checkpoints, and the first one is made before
# there are learners.
COUNTS = {'checkpoint_begun': 2, 'checkpoint_committed': 2}
RUNS = (
  ('softsync', 'momentum', 'memory'),
  ('hardsync', 'momentum', 'flight'),
  ('softsync', 'adam', 'flight'),
)
# The server is killed at every point, and a learner while the server is at some
# of them. Each point is tested in one kind of run only, in turn, because all
# kinds reach a point by the same code.
LEARNER_POINTS = ('received', 'replied', 'checkpoint_begun')
CASES = [
  faults.Fault(*RUNS[number % 3], point, COUNTS.get(point, 25), victim)
  for number, (point, victim) in enumerate(
    [
      *((point, 'server') for point in _crash.POINTS),
      *((point, 'learner') for point in LEARNER_POINTS),
    ]
  )
]
# Part of a checkpoint is written; half of a message is in shared memory.
QUICK = {('checkpoint_begun', 'server'), ('writing', 'learner')}


# A learner is killed while it computes a gradient; after it has written half of
# one to shared memory; after it has sent the first of two chunks.
OWN_CASES = [
  faults.Fault(*RUNS[1], 'computing', 8, 'learner', number=2),
  faults.Fault(*RUNS[0], 'writing', 8, 'learner', number=1),
  faults.Fault(*RUNS[2], 'sending', 8, 'learner', 'wide', number=1),
]


def _draw_random_kill(victim, seed):
  """A kill after a random record, and a random part of a step."""
  rng = random.Random(f'{victim} {seed}')
  run = rng.choice(RUNS)
  if victim == 'node':
    run = (rng.choice([*faults.PEER_STRATEGIES]), *run[1:])
  count = rng.randint(10, 30)  # After the joins, and well before the end.
  number = rng.randrange(faults.NUM_WORKERS)
  return faults.Fault(
    *(*run, faults.RANDOM, count, victim),
    number=number,
    fraction=rng.random(),
  )


RANDOM_CASES = [
  _draw_random_kill(victim, seed)
  for seed in range(2)
  for victim in faults.VICTIMS
]


def _is_quick(fault):
  if fault.point == faults.RANDOM:
    return fault == RANDOM_CASES[1]
  return (fault.point, fault.victim) in QUICK


def _make_param(fault):
  name = f'{fault.point}-{fault.victim}-{fault.strategy}'
  if fault.point == faults.RANDOM:
    name += f'-{fault.count}'
  marks = () if _is_quick(fault) else pytest.mark.slow
  return pytest.param(fault, id=name, marks=marks)


@pytest.mark.parametrize(
  'fault', [_make_param(case) for case in CASES + OWN_CASES + RANDOM_CASES]
)
def test_a_fault_loses_nothing_and_counts_nothing_twice(
  fault, processes, tmp_path
):
  outcome = faults.run_fault(fault, os.fspath(tmp_path))
  assert outcome.is_good, outcome
  assert outcome.recovery is not None, outcome
  assert outcome.recovery > 0, outcome
  if fault.victim == 'server':
    assert outcome.num_restarts == 1, outcome
  elif fault.strategy == 'allreduce':  # All nodes go back to a checkpoint.
    assert outcome.num_restarts == faults.NUM_WORKERS, outcome
  else:
    assert outcome.num_restarts == 0, outcome
    assert outcome.num_left >= 1, outcome
  assert not processes.find()


def test_cases_cover_every_pair():
  """Pairs of points, victims and kinds of run."""
  every = {(case.point, case.victim) for case in CASES + OWN_CASES}
  assert every >= QUICK
  for victim in ('server', 'learner'):
    runs = {case[:3] for case in CASES if case.victim == victim}
    assert runs == set(RUNS)


@pytest.mark.slow
def test_a_server_that_dies_before_its_first_checkpoint_begins_anew(
  processes, tmp_path
):
  del processes
  fault = faults.Fault(
    'softsync', 'momentum', 'memory', 'checkpoint_begun', 1, 'server'
  )
  outcome = faults.run_fault(fault, os.fspath(tmp_path))
  assert outcome.is_good, outcome
