"""Strategies without a server: descriptions and refused arguments."""

import inspect

import numpy as np
import pytest

from jasgd import gossip

# Every strategy; a new one is tested by being listed.
STRATEGIES = {
  gossip.AllReduce: {},
  gossip.Elastic: {'rate': 0.3},
  gossip.Pairs: {'peers': 'matching'},
  gossip.Pull: {'peers': 'permutation'},
  gossip.Push: {'peers': gossip.ring(4)},
  gossip.PushSum: {'peers': gossip.one_peer_exponential(4)},
}
every_strategy = pytest.mark.parametrize('strategy', STRATEGIES)


def test_every_strategy_is_listed():
  public = {getattr(gossip, name) for name in gossip.__all__}
  classes = {
    item
    for item in public
    if inspect.isclass(item) and issubclass(item, gossip.PeerStrategy)
  }
  assert classes - {gossip.PeerStrategy, gossip.Gossip} == set(STRATEGIES)


@every_strategy
def test_describe_says_who_waits_and_how_often(strategy):
  words = strategy(period=np.int64(7), **STRATEGIES[strategy]).describe()
  assert 'wait' in words
  assert 'every 7 steps' in words
  peers = STRATEGIES[strategy].get('peers')
  if peers is not None:
    assert getattr(peers, 'kind', peers) in words


@every_strategy
def test_periods_are_whole_numbers(strategy):
  for period in (0, -1, 1.5, True, '2'):
    message = f'period must be a whole number of at least 1, got {period!r}'
    with pytest.raises(ValueError, match=message):
      strategy(period=period)


@every_strategy
def test_the_number_of_nodes_must_fit_the_topology(strategy):
  made = strategy(**STRATEGIES[strategy])
  made.check(4)
  if isinstance(STRATEGIES[strategy].get('peers'), gossip.Topology):
    with pytest.raises(ValueError, match='has 4 nodes, but there are 5'):
      made.check(5)
  else:
    made.check(5)


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: gossip.Elastic(rate=-0.1), 'rate must be from 0 to 1'),
    (lambda: gossip.Elastic(order='b'), 'Unknown order'),
    (lambda: gossip.Pull(beta=2), 'beta must be from 0 to 1'),
    (
      lambda: gossip.Pull(beta=0.3, peers=gossip.ring(4)),
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
      lambda: gossip.Pairs(peers=gossip.ring(5)).check(5),
      'one peer per node and round, got ring with 2',
    ),
  ],
)
def test_what_cannot_be(build, message):
  with pytest.raises(ValueError, match=message):
    build()


@pytest.mark.parametrize('number', [np.int32(4), np.uint8(4), np.int64(4)])
def test_counts_may_be_of_numpy(number):
  assert gossip.ring(number).num_nodes == 4
  assert gossip.draw_peers('matching', number, number).shape == (4, 4)


@every_strategy
def test_the_period_comes_first(strategy):
  assert strategy(4).period == 4
  for name, value in STRATEGIES[strategy].items():
    assert getattr(strategy(4, value), name) == value
