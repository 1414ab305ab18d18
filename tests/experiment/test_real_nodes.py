"""Nodes in real processes: replays of their traces give the same bits."""

import contextlib
import io
import os
import secrets
import shutil
import signal
import threading

import numpy as np
import pytest

import jasgd
from jasgd import experiment
from jasgd import gossip
from jasgd import simulation
from jasgd import traces
from jasgd import workdir as workdirs
from tests import live
from tests import marks
from tests.runtime import certificates

NUM_NODES = 3
STRATEGIES = {
  'pull': {'name': 'pull'},
  'pull a little': {'name': 'pull', 'beta': 0.2, 'period': 3},
  'pull by a ring': {'name': 'pull', 'peers': 'ring'},
  'push by a ring': {'name': 'push', 'peers': 'ring'},
  'push_sum': {'name': 'push_sum'},
  'elastic': {'name': 'elastic', 'rate': 0.2},
  'easgd': {'name': 'elastic', 'rate': 0.2, 'order': 'easgd', 'period': 2},
}


# These are replayed after a node was killed.
KILLED = ('pull', 'elastic', 'push_sum')


def make_config(strategy, num_steps=60, num_nodes=NUM_NODES, **parts):
  """A run of small models; parts as `TrainingConfig` has them."""
  task = experiment.TaskConfig(name='logistic', batch=4)
  config = experiment.TrainingConfig(
    task=task,
    optimizer=experiment.OptimizerConfig(rate=0.05, momentum=0.9),
    strategy=experiment.StrategyConfig(**STRATEGIES[strategy]),
    num_workers=num_nodes,
    runtime=experiment.RuntimeConfig(mode='local', checkpoint_seconds=0.2),
    processes=experiment.ProcessConfig(
      num_threads=live.NUM_THREADS, min_seconds=(0.01,)
    ),
    deadlines=experiment.DeadlineConfig(step=1.0, end=5.0),
  )
  config.num_epochs, config.num_updates = 1e6, num_steps * num_nodes
  for name, fields in parts.items():
    for field, value in fields.items():
      setattr(getattr(config, name), field, value)
  return config


def check_replay(workdir, members=range(NUM_NODES)):
  """A replay of every node gives the same weights."""
  found = experiment.verify(workdir, stream=io.StringIO())
  assert found.is_same, found
  assert set(members) <= set(found.versions)


class Run:
  """A run in a thread; called, it waits for the result.

  `live.wait_until` treats it as a program, and fails if it has ended.
  """

  def __init__(self, config, workdir):
    self._config, self._workdir = config, workdir
    self.output = None  # The result, or the error.
    self._thread = threading.Thread(target=self._train)
    self._thread.start()

  def _train(self):
    try:
      self.output = experiment.train_and_evaluate(
        self._config, self._workdir, stream=io.StringIO()
      )
    except Exception as error:
      self.output = error

  @property
  def is_running(self):
    return self._thread.is_alive()

  def join(self):
    self._thread.join(live.PATIENCE)
    assert not self.is_running

  def __call__(self):
    self.join()
    if isinstance(self.output, Exception):
      raise self.output
    return self.output


@contextlib.contextmanager
def start_run(config, workdir):
  """A run in a thread, as a function that waits for its result."""
  run = Run(config, workdir)
  yield run
  run.join()


def count_steps(workdir, num_nodes=NUM_NODES):
  """The steps of each node so far."""
  if not (workdir / 'trace').exists():
    return np.zeros(num_nodes, int)
  with contextlib.suppress(traces.TraceError):  # A file is being made.
    steps = traces.Trace.load(workdir / 'trace', allow_truncated=True).steps[
      'replica'
    ]
    return np.bincount(steps, minlength=num_nodes)
  return np.zeros(num_nodes, int)


def has_saved(workdir, num_nodes=NUM_NODES):
  """Whether every node has a checkpoint."""
  return all(
    workdirs.list_checkpoints(workdir / 'nodes' / str(node))
    for node in range(num_nodes)
  )


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['push by a ring', 'easgd'])
def test_every_strategy_replays_to_the_same_bits(strategy, processes, tmp_path):
  config = make_config(strategy)
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.clock == 60 * NUM_NODES
  assert not result.lost
  assert result.metrics['test/accuracy'] > 0.8
  assert result.metrics['gossip/consensus_error'] < 1.0
  members = [*range(NUM_NODES)]
  if config.strategy.name == 'elastic':
    members.append(-1)
    assert result.metrics['centre/accuracy'] > 0.8
  check_replay(tmp_path, members)
  trace = traces.Trace.load(tmp_path / 'trace')
  assert trace.header['is_recorded']
  assert len(trace.mixes) > 20
  assert traces.summarize(trace).num_deaths == 0
  assert np.isfinite(workdirs.load_params(tmp_path)).all()
  assert not processes.find()


@pytest.mark.parametrize(
  ('strategy', 'is_secure', 'parts'),
  [
    (
      'pull a little',
      False,
      {
        'runtime': {'wire_dtype': 'bfloat16', 'wire': 'flight'},
        'optimizer': {'name': 'adam', 'momentum': 0.0, 'rate': 0.01},
      },
    ),
    (
      'pull by a ring',
      True,
      {'runtime': {'wire': 'flight'}, 'schedule': {'name': 'cosine'}},
    ),
  ],
  ids=['bfloat16, adam', 'tls, schedule'],
)
@pytest.mark.slow
def test_variants_replay_to_the_same_bits(
  strategy, is_secure, parts, processes, tmp_path
):
  del processes
  config = make_config(strategy, **parts)
  if is_secure:
    tls = certificates.make_authority(tmp_path, 'ours')
    for field in ('certificate', 'key', 'authority'):
      setattr(config.server, field, str(getattr(tls, field)))
  run = tmp_path / 'run'
  experiment.train_and_evaluate(config, run, stream=io.StringIO())
  check_replay(run)
  # Even if messages are rounded, the mean is of weights that are not.
  own = [
    workdirs.load_params(run / 'nodes' / str(node)) for node in range(NUM_NODES)
  ]
  np.testing.assert_allclose(
    workdirs.load_params(run), np.mean(own, axis=0), rtol=1e-6, atol=1e-7
  )


def find_lost_mass(trace, victim):
  """Mass that was sent and never mixed in, and mass of a node that was killed.

  Computed from the nodes' own records. Half of the mass is sent after a step,
  and the record of the step has the other half. So the message has as much as
  the record, and is mixed in once.
  """
  records, mixes = trace.records, trace.mixes
  own = records[records['kind'] != traces.Kind.LOST]
  steps = own[own['kind'] == traces.Kind.STEP]
  keys = zip(steps['replica'], steps['version'], strict=True)
  kept = dict(zip(keys, steps['mass'], strict=True))
  came = mixes['weight'] * mixes['mass']
  senders = list(zip(mixes['source'], mixes['source_version'], strict=True))
  assert len({*senders}) == len(senders) > 100
  for sender, mass in zip(senders, came, strict=True):
    assert mass == pytest.approx(kept[sender], abs=1e-9)
  lost = 0.0
  for node in range(NUM_NODES):
    last = own[own['replica'] == node]['mass'][-1]
    given = 1 + came[mixes['replica'] == node].sum() - last
    arrived = came[mixes['source'] == node].sum()
    assert given > arrived - 1e-9
    lost += given - arrived
    lost += last if node == victim else 0.0
  return lost


def _measure_strangers(config, num_steps):
  """The distance of nodes from their mean if they never mix."""
  trace = simulation.simulate(
    gossip.Pull(period=num_steps + 1),
    num_workers=NUM_NODES,
    num_gradients=num_steps * NUM_NODES,
  )
  alone = jasgd.replay(
    config.make_task(),
    config.make_optimizer(),
    trace,
    get_rate=config.make_schedule(),
    seed=config.seed,
  )
  return alone.evaluations['consensus'][-1]


@pytest.mark.parametrize('strategy', marks.slow_but(KILLED, 'pull'))
def test_the_others_go_on_when_a_node_is_killed(strategy, processes, tmp_path):
  num_steps = 300  # More than a node can make between a check and its death.
  config = make_config(strategy, num_steps=num_steps)
  victim = secrets.randbelow(NUM_NODES)
  step = secrets.randbelow(40)  # A random time.
  with start_run(config, tmp_path) as wait:
    name = f'node-{victim}'
    (pid,) = live.wait_until(lambda: processes.find_children(name))
    live.wait_until(lambda: count_steps(tmp_path)[victim] > step)
    os.kill(pid, signal.SIGKILL)
    result = wait()
  assert result.lost == [f'node-{victim}'], (victim, step)
  steps = count_steps(tmp_path)
  others = [node for node in range(NUM_NODES) if node != victim]
  assert all(steps[node] == num_steps for node in others)
  assert step < steps[victim] < num_steps
  # The others agree: they are nearer to each other than nodes that never mix.
  apart = _measure_strangers(config, num_steps)
  assert result.metrics['gossip/consensus_error'] < 0.6 * apart
  check_replay(tmp_path, others)
  trace = traces.Trace.load(tmp_path / 'trace')
  died_at = trace.of_replica(victim)['end_time'].max()
  later = trace.mixes[trace.mixes['end_time'] > died_at]
  assert np.count_nonzero(np.isin(later['replica'], others)) > 100
  assert traces.summarize(trace).num_deaths == 1
  if strategy == 'push_sum':
    lost = result.metrics['gossip/mass_lost']
    assert 0 < lost < NUM_NODES
    assert lost == pytest.approx(find_lost_mass(trace, victim), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['pull', 'push_sum'])
def test_nobody_waits_for_a_node_that_is_stopped(strategy, processes, tmp_path):
  """Each node waits once for an answer, for the time of `deadlines.step`.

  If they waited for each answer, they would not end within the test.
  """
  num_steps, others = 300, [0, 1]
  config = make_config(
    strategy, num_steps, deadlines={'step': 2.0, 'silence': 3.0}
  )
  with start_run(config, tmp_path) as wait:
    live.wait_until(lambda: count_steps(tmp_path).min() > 20)
    (pid,) = processes.find_children('node-2')
    os.kill(pid, signal.SIGSTOP)
    live.wait_until(lambda: (count_steps(tmp_path)[others] == num_steps).all())
    assert count_steps(tmp_path)[2] < num_steps
    os.kill(pid, signal.SIGCONT)
    result = wait()
  assert result.clock == num_steps * NUM_NODES or result.lost == ['node-2']
  check_replay(tmp_path)


# Deadlines of nodes that wait for one whose death was not reported to them.
LONG_START = {'start': 600.0, 'first_step': 600.0}


def test_nobody_waits_for_a_node_that_dies_as_it_starts(processes, tmp_path):
  """Its launcher reports the death to the others."""
  config = make_config('pull', 20, num_nodes=2, deadlines=LONG_START)
  with start_run(config, tmp_path) as wait:
    (pid,) = live.wait_until(lambda: processes.find_children('node-1'))
    os.kill(pid, signal.SIGKILL)
    result = wait()
  assert result.lost == ['node-1']
  assert count_steps(tmp_path, 2).tolist() == [20, 0]
  check_replay(tmp_path, [0])


@pytest.mark.slow
def test_nobody_waits_for_a_node_that_never_comes(processes, tmp_path):
  deadlines = {'start': 10.0, 'first_step': 20.0}
  config = make_config('pull', 20, num_nodes=2, deadlines=deadlines)
  with start_run(config, tmp_path) as wait:
    (pid,) = live.wait_until(lambda: processes.find_children('node-1'))
    os.kill(pid, signal.SIGSTOP)
    live.wait_until(lambda: count_steps(tmp_path, 2)[0] == 20)
    os.kill(pid, signal.SIGKILL)  # A stopped process cannot end by itself.
    result = wait()
  assert result.lost == ['node-1']
  assert count_steps(tmp_path, 2).tolist() == [20, 0]
  check_replay(tmp_path, [0])


@pytest.mark.parametrize(
  'number', marks.slow_but([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL)
)
def test_a_lost_centre_is_started_again(number, processes, tmp_path):
  """One node was killed, and one is silent.

  Before that, a node was killed as it started: the others do not wait for it.
  """
  num_steps = 200
  deadlines = {'silence': 2.0, **LONG_START}
  config = make_config('elastic', num_steps, deadlines=deadlines)
  others = range(NUM_NODES - 1)
  with start_run(config, tmp_path) as wait:
    (pid,) = live.wait_until(lambda: processes.find_children('node-2'))
    os.kill(pid, signal.SIGKILL)
    live.wait_until(lambda: count_steps(tmp_path)[others].min() > 10)
    (pid,) = processes.find_children('centre')
    os.kill(pid, number)
    result = wait()
  assert result.lost == ['node-2']
  assert count_steps(tmp_path).tolist() == [num_steps, num_steps, 0]
  trace = traces.Trace.load(tmp_path / 'trace')
  kinds = trace.of_replica(traces.SERVER)['kind']
  assert np.count_nonzero(kinds == traces.Kind.RESTART) == 1
  check_replay(tmp_path, (*others, -1))


def check_forces(trace):
  """The centre has moved by every force by which a node has moved."""
  moves, pulls = trace.of_kind(traces.Kind.MOVE), trace.mixes
  assert len(pulls) > 100
  assert set(
    zip(pulls['replica'].tolist(), (pulls['version'] - 1).tolist(), strict=True)
  ) == set(
    zip(moves['source'].tolist(), moves['source_version'].tolist(), strict=True)
  )
  assert not np.any(trace.records['kind'] == traces.Kind.LOST)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_a_run_goes_on_after_it_was_stopped(number, processes, tmp_path):
  """Ctrl-C loses nothing; SIGKILL of all loses at most the unsaved steps.

  This is elastic averaging; for push-sum, see `test_real_push_sum`.
  """
  num_steps, num_nodes = 200, 2
  deadlines = {'step': live.PATIENCE}  # No node counts as silent.
  script = (
    'import sys; from tests.experiment import test_real_nodes as t;'
    'from jasgd import experiment;'
    f'c = t.make_config("elastic", {num_steps}, {num_nodes}, '
    f'deadlines={deadlines});'
    'print(experiment.train_and_evaluate(c, sys.argv[1]))'
  )
  program = processes.start_python('-c', script, os.fspath(tmp_path))
  live.wait_until(lambda: count_steps(tmp_path, 2).min() > 10, program)
  live.wait_until(lambda: has_saved(tmp_path, 2), program)
  if number == signal.SIGKILL:
    for pid in processes.find():
      os.kill(pid, signal.SIGKILL)
    program.wait(-number)
  else:
    program.kill(number)
    assert 'is_interrupted=True' in program.wait()
  live.wait_until(lambda: not processes.find())
  assert not (tmp_path / 'result.json').exists()
  check_replay(tmp_path, range(num_nodes))
  config = make_config('elastic', num_steps, num_nodes, deadlines=deadlines)
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.clock == num_steps * num_nodes
  trace = traces.Trace.load(tmp_path / 'trace')
  kinds = trace.records['kind']
  restarts = np.count_nonzero(kinds == traces.Kind.RESTART)
  assert restarts == num_nodes + 1  # With the centre.
  if number == signal.SIGINT:
    assert len(trace.steps) == num_steps * num_nodes  # No step was made twice.
    check_forces(trace)
  check_replay(tmp_path, range(num_nodes))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('strategy', 'is_saved'),
  [('elastic', False), ('allreduce', True)],
)
def test_a_run_that_ended_without_a_result_gets_one(
  strategy, is_saved, processes, tmp_path
):
  """All steps were made when the launcher was killed, before or after it saved
  the mean."""
  config = make_config('elastic', 20, num_nodes=2)
  config.strategy.name = strategy
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  params = workdirs.load_params(tmp_path)
  (tmp_path / 'result.json').unlink()
  if not is_saved:
    shutil.rmtree(tmp_path / 'checkpoints')
  again = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert again.clock == result.clock == 20 * 2
  assert again.metrics['test/loss'] == result.metrics['test/loss']
  np.testing.assert_array_equal(workdirs.load_params(tmp_path), params)
  assert not processes.find()
  check_replay(tmp_path, range(2))


@pytest.mark.slow
def test_a_run_that_diverges_replays_too(processes, tmp_path):
  config = make_config('elastic', 10_000, optimizer={'rate': 1e18})
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result.is_diverged
  assert not processes.find()
  check_replay(tmp_path)
