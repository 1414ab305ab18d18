"""All-reduce in real processes: all wait for all, and end together."""

import io
import os
import signal

import numpy as np
import pytest

from jasgd import experiment
from jasgd import traces
from tests import live
from tests.experiment import test_real_nodes as nodes

NUM_NODES = nodes.NUM_NODES


def make_config(num_steps=60, period=1, **parts):
  """As that of other nodes, one flag away."""
  config = nodes.make_config('pull', num_steps, **parts)
  config.strategy.name = 'allreduce'
  config.strategy.period = period
  return config


def check_replay(workdir):
  """Every node is what its trace says, but for the order of sums."""
  found = experiment.verify_nodes(workdir)
  assert not found.is_exact
  assert found.is_same, found
  assert set(found.versions) == set(range(NUM_NODES))


@pytest.mark.parametrize('period', [1, pytest.param(4, marks=pytest.mark.slow)])
def test_all_reduce_replays(period, processes, tmp_path):
  config = make_config(period=period)
  result = experiment.run_nodes(config, tmp_path, stream=io.StringIO())
  assert result['clock'] == 60 * NUM_NODES
  assert result['test/accuracy'] > 0.8
  check_replay(tmp_path)
  trace = traces.NodeTrace.load(tmp_path / 'trace')
  assert len(trace.mixes) == 60 // period * NUM_NODES
  assert np.all(trace.mixes['peer'] == traces.ALL)
  if period == 1:
    assert result['gossip/consensus_error'] == 0
  assert not processes.find()


def test_a_killed_process_ends_the_run_with_its_name(processes, tmp_path):
  config = make_config(num_steps=400)
  with nodes.start_run(config, tmp_path) as wait:
    live.wait_until(lambda: nodes.count_steps(tmp_path).min() > 30)
    live.wait_until(lambda: nodes.has_saved(tmp_path))
    (pid,) = processes.find_children('node-1')
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(experiment.RunError, match=r'node-1 was lost.*goes on'):
      wait()
  assert not processes.find()
  result = experiment.run_nodes(config, tmp_path, stream=io.StringIO())
  assert result['clock'] == 400 * NUM_NODES
  kinds = traces.NodeTrace.load(tmp_path / 'trace').records['kind']
  assert np.count_nonzero(kinds == traces.NodeKind.RESTART) == NUM_NODES
  check_replay(tmp_path)


@pytest.mark.slow
def test_it_goes_on_after_it_was_stopped(processes, tmp_path):
  script = (
    'import sys; from tests.experiment import test_real_allreduce as t;'
    'from jasgd import experiment;'
    'print(experiment.run_nodes(t.make_config(300), sys.argv[1]))'
  )
  program = processes.start_python('-c', script, os.fspath(tmp_path))
  live.wait_until(lambda: nodes.count_steps(tmp_path).min() > 30, program)
  program.kill(signal.SIGINT)
  assert "'is_interrupted': True" in program.wait()
  live.wait_until(lambda: not processes.find())
  result = experiment.run_nodes(
    make_config(300), tmp_path, stream=io.StringIO()
  )
  assert result['clock'] == 300 * NUM_NODES
  trace = traces.NodeTrace.load(tmp_path / 'trace')
  assert len(trace.steps) == 300 * NUM_NODES  # Nothing was made twice.
  check_replay(tmp_path)
