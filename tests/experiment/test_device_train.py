"""Training of nodes on devices: what it leaves, and that it resumes."""

import json

import jax
import numpy as np
import pytest

import jasgd
from jasgd import engine
from jasgd import experiment
from jasgd import reports
from jasgd import workdir
from tests import marks
from tests.experiment import node_cases


class StopError(Exception):
  """What stops a run in these tests."""


def _make_config(name):
  config = node_cases.make_config(name)
  config.runtime.mode = 'devices'
  config.runtime.eval_every = 20
  if name == 'pairs':
    config.strategy.peers = 'matching'
  return config


@pytest.mark.parametrize(
  'name', marks.slow_but(node_cases.STRATEGIES, 'elastic')
)
def test_stopped_and_started_again_it_ends_the_same(name, tmp_path):
  config = _make_config(name)
  calm, stopped = tmp_path / 'calm', tmp_path / 'stopped'
  result = experiment.train_and_evaluate(config, calm)
  assert result['clock'] == 60
  assert result['test/loss'] < 0.69
  assert ('centre/loss' in result) == (name == 'elastic')
  # Of each node by itself; that of their mean is below, as it is convex.
  assert ('local/loss' in result) == (name == 'elastic')
  assert result.get('local/loss', 1.0) > result['test/loss']

  def stop(clock, metrics):
    del metrics
    if clock == 40:
      raise StopError

  with pytest.raises(StopError):
    experiment.train_and_evaluate(config, stopped, on_metrics=stop)
  assert workdir.list_checkpoints(stopped) == [20]
  assert experiment.train_and_evaluate(config, stopped) == result
  for path in ('metrics.jsonl', 'result.json'):
    assert (calm / path).read_bytes() == (stopped / path).read_bytes()
  np.testing.assert_array_equal(
    *(jasgd.load_params(folder) for folder in (calm, stopped))
  )


def test_the_weights_are_the_mean_of_the_program(tmp_path):
  config = _make_config('pull')
  experiment.train_and_evaluate(config, tmp_path)
  with pytest.raises(ValueError, match='there is no trace to replay'):
    experiment.read_nodes(tmp_path)
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


def test_a_report_does_not_miss_a_trace(tmp_path):
  experiment.train_and_evaluate(_make_config('allreduce'), tmp_path)
  page = reports.write_report(tmp_path).read_text()
  assert 'There is no trace' not in page
  assert 'consensus' in (tmp_path / 'metrics.jsonl').read_text()
  assert (tmp_path / 'report/curves.png').exists()


@pytest.mark.parametrize(
  ('name', 'changes', 'message'),
  [
    ('pairs', {'strategy.peers': 'independent'}, "Pairs need peers='matching'"),
    ('elastic', {'runtime.wire_dtype': 'bfloat16'}, 'got dtype=bfloat16'),
    ('pull', {'runtime.runner': 'pmap'}, '4 nodes need a device each'),
    ('pull', {'runtime.runner': 'shard_map'}, '4 nodes need a device each'),
  ],
)
def test_what_devices_cannot_do_is_said_before_there_is_a_folder(
  name, changes, message, tmp_path
):
  config = _make_config(name)
  for path, value in changes.items():
    part, field = path.split('.')
    setattr(getattr(config, part), field, value)
  folder = tmp_path / 'run'
  with pytest.raises(ValueError, match=message):
    experiment.train_and_evaluate(config, folder)
  assert not folder.exists()


def test_a_server_has_no_use_for_it():
  config = experiment.TrainingConfig()
  config.runtime.mode = 'devices'
  with pytest.raises(ValueError, match='is for nodes without a server'):
    config.validate()
