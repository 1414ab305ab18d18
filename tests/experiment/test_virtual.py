"""Training in this process: the files of a run, kills, resumes, signals."""

import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import jasgd
from jasgd import engine
from jasgd import experiment
from jasgd import reports
from jasgd import tasks
from jasgd import traces
from jasgd import workdir
from tests import marks
from tests.experiment import cases

pytestmark = pytest.mark.usefixtures('quick_compiler')

ROOT = pathlib.Path(__file__).parent.parent.parent
ALL = ('asynchronous', *cases.PEERS)


def _read_all(folder):
  """The bytes of all files that must not depend on interruptions."""
  names = ['config.json', 'metrics.jsonl', 'result.json', 'provenance.json']
  trace = folder / 'trace'
  names += [
    str(path.relative_to(folder))
    for path in ([trace] if trace.is_file() else sorted(trace.iterdir()))
  ]
  return {name: (folder / name).read_bytes() for name in names}


def _start(folder, clock):
  """Trains in `folder/run`, with the same command whatever the clock."""
  folder.mkdir(exist_ok=True)
  return subprocess.run(
    [sys.executable, '-m', 'tests.experiment.killed_training'],
    cwd=folder,
    timeout=120,
    capture_output=True,
    text=True,
    env={**os.environ, 'KILL_AT': str(clock), 'PYTHONPATH': str(ROOT)},
  )


@pytest.mark.slow
def test_killed_and_started_again_it_ends_the_same(tmp_path):
  calm, killed = tmp_path / 'calm', tmp_path / 'killed'
  assert _start(calm, 0).returncode == 0
  for clock in (30, 60):
    assert _start(killed, clock).returncode == -signal.SIGKILL
    assert not (killed / 'run/result.json').exists()
  done = _start(killed, 0)
  assert done.returncode == 0, done.stderr
  assert _read_all(calm / 'run') == _read_all(killed / 'run')
  np.testing.assert_array_equal(
    *(jasgd.load_params(folder / 'run') for folder in (calm, killed))
  )


@pytest.mark.parametrize(
  'name', marks.slow_but(['asynchronous', 'elastic', 'push_sum'], 'elastic')
)
def test_stopped_and_started_again_it_ends_the_same(name, tmp_path):
  config = cases.make_config(name)
  calm, stopped = tmp_path / 'calm', tmp_path / 'stopped'
  result = experiment.train_and_evaluate(config, calm)
  for clock in (10, 30, 60):
    with pytest.raises(cases.StopError):
      experiment.train_and_evaluate(
        config, stopped, on_metrics=cases.stop_at(clock)
      )
    assert not (stopped / 'result.json').exists()
  assert experiment.train_and_evaluate(config, stopped) == result
  assert _read_all(calm) == _read_all(stopped)
  jax.tree.map(
    np.testing.assert_array_equal,
    *(jasgd.load_params(folder) for folder in (calm, stopped)),
  )


@pytest.mark.parametrize(
  ('name', 'mode', 'number'),
  [
    ('asynchronous', 'simulate', signal.SIGTERM),
    ('pull', 'devices', signal.SIGINT),
  ],
)
def test_a_signal_saves_first_and_a_second_does_not(
  name, mode, number, tmp_path
):
  config = cases.make_config(name)
  config.runtime.mode = mode
  config.runtime.eval_every = 20
  config.runtime.checkpoint_seconds = 3600.0
  calm, stopped = tmp_path / 'calm', tmp_path / 'stopped'
  result = experiment.train_and_evaluate(config, calm)

  def stop(clock, metrics, times):
    del clock, metrics
    for _ in range(times):
      signal.raise_signal(number)

  with pytest.raises(KeyboardInterrupt):
    experiment.train_and_evaluate(
      config, stopped, on_metrics=functools.partial(stop, times=2)
    )
  assert not workdir.list_checkpoints(stopped)
  interrupted = experiment.train_and_evaluate(
    config, stopped, on_metrics=functools.partial(stop, times=1)
  )
  assert (interrupted.clock, interrupted.is_interrupted) == (20, True)
  assert interrupted.end_reason == 'It was interrupted.'
  assert workdir.list_checkpoints(stopped) == [20]
  assert not (stopped / 'result.json').exists()
  assert experiment.train_and_evaluate(config, stopped) == result


@pytest.mark.parametrize('name', ALL)
def test_the_files_of_a_run(name, tmp_path):
  seen = []
  config = cases.make_config(name)
  result = experiment.train_and_evaluate(
    config, tmp_path, on_metrics=lambda clock, metrics: seen.append(clock)
  )
  assert seen == [10, 20, 30, 40, 50, 60]
  assert {path.name for path in tmp_path.iterdir()} == {
    'checkpoints',
    'config.json',
    'launcher.lock',
    'metrics.jsonl',
    'provenance.json',
    'result.json',
    'tensorboard',
    'trace',
  }
  assert result.clock == 60
  assert result.end_reason == 'All 60 updates were made.'
  assert not result.is_diverged
  trace = traces.Trace.load(tmp_path / 'trace')
  assert result.trace.header == trace.header
  header = json.loads((tmp_path / 'provenance.json').read_text())
  assert header['config'] == trace.header['config']
  assert header['config']['strategy']['name'] == name
  assert header['versions']['jax'] == jax.__version__
  columns = workdir.read_metrics(tmp_path)
  assert columns['clock'].tolist() == seen
  assert columns['test/loss'][-1] == result.metrics['test/loss'] < 0.69
  assert columns['epoch'][-1] == pytest.approx(0.48)
  is_gossip = name not in ('asynchronous', 'allreduce')
  assert ('server/staleness_mean' in columns) == (name == 'asynchronous')
  assert ('gossip/age_mean' in columns) == is_gossip
  assert ('gossip/mass_lost' in columns) == (name == 'push_sum')
  assert ('centre/loss' in columns) == (name == 'elastic')
  if is_gossip:
    assert np.all(columns['gossip/consensus_error'][:-1] > 0)
  # The same weights as a replay, which knows no config.
  replayed = jasgd.replay(
    config.make_task(),
    config.make_optimizer(),
    trace,
    get_rate=lambda epoch: 0.1,
    eval_every=10,
  )
  np.testing.assert_array_equal(jasgd.load_params(tmp_path), replayed.params)
  np.testing.assert_array_equal(result.params, replayed.params)
  assert ('local/loss' in columns) == (name == 'elastic')
  if name == 'elastic':
    replayed.replicas.pop(-1)
    own = tasks.evaluate_all(config.make_task(), replayed.replicas.values())
    assert columns['local/loss'][-1] == pytest.approx(own['loss'], rel=1e-5)
    assert own['loss'] > result.metrics['test/loss']


def test_a_finished_run_is_not_run_again(tmp_path):
  config = cases.make_config(num_updates=10)
  first = experiment.train_and_evaluate(config, tmp_path)
  second = experiment.train_and_evaluate(
    config, tmp_path, on_metrics=lambda *_: pytest.fail('It trained.')
  )
  assert first == second
  with pytest.raises(ValueError, match='num_updates is 10 there and 20 here'):
    experiment.train_and_evaluate(cases.make_config(num_updates=20), tmp_path)


def test_a_damaged_checkpoint_is_set_aside(tmp_path):
  """The run goes on from the one before it, and ends the same."""
  config = cases.make_config()
  first = experiment.train_and_evaluate(config, tmp_path)
  params = jasgd.load_params(tmp_path)
  metrics = (tmp_path / 'metrics.jsonl').read_bytes()
  assert workdir.list_checkpoints(tmp_path) == [50, 60]
  (tmp_path / 'result.json').unlink()
  (path, *_) = (tmp_path / 'checkpoints/60').glob('state/**/d/*')
  path.write_bytes(path.read_bytes()[:-1])
  seen = []
  second = experiment.train_and_evaluate(
    config, tmp_path, on_metrics=lambda clock, metrics: seen.append(clock)
  )
  assert seen == [60]
  assert second == first
  assert (tmp_path / 'metrics.jsonl').read_bytes() == metrics
  np.testing.assert_array_equal(jasgd.load_params(tmp_path), params)
  names = {each.name for each in (tmp_path / 'checkpoints').iterdir()}
  assert names == {'50', '60', '60.broken'}


@pytest.mark.parametrize('name', ['asynchronous', 'pull'])
def test_a_run_that_diverges_says_so(name, tmp_path):
  config = cases.make_config(name)
  config.task.name, config.task.batch = 'quadratic', 1
  config.optimizer.rate, config.num_updates = 1e4, 1000
  result = experiment.train_and_evaluate(config, tmp_path)
  assert result.is_diverged
  assert result.clock < 1000
  assert 'not finite' in result.end_reason
  assert experiment.train_and_evaluate(config, tmp_path).is_diverged


@pytest.mark.parametrize('name', ['asynchronous', 'pull'])
def test_a_run_starts_from_another(name, tmp_path):
  first = cases.make_config(name, num_updates=20)
  experiment.train_and_evaluate(first, tmp_path / 'first')
  second = cases.make_config(
    name, num_updates=12, init_from=str(tmp_path / 'first')
  )
  second.optimizer.rate = 1e-30  # It stays where it begins.
  experiment.train_and_evaluate(second, tmp_path / 'second')
  np.testing.assert_allclose(
    *(jasgd.load_params(tmp_path / folder) for folder in ('first', 'second')),
    rtol=1e-6,
  )
  third = cases.make_config(name, init_from=str(tmp_path / 'first'))
  third.task.name, third.task.model = 'digits', 'mlp'
  with pytest.raises(ValueError, match=r'weights .* there and None here'):
    experiment.train_and_evaluate(third, tmp_path / 'third')
  assert not (tmp_path / 'third').exists()  # Another flag may mend it.
  with pytest.raises(ValueError, match='nowhere'):
    experiment.train_and_evaluate(
      cases.make_config(name, init_from='nowhere'), tmp_path / 'third'
    )


def test_a_run_that_was_started_from_another_does_not_need_it(tmp_path):
  experiment.train_and_evaluate(
    cases.make_config(num_updates=20), tmp_path / 'first'
  )
  config = cases.make_config(init_from=str(tmp_path / 'first'))
  calm = experiment.train_and_evaluate(config, tmp_path / 'calm')
  with pytest.raises(cases.StopError):
    experiment.train_and_evaluate(
      config, tmp_path / 'b', on_metrics=cases.stop_at(10)
    )
  shutil.rmtree(tmp_path / 'first')
  assert experiment.train_and_evaluate(config, tmp_path / 'b') == calm


def test_evaluations_are_about_an_epoch_apart(tmp_path):
  config = cases.make_config(num_updates=300, num_epochs=140.0)
  config.runtime.eval_every = 0
  experiment.train_and_evaluate(config, tmp_path)
  clocks = workdir.read_metrics(tmp_path)['clock']
  assert clocks.tolist() == [125, 250, 300]  # 1000 samples, 8 at a time.


# --- Nodes.


def test_metrics_of_mixes_are_those_of_the_whole_trace(tmp_path):
  config = cases.make_config('pull')
  experiment.train_and_evaluate(config, tmp_path)
  columns = workdir.read_metrics(tmp_path)
  summary = traces.summarize(traces.Trace.load(tmp_path / 'trace'))
  assert columns['gossip/age_max'].max() == summary.age.max > 0
  # One chunk with all mixes in it.
  config.runtime.eval_every = 60
  whole = experiment.train_and_evaluate(config, tmp_path / 'whole').metrics
  assert whole['gossip/age_mean'] == pytest.approx(summary.age.mean)
  assert whole['gossip/lag_mean'] == pytest.approx(summary.lag.mean)


def test_lost_mass_is_said(tmp_path):
  config = cases.make_config('push_sum')
  config.failures.given = ((5.0, 3.0),)
  metrics = experiment.train_and_evaluate(config, tmp_path).metrics
  summary = traces.summarize(traces.Trace.load(tmp_path / 'trace'))
  assert summary.num_deaths == 1
  assert metrics['gossip/mass_lost'] == pytest.approx(summary.lost_mass)
  assert metrics['gossip/mass_lost'] > 0


def test_a_single_node_is_plain_sgd(tmp_path):
  config = cases.make_config('allreduce', num_workers=1)
  config.runtime.engine = 'exact'
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


# --- Devices.


@pytest.mark.parametrize(
  'name', marks.slow_but(['allreduce', 'elastic', 'push_sum'], 'elastic')
)
def test_devices_stopped_and_started_again_end_the_same(name, tmp_path):
  config = cases.make_device_config(name)
  calm, stopped = tmp_path / 'calm', tmp_path / 'stopped'
  result = experiment.train_and_evaluate(config, calm)
  assert result.clock == 60
  assert result.metrics['test/loss'] < 0.69
  assert ('centre/loss' in result.metrics) == (name == 'elastic')
  # The loss is convex: that of the mean is below the mean of the nodes'.
  assert ('local/loss' in result.metrics) == (name == 'elastic')
  assert result.metrics.get('local/loss', 1.0) > result.metrics['test/loss']
  with pytest.raises(cases.StopError):
    experiment.train_and_evaluate(config, stopped, on_metrics=cases.stop_at(40))
  assert workdir.list_checkpoints(stopped) == [20]
  assert experiment.train_and_evaluate(config, stopped) == result
  for path in ('metrics.jsonl', 'result.json'):
    assert (calm / path).read_bytes() == (stopped / path).read_bytes()
  np.testing.assert_array_equal(
    *(jasgd.load_params(folder) for folder in (calm, stopped))
  )


def test_weights_on_devices_are_the_mean_of_the_program(tmp_path):
  config = cases.make_device_config('pull')
  experiment.train_and_evaluate(config, tmp_path)
  with pytest.raises(ValueError, match='there is no trace to replay'):
    experiment.verify(tmp_path)
  program = engine.make_device_program(
    config.make_task(),
    config.make_optimizer(),
    config.make_strategy(),
    num_nodes=4,
    runner='vmap',
    get_rate=lambda epoch: 0.1,
  )
  state = program.init()
  for _ in range(15):
    state, _ = program.step(state)
  params, _ = program.mean(state)
  np.testing.assert_array_equal(jasgd.load_params(tmp_path), params)
  columns = workdir.read_metrics(tmp_path)
  assert columns['clock'].tolist() == [20, 40, 60]
  assert columns['gossip/consensus_error'][-1] == pytest.approx(
    float(program.consensus(state))
  )
  header = json.loads((tmp_path / 'provenance.json').read_text())
  assert header['num_devices'] == jax.device_count()
  # A report does not miss the trace.
  page = reports.write_report(tmp_path).read_text()
  assert 'There is no trace' not in page
  assert (tmp_path / 'report/curves.png').exists()
