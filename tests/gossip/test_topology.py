"""The topology as data: its arrays, its weights, and what it refuses."""

import dataclasses
import inspect
import subprocess
import sys

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import gossip

CHAIN = gossip.from_peers([[0, 1], [0, 2], [1, 2]])  # 0 - 1 - 2


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
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_uniform_weights_of_any_graph(table):
  topology = gossip.from_peers(table)
  num_rounds, n, _ = table.shape
  assert (topology.num_rounds, topology.num_nodes) == (num_rounds, n)
  for index in range(num_rounds):
    is_seen = np.eye(n, dtype=bool)
    for node in range(n):
      is_seen[node, table[index, node]] = True
    expected = is_seen / is_seen.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(topology.matrix(index), expected, atol=1e-15)
  np.testing.assert_allclose(gossip.row_sums(topology), 1, atol=1e-15)


@hypothesis.given(table=tables())
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_metropolis_weights_of_any_undirected_graph(table):
  n = table.shape[1]
  is_edge = np.zeros((n, n), dtype=bool)
  for node in range(n):
    is_edge[node, table[0, node]] = True
  is_edge = (is_edge | is_edge.T) & ~np.eye(n, dtype=bool)
  peers = np.where(is_edge, np.arange(n), np.arange(n)[:, None])
  # Idle entries may repeat: they are no edges.
  topology = gossip.with_metropolis_weights(gossip.from_peers(peers))
  degrees = is_edge.sum(axis=1)
  expected = is_edge / (1 + np.maximum(degrees, degrees[:, None]))
  off_diagonal = topology.matrix() * ~np.eye(n, dtype=bool)
  np.testing.assert_allclose(off_diagonal, expected, atol=1e-15)
  assert gossip.is_symmetric(topology)
  assert gossip.is_doubly_stochastic(topology)
  gap = gossip.spectral_gap(topology)
  assert (gap > 1e-9) == gossip.is_connected(topology)


@hypothesis.given(table=tables(), seed=st.integers(0, 100))
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_push_sum_keeps_the_sum_on_any_directed_graph(table, seed):
  topology = gossip.from_peers(table)
  values = np.random.default_rng(seed).normal(size=topology.num_nodes)
  for index in range(topology.num_rounds):
    matrix = topology.push_matrix(index)
    np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-15)
    pushed = topology.push(values, index)
    np.testing.assert_allclose(pushed, matrix @ values, atol=1e-14)
    assert pushed.sum() == pytest.approx(values.sum(), abs=1e-13)


def test_push_sum_finds_the_mean_where_a_pull_does_not():
  """A directed graph whose nodes are heard by unequally many."""
  peers = np.array([[1, 2], [2, 1], [0, 2], [0, 4], [0, 3]])
  topology = gossip.from_peers(peers)
  assert not gossip.is_connected(topology)  # Nobody tells 3 and 4 anything...
  peers[2] = [0, 3]  # ... but now node 2 listens to 3.
  topology = gossip.from_peers(peers)
  assert gossip.is_connected(topology)
  assert not gossip.is_doubly_stochastic(topology)
  start = np.array([1.0, 2.0, 3.0, 4.0, 10.0])
  x, w, pulled = start, np.ones(5), start
  for _ in range(200):
    x, w, pulled = topology.push(x), topology.push(w), topology.pull(pulled)
  np.testing.assert_allclose(x / w, 4, atol=1e-9)
  assert x.sum() == pytest.approx(20)
  np.testing.assert_allclose(pulled, pulled[0], atol=1e-9)  # They do agree,
  assert abs(pulled[0] - 4) > 0.1  # but on something else.


def test_uniform_and_metropolis_are_the_same_where_degrees_are():
  for topology in (gossip.ring(7), gossip.torus(12), gossip.hypercube(8)):
    uniform = gossip.with_uniform_weights(topology)
    metropolis = gossip.with_metropolis_weights(topology)
    np.testing.assert_array_equal(uniform.weights, metropolis.weights)


def test_constant_weights_are_the_laplacian():
  laplacian = np.array([[1, -1, 0], [-1, 2, -1], [0, -1, 1]])
  topology = gossip.with_constant_weights(CHAIN, 0.3)
  np.testing.assert_allclose(topology.matrix(), np.eye(3) - 0.3 * laplacian)
  assert gossip.is_symmetric(topology)


def test_edges_of_weight_zero_do_not_connect():
  assert gossip.is_connected(CHAIN)
  assert not gossip.is_connected(gossip.with_constant_weights(CHAIN, 0))


def test_rounds_repeat():
  topology = gossip.one_peer_exponential(8)
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
  topology = gossip.from_peers(
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
    ({'peers': [1, 0, 2, 2]}, r'not its own peer, got \(2, 2\)'),
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
    (lambda: gossip.from_peers([0, 1]), r'shape .*, got int64 \(2,\)'),
    (lambda: gossip.from_peers([[0.5]]), r'integers .*, got float64 \(1, 1\)'),
    (lambda: gossip.from_peers(np.zeros((0, 2, 1), int)), r'got int64 \(0, 2'),
    (lambda: gossip.from_peers([[3], [0]]), 'num_nodes - 1 = 1, got 0 to 3'),
    (lambda: gossip.from_peers([[1, 1], [0, 1]]), r'once; got \(0, 1\)'),
    (
      lambda: gossip.from_peers([[1], [0]], [0.5, 0.5]),
      r'shape of peers, \(2, 1\), got \(2,\)',
    ),
    (
      lambda: gossip.with_metropolis_weights(gossip.exponential(8)),
      'undirected graph: in round 0 of Topology.exponential, num_nodes=8',
    ),
    (
      lambda: gossip.with_constant_weights(CHAIN, 0.6),
      'at most 1 / max_degree = 1 / 2, got 0.6',
    ),
    (
      lambda: CHAIN.matrix(-1),
      'round_index must be a whole number of at least 0, got -1',
    ),
  ],
)
def test_errors_say_what_was_given(build, message):
  with pytest.raises(ValueError, match=message):
    build()


def test_needs_no_jax():
  program = 'import sys, jasgd.gossip; print("jax" in sys.modules)'
  output = subprocess.run(
    [sys.executable, '-c', program], check=True, capture_output=True, text=True
  )
  assert output.stdout.strip() == 'False'


def test_contents():
  for name in gossip.__all__:
    value = getattr(gossip, name)
    if inspect.isfunction(value) or value is gossip.Topology:
      for part in ('Examples:', 'References:', '>>> '):
        assert part in value.__doc__, name
