"""Strategies without a server: parameters, configs, refused arguments."""

import dataclasses
import inspect
import json

import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd.gossip import topologies

# Every strategy; a new one is tested by being listed.
STRATEGIES = {
  gossip.AllReduce: {},
  gossip.Elastic: {'rate': 0.3},
  gossip.Pairs: {'peers': 'matching'},
  gossip.Pull: {'peers': 'permutation'},
  gossip.Push: {'peers': topologies.ring(4)},
  gossip.PushSum: {'peers': 'one_peer_exponential'},
}
every_strategy = pytest.mark.parametrize('strategy', STRATEGIES)


class HalvingNode(gossip.GossipNode):
  """A strategy of a user: asks a peer, and counts its exchanges."""

  count = 0

  def exchange(self, step):
    return [gossip.Ask(peer) for peer, _ in self.choose_peers(step)]

  def on_replies(self, replies):
    self.count += 1
    weight = self.strategy.weight / self.count
    return [gossip.Mix(1 - weight, ((replies[0], weight),))]

  def save_state(self):
    return {'count': self.count}

  def restore_state(self, state):
    self.count = state['count']


@dataclasses.dataclass(frozen=True)
class Halving(gossip.Gossip):
  """The parameters of that strategy."""

  weight: float = 0.25
  node_class = HalvingNode


def test_every_strategy_is_listed():
  classes = {
    value
    for name in gossip.__all__
    if inspect.isclass(value := getattr(gossip, name))
    and issubclass(value, gossip.PeerStrategy)
  }
  assert classes - {gossip.PeerStrategy, gossip.Gossip} == set(STRATEGIES)
  assert set(gossip.STRATEGIES.values()) == set(STRATEGIES)
  assert all(kind.name == name for name, kind in gossip.STRATEGIES.items())


@every_strategy
def test_parameters(strategy):
  arguments = STRATEGIES[strategy]
  words = strategy(period=np.int64(7), **arguments).describe()
  assert 'wait' in words
  assert 'every 7 steps' in words
  peers = arguments.get('peers')
  if peers is not None:
    assert getattr(peers, 'kind', peers) in words
  assert strategy(4).period == 4  # The period comes first.
  for name, value in arguments.items():
    assert getattr(strategy(4, value), name) == value
  for period in (0, -1, 1.5, True, '2'):
    message = f'period must be a whole number of at least 1, got {period!r}'
    with pytest.raises(ValueError, match=message):
      strategy(period=period)


@every_strategy
def test_the_number_of_nodes_must_fit_the_topology(strategy):
  made = strategy(**STRATEGIES[strategy])
  made.check(4)
  if isinstance(STRATEGIES[strategy].get('peers'), topologies.Topology):
    with pytest.raises(ValueError, match='has 4 nodes, but there are 5'):
      made.check(5)
  else:
    made.check(5)


def test_a_topology_by_name_is_built_for_the_number_of_nodes():
  strategy = gossip.Pull(peers='ring')
  for num_nodes in (4, 5):
    node = strategy.make_node(0, num_nodes)
    peers = [ask.peer for ask in node.on_step(1)]
    assert peers == [1, num_nodes - 1]
  with pytest.raises(ValueError, match='hypercube needs a power of 2'):
    gossip.Pull(peers='hypercube').check(5)


# --- Configs.


@pytest.mark.parametrize(
  'strategy',
  [
    *(kind(np.int64(2), **given) for kind, given in STRATEGIES.items()),
    Halving(peers='matching', weight=np.float32(0.5)),
    protocols.softsync(2),
    protocols.ramp_up(protocols.hardsync(), 3),
  ],
  ids=lambda each: each.name,
)
def test_configs_go_through_json(strategy):
  config = json.loads(json.dumps(strategy.to_config()))
  assert config.keys() == {'name', 'arguments'}
  again = gossip.make_strategy(config)
  assert type(again) is type(strategy)
  assert again.to_config() == strategy.to_config()
  assert again.describe() == strategy.describe()


def test_a_config_names_the_class_of_a_user():
  assert Halving().to_config() == {
    'name': 'tests.gossip.test_strategies:Halving',
    'arguments': {'period': 1, 'peers': 'independent', 'weight': 0.25},
  }
  assert gossip.make_strategy({'name': 'pull'}) == gossip.Pull()


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    ('pull', "The config of a strategy is a dict .* got 'pull'"),
    (
      {'name': 'gossip'},
      "Unknown strategy 'gossip'. Known: asynchronous, .* push_sum;",
    ),
    ({'name': 'ring'}, "Unknown strategy 'ring'"),  # Only as an argument.
    (
      {'name': 'pull', 'arguments': {'rate': 1}},
      r"'pull' takes the arguments \(period, peers, beta\), got {'rate': 1}",
    ),
    (
      {'name': 'pull', 'arguments': {'peers': {'name': 'rign'}}},
      "Unknown strategy 'rign'",
    ),
    ({'name': 'json:dumps'}, 'must be the name of a subclass of jasgd'),
    ({'name': 'no_module:Own'}, "The strategy 'no_module:Own' cannot"),
  ],
)
def test_configs_that_are_refused(config, message):
  with pytest.raises(ValueError, match=message):
    gossip.make_strategy(config)


# --- Strategies of users.


def test_a_strategy_of_a_user():
  strategy = Halving(period=2, peers='ring')
  node = strategy.make_node(1, 4)
  assert strategy.name == 'halving'
  assert 'halving(2)' in strategy.describe()
  assert node.on_step(1) == ()
  assert node.on_step(2) == [gossip.Ask(0), gossip.Ask(2)]
  replies = [gossip.Reply(0, gossip.Outcome.TAKEN)]
  assert node.on_replies(replies) == [gossip.Mix(0.75, ((replies[0], 0.25),))]
  again = strategy.make_node(1, 4).restore(json.loads(json.dumps(node.save())))
  assert again.save() == {'step': 2, 'mass': 0.0, 'count': 1}


def test_a_node_must_say_what_it_exchanges():
  @dataclasses.dataclass(frozen=True)
  class Silent(gossip.PeerStrategy):
    node_class = gossip.PeerNode

  with pytest.raises(
    NotImplementedError, match=r'must define exchange\(step\)'
  ):
    Silent().make_node(0, 2).on_step(1)


# --- Refused arguments.


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: gossip.Elastic(rate=-0.1), 'rate must be from 0 to 1'),
    (lambda: gossip.Elastic(order='b'), 'Unknown order'),
    (lambda: gossip.Pull(beta=2), 'beta must be from 0 to 1'),
    (
      lambda: gossip.Pull(beta=0.3, peers=topologies.ring(4)),
      'leave beta at 0.5',
    ),
    (lambda: gossip.Elastic(rate=1.1), 'from 0 to 1, got 1.1'),
    (lambda: gossip.Elastic(rate=float('nan')), 'from 0 to 1, got nan'),
    (lambda: gossip.Elastic(rate='x'), "rate must be a number, got 'x'"),
    (lambda: gossip.Elastic(rate=None), 'rate must be a number, got None'),
    (lambda: gossip.Pull(peers='friends'), "Unknown peers 'friends'. Known"),
    (lambda: gossip.Pull(peers=None), 'Unknown peers None. Known'),
    (lambda: gossip.Push(peers=3), 'Unknown peers 3. Known'),
    (
      lambda: gossip.Pairs(peers=topologies.ring(5)).check(5),
      'one peer per node and round, got ring with 2',
    ),
  ],
)
def test_refused_arguments(build, message):
  with pytest.raises(ValueError, match=message):
    build()


@pytest.mark.parametrize('number', [np.int32(4), np.uint8(4), np.int64(4)])
def test_counts_may_be_of_numpy(number):
  assert topologies.ring(number).num_nodes == 4
  assert gossip.draw_peers('matching', number, number).shape == (4, 4)
