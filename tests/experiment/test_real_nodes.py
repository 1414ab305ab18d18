"""Nodes in real processes are what their traces say, bit by bit."""

import contextlib
import io
import os
import signal
import threading

import numpy as np
import pytest

from jasgd import experiment
from jasgd import traces
from jasgd import workdir as workdirs
from tests import live

NUM_NODES = 3
STRATEGIES = {
  'pull': {'name': 'pull'},
  'pull a little': {'name': 'pull', 'beta': 0.2, 'period': 3},
  'pull by a ring': {'name': 'pull', 'peers': 'ring'},
  'push': {'name': 'push'},
  'push by a ring': {'name': 'push', 'peers': 'ring'},
  'push_sum': {'name': 'push_sum'},
  'elastic': {'name': 'elastic', 'rate': 0.2},
  'easgd': {'name': 'elastic', 'rate': 0.2, 'order': 'easgd', 'period': 2},
}
# What is not run each time.
SLOW = ('pull a little', 'pull by a ring', 'push', 'push by a ring', 'easgd')


def make_config(strategy, num_steps=60, **parts):
  """A run of small models; parts as `NodeTrainingConfig` has them."""
  task = experiment.TaskConfig(name='logistic', batch=4)
  config = experiment.NodeTrainingConfig(
    task=task,
    optimizer=experiment.OptimizerConfig(rate=0.05, momentum=0.9),
    strategy=experiment.StrategyConfig(
      num_nodes=NUM_NODES, **STRATEGIES[strategy]
    ),
    runtime=experiment.RuntimeConfig(mode='local', checkpoint_seconds=0.2),
    processes=experiment.ProcessConfig(
      num_threads=live.NUM_THREADS, min_seconds=(0.01,)
    ),
    deadlines=experiment.DeadlineConfig(step=1.0, end=5.0),
  )
  per_epoch = task.make(1, 0).num_samples / task.batch
  config.num_epochs = num_steps * NUM_NODES / per_epoch
  for name, fields in parts.items():
    for field, value in fields.items():
      setattr(getattr(config, name), field, value)
  return config


def check_replay(workdir, members=range(NUM_NODES)):
  """Every node is what its trace says."""
  found = experiment.verify_nodes(workdir)
  assert found.is_exact
  assert found.is_same, found
  assert set(members) <= set(found.versions)


@contextlib.contextmanager
def start_run(config, workdir):
  """A run in a thread; gives a function that waits for its result."""
  results = []

  def run():
    try:
      results.append(
        experiment.run_nodes(config, workdir, stream=io.StringIO())
      )
    except Exception as error:
      results.append(error)

  thread = threading.Thread(target=run)
  thread.start()

  def wait():
    thread.join(live.PATIENCE)
    assert results, 'It has not ended.'
    if isinstance(results[0], Exception):
      raise results[0]
    return results[0]

  yield wait
  thread.join(live.PATIENCE)
  assert not thread.is_alive()


def count_steps(workdir):
  """The steps of each node so far."""
  if not (workdir / 'trace' / 'node-0').exists():
    return np.zeros(NUM_NODES, int)
  with contextlib.suppress(traces.TraceError):  # A file is being made.
    steps = traces.NodeTrace.load(
      workdir / 'trace', allow_truncated=True
    ).steps['node']
    return np.bincount(steps, minlength=NUM_NODES)
  return np.zeros(NUM_NODES, int)


def has_saved(workdir):
  """Whether every node has a checkpoint."""
  return all(
    workdirs.list_checkpoints(workdir / 'nodes' / str(node))
    for node in range(NUM_NODES)
  )


@pytest.mark.parametrize(
  'strategy',
  [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
    for name in STRATEGIES
  ],
)
def test_every_strategy_replays_to_the_same_bits(strategy, processes, tmp_path):
  config = make_config(strategy)
  result = experiment.run_nodes(config, tmp_path, stream=io.StringIO())
  assert result['clock'] == 60 * NUM_NODES
  assert not result['lost_nodes']
  assert result['test/accuracy'] > 0.8
  assert result['gossip/consensus_error'] < 1.0
  members = [*range(NUM_NODES)]
  if config.strategy.name == 'elastic':
    members.append(traces.CENTRE)
    assert result['centre/accuracy'] > 0.8
  check_replay(tmp_path, members)
  trace = traces.NodeTrace.load(tmp_path / 'trace')
  assert trace.header['is_recorded']
  assert len(trace.mixes) > 20
  assert traces.summarize_nodes(trace).num_deaths == 0
  if config.strategy.name == 'push_sum':
    assert result['gossip/mass_lost'] == 0
    last = [trace.of_node(node)[-1]['mass'] for node in range(NUM_NODES)]
    assert sum(last) == pytest.approx(NUM_NODES)
  assert np.isfinite(workdirs.load_params(tmp_path)).all()
  assert not processes.find()


@pytest.mark.parametrize(
  ('name', 'parts'),
  [
    ('bfloat16', {'runtime': {'wire_dtype': 'bfloat16', 'wire': 'flight'}}),
    ('adam', {'optimizer': {'name': 'adam', 'momentum': 0.0, 'rate': 0.01}}),
    ('schedule', {'schedule': {'name': 'cosine'}}),
  ],
)
@pytest.mark.slow
def test_variants_replay_to_the_same_bits(name, parts, processes, tmp_path):
  del name, processes
  config = make_config('pull', **parts)
  experiment.run_nodes(config, tmp_path, stream=io.StringIO())
  check_replay(tmp_path)


@pytest.mark.parametrize(
  'strategy', ['pull', pytest.param('push_sum', marks=pytest.mark.slow)]
)
def test_the_others_go_on_when_a_node_is_killed(strategy, processes, tmp_path):
  config = make_config(strategy, num_steps=200)
  with start_run(config, tmp_path) as wait:
    live.wait_until(lambda: count_steps(tmp_path).min() > 20)
    (pid,) = processes.find_children('node-1')
    os.kill(pid, signal.SIGKILL)
    result = wait()
  assert result['lost_nodes'] == [1]
  steps = count_steps(tmp_path)
  assert steps[0] == steps[2] == 200
  assert 20 < steps[1] < 200
  assert result['gossip/consensus_error'] < 0.5  # The others agree.
  check_replay(tmp_path, (0, 2))
  summary = traces.summarize_nodes(traces.NodeTrace.load(tmp_path / 'trace'))
  assert summary.num_deaths == 1
  if strategy == 'push_sum':
    lost = result['gossip/mass_lost']
    assert 0 < lost < NUM_NODES
    assert summary.lost_mass == pytest.approx(lost)
    trace = traces.NodeTrace.load(tmp_path / 'trace')
    kept = sum(trace.of_node(node)[-1]['mass'] for node in (0, 2))
    assert kept + lost == pytest.approx(NUM_NODES)


def test_nobody_waits_for_a_node_that_is_stopped(processes, tmp_path):
  config = make_config('pull', num_steps=150, deadlines={'silence': 3.0})
  with start_run(config, tmp_path) as wait:
    live.wait_until(lambda: count_steps(tmp_path).min() > 20)
    (pid,) = processes.find_children('node-2')
    os.kill(pid, signal.SIGSTOP)
    live.wait_until(lambda: (count_steps(tmp_path)[:2] == 150).all())
    os.kill(pid, signal.SIGCONT)
    result = wait()
  assert result['clock'] == 150 * NUM_NODES or result['lost_nodes'] == [2]
  check_replay(tmp_path)


def test_a_killed_centre_is_started_again(processes, tmp_path):
  config = make_config('elastic', num_steps=150)
  with start_run(config, tmp_path) as wait:
    live.wait_until(lambda: count_steps(tmp_path).min() > 40)
    (pid,) = processes.find_children('centre')
    os.kill(pid, signal.SIGKILL)
    result = wait()
  assert result['clock'] == 150 * NUM_NODES
  trace = traces.NodeTrace.load(tmp_path / 'trace')
  kinds = trace.of_node(traces.CENTRE)['kind']
  assert np.count_nonzero(kinds == traces.NodeKind.RESTART) == 1
  check_replay(tmp_path, (*range(NUM_NODES), traces.CENTRE))


@pytest.mark.parametrize(
  ('strategy', 'number'),
  [
    ('push_sum', signal.SIGINT),
    pytest.param('pull', signal.SIGKILL, marks=pytest.mark.slow),
    pytest.param('elastic', signal.SIGKILL, marks=pytest.mark.slow),
  ],
)
def test_a_run_goes_on_after_it_was_stopped(
  strategy, number, processes, tmp_path
):
  """Ctrl-C loses nothing; SIGKILL of all, at most what was not saved."""
  script = (
    'import sys; from tests.experiment import test_real_nodes as t;'
    'from jasgd import experiment;'
    f'r = experiment.run_nodes(t.make_config({strategy!r}, 150), sys.argv[1]);'
    'print(r)'
  )
  program = processes.start_python('-c', script, os.fspath(tmp_path))
  live.wait_until(lambda: count_steps(tmp_path).min() > 30, program)
  live.wait_until(lambda: has_saved(tmp_path), program)
  if number == signal.SIGKILL:
    for pid in processes.find():
      os.kill(pid, signal.SIGKILL)
    program.wait(-number)
  else:
    program.kill(number)
    assert "'is_interrupted': True" in program.wait()
  live.wait_until(lambda: not processes.find())
  assert not (tmp_path / 'result.json').exists()
  check_replay(tmp_path)
  result = experiment.run_nodes(
    make_config(strategy, 150), tmp_path, stream=io.StringIO()
  )
  assert result['clock'] == 150 * NUM_NODES
  trace = traces.NodeTrace.load(tmp_path / 'trace')
  kinds = trace.records['kind']
  restarts = np.count_nonzero(kinds == traces.NodeKind.RESTART)
  assert restarts == NUM_NODES + (strategy == 'elastic')
  if number == signal.SIGINT:
    assert len(trace.steps) == 150 * NUM_NODES  # Nothing was made twice.
  check_replay(tmp_path)
