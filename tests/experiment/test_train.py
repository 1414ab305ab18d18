"""Training from a config: what it leaves, and that it can be killed."""

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
from jasgd import experiment
from jasgd import traces
from jasgd import workdir
from tests.experiment import cases

ROOT = pathlib.Path(__file__).parent.parent.parent


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
  for clock in (10, 30, 60):
    assert _start(killed, clock).returncode == -signal.SIGKILL
    assert not (killed / 'run/result.json').exists()
  done = _start(killed, 0)
  assert done.returncode == 0, done.stderr
  for name in ('config.json', 'metrics.jsonl', 'result.json', 'trace'):
    first, second = (folder / 'run' / name for folder in (calm, killed))
    assert first.read_bytes() == second.read_bytes(), name
  first, second = (
    jasgd.load_params(folder / 'run') for folder in (calm, killed)
  )
  np.testing.assert_array_equal(first, second)


def test_what_a_run_leaves(tmp_path):
  seen = []
  config = cases.make_config()
  result = experiment.train_and_evaluate(
    config, tmp_path, on_metrics=lambda clock, metrics: seen.append(clock)
  )
  assert seen == [10, 20, 30, 40, 50, 60]
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {
    'checkpoints',
    'config.json',
    'metrics.jsonl',
    'provenance.json',
    'result.json',
    'tensorboard',
    'trace',
  }
  trace = traces.Trace.load(tmp_path / 'trace')
  assert trace.num_updates == 60
  header = json.loads((tmp_path / 'provenance.json').read_text())
  assert header == trace.header
  assert header['config']['optimizer']['rate'] == 0.1
  assert header['versions']['jax'] == jax.__version__
  columns = workdir.read_metrics(tmp_path)
  assert columns['clock'].tolist() == seen
  assert columns['test/loss'][-1] == result['test/loss'] < 0.69
  assert result['clock'] == 60
  assert not result['is_diverged']
  # The same weights as replay gives, which knows no config.
  replayed = jasgd.replay(
    config.make_task(),
    config.optimizer.make_optimizer(),
    trace,
    get_rate=lambda epoch: 0.1,
    eval_every=10,
  )
  np.testing.assert_array_equal(jasgd.load_params(tmp_path), replayed.params)


def test_a_finished_run_is_not_run_again(tmp_path):
  config = cases.make_config(num_updates=10)
  first = experiment.train_and_evaluate(config, tmp_path)
  second = experiment.train_and_evaluate(
    config, tmp_path, on_metrics=lambda *_: pytest.fail('It trained.')
  )
  assert first == second


def test_a_damaged_checkpoint_is_set_aside(tmp_path):
  """The run goes on from the one before it, and ends the same."""
  config = cases.make_config()
  config.runtime.checkpoint_seconds = 0.0
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


def test_a_folder_is_for_one_config(tmp_path):
  experiment.train_and_evaluate(cases.make_config(num_updates=10), tmp_path)
  with pytest.raises(ValueError, match='num_updates is 10 there and 20 here'):
    experiment.train_and_evaluate(cases.make_config(num_updates=20), tmp_path)


def test_a_run_that_diverges_says_so(tmp_path):
  config = cases.make_config()
  config.task.name, config.task.batch = 'quadratic', 1
  config.optimizer.rate = 1e4
  result = experiment.train_and_evaluate(config, tmp_path)
  assert result['is_diverged']
  assert result['clock'] < 60
  again = experiment.train_and_evaluate(config, tmp_path)
  assert again['is_diverged']


def test_a_run_starts_from_another(tmp_path):
  first = cases.make_config(num_updates=20)
  experiment.train_and_evaluate(first, tmp_path / 'first')
  second = cases.make_config(num_updates=10, init_from=str(tmp_path / 'first'))
  second.optimizer.rate = 1e-30  # It stays where it begins.
  experiment.train_and_evaluate(second, tmp_path / 'second')
  np.testing.assert_array_equal(
    jasgd.load_params(tmp_path / 'first'),
    jasgd.load_params(tmp_path / 'second'),
  )
  third = cases.make_config(init_from=str(tmp_path / 'first'))
  third.task.name, third.task.model = 'digits', 'mlp'
  with pytest.raises(ValueError, match=r'weights .* there and None here'):
    experiment.train_and_evaluate(third, tmp_path / 'third')
  assert not (tmp_path / 'third').exists()  # Another flag may mend it.
  with pytest.raises(ValueError, match='nowhere'):
    experiment.train_and_evaluate(
      cases.make_config(init_from='nowhere'), tmp_path / 'third'
    )


def test_a_run_that_was_started_from_another_does_not_need_it(tmp_path):
  experiment.train_and_evaluate(
    cases.make_config(num_updates=20), tmp_path / 'first'
  )
  config = cases.make_config(init_from=str(tmp_path / 'first'))
  calm = experiment.train_and_evaluate(config, tmp_path / 'calm')

  class StopError(Exception):
    pass

  def stop(clock, metrics):
    del clock, metrics
    raise StopError

  with pytest.raises(StopError):
    experiment.train_and_evaluate(config, tmp_path / 'b', on_metrics=stop)
  shutil.rmtree(tmp_path / 'first')
  assert experiment.train_and_evaluate(config, tmp_path / 'b') == calm


def test_evaluations_are_about_an_epoch_apart(tmp_path):
  config = cases.make_config(num_updates=300, num_epochs=140.0)
  config.runtime.eval_every = 0
  experiment.train_and_evaluate(config, tmp_path)
  clocks = workdir.read_metrics(tmp_path)['clock']
  assert clocks.tolist() == [125, 250, 300]  # 1000 samples, 8 at a time.


@pytest.mark.parametrize(
  ('name', 'changes'),
  [
    ('asynchronous', {}),
    ('backup', {'num_backups': 2}),
    ('constant_delay', {'delay': 3}),
    ('downpour', {'n_push': 2, 'n_fetch': 4}),
    ('hardsync', {}),
    ('rennala', {'s': 3}),
    ('ringmaster', {'r': 3}),
    ('softsync', {'n': 2}),
    ('ssp', {'s': 1}),
  ],
)
def test_a_trace_ends_at_its_budget(name, changes):
  config = cases.make_config(num_updates=0, num_epochs=1.5)
  config.protocol = experiment.ProtocolConfig(
    name=name, num_learners=8, **changes
  )
  if name == 'constant_delay':
    config.time = experiment.TimeConfig(name='constant', arguments=(1.0,))
  config.validate()
  trace = config.simulate()
  samples = trace.samples.max()
  largest = 8 * max(8, changes.get('n_push', 1))  # Of one update.
  assert 1500 <= samples < 1500 + largest
  # Nothing of a later update is in it.
  applied = trace.apply_clock[trace.apply_clock >= 0]
  assert applied[-1] == trace.num_updates - 1 == applied.max()
  config.num_updates = 7
  assert config.simulate().num_updates == 7


def test_messages_have_the_size_of_the_model():
  config = cases.make_config()
  assert config.simulate().header['bytes_per_push'] == 4 * 20
  config.network.num_parameters = 1000
  assert config.simulate().header['bytes_per_push'] == 4000


def test_all_problems_are_named_at_once():
  config = cases.make_config(num_epochs=0.0, seed=-1)
  config.task.name = 'imagenet'
  config.optimizer.rate = -1.0
  config.schedule.name = 'linear'
  config.protocol.name = 'hardsink'
  config.runtime.mode = 'cloud'
  config.runtime.checkpoint_seconds = -1.0
  with pytest.raises(ValueError, match='Bad config') as caught:
    config.validate()
  for problem in (
    "Unknown task 'imagenet'",
    'optimizer.rate must be finite and above 0, got -1.0',
    "Unknown schedule 'linear'",
    "Unknown protocol 'hardsink'",
    "Unknown runtime.mode 'cloud'. Known: simulate",
    'num_epochs must be finite and above 0, got 0.0',
    'runtime.checkpoint_seconds must be at least 0, got -1.0',
    'seed must be from 0 to 2^31 - 1, got -1',
  ):
    assert problem in str(caught.value)


def test_missing_data_and_memory_are_named_with_the_rest(tmp_path):
  config = cases.make_config()
  config.optimizer.rate = -1.0
  config.task.name, config.task.data_dir = 'mnist', str(tmp_path / 'data')
  with pytest.raises(ValueError, match='rate must be') as caught:
    config.validate()
  assert f'cannot be read from {tmp_path}/data' in str(caught.value)
  config = cases.make_config()
  config.optimizer.rate = -1.0
  config.protocol.name, config.protocol.delay = 'constant_delay', 10**10
  with pytest.raises(ValueError, match='rate must be') as caught:
    config.validate()
  assert '10000000002 versions of the weights' in str(caught.value)
  assert 'set time.name=constant' in str(caught.value)


@pytest.mark.parametrize(
  ('part', 'changes', 'message'),
  [
    ('task', {'batch': 5000}, 'batch'),
    ('task', {'shards': 'shards', 'batch': 200}, 'batch'),
    ('protocol', {'name': 'softsync', 'n': 9}, 'n must be at most'),
    (
      'protocol',
      {'name': 'constant_delay', 'delay': 10**10},
      r'10000000002 versions of the weights, of 80 bytes each, are '
      r'800,000,000,160 bytes, and [\d,]+ are free',
    ),
  ],
)
def test_what_cannot_be_is_refused(part, changes, message):
  config = cases.make_config()
  config.time = experiment.TimeConfig(name='constant', arguments=(1.0,))
  for name, value in changes.items():
    setattr(getattr(config, part), name, value)
  with pytest.raises(ValueError, match=message):
    config.validate()
