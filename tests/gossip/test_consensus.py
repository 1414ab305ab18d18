"""Consensus rates against all outcomes, and against many random ones."""

import itertools
import math

import numpy as np
import pytest

from jasgd import gossip


def _list_outcomes(peers, n):
  """Every outcome of a draw, all equally likely: [outcomes, n]."""
  if peers == 'independent':
    return list(itertools.product(range(n), repeat=n))
  permutations = list(itertools.permutations(range(n)))
  if peers == 'permutation':
    return permutations
  # Each matching comes as often as any other from pairing up a permutation.
  matchings = set()
  for order in permutations:
    matching = list(range(n))
    for i, j in zip(order[0::2], order[1::2], strict=False):
      matching[i], matching[j] = j, i
    matchings.add(tuple(matching))
  return sorted(matchings)


def _mean_square(matrices):
  """E[W'(I - J)W], by definition."""
  n = len(matrices[0])
  centred = np.eye(n) - 1 / n
  return sum(w.T @ centred @ w for w in matrices) / len(matrices)


@pytest.mark.parametrize('peers', gossip.PEERS)
@pytest.mark.parametrize(
  ('n', 'weight'), [(2, 0.5), (3, 0.5), (4, 0.5), (5, 0.5), (3, 0.2), (4, 1)]
)
def test_exact_over_all_outcomes(peers, n, weight):
  outcomes = np.array(_list_outcomes(peers, n))[:, :, None]
  topology = gossip.from_peers(outcomes)
  topology = gossip.with_constant_weights(topology, weight)
  rate = gossip.consensus_rate(peers, n, weight)
  measured = gossip.topology_consensus_rate(topology)
  assert measured == pytest.approx(rate, abs=1e-12)
  # And not only the largest eigenvalue: all are the same, so it is an equality.
  matrices = [topology.matrix(index) for index in range(topology.num_rounds)]
  np.testing.assert_allclose(
    _mean_square(matrices), rate * (np.eye(n) - 1 / n), atol=1e-12
  )


def test_matchings_of_six():
  outcomes = np.array(_list_outcomes('matching', 6))
  assert len(outcomes) == 15
  topology = gossip.from_peers(outcomes[:, :, None])
  measured = gossip.topology_consensus_rate(topology)
  assert measured == pytest.approx(0.5 * (1 - 1 / 5), abs=1e-12)


@pytest.mark.parametrize('n', [2, 3, 10, 101, 100_000])
def test_formulas_at_one_half(n):
  assert gossip.consensus_rate('independent', n) == pytest.approx(
    1 / 2 - 1 / (4 * n), abs=1e-15
  )
  assert gossip.consensus_rate('permutation', n) == 0.5
  matching = 0.5 if n % 2 else 0.5 * (1 - 1 / (n - 1))
  assert gossip.consensus_rate('matching', n) == pytest.approx(matching)


@pytest.mark.parametrize('peers', gossip.PEERS)
@pytest.mark.parametrize('n', [16, 33])
def test_monte_carlo(peers, n):
  num_rounds = 20_000
  drawn = gossip.draw_peers(peers, n, num_rounds, seed=11)
  values = np.random.default_rng(3).normal(size=n)
  mixed = (values + values[drawn]) / 2
  factors = mixed.var(axis=1) / values.var()
  rate = gossip.consensus_rate(peers, n)
  error = factors.std() / math.sqrt(num_rounds)
  assert abs(factors.mean() - rate) < 4 * error
  assert error < 0.002


def _push_matrix(targets):
  """A3's push: the mean of the own value and of all that were received."""
  n = len(targets)
  matrix = np.eye(n)
  np.add.at(matrix, (targets, np.arange(n)), 1)
  return matrix / matrix.sum(axis=1, keepdims=True)


@pytest.mark.parametrize('n', [2, 3, 4, 5])
def test_push_is_exact_over_all_outcomes(n):
  outcomes = np.array(_list_outcomes('independent', n))
  mean = _mean_square([_push_matrix(targets) for targets in outcomes])
  rate = gossip.push_consensus_rate(n)
  np.testing.assert_allclose(mean, rate * (np.eye(n) - 1 / n), atol=1e-12)


def test_push_as_the_paper_codes_it():
  """Own weight 2 if the draw was the node itself, which then sends nothing."""
  targets = np.array([0, 0, 1, 1])
  received = {0: [1], 1: [2, 3], 2: [], 3: []}
  values = np.array([1.0, 2.0, 4.0, 8.0])
  expected = []
  for node, senders in received.items():
    own = 2 if targets[node] == node else 1
    total = own * values[node] + sum(values[j] for j in senders)
    expected.append(total / (own + len(senders)))
  np.testing.assert_allclose(_push_matrix(targets) @ values, expected)


def test_push_monte_carlo_and_limit():
  n, num_rounds = 33, 2_000
  values = np.random.default_rng(4).normal(size=n)
  drawn = gossip.draw_peers('independent', n, num_rounds, seed=12)
  factors = np.array(
    [np.var(_push_matrix(row) @ values) for row in drawn]
  ) / np.var(values)
  error = factors.std() / math.sqrt(num_rounds)
  assert abs(factors.mean() - gossip.push_consensus_rate(n)) < 4 * error
  limit = 1 - math.exp(-1)
  assert gossip.push_consensus_rate(10**6) == pytest.approx(limit, abs=1e-5)


def test_other_conventions_have_other_rates():
  """Why the rates say how peers are drawn."""
  n = 4
  others = [[j for j in range(n) if j != i] for i in range(n)]
  without_self = np.array(list(itertools.product(*others)))
  derangements = np.array(
    [p for p in itertools.permutations(range(n)) if all(np.arange(n) != p)]
  )
  for outcomes, expected in (
    (without_self, 1 / 2 - 1 / (2 * 3) - (1 - 1 / 3**2) / (4 * n)),
    (derangements, 1 / 2 - 1 / (2 * 3)),  # As if in pairs.
  ):
    topology = gossip.from_peers(outcomes[:, :, None])
    rate = gossip.topology_consensus_rate(topology)
    assert rate == pytest.approx(expected, abs=1e-12)


def test_one_node_always_agrees():
  for peers in gossip.PEERS:
    assert gossip.consensus_rate(peers, 1) == 0
  assert gossip.push_consensus_rate(1) == 0


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (('random', 4), "Unknown peers 'random'. Known: independent, matching"),
    (('matching', 0), 'num_nodes must be a whole number of at least 1, got 0'),
    (
      ('matching', 4.5),
      'num_nodes must be a whole number of at least 1, got 4.5',
    ),
    (('matching', 4, 1.5), 'weight must be from 0 to 1, got 1.5'),
    (('matching', 4, math.nan), 'weight must be from 0 to 1, got nan'),
    (('matching', 4, 'x'), "weight must be a number, got 'x'"),
  ],
)
def test_errors_say_what_was_given(arguments, message):
  with pytest.raises(ValueError, match=message):
    gossip.consensus_rate(*arguments)
