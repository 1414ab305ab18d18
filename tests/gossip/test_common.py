"""Requirements for every topology, tested on every kind and a few sizes."""

import numpy as np
import pytest

from jasgd import gossip
from tests.gossip import cases


def every_topology(check):
  """Makes a test of a check: one for each case, with all its sizes."""

  def test(case):
    for num_nodes in case.sizes:
      check(case, num_nodes)

  test.__doc__ = check.__doc__
  return cases.every_case(test)


def _multiply_rounds(topology):
  """The product of all rounds, the first on the right."""
  product = np.eye(topology.num_nodes)
  for index in range(topology.num_rounds):
    product = topology.matrix(index) @ product
  return product


def test_every_kind_is_in_the_common_test():
  assert {case.kind for case in cases.CASES} == set(gossip.KINDS)
  assert set(gossip.KINDS) <= set(gossip.__all__)


@every_topology
def test_arrays_and_weights(case, num_nodes):
  topology = case.make(num_nodes)
  assert topology.kind == case.kind
  assert topology.num_nodes == num_nodes
  assert topology.num_rounds >= 1
  for array, dtype in (
    (topology.starts, np.int64),
    (topology.nodes, np.int32),
    (topology.peers, np.int32),
    (topology.weights, np.float64),
  ):
    assert array.dtype == dtype
    assert not array.flags.writeable
  assert topology.degrees.shape == (topology.num_rounds, num_nodes)
  assert topology.max_degree <= num_nodes - 1
  assert (topology.weights > 0).all()
  np.testing.assert_allclose(gossip.row_sums(topology), 1, atol=1e-14)
  for index in range(topology.num_rounds):
    matrix = topology.matrix(index)
    assert matrix.shape == (num_nodes, num_nodes)
    assert (matrix >= 0).all()
    # A node keeps something of itself: without that, rounds may go in circles.
    assert (np.diag(matrix) > 0.05 / num_nodes).all()
    rows, columns = matrix.sum(axis=1), matrix.sum(axis=0)
    np.testing.assert_allclose(rows, 1, atol=1e-14)
    np.testing.assert_allclose(
      columns, gossip.column_sums(topology)[index], atol=1e-14
    )
    np.testing.assert_array_equal(topology.push_matrix(index), matrix.T)


@every_topology
def test_claims(case, num_nodes):
  topology = case.make(num_nodes)
  matrices = [topology.matrix(index) for index in range(topology.num_rounds)]
  symmetric = all((matrix == matrix.T).all() for matrix in matrices)
  doubly = all(
    np.abs(matrix.sum(axis=0) - 1).max() < 1e-12 for matrix in matrices
  )
  assert gossip.is_symmetric(topology) == symmetric
  assert gossip.is_doubly_stochastic(topology) == doubly
  if num_nodes > 3:  # Where there are few, what is not promised may still be.
    assert (symmetric, doubly) == (case.is_symmetric, case.is_doubly_stochastic)
  assert symmetric >= case.is_symmetric
  assert doubly >= case.is_doubly_stochastic
  union = sum(matrices)
  reach = np.linalg.matrix_power(union > 0, num_nodes)  # Of booleans.
  assert gossip.is_connected(topology) == reach.all()
  assert reach.all()


@every_topology
def test_spectral_gap_and_consensus_rate(case, num_nodes):
  topology = case.make(num_nodes)
  gap = gossip.spectral_gap(topology)
  assert isinstance(gap, float)
  assert 0 < gap <= 1 + 1e-15
  centred = np.eye(num_nodes) - 1 / num_nodes
  sigma = np.linalg.norm(centred @ _multiply_rounds(topology), 2)
  # Sigma comes from its square, hence the loose tolerance where it is 0.
  assert gap == pytest.approx(1 - sigma, abs=1e-7)
  if sigma > 0.01:
    assert gap == pytest.approx(1 - sigma, abs=1e-12)
  matrices = [topology.matrix(index) for index in range(topology.num_rounds)]
  mean = sum(w.T @ centred @ w for w in matrices) / len(matrices)
  expected = np.linalg.eigvalsh(mean)[-1]
  rate = gossip.topology_consensus_rate(topology)
  assert rate == pytest.approx(expected, abs=1e-12)
  assert rate < 1
  if topology.num_rounds == 1:
    assert rate == pytest.approx((1 - gap) ** 2, abs=1e-12)


@every_topology
def test_pull_push_and_table_are_the_matrix(case, num_nodes):
  topology = case.make(num_nodes)
  values = np.random.default_rng(0).normal(size=(num_nodes, 2, 3))
  for index in (0, topology.num_rounds - 1, topology.num_rounds):
    matrix = topology.matrix(index)
    pulled = np.einsum('ij,jkl->ikl', matrix, values)
    pushed = np.einsum('ji,jkl->ikl', matrix, values)
    np.testing.assert_allclose(topology.pull(values, index), pulled, atol=1e-14)
    np.testing.assert_allclose(topology.push(values, index), pushed, atol=1e-14)
    np.testing.assert_allclose(
      topology.push(values[:, 0, 0], index), pushed[:, 0, 0], atol=1e-14
    )
    peers, weights = topology.peer_table(index)
    own = 1 - weights.sum(axis=1)
    gathered = own[:, None, None] * values + np.einsum(
      'ik,ikab->iab', weights, values[peers]
    )
    np.testing.assert_allclose(gathered, pulled, atol=1e-14)


@every_topology
def test_push_sum_keeps_the_sum_and_finds_the_mean(case, num_nodes):
  """Push-sum: (x, w) <- (P x, P w) with columns that sum to 1; z = x / w."""
  topology = case.make(num_nodes)
  start = np.random.default_rng(1).normal(size=num_nodes)
  both = np.stack([start, np.ones(num_nodes)], axis=-1)
  for index in range(topology.num_rounds * 40):
    both = topology.push(both, index)
  x, w = both.T
  assert x.sum() == pytest.approx(start.sum(), abs=1e-12)
  assert w.sum() == pytest.approx(num_nodes, abs=1e-12)
  error = np.abs(x / w - start.mean()).max()
  assert error < max(1e-6, 5 * (1 - gossip.spectral_gap(topology)) ** 40)


@every_topology
def test_round_trip_through_a_table(case, num_nodes):
  """A topology can be built again from its own arrays."""
  topology = case.make(num_nodes)
  width = topology.max_degree
  shape = (topology.num_rounds, num_nodes, width)
  peers = np.zeros(shape, np.int32) + np.arange(num_nodes)[:, None]
  weights = np.zeros(shape)
  for index in range(topology.num_rounds):
    table, values = topology.peer_table(index)
    peers[index, :, : table.shape[1]] = table
    weights[index, :, : table.shape[1]] = values
  again = gossip.from_peers(peers, weights, kind=topology.kind)
  for name in ('starts', 'nodes', 'peers', 'weights'):
    np.testing.assert_array_equal(
      getattr(again, name), getattr(topology, name), err_msg=name
    )
