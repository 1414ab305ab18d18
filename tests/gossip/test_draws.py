"""Random peers: draws, their distribution, and the rate of agreement."""

import itertools
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import topologies

every_kind = pytest.mark.parametrize('peers', gossip.PEERS)


@every_kind
@hypothesis.given(
  n=st.integers(1, 40),
  seed=st.integers(0, 2**64 - 1),
  first_round=st.integers(0, 10**12),
  num_rounds=st.integers(1, 5),
)
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
def test_rows(peers, n, seed, first_round, num_rounds):
  drawn = gossip.draw_peers(
    peers, n, num_rounds, seed=seed, first_round=first_round
  )
  assert drawn.shape == (num_rounds, n)
  assert drawn.dtype == np.int32
  assert ((drawn >= 0) & (drawn < n)).all()
  for index, row in enumerate(drawn):
    # A row does not depend on the rows that are drawn with it.
    (alone,) = gossip.draw_peers(
      peers, n, seed=seed, first_round=first_round + index
    )
    np.testing.assert_array_equal(alone, row)
    if peers != 'independent':
      assert sorted(row) == list(range(n))
    if peers == 'matching':
      np.testing.assert_array_equal(row[row], np.arange(n))
      assert (row == np.arange(n)).sum() == n % 2


def _philox(key, counter):
  """Philox4x64-10 by its definition: four words for one counter."""
  mask = 2**64 - 1
  words = [counter >> shift & mask for shift in (0, 64, 128, 192)]
  for _ in range(10):
    left = 0xD2E7470EE14C6C93 * words[0]
    right = 0xCA5A826395121157 * words[2]
    words = [
      (right >> 64) ^ words[1] ^ key[0],
      right & mask,
      (left >> 64) ^ words[3] ^ key[1],
      left & mask,
    ]
    key = (
      key[0] + 0x9E3779B97F4A7C15 & mask,
      key[1] + 0xBB67AE8584CAA73B & mask,
    )
  return words


@pytest.mark.parametrize(
  ('peers', 'stream', 'expected'),
  [
    ('independent', 0, [2, 4, 3, 2, 3]),
    ('permutation', 1, [0, 4, 3, 2, 1]),
    ('matching', 2, [3, 1, 4, 0, 2]),
  ],
)
def test_same_on_every_machine(peers, stream, expected):
  """A change of these numbers changes all runs."""
  # Five nodes need two blocks, and numpy counts up before it computes one.
  counter = (5 << 128) + 7 * 2 + 1
  blocks = [_philox((2024, stream), counter + block) for block in range(2)]
  words = [word for block in blocks for word in block][:5]
  row = [word * 5 >> 64 for word in words]
  if peers != 'independent':
    row = sorted(range(5), key=words.__getitem__)
  if peers == 'matching':
    pairs = {row[0]: row[1], row[2]: row[3]}
    pairs |= {right: left for left, right in pairs.items()}
    row = [pairs.get(node, node) for node in range(5)]
  drawn = gossip.draw_peers(peers, 5, seed=2024, first_round=7)
  assert drawn.tolist() == [row] == [expected]


@every_kind
@pytest.mark.parametrize('n', [4, 5])
def test_every_peer_is_equally_likely(peers, n):
  num_rounds = 20_000
  drawn = gossip.draw_peers(peers, n, num_rounds, seed=1)
  counts = (drawn[:, :, None] == np.arange(n)).sum(axis=0)
  expected = np.full((n, n), 1 / n)
  if peers == 'matching' and n % 2 == 0:
    expected = (1 - np.eye(n)) / (n - 1)
  tolerance = 4.5 * np.sqrt(expected * (1 - expected) / num_rounds)
  assert (np.abs(counts / num_rounds - expected) <= tolerance).all()


def test_all_matchings_are_equally_likely():
  drawn = gossip.draw_peers('matching', 6, 15_000, seed=2)
  _, counts = np.unique(drawn, axis=0, return_counts=True)
  assert len(counts) == 15
  # Chi-square with 14 degrees of freedom: above 36 in 0.1% of all seeds.
  assert ((counts - 1000) ** 2 / 1000).sum() < 36


def test_nodes_and_rounds_are_independent():
  drawn = gossip.draw_peers('independent', 2, 40_000, seed=3)
  pairs = drawn[:, 0] * 2 + drawn[:, 1]
  steps = drawn[:-1, 0] * 2 + drawn[1:, 0]
  for codes in (pairs, steps):
    shares = np.bincount(codes, minlength=4) / len(codes)
    np.testing.assert_allclose(shares, 0.25, atol=0.01)


@every_kind
def test_seeds_sizes_and_kinds_differ(peers):
  base = gossip.draw_peers(peers, 64, seed=1)
  assert (base != gossip.draw_peers(peers, 64, seed=2)).any()
  assert (base != gossip.draw_peers(peers, 65, seed=1)[:, :64]).any()
  assert (base != gossip.draw_peers(peers, 64, seed=1, first_round=1)).any()
  for other in set(gossip.PEERS) - {peers}:
    assert (base != gossip.draw_peers(other, 64, seed=1)).any()


def test_many_nodes():
  drawn = gossip.draw_peers('matching', 100_001, seed=4)[0]
  assert (drawn == np.arange(100_001)).sum() == 1
  np.testing.assert_array_equal(drawn[drawn], np.arange(100_001))
  largest = gossip.draw_peers('independent', 100_000, 10, seed=5).max()
  assert 99_900 < largest < 100_000


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'peers': 'some'}, "Unknown peers 'some'"),
    ({'num_nodes': 0}, 'num_nodes must be a whole number of at least 1, got 0'),
    (
      {'num_nodes': True},
      'num_nodes must be a whole number of at least 1, got True',
    ),
    (
      {'num_rounds': 0},
      'num_rounds must be a whole number of at least 1, got 0',
    ),
    (
      {'first_round': -1},
      'first_round must be a whole number of at least 0, got -1',
    ),
    ({'seed': -1}, 'seed must be a whole number of at least 0, got -1'),
    ({'seed': 2**64}, r'seed must be below 2\*\*64, got 18446744073709551616'),
    ({'seed': 0.5}, 'seed must be a whole number of at least 0, got 0.5'),
  ],
)
def test_errors_say_what_was_given(arguments, message):
  arguments = {'peers': 'matching', 'num_nodes': 4, **arguments}
  with pytest.raises(ValueError, match=message):
    gossip.draw_peers(**arguments)


# --- Rates, against all outcomes and against many random ones.


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
  ('n', 'weight'), [(2, 0.5), (4, 0.5), (5, 0.5), (3, 0.2), (4, 1)]
)
def test_exact_over_all_outcomes(peers, n, weight):
  outcomes = np.array(_list_outcomes(peers, n))[:, :, None]
  topology = topologies.from_peers(outcomes)
  topology = topologies.with_constant_weights(topology, weight)
  rate = topologies.consensus_rate(peers, n, weight)
  # The rate is the same for all values: it is an equality, not a bound.
  matrices = [topology.matrix(index) for index in range(topology.num_rounds)]
  np.testing.assert_allclose(
    _mean_square(matrices), rate * (np.eye(n) - 1 / n), atol=1e-12
  )


@pytest.mark.parametrize('n', [2, 3, 10, 101, 100_000])
def test_formulas_at_one_half(n):
  assert topologies.consensus_rate('independent', n) == pytest.approx(
    1 / 2 - 1 / (4 * n), abs=1e-15
  )
  assert topologies.consensus_rate('permutation', n) == 0.5
  matching = 0.5 if n % 2 else 0.5 * (1 - 1 / (n - 1))
  assert topologies.consensus_rate('matching', n) == pytest.approx(matching)


@pytest.mark.parametrize('peers', gossip.PEERS)
def test_monte_carlo(peers):
  n, num_rounds = 33, 20_000
  drawn = gossip.draw_peers(peers, n, num_rounds, seed=11)
  values = np.random.default_rng(3).normal(size=n)
  mixed = (values + values[drawn]) / 2
  factors = mixed.var(axis=1) / values.var()
  rate = topologies.consensus_rate(peers, n)
  error = factors.std() / math.sqrt(num_rounds)
  assert abs(factors.mean() - rate) < 4 * error
  assert error < 0.002


def test_one_node_always_agrees():
  for peers in gossip.PEERS:
    assert topologies.consensus_rate(peers, 1) == 0


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
def test_errors_of_rates(arguments, message):
  with pytest.raises(ValueError, match=message):
    topologies.consensus_rate(*arguments)
