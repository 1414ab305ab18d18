"""Topologies: every kind, its weights, its properties, and refused arguments.

The first tests are requirements for every kind, with a few sizes each.
"""

import dataclasses
import inspect
import json
import math
import subprocess
import sys

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import topologies
from tests.gossip import cases

CHAIN = topologies.from_peers([[0, 1], [0, 2], [1, 2]])  # 0 - 1 - 2


def every_topology(check):
  """Makes a test of a check: one for each case, with all its sizes."""

  def test(case):
    for num_nodes in case.sizes:
      check(case, num_nodes)

  test.__doc__ = check.__doc__
  return cases.every_case(test)


def test_every_kind_is_in_the_common_test():
  assert {case.kind for case in cases.CASES} == set(topologies.KINDS)
  assert set(topologies.KINDS) <= set(topologies.__all__)


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
  for index in range(topology.num_rounds):
    matrix = topology.matrix(index)
    assert matrix.shape == (num_nodes, num_nodes)
    assert (matrix >= 0).all()
    # A node keeps something of itself: without that, rounds may go in circles.
    assert (np.diag(matrix) > 0.05 / num_nodes).all()
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-14)


@every_topology
def test_claims(case, num_nodes):
  topology = case.make(num_nodes)
  matrices = [topology.matrix(index) for index in range(topology.num_rounds)]
  symmetric = all((matrix == matrix.T).all() for matrix in matrices)
  doubly = all(
    np.abs(matrix.sum(axis=0) - 1).max() < 1e-12 for matrix in matrices
  )
  assert topologies.is_symmetric(topology) == symmetric
  assert topologies.is_doubly_stochastic(topology) == doubly
  if num_nodes > 3:  # Few nodes may have further properties.
    assert (symmetric, doubly) == (case.is_symmetric, case.is_doubly_stochastic)
  assert symmetric >= case.is_symmetric
  assert doubly >= case.is_doubly_stochastic
  union = sum(matrices)
  reach = np.linalg.matrix_power(union > 0, num_nodes)  # Of booleans.
  assert topologies.is_connected(topology) == reach.all()
  assert reach.all()


@every_topology
def test_spectral_gap(case, num_nodes):
  topology = case.make(num_nodes)
  gap = topologies.spectral_gap(topology)
  assert isinstance(gap, float)
  assert 0 < gap <= 1 + 1e-12
  product = np.eye(num_nodes)
  for index in range(topology.num_rounds):
    product = topology.matrix(index) @ product
  # The square of sigma is the largest eigenvalue of P'(I - J)P.
  centred = np.eye(num_nodes) - 1 / num_nodes
  square = np.linalg.eigvalsh(product.T @ centred @ product)[-1]
  assert (1 - gap) ** 2 == pytest.approx(square, abs=1e-12)


@every_topology
def test_configs(case, num_nodes):
  """A kind is stored as name and arguments, other weights as all edges."""
  topology = case.make(num_nodes)
  config = json.loads(json.dumps(topology.to_config()))
  arguments = {'num_nodes': num_nodes, **case.arguments}
  assert config['name'] == case.kind
  assert config['arguments'].items() >= arguments.items()
  other = topologies.with_constant_weights(topology, 0.9 / num_nodes)
  for each in (topology, other):
    config = json.loads(json.dumps(gossip.Push(peers=each).to_config()))
    again = gossip.make_strategy(config).peers
    assert again.to_config() == each.to_config()
    for name in ('starts', 'nodes', 'peers', 'weights'):
      np.testing.assert_array_equal(getattr(again, name), getattr(each, name))


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
  assert error < max(1e-6, 5 * (1 - topologies.spectral_gap(topology)) ** 40)


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
  again = topologies.from_peers(peers, weights, kind=topology.kind)
  for name in ('starts', 'nodes', 'peers', 'weights'):
    np.testing.assert_array_equal(
      getattr(again, name), getattr(topology, name), err_msg=name
    )


# --- Single kinds.


def _is_prime(n):
  return n > 1 and all(n % k for k in range(2, n))


def test_torus_refuses_primes_alone():
  for n in range(1, 40):
    if not _is_prime(n):
      assert topologies.torus(n).num_nodes == n
      continue
    below = max(k for k in range(1, n) if not _is_prime(k))
    above = min(k for k in range(n, 2 * n + 1) if not _is_prime(k))
    message = f'num_nodes={n}: the nearest are {below} and {above}'
    with pytest.raises(ValueError, match=message):
      topologies.torus(n)


def test_torus_is_as_square_as_possible():
  # 6 x 8: up and down are 8 apart, left and right are 1 apart.
  assert topologies.torus(48).peer_table()[0][9].tolist() == [
    1,
    8,
    10,
    17,
  ]
  assert topologies.torus(48).max_degree == 4
  assert topologies.torus(10).max_degree == 3  # 2 x 5
  assert topologies.torus(4).max_degree == 2  # 2 x 2


@hypothesis.given(
  n=st.integers(1, 60),
  degree=st.integers(2, 30),
  seed=st.integers(0, 2**64 - 1),
)
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
def test_random_regular(n, degree, seed):
  """Either a connected simple graph of that degree, or an error."""
  if n <= degree or n * degree % 2:
    with pytest.raises(ValueError, match=f'num_nodes={n}: the '):
      topologies.random_regular(n, degree, seed=seed)
    return
  graph = topologies.random_regular(n, degree, seed=seed)
  assert (graph.degrees == degree).all()
  assert topologies.is_symmetric(graph)
  assert topologies.is_connected(graph)
  again = topologies.random_regular(n, degree, seed=seed)
  np.testing.assert_array_equal(graph.peers, again.peers)


@pytest.mark.parametrize(('n', 'degree'), [(8, 3), (7, 4), (7, 2)])
def test_every_edge_of_random_regular_is_equally_likely(n, degree):
  num_graphs = 500
  total = sum(
    topologies.random_regular(n, degree, seed=seed).matrix() > 0
    for seed in range(num_graphs)
  )
  share = degree / (n - 1)
  tolerance = 4.5 * np.sqrt(share * (1 - share) / num_graphs)
  is_edge = ~np.eye(n, dtype=bool)
  assert (np.abs(total / num_graphs - share)[is_edge] < tolerance).all()


@pytest.mark.parametrize(
  ('kind', 'n', 'arguments'),
  [
    ('one_peer_exponential', 10_001, {}),
    ('random_regular', 10_000, {'degree': 3}),
    ('star', 100_000, {}),
  ],
)
def test_many_nodes(kind, n, arguments):
  topology = topologies.make_topology(kind, n, **arguments)
  assert topologies.is_doubly_stochastic(topology)
  assert topologies.is_connected(topology)
  values = np.arange(n) / n
  assert topology.pull(values).mean() == pytest.approx(values.mean())


def test_every_node_of_a_ring_is_reached_one_by_one():
  ring = topologies.ring(2_000)
  assert topologies.is_connected(ring)
  one_way = topologies.from_peers(np.roll(np.arange(2_000), -1)[:, None])
  assert topologies.is_connected(one_way)
  line = np.minimum(np.arange(2_000) + 1, 1_999)[:, None]
  assert not topologies.is_connected(topologies.from_peers(line))


@pytest.mark.parametrize(
  ('kind', 'n', 'arguments', 'message'),
  [
    ('hypercube', 6, {}, 'a power of 2, got num_nodes=6: .* are 4 and 8'),
    (
      'one_peer_hypercube',
      100,
      {},
      'num_nodes=100: the nearest are 64 and 128',
    ),
    ('torus', 7, {}, 'two sides of at least 2, .*=7: the nearest are 6 and 8'),
    (
      'random_regular',
      9,
      {'degree': 3},
      'even, .*=9: the nearest are 8 and 10',
    ),
    ('random_regular', 4, {'degree': 4}, 'degree 4 .*=4: the smallest is 5'),
    ('random_regular', 1, {'degree': 3}, 'num_nodes=1: the smallest is 4'),
    (
      'random_regular',
      9,
      {'degree': 1},
      'degree must be a whole number of at least 2, got 1',
    ),
    ('complete', 2049, {}, 'at most 2048 nodes, .*, got num_nodes=2049'),
    (
      'ring',
      4,
      {'degree': 2},
      r"'ring' takes \(num_nodes\), got {'degree': 2}",
    ),
    ('rign', 4, {}, "Unknown topology 'rign'. Known: complete, exponential"),
  ],
)
def test_errors_of_kinds(kind, n, arguments, message):
  with pytest.raises(ValueError, match=message):
    topologies.make_topology(kind, n, **arguments)


@pytest.mark.parametrize('kind', topologies.KINDS)
def test_every_kind_refuses_sizes_that_are_no_counts(kind):
  for n in (0, -3, 2.0, '8', None, True):
    with pytest.raises(ValueError, match=f'num_nodes must be .*, got {n!r}'):
      topologies.make_topology(kind, n)


# --- Tables and weights.


@st.composite
def tables(draw):
  """Peers [rounds, nodes, degree], no peer twice; own index where idle."""
  n = draw(st.integers(1, 8))
  num_rounds = draw(st.integers(1, 3))
  degree = draw(st.integers(0, n))
  order = st.permutations(range(n)).map(lambda nodes: nodes[:degree])
  rows = draw(st.lists(order, min_size=num_rounds * n, max_size=num_rounds * n))
  return np.array(rows, np.int64).reshape(num_rounds, n, degree)


@hypothesis.given(table=tables())
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
def test_uniform_weights_of_any_graph(table):
  topology = topologies.from_peers(table)
  num_rounds, n, _ = table.shape
  assert (topology.num_rounds, topology.num_nodes) == (num_rounds, n)
  for index in range(num_rounds):
    is_seen = np.eye(n, dtype=bool)
    for node in range(n):
      is_seen[node, table[index, node]] = True
    expected = is_seen / is_seen.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(topology.matrix(index), expected, atol=1e-15)


@hypothesis.given(table=tables())
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
def test_metropolis_weights_of_any_undirected_graph(table):
  n = table.shape[1]
  is_edge = np.zeros((n, n), dtype=bool)
  for node in range(n):
    is_edge[node, table[0, node]] = True
  is_edge = (is_edge | is_edge.T) & ~np.eye(n, dtype=bool)
  peers = np.where(is_edge, np.arange(n), np.arange(n)[:, None])
  # Idle entries may repeat: they are no edges.
  topology = topologies.with_metropolis_weights(topologies.from_peers(peers))
  degrees = is_edge.sum(axis=1)
  expected = is_edge / (1 + np.maximum(degrees, degrees[:, None]))
  off_diagonal = topology.matrix() * ~np.eye(n, dtype=bool)
  np.testing.assert_allclose(off_diagonal, expected, atol=1e-15)
  assert topologies.is_symmetric(topology)
  assert topologies.is_doubly_stochastic(topology)
  gap = topologies.spectral_gap(topology)
  assert (gap > 1e-9) == topologies.is_connected(topology)


@hypothesis.given(table=tables(), seed=st.integers(0, 100))
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
def test_push_sum_keeps_the_sum_on_any_directed_graph(table, seed):
  topology = topologies.from_peers(table)
  values = np.random.default_rng(seed).normal(size=topology.num_nodes)
  for index in range(topology.num_rounds):
    matrix = topology.matrix(index).T
    pushed = topology.push(values, index)
    np.testing.assert_allclose(pushed, matrix @ values, atol=1e-14)
    assert pushed.sum() == pytest.approx(values.sum(), abs=1e-13)


def test_push_sum_finds_the_mean_where_a_pull_does_not():
  """A directed graph whose nodes have unequal numbers of listeners."""
  peers = np.array([[1, 2], [2, 1], [0, 2], [0, 4], [0, 3]])
  topology = topologies.from_peers(peers)
  assert not topologies.is_connected(topology)  # Nodes 3 and 4 receive nothing,
  peers[2] = [0, 3]  # and node 2 receives from node 3.
  topology = topologies.from_peers(peers)
  assert topologies.is_connected(topology)
  assert not topologies.is_doubly_stochastic(topology)
  start = np.array([1.0, 2.0, 3.0, 4.0, 10.0])
  x, w, pulled = start, np.ones(5), start
  for _ in range(200):
    x, w, pulled = topology.push(x), topology.push(w), topology.pull(pulled)
  np.testing.assert_allclose(x / w, 4, atol=1e-9)
  assert x.sum() == pytest.approx(20)
  np.testing.assert_allclose(pulled, pulled[0], atol=1e-9)  # They agree,
  assert abs(pulled[0] - 4) > 0.1  # but not on the mean.


def test_uniform_and_metropolis_are_the_same_where_degrees_are():
  for topology in (
    topologies.ring(7),
    topologies.torus(12),
    topologies.hypercube(8),
  ):
    uniform = topologies.with_uniform_weights(topology)
    metropolis = topologies.with_metropolis_weights(topology)
    np.testing.assert_array_equal(uniform.weights, metropolis.weights)


def test_constant_weights_are_the_laplacian():
  laplacian = np.array([[1, -1, 0], [-1, 2, -1], [0, -1, 1]])
  topology = topologies.with_constant_weights(CHAIN, 0.3)
  np.testing.assert_allclose(topology.matrix(), np.eye(3) - 0.3 * laplacian)
  assert topologies.is_symmetric(topology)


def test_edges_of_weight_zero_do_not_connect():
  assert topologies.is_connected(CHAIN)
  assert not topologies.is_connected(topologies.with_constant_weights(CHAIN, 0))


def test_rounds_repeat():
  topology = topologies.one_peer_exponential(8)
  for index in range(3):
    np.testing.assert_array_equal(
      topology.matrix(index), topology.matrix(index + 3000)
    )


def test_arrays_cannot_be_changed():
  with pytest.raises(ValueError, match='read-only'):
    CHAIN.weights[0] = 1
  with pytest.raises(dataclasses.FrozenInstanceError):
    CHAIN.num_nodes = 4


def test_weights_of_a_table_follow_its_order():
  topology = topologies.from_peers(
    [[2, 1], [1, 0], [2, 2]], [[0.1, 0.2], [9, 1], [0, 0]]
  )
  expected = [[0.7, 0.2, 0.1], [1, 0, 0], [0, 0, 1]]
  np.testing.assert_allclose(topology.matrix(), expected)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_nodes': 0}, 'num_nodes must be a whole number of at least 1, got 0'),
    ({'num_nodes': 2}, r'from 0 to num_nodes - 1 = 1, got 0 to 2'),
    ({'starts': [0]}, r'from 0 to num_edges=4, got \[0\]'),
    ({'starts': [0, 3]}, r'from 0 to num_edges=4, got \[0 3\]'),
    ({'starts': [0, 5, 4]}, r'from 0 to num_edges=4, got \[0 5 4\]'),
    (
      {'nodes': [0, 1, 1.5, 2]},
      r'nodes must be int32, got \[0.  1.  1.5 2. \]',
    ),
    ({'peers': [1, 0, 2, 2**32 + 1]}, 'peers must be int32, got .*4294967297'),
    ({'nodes': [0, 1, 1]}, 'must have one shape|num_edges=3'),
    ({'peers': [1, 0, 2, -1]}, 'peers must be from 0 .* got -1 to 2'),
    ({'peers': [1, 0, 2, 2]}, r'be its own peer, got the edge \(2, 2\)'),
    ({'peers': [1, 2, 0, 1]}, r'ascend .* got \(1, 2\) before \(1, 0\)'),
    ({'peers': [1, 0, 0, 1]}, r'each once; got \(1, 0\) before \(1, 0\)'),
    ({'weights': [0.5, -0.1, 0.3, 0.5]}, 'at least 0, got -0.1'),
    ({'weights': [0.5, np.nan, 0.3, 0.5]}, 'at least 0, got nan'),
    ({'weights': [0.5, 0.8, 0.8, 0.5]}, 'got 1.6 for node 1 in round 0'),
    ({'weights': [0.5]}, r'one shape, got \(4,\), \(4,\) and \(1,\)'),
  ],
)
def test_a_topology_checks_itself(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CHAIN, **changes)


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (
      lambda: topologies.from_peers([0, 1]),
      r'shape .*, got int64 \(2,\)',
    ),
    (
      lambda: topologies.from_peers([[0.5]]),
      r'integers .*, got float64 \(1, 1\)',
    ),
    (
      lambda: topologies.from_peers(np.zeros((0, 2, 1), int)),
      r'got int64 \(0, 2',
    ),
    (
      lambda: topologies.from_peers([[3], [0]]),
      'num_nodes - 1 = 1, got 0 to 3',
    ),
    (
      lambda: topologies.from_peers([[1, 1], [0, 1]]),
      r'once; got \(0, 1\)',
    ),
    (
      lambda: topologies.from_peers([[1], [0]], [0.5, 0.5]),
      r'shape of peers, \(2, 1\), got \(2,\)',
    ),
    (
      lambda: topologies.with_metropolis_weights(topologies.exponential(8)),
      'undirected graph: in round 0 of Topology.exponential, num_nodes=8',
    ),
    (
      lambda: topologies.with_constant_weights(CHAIN, 0.6),
      'at most 1 / max_degree = 1 / 2, got 0.6',
    ),
    (
      lambda: CHAIN.matrix(-1),
      'round_index must be a whole number of at least 0, got -1',
    ),
  ],
)
def test_errors_of_tables_and_weights(build, message):
  with pytest.raises(ValueError, match=message):
    build()


def test_needs_no_jax():
  program = 'import sys, jasgd.gossip; print("jax" in sys.modules)'
  output = subprocess.run(
    [sys.executable, '-c', program], check=True, capture_output=True, text=True
  )
  assert output.stdout.strip() == 'False'


def test_contents():
  for room in (gossip, topologies):
    for name in room.__all__:
      value = getattr(room, name)
      if inspect.isfunction(value) or value is topologies.Topology:
        parts = {'Examples:', 'References:', '>>> '}
        if value is gossip.make_strategy:  # Every strategy has its own paper.
          parts.remove('References:')
        assert not [part for part in parts if part not in value.__doc__], name


# --- Spectral gaps in closed form.


@pytest.mark.parametrize('n', [3, 16])
def test_gaps_of_circulant_kinds(n):
  ring = 1 - (1 + 2 * math.cos(2 * math.pi / n)) / 3
  assert topologies.spectral_gap(topologies.ring(n)) == pytest.approx(ring)
  complete = topologies.spectral_gap(topologies.complete(n))
  assert complete == pytest.approx(1, abs=1e-13)
  star = topologies.spectral_gap(topologies.star(n))
  assert star == pytest.approx(1 / n)
  # Round k of one_peer_exponential has the eigenvalues cos(pi 2^k j / n), up to
  # a phase; a product of cosines of doubled angles is a quotient of sines.
  angles = np.pi * np.arange(1, n) / n
  period = 2 ** math.ceil(math.log2(n))
  left = np.abs(np.sin(period * angles) / (period * np.sin(angles))).max()
  gap = topologies.spectral_gap(topologies.one_peer_exponential(n))
  assert gap == pytest.approx(1 - left, abs=1e-12)


@pytest.mark.parametrize('n', [2, 32])
def test_gaps_of_powers_of_two(n):
  expected = 2 / (1 + math.log2(n))
  for kind in ('hypercube', 'exponential'):
    gap = topologies.spectral_gap(topologies.make_topology(kind, n))
    assert gap == pytest.approx(expected, rel=1e-9)
  for kind in ('one_peer_hypercube', 'one_peer_exponential'):
    topology = topologies.make_topology(kind, n)
    assert topology.num_rounds == math.log2(n)
    assert topologies.spectral_gap(topology) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize('sides', [(3, 5), (4, 4)])
def test_gap_of_a_torus(sides):
  # Eigenvalues are those of a mean over a step along either side.
  rows, columns = (
    2 * np.cos(2 * np.pi * np.arange(side) / side) for side in sides
  )
  moduli = np.sort(np.abs(1 + rows[:, None] + columns).ravel()) / 5
  gap = topologies.spectral_gap(topologies.torus(math.prod(sides)))
  assert gap == pytest.approx(1 - moduli[-2], rel=1e-9)


def test_random_regular_has_the_gap_of_an_expander():
  gap = topologies.spectral_gap(topologies.random_regular(400, 4, seed=1))
  assert gap == pytest.approx((4 - 2 * math.sqrt(3)) / 5, rel=0.2)


def test_unconnected_nodes_have_no_gap():
  pairs = topologies.random_matching(30, num_rounds=1)
  assert not topologies.is_connected(pairs)
  assert topologies.spectral_gap(pairs) == pytest.approx(0, abs=1e-12)


def test_a_drifting_mean_may_have_a_negative_gap():
  # Half of the nodes copy one node: its deviation is spread before it is lost.
  peers = np.arange(16)[:, None].copy()
  peers[1:8] = 0
  copies = topologies.from_peers(peers, np.ones(peers.shape))
  assert topologies.spectral_gap(copies) < 0
  assert not topologies.is_connected(copies)


def test_a_gap_of_too_many_nodes_is_an_error():
  with pytest.raises(ValueError, match=r'at most 2048 nodes, .* closed form'):
    topologies.spectral_gap(topologies.ring(2049))
