"""All-reduce in real processes: all wait for all, and end together."""

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

NUM_NODES = nodes.NUM_NODES
# Seconds of silence: a death must be seen long before.
NEVER = 2 * live.PATIENCE


def make_config(num_steps=60, period=1, **parts):
  """As that of other nodes, one flag away."""
  config = nodes.make_config('pull', num_steps, **parts)
  config.strategy.name = 'allreduce'
  config.strategy.period = period
  return config


def check_replay(workdir):
  """Every node is what its trace says."""
  found = experiment.verify(workdir)
  assert found.is_same, found
  assert set(found.versions) == set(range(NUM_NODES))


@pytest.mark.slow
@pytest.mark.parametrize('period', [1, 4])
def test_all_reduce_replays(period, processes, tmp_path):
  """However long: roundings would have grown."""
  config = make_config(200, period=period, processes={'min_seconds': ()})
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.clock == 200 * NUM_NODES
  assert result.metrics['test/accuracy'] > 0.8
  check_replay(tmp_path)
  trace = traces.Trace.load(tmp_path / 'trace')
  assert len(trace.mixes) == 200 // period * NUM_NODES
  assert np.all(trace.mixes['kind'] == traces.Kind.MEAN)
  if period == 1:
    assert result.metrics['gossip/consensus_error'] == 0
  assert not processes.find()


@pytest.mark.parametrize(
  ('victim', 'number', 'silence', 'what'),
  [
    pytest.param(  # Where all meet.
      *('node-0', signal.SIGKILL, NEVER, 'was lost'), marks=pytest.mark.slow
    ),
    ('node-1', signal.SIGKILL, NEVER, 'was lost'),
    pytest.param(
      *('node-2', signal.SIGSTOP, 5.0, 'has said nothing for 5 s'),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_lost_process_ends_the_run_with_its_name(
  victim, number, silence, what, processes, tmp_path
):
  config = make_config(num_steps=200, deadlines={'silence': silence})
  with nodes.start_run(config, tmp_path) as wait:
    live.wait_until(lambda: nodes.count_steps(tmp_path).min() > 10)
    live.wait_until(lambda: nodes.has_saved(tmp_path))
    (pid,) = processes.find_children(victim)
    os.kill(pid, number)
    with pytest.raises(
      experiment.RunError, match=rf'{victim} {what}.*The same command goes on'
    ):
      wait()
  assert not processes.find()
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.clock == 200 * NUM_NODES
  kinds = traces.Trace.load(tmp_path / 'trace').records['kind']
  assert np.count_nonzero(kinds == traces.Kind.RESTART) == NUM_NODES
  check_replay(tmp_path)


@pytest.mark.slow
def test_without_a_checkpoint_it_goes_on_from_the_start(processes, tmp_path):
  config = make_config(100, runtime={'checkpoint_seconds': 3600.0})
  with nodes.start_run(config, tmp_path) as wait:
    live.wait_until(lambda: nodes.count_steps(tmp_path).min() > 30)
    (pid,) = processes.find_children('node-1')
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(experiment.RunError, match='goes on from the start'):
      wait()
  assert not processes.find()
  with open(tmp_path / 'metrics.jsonl', 'a') as file:  # As if it was evaluated.
    file.write(f'{{"clock": {90 * NUM_NODES}, "test/loss": 7.0}}\n')
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.clock == 100 * NUM_NODES
  columns = workdirs.read_metrics(tmp_path)
  assert not np.any(columns['test/loss'] == 7.0)  # What was lost is not in it.
  check_replay(tmp_path)


@pytest.mark.slow
def test_it_goes_on_after_it_was_stopped(processes, tmp_path):
  script = (
    'import sys; from tests.experiment import test_real_allreduce as t;'
    'from jasgd import experiment;'
    'print(experiment.train_and_evaluate(t.make_config(300), sys.argv[1]))'
  )
  program = processes.start_python('-c', script, os.fspath(tmp_path))
  live.wait_until(lambda: nodes.count_steps(tmp_path).min() > 30, program)
  program.kill(signal.SIGINT)
  said = program.wait()
  assert 'is_interrupted=True' in said
  clock = nodes.count_steps(tmp_path).sum()
  assert f'clock={clock},' in said
  # What is said of it is of that clock, and nothing is left out.
  columns = workdirs.read_metrics(tmp_path)
  assert columns['clock'][-1] == clock
  assert f"'epoch': {columns['epoch'][-1]}" in said
  assert columns['epoch'][-1] / columns['epoch'][0] == pytest.approx(
    clock / columns['clock'][0]
  )
  live.wait_until(lambda: not processes.find())
  result = experiment.train_and_evaluate(
    make_config(300), tmp_path, stream=io.StringIO()
  )
  assert result.clock == 300 * NUM_NODES
  trace = traces.Trace.load(tmp_path / 'trace')
  assert len(trace.steps) == 300 * NUM_NODES  # Nothing was made twice.
  check_replay(tmp_path)


@pytest.mark.slow
def test_a_run_that_diverges_ends_for_all(processes, tmp_path):
  """Even if only one has a loss that is not finite, at first."""
  config = make_config(10_000, optimizer={'rate': 1e18})
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.is_diverged
  assert nodes.count_steps(tmp_path).max() < 100
  assert not processes.find()
  check_replay(tmp_path)
