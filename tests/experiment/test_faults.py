"""SIGKILL at every point, in server and learner: nothing is counted twice."""

import os

import pytest

from jasgd.runtime import _crash
from launch.benchmarks import faults

# The how manieth time that a point is reached: after the run has begun, and
# well before it is over. There are few checkpoints, and the first one is before
# there are learners.
COUNTS = {'checkpoint_begun': 2, 'checkpoint_committed': 2}
RUNS = (
  ('softsync', 'momentum', 'memory'),
  ('hardsync', 'momentum', 'flight'),
  ('softsync', 'adam', 'flight'),
)
# The server is killed at every point, and a learner while the server is at some
# of them; each in one of the runs in turn: all reach a point by the same code.
LEARNER_POINTS = ('received', 'updated', 'replied', 'checkpoint_begun')
CASES = [
  faults.Fault(*RUNS[number % 3], point, COUNTS.get(point, 25), victim)
  for number, (point, victim) in enumerate(
    [
      *((point, 'server') for point in _crash.POINTS),
      *((point, 'learner') for point in LEARNER_POINTS),
    ]
  )
]
# A checkpoint of which only part is there, and a learner that awaits an answer.
QUICK = {('checkpoint_begun', 'server'), ('received', 'learner')}


def _make_param(fault):
  name = (fault.point, fault.victim)
  marks = () if name in QUICK else pytest.mark.slow
  return pytest.param(fault, id='-'.join(name), marks=marks)


@pytest.mark.parametrize('fault', [_make_param(case) for case in CASES])
def test_a_fault_loses_nothing_and_counts_nothing_twice(
  fault, processes, tmp_path
):
  outcome = faults.run_fault(fault, os.fspath(tmp_path))
  assert outcome.is_good, outcome
  if fault.victim == 'server':
    assert outcome.num_restarts == 1, outcome
  else:
    assert outcome.num_restarts == 0, outcome
    assert outcome.num_left >= 1, outcome
  assert not processes.find()


def test_cases_cover_every_pair():
  """Of a victim and a run."""
  assert {(case.point, case.victim) for case in CASES} >= QUICK
  for victim in faults.VICTIMS:
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
