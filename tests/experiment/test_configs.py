"""Configs: every name can be used, and messages list all errors."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jasgd import experiment
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks
from jasgd import traces
from jasgd import workdir
from tests.experiment import cases
from tests.experiment import own_strategies

OWN = 'tests.experiment.own_strategies'
PROTOCOLS = {
  'asynchronous': {},
  'backup': {'num_backups': 3},
  'constant_delay': {'delay': 7},
  'downpour': {'n_push': 2, 'n_fetch': 6},
  'hardsync': {},
  'rennala': {'s': 5},
  'ringmaster': {'r': 30},
  'softsync': {'n': 4},
  'ssp': {'s': 2},
}
PER_UPDATE = {'backup': 5, 'downpour': 2, 'hardsync': 8, 'rennala': 5}
PER_UPDATE |= {'softsync': 2}
TIMES = {
  'constant': (2.0,),
  'exponential': (1.0,),
  'gamma': (1.0, 10.0),
  'lognormal': (1.0, 0.5),
  'normal': (1.0, 0.2),
  'pareto': (1.0, 2.5),
  'recorded': (1.0, 2.0, 0.5),
}


def _change(config, changes):
  """Sets fields by their full paths."""
  for path, value in changes.items():
    *names, last = path.split('.')
    part = config
    for name in names:
      part = getattr(part, name)
    setattr(part, last, value)
  return config


def _make(name='asynchronous', **changes):
  config = cases.make_config(name)
  if name == 'constant_delay':
    config.time = experiment.TimeConfig(name='constant', arguments=(1.0,))
  for field, value in changes.items():
    setattr(config.strategy, field, value)
  return config


# --- Strategies.


def test_every_protocol_has_a_name():
  assert set(PROTOCOLS) == set(protocols.PROTOCOLS) - {'ramp_up'}


@pytest.mark.parametrize('name', PROTOCOLS)
def test_protocols_by_name(name):
  config = _make(name, **PROTOCOLS[name])
  config.validate()
  made = config.make_strategy()
  expected = getattr(protocols, name)(*PROTOCOLS[name].values())
  assert made.to_config() == expected.to_config()
  per_update = config.count_gradients_per_update()
  assert per_update == PER_UPDATE.get(name, 1)
  config.strategy.ramp_up = 9
  assert repr(config.make_strategy()).startswith('ramp_up(')
  assert config.count_gradients_per_update() == per_update


@pytest.mark.parametrize('name', PROTOCOLS)
def test_a_trace_ends_at_its_budget(name):
  config = _make(name, **PROTOCOLS[name])
  config.num_updates, config.num_epochs = 0, 1.5
  trace = config.simulate()
  samples = trace.samples.max()
  assert 1500 <= samples < 1500 + 8 * 8  # At most one update more.
  # The trace has no record of a later update.
  applied = trace.clock[trace.clock >= 0]
  assert applied[-1] == trace.num_updates - 1 == applied.max()
  config.num_updates = 7
  assert config.simulate().num_updates == 7


@pytest.mark.parametrize('name', cases.PEERS)
@pytest.mark.parametrize('peers', ['independent', 'random_matching'])
def test_peer_strategies_by_name(name, peers):
  config = _make(name, peers=peers, period=2)
  config.validate()
  trace = config.simulate()
  assert isinstance(trace, traces.Trace)
  assert len(trace.steps) == 60
  assert len(trace.mixes)


@pytest.mark.parametrize('kind', gossip.topologies.KINDS)
def test_every_topology_has_a_name(kind):
  config = experiment.StrategyConfig(name='pull', peers=kind)
  assert config.make(16, seed=0).peers.num_nodes == 16


@pytest.mark.parametrize('ramp_up', [0, 9])
def test_a_constant_delay_of_ones_own(ramp_up):
  """The properties of a strategy decide what it needs, not its name."""
  config = _make(f'{OWN}:Late', delay=3, ramp_up=ramp_up)
  assert config.num_workers == 8
  assert config.count_workers() == 4
  with pytest.raises(ValueError, match=r'late.* needs equal times: set time'):
    config.validate()
  config.time = experiment.TimeConfig(name='constant', arguments=(1.0,))
  config.validate()
  trace = config.simulate()
  assert trace.num_workers == 4
  assert trace.staleness[-1] == 3
  # A version for every learner, and one for the server.
  config.strategy.delay = 10**6
  config.task = experiment.TaskConfig(name='digits', model='lenet')
  with pytest.raises(ValueError, match='1000002 versions of the weights'):
    config.simulate()


def test_a_strategy_of_ones_own():
  config = _make(f'{OWN}:Every', arguments=(('count', 3),))
  config.validate()
  # For a field of the config that was not set, the class uses its own default.
  made = config.make_strategy()
  assert isinstance(made, own_strategies.Every)
  assert (made.count, made.s) == (3, 5)
  assert config.count_gradients_per_update() == 3
  assert config.simulate().num_updates == 60
  config.strategy.s = 4
  assert config.make_strategy().s == 4
  peers = _make(f'{OWN}:Neighbour', period=2)
  peers.num_workers = 4
  assert peers.strategy.is_peer
  peers.validate()
  assert peers.make_strategy() == own_strategies.Neighbour(period=2)
  assert len(peers.simulate().steps) == 60


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'strategy.name': f'{OWN}:nothing'}, "cannot be imported .*'nothing'"),
    ({'strategy.name': 'no_module:Every'}, 'No module named'),
    (
      {'strategy.name': f'{OWN}:make_task'},
      'must be the name of a subclass of',
    ),
    (
      {
        'strategy.name': f'{OWN}:Every',
        'strategy.arguments': (('speed', 3),),
      },
      "takes the arguments .*'speed'",
    ),
    ({'task.name': f'{OWN}:nothing'}, 'The task .* cannot be imported'),
    ({'time.name': f'{OWN}:nothing'}, 'The time .* cannot be imported'),
  ],
)
def test_errors_in_ones_own_are_named(changes, message):
  with pytest.raises(ValueError, match=message):
    _change(_make(), changes).validate()


def test_a_task_and_a_time_model_of_ones_own():
  config = _make()
  config.task.name, config.task.batch = f'{OWN}:make_task', 4
  config.task.arguments = (('dimension', 7),)
  config.time.name, config.time.arguments = f'{OWN}:take_two_seconds', ()
  config.validate()
  params, _ = jax.eval_shape(config.make_task().init, jax.random.key(0))
  assert params.shape == (7,)
  assert config.make_task() is config.make_task()
  assert config.simulate().duration == 16.0  # 60 updates of 8 learners.
  config.task.name, config.task.arguments = f'{OWN}:make_nothing', ()
  with pytest.raises(ValueError, match='but it returned 4'):
    config.make_task()


# --- Times, messages, failures.


@pytest.mark.parametrize('name', TIMES)
def test_times_by_name(name):
  time = experiment.TimeConfig(name=name, arguments=TIMES[name]).make()
  arguments = (TIMES[name],) if name == 'recorded' else TIMES[name]
  expected = getattr(simulation, name)(*arguments)
  np.testing.assert_array_equal(
    time.table(0, 0, 5, 3), expected.table(0, 0, 5, 3)
  )


def test_times_are_modified():
  config = experiment.TimeConfig(
    name='constant',
    arguments=(1.0,),
    slow_fraction=0.5,
    slow_factor=3.0,
    spell_period=2,
    spell_length=1,
    spell_factor=10.0,
    speeds=(1.0, 2.0),
  )
  table = config.make().table(0, 0, 2, 2)
  # Spells are spread over the period: each worker has its own turn.
  np.testing.assert_array_equal(table, [[10.0, 1.5], [1.0, 15.0]])


def test_failures_given_and_drawn():
  config = experiment.FailureConfig(
    given=((1.0, 0), (2.0, 1, 3.0)), mean_time_between=50.0
  )
  failures = config.make(4, seed=3)
  drawn = simulation.draw_failures(4, 1000.0, 50.0, 1.0, seed=3)
  assert failures == [
    simulation.Failure(1.0, 0),
    simulation.Failure(2.0, 1, 3.0),
    *drawn,
  ]
  assert len(drawn) > 40


def test_messages_have_the_size_of_the_model():
  config = cases.make_config()
  assert config.simulate().header['bytes_per_push'] == 4 * 20
  config.network.num_parameters = 1000
  assert config.simulate().header['bytes_per_push'] == 4000


# --- Length and rate.


def test_steps_and_epochs():
  config = cases.make_config('pull', num_epochs=1.0, num_updates=0)
  assert config.count_steps() == 32  # 1000 samples, 4 nodes, batch 8: 31.25.
  config.runtime.eval_every = 0
  assert config.choose_eval_every() == 125
  config.num_updates = 42
  assert config.count_steps() == 11


@pytest.mark.parametrize(
  ('name', 'period', 'rate'),
  [
    ('allreduce', 1, 0.4),
    ('allreduce', 2, 0.1),
    ('pull', 1, 0.1),
    ('hardsync', 1, 0.8),
    ('softsync', 1, 0.8),
  ],
)
def test_the_rate_scales_with_the_samples_of_an_update(name, period, rate):
  config = _make(name, period=period)
  config.schedule.scaling, config.schedule.base_batch = 'linear', 8
  assert config.make_schedule()(0.0) == pytest.approx(rate)


# --- Validation.


def test_validation_loads_nothing(monkeypatch):
  def fail(*arguments, **options):
    raise AssertionError((arguments, options))

  made = []
  make = experiment.StrategyConfig.make
  monkeypatch.setattr(tasks, 'make_task', fail)
  monkeypatch.setattr(
    experiment.StrategyConfig,
    'make',
    lambda *arguments: made.append(make(*arguments)) or made[-1],
  )
  # The first request for its devices starts the backend of jax.
  for name in ('devices', 'local_devices', 'device_count', 'default_backend'):
    monkeypatch.setattr(jax, name, fail)
  monkeypatch.setattr(jax, 'local_device_count', fail)
  for config in (
    cases.make_config('asynchronous'),
    cases.make_config('pull'),
    cases.make_device_config('pull'),
  ):
    config.task.name, config.task.data_dir = 'mnist', '/nowhere'
    config.validate()
  assert len(made) == 3  # Once for each config.


def test_all_problems_are_named_at_once():
  config = cases.make_config(num_epochs=0.0, seed=-1)
  config.task.name = 'imagenet'
  config.task.batch = 0
  config.optimizer.rate = -1.0
  config.schedule.name = 'linear'
  config.strategy.name = 'hardsink'
  config.time.arguments = (1.0, 2.0, 3.0)
  config.network.latency = -1.0
  config.failures.given = ((1.0,),)
  config.runtime.mode = 'cloud'
  config.runtime.checkpoint_seconds = -1.0
  with pytest.raises(ValueError, match='Bad config') as caught:
    config.validate()
  for problem in (
    "Unknown task 'imagenet'. Known: cifar10",
    'task.batch must be at least 1, got 0',
    'optimizer.rate must be finite and above 0, got -1.0',
    "Unknown schedule 'linear'",
    "Unknown strategy 'hardsink'. Known: asynchronous, backup",
    "time 'normal' does not take arguments (1.0, 2.0, 3.0)",
    'latency must be finite and at least 0, got -1.0',
    'A failure is given as (time, worker, until)',
    "Unknown runtime.mode 'cloud'. Known: simulate",
    'num_epochs must be finite and above 0, got 0.0',
    'runtime.checkpoint_seconds must be at least 0, got -1.0',
    'seed must be from 0 to 2^31 - 1, got -1',
  ):
    assert problem in str(caught.value)


BAD = [
  ('softsync', {'strategy.n': 9}, 'n must be at most'),
  (
    'asynchronous',
    {'num_workers': 0},
    'num_workers must be from 1 to .* got 0',
  ),
  ('asynchronous', {'num_updates': -1}, 'num_updates must be at least 0'),
  ('asynchronous', {'runtime.mode': 'devices'}, 'is for peer strategies'),
  ('constant_delay', {'strategy.delay': 7}, 'needs equal times'),
  ('constant_delay', {'strategy.delay': 10**10}, 'got 10000000001'),
  ('asynchronous', {'time.speeds': (1.0, 2.0)}, 'There are 2 speeds, but 8'),
  ('asynchronous', {'failures.given': ((1.0, 0.5),)}, 'a whole number for the'),
  (
    'rennala',
    {'strategy.ramp_up': 5, 'runtime.overlap': True},
    'With overlap a learner pulls before',
  ),
  ('pull', {'strategy.ramp_up': 5}, 'is for protocols with a server'),
  ('pull', {'num_workers': 0}, 'num_workers must be from 1 to .* got 0'),
  ('pull', {'optimizer.policy': 'inverse'}, 'policy must be constant'),
  ('pull', {'optimizer.correction': 'gap_aware'}, 'correction must be none'),
  ('pull', {'optimizer.clip_gradient': 1.0}, r'use optimizer\.clip_update'),
  ('pull', {'runtime.overlap': True}, r'runtime\.overlap must be False'),
  ('pull', {'strategy.beta': 2.0}, 'must be'),
  ('elastic', {'strategy.order': 'b'}, "Unknown order 'b'"),
  ('pull', {'strategy.peers': 'circle'}, "Unknown peers 'circle'. Known: comp"),
  (
    'pull',
    {'strategy.peers': 'hypercube', 'num_workers': 12},
    'the nearest are 8 and 16',
  ),
  ('pairs', {'strategy.peers': 'ring'}, 'one peer per node and round'),
  ('pull', {'failures.given': ((1.0, 9.0),)}, '9'),
  ('pairs', {'runtime.mode': 'local'}, 'in the simulator and on devices only'),
  (
    'allreduce',
    {'runtime.mode': 'local', 'runtime.wire_dtype': 'bfloat16'},
    "must be float32, got 'bfloat16'",
  ),
  (
    'pull',
    {'runtime.runner': 'tmap'},
    "runtime.runner 'tmap'. Known: auto, pmap, shard_map, vmap",
  ),
  *(
    (
      name,
      {'runtime.mode': mode, 'failures.mean_time_between': 9.0},
      'failures are only for virtual time',
    )
    for name, mode in (('asynchronous', 'local'), ('pull', 'devices'))
  ),
]


@pytest.mark.parametrize(('name', 'changes', 'message'), BAD)
def test_a_bad_config_is_refused(name, changes, message):
  config = _change(cases.make_config(name), changes)
  with pytest.raises(ValueError, match=message):
    config.validate()


@pytest.mark.parametrize(
  ('name', 'changes', 'message'),
  [
    ('pairs', {'strategy.peers': 'independent'}, "Pairs need peers='matching'"),
    ('elastic', {'runtime.wire_dtype': 'bfloat16'}, 'got dtype=bfloat16'),
    ('pull', {'runtime.runner': 'pmap'}, '4 nodes need a device each'),
    ('pull', {'runtime.runner': 'shard_map'}, '4 nodes need a device each'),
  ],
)
def test_devices_refuse_before_there_is_a_folder(
  name, changes, message, tmp_path
):
  config = _change(cases.make_device_config(name), changes)
  with pytest.raises(ValueError, match=message):
    experiment.train_and_evaluate(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_devices_may_round_an_all_reduce_and_are_described():
  config = cases.make_device_config('allreduce')
  config.runtime.wire_dtype = 'bfloat16'
  config.validate()
  assert 'nodes step together: on one device (vmap), of 1' in config.describe()
  config.runtime.runner = 'pmap'
  assert 'on a device each (pmap)' in config.describe()


@pytest.mark.parametrize(
  ('name', 'changes', 'message'),
  [
    ('asynchronous', {'task.batch': 5000}, 'batch'),
    ('pull', {'task.shards': 'shards', 'task.batch': 400}, 'batch'),
    ('asynchronous', {'task.name': 'mnist'}, 'cannot be read from .*data'),
    (
      'constant_delay',
      {
        'strategy.delay': 10**6,
        'task.name': 'digits',
        'task.model': 'lenet',
      },
      r'1000002 versions of the weights, of [\d,]+ bytes each, are '
      r'[\d,]+ bytes, and [\d,]+ are free',
    ),
  ],
)
def test_data_that_does_not_fit_is_named_when_the_run_begins(
  name, changes, message, tmp_path
):
  config = _change(_make(name), changes)
  config.task.data_dir = str(tmp_path / 'data')
  config.validate()
  with pytest.raises((ValueError, tasks.MissingDataError), match=message):
    experiment.train_and_evaluate(config, tmp_path / 'run')
  if name != 'constant_delay':
    assert not (tmp_path / 'run').exists()


def _make_version_1(name):
  """The settings that a run left before its config had one strategy."""
  settings = dataclasses.asdict(cases.make_config(name))
  number = settings.pop('num_workers')
  if name in cases.PEERS:
    settings['strategy']['num_nodes'] = number
  else:
    settings.pop('strategy')
    settings['protocol'] = {'name': name, 'num_learners': number, 'n': 1}
  return settings


@pytest.mark.parametrize(
  ('name', 'clause', 'unknown'),
  [
    ('softsync', 'has protocol and lacks num_workers, strategy', 'protocol'),
    ('pull', 'lacks num_workers', 'strategy.num_nodes'),
  ],
)
def test_a_workdir_of_version_1_is_refused(name, clause, unknown, tmp_path):
  workdir.write_json(tmp_path / 'config.json', _make_version_1(name))
  before = (tmp_path / 'config.json').read_bytes()
  with pytest.raises(ValueError, match='of another version') as caught:
    experiment.train_and_evaluate(cases.make_config(name), tmp_path)
  assert str(caught.value) == (
    f"The workdir '{tmp_path}' holds a run of another kind, or of another "
    f'version of jasgd: its config {clause}. Give another workdir, or use the '
    'program that wrote it.'
  )
  assert [path.name for path in tmp_path.iterdir()] == ['config.json']
  assert (tmp_path / 'config.json').read_bytes() == before
  with pytest.raises(ValueError, match='not the config') as caught:
    experiment.verify(tmp_path)
  assert str(caught.value) == (
    'This is not the config of a training run of this version of jasgd: it has '
    f'{unknown}. Run the training again, or use the jasgd that wrote it.'
  )


@pytest.mark.parametrize('name', ['softsync', 'elastic'])
def test_a_config_comes_back_from_json(name, tmp_path):
  config = cases.make_config(name)
  config.failures.given = ((1.0, 2.0),)
  folder = workdir.open_workdir(tmp_path, dataclasses.asdict(config))
  settings = workdir.read_json(folder.config)
  assert experiment.read_config(settings) == config
  json.dumps(settings)
  for wrong in ({'speed': 3}, {'task': 3}, {'task': {'speed': 3}}):
    with pytest.raises(ValueError, match='not the config of a training run'):
      experiment.read_config(wrong)
