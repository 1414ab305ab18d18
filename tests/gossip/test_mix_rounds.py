"""Rounds as permutations, and sets of rounds for random peers.

Both are functions of numpy inside the room: that messages are as few as
possible, and that rates hold exactly, can be shown without compiling anything.
"""

import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import _exchange
from jasgd.gossip import topologies
from tests.gossip import cases
from tests.gossip import mix_cases


def _check_permutations(sources, weights, own, expected):
  """Sources and weights of permutations, [message, node], make a matrix."""
  num_nodes = len(expected)
  matrix = np.diag(own)
  for row, weight in zip(sources, weights, strict=True):
    np.testing.assert_array_equal(np.sort(row), np.arange(num_nodes))
    np.add.at(matrix, (np.arange(num_nodes), row), weight)
  np.testing.assert_allclose(matrix, expected, atol=1e-12)
  is_edge = (expected > 0) & ~np.eye(num_nodes, dtype=bool)
  return max(*is_edge.sum(axis=0), *is_edge.sum(axis=1))


@cases.every_case
def test_rounds_are_split_into_permutations(case):
  for num_nodes in case.sizes:
    topology = case.make(num_nodes)
    for rule in (*mix_cases.RULES, gossip.Pairs):
      strategy = rule(peers=topology)
      rounds = _exchange.list_rounds(strategy, topology)
      own, sources, weights = _exchange.split_rounds(rounds)
      most = 0
      for index, each in enumerate(rounds):
        expected = mix_cases.make_matrix(strategy, index, None, num_nodes)
        most = max(
          most,
          _check_permutations(
            sources[index], weights[index], own[index], expected
          ),
        )
        assert each.is_mean == np.allclose(expected, 1 / num_nodes, atol=1e-15)
      assert sources.shape[1] == most  # As few as possible.


@pytest.mark.parametrize('num_nodes', [6, 11])
@pytest.mark.parametrize('density', [0.2, 0.9])
def test_permutations_of_random_graphs(num_nodes, density):
  """Where colours must be swapped along paths."""
  generator = np.random.default_rng(0)
  for _ in range(5):
    is_edge = generator.random((num_nodes, num_nodes)) < density
    np.fill_diagonal(is_edge, False)
    expected = np.where(is_edge, generator.random(is_edge.shape) + 0.1, 0)
    targets, picked = np.nonzero(is_edge)
    order = generator.permutation(len(targets))
    targets, picked = targets[order], picked[order]
    own = np.zeros(num_nodes)
    each = _exchange.Round(own, targets, picked, expected[targets, picked])
    _, sources, weights = _exchange.split_rounds([each])
    most = _check_permutations(sources[0], weights[0], own, expected)
    assert sources.shape[1] == most


@pytest.mark.parametrize('peers', ['permutation', 'matching'])
@pytest.mark.parametrize(
  ('num_nodes', 'weight'), [(1, 0.5), (2, 0.5), (8, 0.3), (13, 0.5), (64, 0.5)]
)
def test_few_rounds_have_the_rate_of_all(peers, num_nodes, weight):
  rounds = _exchange.make_random_rounds(peers, num_nodes, weight)
  assert rounds.num_rounds <= num_nodes
  assert topologies.is_doubly_stochastic(rounds)
  assert topologies.is_symmetric(rounds) >= (peers == 'matching')
  matrices = [rounds.matrix(index) for index in range(rounds.num_rounds)]
  centred = np.eye(num_nodes) - 1 / num_nodes
  mean = sum(w.T @ centred @ w for w in matrices) / len(matrices)
  rate = topologies.consensus_rate(peers, num_nodes, weight)
  np.testing.assert_allclose(mean, rate * centred, atol=1e-12)
  # Every node meets every other node equally often; in pairs, never itself.
  others = sum(matrices)[~np.eye(num_nodes, dtype=bool)]
  np.testing.assert_allclose(others, weight, atol=1e-12)
  idle = [np.diag(matrix) == 1 for matrix in matrices]
  if peers == 'matching' and num_nodes > 1:
    np.testing.assert_array_equal(np.sum(idle, axis=1), num_nodes % 2)
  if peers == 'permutation' and num_nodes > 3:
    assert not np.all(idle, axis=1).any()  # No round without any mix.


@pytest.mark.parametrize('peers', ['permutation', 'matching'])
def test_many_nodes_have_a_rate_near_that(peers):
  rounds = _exchange.make_random_rounds(peers, 100)
  assert rounds.num_rounds == _exchange.MAX_ROUNDS
  centred = np.eye(100) - 1 / 100
  matrices = [rounds.matrix(index) for index in range(rounds.num_rounds)]
  mean = sum(w.T @ centred @ w for w in matrices) / len(matrices)
  # The mean of d random permutations has about 2 / sqrt(d) where J has 0.
  rate = np.linalg.eigvalsh(mean)[-1]
  assert 0.45 < rate < 0.5 + 1 / rounds.num_rounds**0.5
