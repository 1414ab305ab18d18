"""All-reduce in real processes: all nodes wait for each other, and all end."""

import io
import os
import signal

import numpy as np
import pytest

from jasgd import experiment
from jasgd import traces
from jasgd import workdir as workdirs
from tests import live
from tests.experiment import test_real_nodes as nodes

pytestmark = pytest.mark.usefixtures('quick_compiler')

# Deadline for silent nodes: a death must be detected long before it.
NEVER = 2 * live.PATIENCE


def make_config(num_steps=60, period=1, num_nodes=2, **parts):
  """The config of other nodes with another strategy."""
  config = nodes.make_config('pull', num_steps, num_nodes, **parts)
  config.strategy.name = 'allreduce'
  config.strategy.period = period
  return config


def check_replay(workdir, num_nodes=2):
  """A replay of every node gives the same weights."""
  found = experiment.verify(workdir, stream=io.StringIO())
  assert found.is_same, found
  assert set(found.versions) == set(range(num_nodes))


@pytest.mark.slow
def test_all_reduce_with_a_period_replays(processes, tmp_path):
  """Bits are equal after many steps, in which rounding errors would grow."""
  config = make_config(
    200, period=4, num_nodes=3, processes={'min_seconds': ()}
  )
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.clock == 200 * 3
  assert result.metrics['test/accuracy'] > 0.8
  check_replay(tmp_path, 3)
  trace = traces.Trace.load(tmp_path / 'trace')
  assert len(trace.mixes) == 200 // 4 * 3
  assert np.all(trace.mixes['kind'] == traces.Kind.MEAN)
  assert not processes.find()


@pytest.mark.parametrize(
  ('victim', 'num_nodes', 'number', 'silence', 'what'),
  [
    pytest.param(  # Node 0, where all nodes meet.
      *('node-0', 2, signal.SIGKILL, NEVER, 'was lost'), marks=pytest.mark.slow
    ),
    # The order of additions matters for the bits of three nodes, not of two.
    ('node-1', 3, signal.SIGKILL, NEVER, 'was lost'),
    pytest.param(
      *('node-1', 2, signal.SIGSTOP, 3.0, 'has said nothing for 3 s'),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_lost_process_ends_the_run_with_its_name(
  victim, num_nodes, number, silence, what, processes, tmp_path
):
  config = make_config(200, num_nodes=num_nodes, deadlines={'silence': silence})
  with nodes.start_run(config, tmp_path) as wait:
    live.wait_until(
      lambda: nodes.count_steps(tmp_path, num_nodes).min() > 10, wait
    )
    live.wait_until(lambda: nodes.has_saved(tmp_path, num_nodes), wait)
    (pid,) = processes.find_children(victim)
    os.kill(pid, number)
    with pytest.raises(
      experiment.RunError, match=rf'{victim} {what}.*The same command goes on'
    ):
      wait()
  assert not processes.find()
  # All nodes save at the same steps and, before the first restart, at the same
  # versions.
  versions = [
    workdirs.list_checkpoints(tmp_path / 'nodes' / str(node))
    for node in range(num_nodes)
  ]
  common = max(set.intersection(*map(set, versions)))
  assert common > 0
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.clock == 200 * num_nodes
  assert result.metrics['gossip/consensus_error'] == 0
  records = traces.Trace.load(tmp_path / 'trace').records
  restarts = records[records['kind'] == traces.Kind.RESTART]
  assert sorted(restarts['replica']) == [*range(num_nodes)]
  assert restarts['read_version'].tolist() == [common] * num_nodes
  assert restarts['incarnation'].tolist() == [1] * num_nodes
  check_replay(tmp_path, num_nodes)


@pytest.mark.slow
def test_without_a_checkpoint_it_goes_on_from_the_start(processes, tmp_path):
  config = make_config(100, runtime={'checkpoint_seconds': 3600.0})
  with nodes.start_run(config, tmp_path) as wait:
    live.wait_until(lambda: nodes.count_steps(tmp_path, 2).min() > 30, wait)
    (pid,) = processes.find_children('node-1')
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(experiment.RunError, match='goes on from the start'):
      wait()
  assert not processes.find()
  with open(tmp_path / 'metrics.jsonl', 'a') as file:  # As if it was evaluated.
    file.write(f'{{"clock": {90 * 2}, "test/loss": 7.0}}\n')
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.clock == 100 * 2
  columns = workdirs.read_metrics(tmp_path)
  assert not np.any(columns['test/loss'] == 7.0)  # Lost steps have no row.
  check_replay(tmp_path)


@pytest.mark.slow
def test_it_goes_on_after_it_was_stopped(processes, tmp_path):
  script = (
    'import sys; from tests.experiment import test_real_allreduce as t;'
    'from jasgd import experiment;'
    'print(experiment.train_and_evaluate(t.make_config(150), sys.argv[1]))'
  )
  program = processes.start_python('-c', script, os.fspath(tmp_path))
  live.wait_until(lambda: nodes.count_steps(tmp_path, 2).min() > 20, program)
  program.kill(signal.SIGINT)
  said = program.wait()
  assert 'is_interrupted=True' in said
  clock = nodes.count_steps(tmp_path).sum()
  assert f'clock={clock},' in said
  # The report covers the trace up to that clock, without a gap.
  columns = workdirs.read_metrics(tmp_path)
  assert columns['clock'][-1] == clock
  assert f"'epoch': {columns['epoch'][-1]}" in said
  assert columns['epoch'][-1] / columns['epoch'][0] == pytest.approx(
    clock / columns['clock'][0]
  )
  live.wait_until(lambda: not processes.find())
  result = experiment.train_and_evaluate(
    make_config(150), tmp_path, stream=io.StringIO()
  )
  assert result.clock == 150 * 2
  trace = traces.Trace.load(tmp_path / 'trace')
  assert len(trace.steps) == 150 * 2  # No step was made twice.
  check_replay(tmp_path)


@pytest.mark.slow
def test_a_run_that_diverges_ends_for_all(processes, tmp_path):
  """All nodes end, even if at first only one has a loss that is not finite."""
  config = make_config(10_000, optimizer={'rate': 1e18})
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.is_diverged
  assert nodes.count_steps(tmp_path).max() < 100
  assert not processes.find()
  check_replay(tmp_path)
