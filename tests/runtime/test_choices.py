"""Whom a node mixes with: live peers, drawn alike by all."""

import collections
import math

import pytest

from jasgd import gossip
from jasgd.runtime import _choices
from tests.runtime import mixing_cases


def choose(strategy, node, alive, round_index):
  """The node's peer, which is itself if it has none."""
  others = [each for each in alive if each != node]
  chosen = _choices.choose_peers(
    strategy, node, others, round_index, mixing_cases.SEED, 0.25
  )
  if not chosen:
    return node
  ((peer, weight),) = chosen
  assert weight == 0.25
  assert peer != node
  assert peer in others
  return peer


@pytest.mark.parametrize('peers', ['permutation', 'matching'])
@pytest.mark.parametrize(
  'alive', [[0, 1, 2, 3, 4], [0, 2, 5, 9], [3, 4], [6], [1, 7, 8]]
)
def test_live_nodes_agree_on_who_is_whose(peers, alive):
  """Each draws alone, and yet each live node is drawn exactly once."""
  strategy = gossip.Pull(peers=peers)
  rounds = set()
  for round_index in range(40):
    drawn = {node: choose(strategy, node, alive, round_index) for node in alive}
    assert sorted(drawn.values()) == alive
    if peers == 'matching':
      assert all(drawn[peer] == node for node, peer in drawn.items())
    rounds.add(tuple(drawn.values()))
  if len(alive) > 2:
    assert len(rounds) > 2  # Not always the same.


def test_independent_peers_are_uniform():
  """All live ones are as likely as the node itself, which is then idle."""
  alive, num_rounds = [0, 2, 3, 7], 4_000
  strategy = gossip.Pull()
  for node in (0, 3):
    counts = collections.Counter(
      choose(strategy, node, alive, round_index)
      for round_index in range(num_rounds)
    )
    assert sorted(counts) == alive
    mean, share = num_rounds / 4, 1 / 4
    deviation = math.sqrt(num_rounds * share * (1 - share))
    for count in counts.values():
      assert abs(count - mean) < 4 * deviation


def test_independent_nodes_draw_on_their_own():
  strategy, alive = gossip.Pull(), list(range(4))
  pairs = collections.Counter(
    tuple(choose(strategy, node, alive, index) for node in (0, 1))
    for index in range(2_000)
  )
  assert len(pairs) == 16
  deviation = math.sqrt(2_000 / 16 * 15 / 16)
  assert all(abs(count - 125) < 4.5 * deviation for count in pairs.values())


TOPOLOGIES = {
  'ring': gossip.ring(5),
  'star': gossip.star(6),
  'hypercube': gossip.hypercube(8),
  'one_peer_exponential': gossip.one_peer_exponential(6),
  'random_matching': gossip.random_matching(5, 3, seed=1),
  'random_independent': gossip.random_independent(5, 4, seed=2),
  'nobody': gossip.ring(1),
}


@pytest.mark.parametrize('name', TOPOLOGIES)
def test_a_topology_says_who_and_at_what_weight(name):
  topology = TOPOLOGIES[name]
  num_nodes, strategy = topology.num_nodes, gossip.Pull(peers=topology)
  for round_index in range(2 * topology.num_rounds + 1):
    matrix = topology.matrix(round_index)
    for node in range(num_nodes):
      others = [each for each in range(num_nodes) if each != node]
      for alive in (others, others[::2], [*others, 99], []):
        chosen = _choices.choose_peers(
          strategy, node, alive, round_index, mixing_cases.SEED
        )
        assert dict(chosen) == {
          peer: matrix[node, peer]
          for peer in alive
          if peer < num_nodes and matrix[node, peer]
        }
        assert len(dict(chosen)) == len(chosen)
