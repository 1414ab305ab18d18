"""Training of nodes in virtual time: what it leaves, and that it resumes."""

import dataclasses
import functools
import json
import signal
import types

import jax
import numpy as np
import pytest

import jasgd
from jasgd import experiment
from jasgd import runtime
from jasgd import tasks
from jasgd import traces
from jasgd import workdir
from jasgd.experiment import _node_local
from tests import marks
from tests.experiment import node_cases

pytestmark = pytest.mark.usefixtures('quick_compiler')


class StopError(Exception):
  """What stops a run in these tests."""


def _stop_at(clock):
  """A logger that stops the run once it has come to a clock."""

  def stop(now, metrics):
    del metrics
    if now == clock:
      raise StopError

  return stop


def _read_all(folder):
  """The bytes of all files that must not depend on what disturbed the run."""
  names = ['config.json', 'metrics.jsonl', 'result.json', 'provenance.json']
  names += sorted(f'trace/{path.name}' for path in (folder / 'trace').iterdir())
  return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.parametrize(
  'name', marks.slow_but(node_cases.STRATEGIES, 'elastic', 'push_sum')
)
def test_stopped_and_started_again_it_ends_the_same(name, tmp_path):
  config = node_cases.make_config(name)
  calm, stopped = tmp_path / 'calm', tmp_path / 'stopped'
  result = experiment.train_and_evaluate(config, calm)
  for clock in (10, 30, 60):
    with pytest.raises(StopError):
      experiment.train_and_evaluate(config, stopped, on_metrics=_stop_at(clock))
    assert not (stopped / 'result.json').exists()
  assert experiment.train_and_evaluate(config, stopped) == result
  assert _read_all(calm) == _read_all(stopped)
  jax.tree.map(
    np.testing.assert_array_equal,
    jasgd.load_params(calm),
    jasgd.load_params(stopped),
  )


@pytest.mark.parametrize(
  ('mode', 'number'),
  [('simulate', signal.SIGTERM), ('devices', signal.SIGINT)],
)
def test_a_signal_saves_first_and_a_second_does_not(mode, number, tmp_path):
  config = node_cases.make_config()
  config.runtime.mode = mode
  config.runtime.eval_every = 20
  config.runtime.checkpoint_seconds = 3600.0
  calm, stopped = tmp_path / 'calm', tmp_path / 'stopped'
  result = experiment.train_and_evaluate(config, calm)

  def stop(clock, metrics, times):
    del clock, metrics
    for _ in range(times):
      signal.raise_signal(number)

  for times, clocks in ((2, []), (1, [20])):
    with pytest.raises(KeyboardInterrupt):
      experiment.train_and_evaluate(
        config, stopped, on_metrics=functools.partial(stop, times=times)
      )
    assert workdir.list_checkpoints(stopped) == clocks
  assert experiment.train_and_evaluate(config, stopped) == result


@pytest.mark.parametrize('name', node_cases.STRATEGIES)
def test_what_a_run_leaves(name, tmp_path):
  seen = []
  config = node_cases.make_config(name)
  result = experiment.train_and_evaluate(
    config, tmp_path, on_metrics=lambda clock, metrics: seen.append(clock)
  )
  assert seen == [10, 20, 30, 40, 50, 60]
  trace = traces.NodeTrace.load(tmp_path / 'trace')
  assert len(trace.steps) == 60
  header = json.loads((tmp_path / 'provenance.json').read_text())
  assert header['config'] == trace.header['config']
  assert header['config']['strategy']['name'] == name
  columns = workdir.read_metrics(tmp_path)
  assert columns['clock'].tolist() == seen
  assert columns['test/loss'][-1] == result['test/loss'] < 0.69
  assert columns['epoch'][-1] == pytest.approx(0.48)
  assert ('gossip/age_mean' in columns) == (name != 'allreduce')
  assert ('gossip/mass_lost' in columns) == (name == 'push_sum')
  assert ('centre/loss' in columns) == (name == 'elastic')
  assert np.all(columns['gossip/consensus_error'][:-1] > 0) or (
    name == 'allreduce'
  )
  # The same weights as replay gives, which knows no config.
  replayed = jasgd.replay(
    config.make_task(),
    config.make_optimizer(),
    trace,
    get_rate=lambda epoch: 0.1,
    eval_every=10,
  )
  np.testing.assert_array_equal(jasgd.load_params(tmp_path), replayed.params)
  assert ('local/loss' in columns) == (name == 'elastic')
  if name == 'elastic':
    replayed.replicas.pop(-1)
    own = tasks.evaluate_all(config.make_task(), replayed.replicas.values())
    assert columns['local/loss'][-1] == pytest.approx(own['loss'], rel=1e-5)
    assert own['loss'] > result['test/loss']


def test_metrics_of_mixes_are_those_of_the_whole_trace(tmp_path):
  config = node_cases.make_config('pull')
  experiment.train_and_evaluate(config, tmp_path)
  columns = workdir.read_metrics(tmp_path)
  summary = traces.summarize_nodes(traces.NodeTrace.load(tmp_path / 'trace'))
  assert columns['gossip/age_max'].max() == summary.age.max > 0
  # One chunk with all mixes in it.
  config.runtime.eval_every = 60
  whole = experiment.train_and_evaluate(config, tmp_path / 'whole')
  assert whole['gossip/age_mean'] == pytest.approx(summary.age.mean)
  assert whole['gossip/lag_mean'] == pytest.approx(summary.lag.mean)


def test_lost_mass_is_said(tmp_path):
  config = node_cases.make_config('push_sum')
  config.failures.given = ((5.0, 3.0),)
  result = experiment.train_and_evaluate(config, tmp_path)
  summary = traces.summarize_nodes(traces.NodeTrace.load(tmp_path / 'trace'))
  assert summary.num_deaths == 1
  assert result['gossip/mass_lost'] == pytest.approx(summary.lost_mass)
  assert result['gossip/mass_lost'] > 0


def test_exact_and_fast_agree(tmp_path):
  params = []
  for engine in ('fast', 'exact'):
    config = node_cases.make_config('elastic')
    config.runtime.engine = engine
    experiment.train_and_evaluate(config, tmp_path / engine)
    params.append(jasgd.load_params(tmp_path / engine))
  np.testing.assert_allclose(*params, rtol=1e-5, atol=1e-6)


def test_a_single_node_is_plain_sgd(tmp_path):
  config = node_cases.make_config('allreduce')
  config.strategy.num_nodes = 1
  experiment.train_and_evaluate(config, tmp_path)
  task, optimizer = config.make_task(), config.make_optimizer()
  params, stats = task.init(jax.random.key(0, impl='threefry2x32'))
  state = optimizer.init(params)

  @jax.jit
  def update(params, state, step):
    batch = task.batches(task.data, 0, 0, step)
    grads = jax.grad(lambda params: task.loss(params, stats, batch, None)[0])
    updates, state = optimizer.update(grads(params), state, params)
    return params + 0.1 * updates, state

  for step in range(60):
    params, state = update(params, state, step)
  np.testing.assert_allclose(
    jasgd.load_params(tmp_path), params, rtol=1e-5, atol=1e-6
  )


def test_a_run_starts_from_another(tmp_path):
  first = node_cases.make_config()
  experiment.train_and_evaluate(first, tmp_path / 'first')
  second = node_cases.make_config(init_from=str(tmp_path / 'first'))
  second.optimizer.rate = 1e-30  # It stays where it begins.
  experiment.train_and_evaluate(second, tmp_path / 'second')
  np.testing.assert_allclose(
    *(jasgd.load_params(tmp_path / name) for name in ('first', 'second')),
    rtol=1e-6,
  )


def test_a_run_that_diverges_says_so(tmp_path):
  config = node_cases.make_config()
  config.task.name, config.task.batch = 'quadratic', 1
  config.optimizer.rate, config.num_epochs = 1e4, 1.0
  result = experiment.train_and_evaluate(config, tmp_path)
  assert result['is_diverged']
  assert experiment.train_and_evaluate(config, tmp_path)['is_diverged']


def test_steps_and_epochs():
  config = node_cases.make_config(num_epochs=1.0)  # Of 1000 samples.
  assert config.count_steps() == 32  # 4 nodes with batches of 8: 31.25.
  config.runtime.eval_every = 0
  assert config.choose_eval_every() == 128


@pytest.mark.parametrize(
  ('name', 'period', 'rate'),
  [('allreduce', 1, 0.4), ('allreduce', 2, 0.1), ('pull', 1, 0.1)],
)
def test_the_rate_scales_with_the_samples_of_an_update(name, period, rate):
  config = node_cases.make_config(name)
  config.strategy.period = period
  config.schedule.scaling, config.schedule.base_batch = 'linear', 8
  assert config.make_schedule()(0.0) == pytest.approx(rate)


@pytest.mark.parametrize(
  ('part', 'changes', 'message'),
  [
    ('optimizer', {'policy': 'inverse'}, 'policy must be constant'),
    ('optimizer', {'correction': 'gap_aware'}, 'correction must be none'),
    ('optimizer', {'clip_gradient': 1.0}, r'use optimizer\.clip_update'),
    ('runtime', {'overlap': True}, r'runtime\.overlap must be False'),
    ('strategy', {'name': 'gossip'}, "Unknown strategy 'gossip'"),
    ('strategy', {'beta': 2.0}, 'must be'),
    ('strategy', {'name': 'elastic', 'order': 'b'}, "Unknown order 'b'"),
    ('strategy', {'peers': 'tree'}, "Unknown peers 'tree'"),
    ('failures', {'given': ((1.0, 9.0),)}, '9'),
  ],
)
def test_what_makes_no_sense_for_nodes_is_refused(part, changes, message):
  config = node_cases.make_config()
  changed = dataclasses.replace(getattr(config, part), **changes)
  setattr(config, part, changed)
  with pytest.raises(ValueError, match=message):
    config.validate()


def test_a_config_comes_back_from_json(tmp_path):
  config = node_cases.make_config('elastic')
  folder = workdir.open_workdir(tmp_path, dataclasses.asdict(config))
  settings = workdir.read_json(folder.config)
  assert experiment.read_config(settings) == config


def test_nodes_can_be_swept(tmp_path):
  config = node_cases.make_config()
  rows = experiment.sweep(
    config, 'strategy.name=pull,allreduce;optimizer.rate=0.1,0.2', tmp_path
  )
  assert [row['optimizer.rate'] for row in rows] == [0.1, 0.2, 0.1, 0.2]
  assert all(row['clock'] == 60 for row in rows)
  alone = experiment.train_and_evaluate(config, tmp_path / 'alone')
  assert rows[0]['test/loss'] == pytest.approx(alone['test/loss'])


def test_no_nodes_are_refused():
  config = node_cases.make_config()
  config.strategy.num_nodes = 0
  with pytest.raises(ValueError, match=r'num_nodes must be .* got 0'):
    config.validate()


def test_stopped_before_it_is_evaluated_it_knows_its_steps(
  tmp_path, monkeypatch
):
  """By the traces of the run that it was to go on with."""
  config = node_cases.make_config()
  experiment.train_and_evaluate(config, tmp_path)
  folder = workdir.Workdir(tmp_path)
  folder.result.unlink()
  ended = {'clock': 0, 'mean': None, 'metrics': {}, 'unwritten_at': None}
  ended |= {'lost': [], 'is_interrupted': True, 'is_diverged': False}
  monkeypatch.setattr(
    _node_local._node_supervisor,
    'NodeSupervisor',
    lambda *_, **__: types.SimpleNamespace(run=lambda: ended),
  )
  result = _node_local.supervise(
    config,
    folder,
    runtime.Registry(folder),
    {},
    is_owner=True,
    stream=None,
    on_metrics=None,
  )
  assert result['clock'] == 60
  assert result['is_interrupted']
