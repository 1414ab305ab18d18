"""SIGKILL at every point, in server and learner: nothing is counted twice."""

import os

import pytest

from jasgd import runtime
from launch.benchmarks import faults

# The how manieth time that a point is reached: after the run has begun, and
# well before it is over. There are few checkpoints, and the first one is before
# there are learners.
COUNTS = {'checkpoint_begun': 2, 'checkpoint_committed': 2}
CASES = [
  faults.Fault(protocol, optimizer, wire, point, COUNTS.get(point, 25), victim)
  for protocol, optimizer, wire in (
    ('softsync', 'momentum', 'memory'),
    ('hardsync', 'momentum', 'flight'),
    ('softsync', 'adam', 'flight'),
  )
  for point in runtime.CRASH_POINTS
  for victim in faults.VICTIMS
]
# A checkpoint of which only part is there.
QUICK = {
  ('softsync', 'momentum', 'checkpoint_begun', 'server'),
}


def _make_param(fault):
  name = (fault.protocol, fault.optimizer, fault.point, fault.victim)
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


def test_quick_cases_are_cases():
  names = {(each[0], each[1], each[3], each[5]) for each in CASES}
  assert names >= QUICK
  assert len(CASES) == 48


@pytest.mark.slow
def test_a_server_that_dies_before_its_first_checkpoint_begins_anew(tmp_path):
  fault = faults.Fault(
    'softsync', 'momentum', 'memory', 'checkpoint_begun', 1, 'server'
  )
  outcome = faults.run_fault(fault, os.fspath(tmp_path))
  assert outcome.is_good, outcome
