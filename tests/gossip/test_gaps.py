"""Spectral gaps against closed forms, for few nodes and for very many."""

import math

import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import _spectra


@pytest.mark.parametrize('n', [3, 16, 1000])
def test_ring(n):
  expected = 1 - (1 + 2 * math.cos(2 * math.pi / n)) / 3
  assert gossip.spectral_gap(gossip.ring(n)) == pytest.approx(
    expected, rel=1e-9
  )


@pytest.mark.parametrize('n', [1, 17, 300])
def test_complete_agrees_at_once(n):
  assert gossip.spectral_gap(gossip.complete(n)) == pytest.approx(1, abs=1e-13)


@pytest.mark.parametrize('sides', [(3, 5), (4, 4), (25, 40)])
def test_torus(sides):
  # Eigenvalues are those of a mean over a step along either side.
  rows, columns = (
    2 * np.cos(2 * np.pi * np.arange(side) / side) for side in sides
  )
  moduli = np.sort(np.abs(1 + rows[:, None] + columns).ravel()) / 5
  gap = gossip.spectral_gap(gossip.torus(math.prod(sides)))
  assert gap == pytest.approx(1 - moduli[-2], rel=1e-6)


@pytest.mark.parametrize('n', [2, 32, 1024])
def test_hypercube(n):
  expected = 2 / (1 + math.log2(n))
  gap = gossip.spectral_gap(gossip.hypercube(n))
  assert gap == pytest.approx(expected, rel=1e-6)
  one_peer = gossip.one_peer_hypercube(n)
  assert gossip.spectral_gap(one_peer) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize('n', [3, 10, 300, 100_000])
def test_star(n):
  star = gossip.star(n)
  assert len(star.nodes) == 2 * (n - 1)
  assert gossip.spectral_gap(star) == pytest.approx(1 / n, rel=1e-6)


@pytest.mark.parametrize('n', [6, 32, 100_000])
def test_exponential_of_even_size(n):
  expected = 2 / (1 + math.ceil(math.log2(n)))
  gap = gossip.spectral_gap(gossip.exponential(n))
  assert gap == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize('n', [3, 12, 1001])
def test_one_peer_exponential(n):
  # Round k has the eigenvalues cos(pi 2^k j / n), up to a phase; the product of
  # cosines of doubled angles is a quotient of sines.
  angles = np.pi * np.arange(1, n) / n
  period = 2 ** math.ceil(math.log2(n))
  left = np.abs(np.sin(period * angles) / (period * np.sin(angles))).max()
  gap = gossip.spectral_gap(gossip.one_peer_exponential(n))
  assert gap == pytest.approx(1 - left, abs=1e-12)


@pytest.mark.parametrize('n', [2, 8, 1024])
def test_one_peer_exponential_agrees_after_a_period(n):
  topology = gossip.one_peer_exponential(n)
  assert topology.num_rounds == math.log2(n)
  values = np.random.default_rng(0).normal(size=n)
  mean = values.mean()
  for index in range(topology.num_rounds):
    values = topology.pull(values, index)
  np.testing.assert_allclose(values, mean, atol=1e-14)
  assert gossip.spectral_gap(topology) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize('degree', [4, 8])
def test_random_regular_has_the_gap_of_an_expander(degree):
  topology = gossip.random_regular(400, degree, seed=1)
  centred = topology.matrix() - 1 / 400
  gap = gossip.spectral_gap(topology)  # By Lanczos; the next line by LAPACK.
  expected = 1 - np.abs(np.linalg.eigvalsh(centred)).max()
  assert gap == pytest.approx(expected, rel=1e-6)
  friedman = (degree - 2 * math.sqrt(degree - 1)) / (degree + 1)
  assert gap == pytest.approx(friedman, rel=0.2)


def test_lanczos_on_rounds_that_are_not_symmetric():
  topology = gossip.random_permutation(300, num_rounds=3, seed=2)
  product = np.eye(300)
  for index in range(3):
    product = topology.matrix(index) @ product
  sigma = np.linalg.norm(product - 1 / 300, 2)
  assert gossip.spectral_gap(topology) == pytest.approx(1 - sigma, rel=1e-6)


def test_what_never_meets_has_no_gap():
  pairs = gossip.random_matching(300, num_rounds=1)
  assert not gossip.is_connected(pairs)
  assert gossip.spectral_gap(pairs) == pytest.approx(0, abs=1e-12)
  assert gossip.topology_consensus_rate(pairs) == pytest.approx(1, abs=1e-12)


def test_a_gap_too_small_to_find_is_an_error(monkeypatch):
  monkeypatch.setattr(_spectra, '_MAX_STEPS', 64)
  order = gossip.draw_peers('permutation', 2_000, seed=1)[0]
  # A ring in disguise, which no Fourier transform sees through.
  peers = np.empty((2_000, 2), np.int32)
  peers[order] = np.stack([np.roll(order, 1), np.roll(order, -1)], axis=-1)
  ring = gossip.from_peers(peers)
  assert gossip.is_doubly_stochastic(ring)
  with pytest.raises(RuntimeError, match='did not settle in 64 steps'):
    gossip.spectral_gap(ring)


def test_a_drifting_mean_may_have_a_negative_gap():
  # Half of the nodes copy one node: its deviation is spread before it is lost.
  peers = np.arange(16)[:, None].copy()
  peers[1:8] = 0
  copies = gossip.from_peers(peers, np.ones(peers.shape))
  assert gossip.spectral_gap(copies) < 0
  assert not gossip.is_connected(copies)
