"""A learner that is stopped: which processes wait for it, and how long?"""

import os
import re
import signal

import numpy as np
import pytest

from jasgd import protocols
from jasgd import traces
from tests import live

NUM_LEARNERS = 3
PROTOCOLS = {
  'softsync': {'name': 'softsync', 'n': 1},
  'hardsync': {'name': 'hardsync'},
}


def _make_config(name, **parts):
  return live.make_config(
    strategy=PROTOCOLS[name], num_workers=NUM_LEARNERS, **parts
  )


def _count_working(run):
  """Learners whose gradients have been applied."""
  status = run.get_status() or {'learners': {}}
  return sum(each['num_applied'] > 0 for each in status['learners'].values())


def _stop_one(processes, run):
  """Stops a learner once all are at work; returns its process."""
  live.wait_until(lambda: _count_working(run) == NUM_LEARNERS)
  (pid,) = processes.find_children('learner-1')
  os.kill(pid, signal.SIGSTOP)
  return pid


@pytest.mark.slow
def test_nobody_waits_for_a_stopped_learner(processes, tmp_path):
  num_updates = 200
  config = _make_config(
    'softsync', num_updates=num_updates, deadlines={'end': 0.5}
  )
  with live.start_run(config, tmp_path, processes) as (run, result):
    pid = _stop_one(processes, run)
    # The server ends without it, and removes its own address.
    live.wait_until(lambda: not run.folder.server.exists())
    assert not result.done()
    os.kill(pid, signal.SIGCONT)
    assert result.result(live.PATIENCE).clock == num_updates
  records = run.load_trace().records
  assert not np.any(records['kind'] == traces.Kind.RESTART)
  # Until the end no process waited for it.
  end = np.flatnonzero(records['kind'] == traces.Kind.END)[0]
  assert not np.any(records['kind'][:end] == traces.Kind.LEAVE)
  assert run.check_replay() == num_updates


@pytest.mark.slow
def test_a_stopped_learner_is_lost_and_comes_back(processes, tmp_path):
  config = _make_config('hardsync', deadlines={'step': 1.0})
  with live.start_run(config, tmp_path, processes) as (run, _):
    pid = _stop_one(processes, run)
    live.wait_until(lambda: run.get_status()['num_alive'] < NUM_LEARNERS)
    clock = run.get_clock()
    live.wait_until(lambda: run.get_clock() > clock + 20)  # Others go on.
    os.kill(pid, signal.SIGCONT)
    log = tmp_path / 'logs' / 'learner-1.log'
    found = live.wait_until(
      lambda: re.search(r'Learner (\d): .*Trying again', log.read_text())
    )
    gone = int(found[1])
    before = run.get_status()['learners'][str(gone)]['num_applied']
    live.wait_until(
      lambda: run.get_status()['learners'][str(gone)]['num_applied'] > before
    )
  records = run.load_trace().records
  own = records[records['worker'] == gone]
  left, came = (
    np.flatnonzero(own['kind'] == kind)
    for kind in (traces.Kind.LEAVE, traces.Kind.JOIN)
  )
  assert came[1] > left[0]  # It joined at the start, and once more later.
  later = own[came[1] :]
  assert np.any(
    (later['kind'] == traces.Kind.PUSH)
    & (later['fate'] == protocols.Fate.APPLIED)
  )
  log = (tmp_path / 'logs' / 'server.log').read_text()
  assert f'Learner {gone} left at clock' in log
  assert 'no gradient came within 1 s' in log
  run.check_replay()
