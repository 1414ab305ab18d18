"""Rounds as permutations, rounds of random peers, and packing of arrays."""

import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import _edges
from jasgd.gossip import _packing
from jasgd.gossip import _random_rounds
from tests.gossip import cases
from tests.gossip import mix_cases
from tests.gossip import mix_vmap

pytestmark = pytest.mark.usefixtures('quick_compiler')


@cases.every_case
def test_rounds_are_split_into_permutations(case):
  for num_nodes in case.sizes:
    topology = case.make(num_nodes)
    for rule in (*mix_cases.RULES, gossip.Pairs):
      _check_split(rule, topology, num_nodes)


def _check_split(rule, topology, num_nodes):
  rounds = _edges.list_rounds(rule(peers=topology), topology)
  own, sources, weights = _edges.split_rounds(rounds)
  most = 0
  for index, each in enumerate(rounds):
    expected = mix_cases.make_matrix(
      rule(peers=topology), index, None, num_nodes
    )
    matrix = np.diag(own[index])
    for row, weight in zip(sources[index], weights[index], strict=True):
      np.testing.assert_array_equal(np.sort(row), np.arange(num_nodes))
      np.add.at(matrix, (np.arange(num_nodes), row), weight)
    np.testing.assert_allclose(matrix, expected, atol=1e-12)
    is_edge = (expected > 0) & ~np.eye(num_nodes, dtype=bool)
    most = max(most, *is_edge.sum(axis=0), *is_edge.sum(axis=1))
    assert each.is_mean == np.allclose(expected, 1 / num_nodes, atol=1e-15)
  assert sources.shape[1] == most  # As few as can be.


def test_colours_of_random_graphs():
  """Where edges are in each other's way."""
  generator = np.random.default_rng(0)
  for num_nodes in (3, 6, 11, 20):
    for density in (0.2, 0.5, 0.9):
      is_edge = generator.random((num_nodes, num_nodes)) < density
      np.fill_diagonal(is_edge, False)
      targets, picked = np.nonzero(is_edge)
      order = generator.permutation(len(targets))
      given = generator.random(len(targets)) + 0.1
      each = _edges.Round(
        np.ones(num_nodes), targets[order], picked[order], given
      )
      _, sources, weights = _edges.split_rounds([each])
      matrix = np.zeros((num_nodes, num_nodes))
      for row, weight in zip(sources[0], weights[0], strict=True):
        np.testing.assert_array_equal(np.sort(row), np.arange(num_nodes))
        np.add.at(matrix, (np.arange(num_nodes), row), weight)
      expected = np.zeros((num_nodes, num_nodes))
      expected[targets[order], picked[order]] = given
      np.testing.assert_allclose(matrix, expected)
      degrees = is_edge.sum(axis=0), is_edge.sum(axis=1)
      assert sources.shape[1] == np.max(degrees)


@pytest.mark.parametrize('peers', ['permutation', 'matching'])
@pytest.mark.parametrize('weight', [0.5, 0.3])
@pytest.mark.parametrize('num_nodes', [1, 2, 3, 8, 13, 64])
def test_few_rounds_have_the_rate_of_all(peers, weight, num_nodes):
  rounds = _random_rounds.make_random_rounds(peers, num_nodes, weight)
  assert rounds.num_rounds <= num_nodes
  assert gossip.is_doubly_stochastic(rounds)
  assert gossip.is_symmetric(rounds) >= (peers == 'matching')
  rate = gossip.consensus_rate(peers, num_nodes, weight)
  assert gossip.topology_consensus_rate(rounds) == pytest.approx(
    rate, abs=1e-12
  )
  # Everybody meets everybody equally often, and for pairs, nobody itself.
  total = sum(rounds.matrix(index) for index in range(rounds.num_rounds))
  others = total[~np.eye(num_nodes, dtype=bool)]
  np.testing.assert_allclose(others, weight, atol=1e-12)
  idle = [np.diag(rounds.matrix(r)) == 1 for r in range(rounds.num_rounds)]
  if peers == 'matching' and num_nodes > 1:
    np.testing.assert_array_equal(np.sum(idle, axis=1), num_nodes % 2)
  if peers == 'permutation' and num_nodes > 3:
    assert not np.all(idle, axis=1).any()  # No round is for nothing.


@pytest.mark.parametrize('peers', ['permutation', 'matching'])
def test_many_nodes_have_a_rate_near_that(peers):
  rounds = _random_rounds.make_random_rounds(peers, 100)
  assert rounds.num_rounds == _random_rounds.MAX_ROUNDS
  rate = gossip.topology_consensus_rate(rounds)
  # The mean of d random permutations has about 2 / sqrt(d) where J has 0.
  assert 0.45 < rate < 0.5 + 1 / rounds.num_rounds**0.5
  mixed = mix_vmap.mix_all(jnp.eye(100), gossip.Pull(peers=peers))
  matrices = [rounds.matrix(index) for index in range(rounds.num_rounds)]
  assert any(np.allclose(mixed, matrix) for matrix in matrices)


def test_packing():
  small, large = _packing._SMALL - 1, _packing._SMALL
  arrays = [
    jnp.arange(6.0).reshape(2, 3),
    jnp.arange(large * 1.0),
    jnp.ones((), jnp.float32) * 7,
    jnp.arange(4, dtype=jnp.bfloat16),
    jnp.arange(small * 1.0).reshape(1, -1),
    jnp.zeros((0, 5)),
  ]
  packed, unpack = _packing.pack(arrays)
  assert [each.shape for each in packed] == [(small + 7,), (large,), (4,)]
  again = unpack([each + 1 for each in packed])
  for array, other in zip(arrays, again, strict=True):
    assert array.dtype == other.dtype
    np.testing.assert_array_equal(array + 1, other)
  packed, unpack = _packing.pack([])
  assert packed == unpack(packed) == []
