"""Configs of simulations: every name makes something, and errors name all."""

import dataclasses
import json

import numpy as np
import pytest

from jasgd import experiment
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import traces

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
TIMES = {
  'constant': (2.0,),
  'exponential': (1.0,),
  'gamma': (1.0, 10.0),
  'lognormal': (1.0, 0.5),
  'normal': (1.0, 0.2),
  'pareto': (1.0, 2.5),
  'recorded': (1.0, 2.0, 0.5),
}


def test_every_protocol_has_a_name():
  public = set(protocols.__all__) - {
    *('Decision', 'Fate', 'Protocol'),
    *('check_count', 'check_number', 'from_config', 'ramp_up'),
  }
  assert set(PROTOCOLS) == public


@pytest.mark.parametrize('name', PROTOCOLS)
def test_protocols_by_name(name):
  arguments = PROTOCOLS[name]
  config = experiment.SimulationConfig(
    protocol=experiment.ProtocolConfig(name=name, **arguments),
    time=experiment.TimeConfig(name='constant', arguments=(1.0,)),
    num_gradients=100,
  )
  config.validate()
  expected = simulation.simulate(
    getattr(protocols, name)(*arguments.values()),
    num_learners=arguments.get('delay', 15) + 1,
    num_gradients=100,
    network=simulation.make_network(1),
  )
  trace = config.simulate()
  assert trace.records.tobytes() == expected.records.tobytes()
  assert trace.header['config'] == json.loads(
    json.dumps(dataclasses.asdict(config)).replace('Infinity', '"inf"')
  )


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
  # Spells are spread over the period: each learner has its own turn.
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


@pytest.mark.parametrize(
  'name', ['allreduce', 'elastic', 'pairs', 'pull', 'push', 'push_sum']
)
@pytest.mark.parametrize('peers', ['independent', 'random_matching'])
def test_strategies_by_name(name, peers):
  config = experiment.NodeSimulationConfig(
    strategy=experiment.StrategyConfig(name=name, peers=peers, period=2),
    num_steps=20,
  )
  config.validate()
  trace = config.simulate()
  assert isinstance(trace, traces.NodeTrace)
  assert len(trace.steps) == 16 * 20
  assert len(trace.mixes)
  assert trace.header['config']['strategy']['name'] == name


@pytest.mark.parametrize('kind', gossip.KINDS)
def test_every_topology_has_a_name(kind):
  config = experiment.StrategyConfig(peers=kind)
  assert config.make(seed=0).peers.num_nodes == 16


def test_all_problems_are_named_at_once():
  config = experiment.SimulationConfig(
    protocol=experiment.ProtocolConfig(name='hardsink'),
    time=experiment.TimeConfig(arguments=(1.0, 2.0, 3.0)),
    network=experiment.NetworkConfig(latency=-1.0),
    failures=experiment.FailureConfig(given=((1.0,),)),
    num_gradients=0,
  )
  with pytest.raises(ValueError, match='Bad config') as caught:
    config.validate()
  for problem in (
    "Unknown protocol 'hardsink'. Known: asynchronous, backup",
    "time 'normal' does not take arguments (1.0, 2.0, 3.0)",
    'latency must be finite and at least 0, got -1.0',
    'A failure is given as (time, learner, until)',
    'for the learner, got (1.0,)',
    'num_gradients must be at least 1, got 0',
  ):
    assert problem in str(caught.value)


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (
      experiment.SimulationConfig(
        protocol=experiment.ProtocolConfig(name='constant_delay', delay=15)
      ),
      'equal, constant times',
    ),
    (
      experiment.SimulationConfig(
        protocol=experiment.ProtocolConfig(name='softsync', n=17)
      ),
      'n must be at most num_learners=16, got 17',
    ),
    (
      experiment.SimulationConfig(
        time=experiment.TimeConfig(speeds=(1.0, 2.0))
      ),
      'There are 2 speeds, but 16 learners',
    ),
    (
      experiment.SimulationConfig(
        failures=experiment.FailureConfig(given=((1.0, 0.5),))
      ),
      r'a whole number for the learner, got \(1.0, 0.5\)',
    ),
    (
      experiment.SimulationConfig(
        protocol=experiment.ProtocolConfig(name='rennala', ramp_up=5),
        overlap=True,
      ),
      'With overlap a learner pulls before',
    ),
    (
      experiment.NodeSimulationConfig(
        strategy=experiment.StrategyConfig(name='gossip')
      ),
      "Unknown strategy 'gossip'. Known: allreduce",
    ),
    (
      experiment.NodeSimulationConfig(
        strategy=experiment.StrategyConfig(peers='circle')
      ),
      "Unknown peers 'circle'. Known: complete",
    ),
    (
      experiment.NodeSimulationConfig(
        strategy=experiment.StrategyConfig(peers='hypercube', num_nodes=12)
      ),
      'the nearest are 8 and 16',
    ),
    (
      experiment.NodeSimulationConfig(
        strategy=experiment.StrategyConfig(name='pairs', peers='ring')
      ),
      'one peer per node and round',
    ),
    (
      experiment.NodeSimulationConfig(num_steps=0),
      'num_steps must be a whole number of at least 1, got 0',
    ),
  ],
)
def test_what_cannot_be_is_refused_before_any_work(config, message):
  with pytest.raises(ValueError, match=message):
    config.validate()


def test_traffic_is_told_if_a_size_was_given():
  for size, is_told in ((1, False), (1000, True)):
    config = experiment.SimulationConfig(
      network=experiment.NetworkConfig(num_parameters=size), num_gradients=100
    )
    text = str(traces.summarize(config.simulate()))
    assert ('server     received 0.4 MB' in text) == is_told
    assert ('received' in text) == is_told
