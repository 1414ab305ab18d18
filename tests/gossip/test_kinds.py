"""Single kinds: their graphs, refused sizes, and many nodes."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import gossip

RANDOM_ROUNDS = {f'random_{peers}' for peers in gossip.PEERS}


def _is_prime(n):
  return n > 1 and all(n % k for k in range(2, n))


def test_torus_refuses_primes_alone():
  for n in range(1, 40):
    if not _is_prime(n):
      assert gossip.torus(n).num_nodes == n
      continue
    below = max(k for k in range(1, n) if not _is_prime(k))
    above = min(k for k in range(n, 2 * n + 1) if not _is_prime(k))
    message = f'num_nodes={n}: the nearest are {below} and {above}'
    with pytest.raises(ValueError, match=message):
      gossip.torus(n)


def test_torus_is_as_square_as_possible():
  # 6 x 8: up and down are 8 apart, left and right are 1 apart.
  assert gossip.torus(48).peer_table()[0][9].tolist() == [1, 8, 10, 17]
  assert gossip.torus(48).max_degree == 4
  assert gossip.torus(10).max_degree == 3  # 2 x 5
  assert gossip.torus(4).max_degree == 2  # 2 x 2


@hypothesis.given(
  n=st.integers(1, 60),
  degree=st.integers(2, 30),
  seed=st.integers(0, 2**64 - 1),
)
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_random_regular(n, degree, seed):
  """Either a connected simple graph of that degree, or an error."""
  if n <= degree or n * degree % 2:
    with pytest.raises(ValueError, match=f'num_nodes={n}: the '):
      gossip.random_regular(n, degree, seed=seed)
    return
  graph = gossip.random_regular(n, degree, seed=seed)
  assert (graph.degrees == degree).all()
  assert gossip.is_symmetric(graph)
  assert gossip.is_connected(graph)
  again = gossip.random_regular(n, degree, seed=seed)
  np.testing.assert_array_equal(graph.peers, again.peers)


@pytest.mark.parametrize(('n', 'degree'), [(8, 3), (7, 4), (7, 2)])
def test_every_edge_of_random_regular_is_equally_likely(n, degree):
  num_graphs = 500
  total = sum(
    gossip.random_regular(n, degree, seed=seed).matrix() > 0
    for seed in range(num_graphs)
  )
  share = degree / (n - 1)
  tolerance = 4.5 * np.sqrt(share * (1 - share) / num_graphs)
  is_edge = ~np.eye(n, dtype=bool)
  assert (np.abs(total / num_graphs - share)[is_edge] < tolerance).all()


@pytest.mark.parametrize(
  ('kind', 'n', 'arguments'),
  [
    ('exponential', 100_000, {}),
    ('hypercube', 2**16, {}),
    ('one_peer_exponential', 100_000, {}),
    ('random_matching', 100_000, {'num_rounds': 3}),
    ('random_regular', 100_000, {'degree': 3}),
    ('star', 100_000, {}),
    ('torus', 100_000, {}),
  ],
)
def test_many_nodes(kind, n, arguments):
  topology = gossip.make_topology(kind, n, **arguments)
  assert gossip.is_doubly_stochastic(topology)
  assert gossip.is_connected(topology)
  values = np.arange(n) / n
  assert topology.pull(values).mean() == pytest.approx(values.mean())


def test_every_node_of_a_ring_is_reached_one_by_one():
  ring = gossip.ring(2_000)
  assert gossip.is_connected(ring)
  one_way = gossip.from_peers(np.roll(np.arange(2_000), -1)[:, None])
  assert gossip.is_connected(one_way)
  line = np.minimum(np.arange(2_000) + 1, 1_999)[:, None]
  assert not gossip.is_connected(gossip.from_peers(line))


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
    ('random_matching', 4, {}, r'takes \(num_nodes, num_rounds, seed\), got'),
    (
      'ring',
      4,
      {'degree': 2},
      r"'ring' takes \(num_nodes\), got {'degree': 2}",
    ),
    ('rign', 4, {}, "Unknown topology 'rign'. Known: complete, exponential"),
  ],
)
def test_errors_say_what_was_given(kind, n, arguments, message):
  with pytest.raises(ValueError, match=message):
    gossip.make_topology(kind, n, **arguments)


@pytest.mark.parametrize('kind', gossip.KINDS)
def test_every_kind_refuses_what_is_no_size(kind):
  arguments = {'num_rounds': 2} if kind in RANDOM_ROUNDS else {}
  arguments |= {'degree': 2} if kind == 'random_regular' else {}
  for n in (0, -3, 2.0, '8', None, True):
    with pytest.raises(ValueError, match=f'num_nodes must be .*, got {n!r}'):
      gossip.make_topology(kind, n, **arguments)
