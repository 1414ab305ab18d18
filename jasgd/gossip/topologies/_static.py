"""The static kinds of topologies: one graph, the same in every round."""

import collections
from collections.abc import Callable, Iterable
import itertools
import math

import numpy as np

from jasgd import protocols
from jasgd.gossip.topologies import _draws
from jasgd.gossip.topologies import _topology

# A complete graph has n (n - 1) edges, which are all stored.
_MAX_COMPLETE = 2048


@_topology.register
def complete(num_nodes: int) -> _topology.Topology:
  r"""All pairs of nodes are connected: all nodes agree after one round.

  .. math:: W_{ij} = 1 / n

  Args:
    num_nodes: Number of nodes, n, from 1 to 2,048: there are n (n - 1) edges.

  Returns:
    A static, symmetric topology of degree n - 1.

  Raises:
    ValueError: if the size is out of range.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topologies.complete(8)
    Topology(complete, num_nodes=8, num_rounds=1, max_degree=7)

  References:
    Boyd et al., `Randomized Gossip Algorithms
    <https://doi.org/10.1109/TIT.2006.874516>`_, 2006
  """
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  if num_nodes > _MAX_COMPLETE:
    raise ValueError(
      f'complete needs at most {_MAX_COMPLETE} nodes, since its edges are '
      f'stored one by one, got num_nodes={num_nodes}. Use AllReduce or random '
      'peers instead.'
    )
  return _circulant('complete', num_nodes, range(1, num_nodes))


@_topology.register
def ring(num_nodes: int) -> _topology.Topology:
  r"""Each node has its two neighbours on a ring as peers.

  .. math:: W_{i,i} = W_{i,i \pm 1} = 1 / 3

  The spectral gap is :math:`(2 - 2 \cos(2 \pi / n)) / 3`, about 13 / n^2.

  Args:
    num_nodes: Number of nodes, n, at least 1. Two nodes are one pair, with
      weight 1/2.

  Returns:
    A static, symmetric topology of degree 2.

  Raises:
    ValueError: if num_nodes is below 1.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> print(topologies.ring(5).peer_table()[0].tolist())
    [[1, 4], [0, 2], [1, 3], [2, 4], [0, 3]]

  References:
    Lian et al., `Asynchronous Decentralized Parallel Stochastic Gradient
    Descent <https://arxiv.org/abs/1710.06952>`_, 2018
  """
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  return _circulant('ring', num_nodes, (1, num_nodes - 1))


@_topology.register
def torus(num_nodes: int) -> _topology.Topology:
  """A grid that wraps around at its borders, as near to a square as possible.

  The number of nodes is a product of two sides of at least 2, hence no prime.
  A node has one neighbour along a side of length 2, two along longer sides.

  Args:
    num_nodes: Number of nodes, n, 1 or not a prime.

  Returns:
    A static, symmetric topology of degree 4, or less with a side of length 2.

  Raises:
    ValueError: if the size is a prime.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topologies.torus(12)  # 3 x 4
    Topology(torus, num_nodes=12, num_rounds=1, max_degree=4)
    >>> topologies.torus(13)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: torus needs ... got num_nodes=13: the nearest are 12 and 14.

  References:
    Lian et al., `Can Decentralized Algorithms Outperform Centralized
    Algorithms? <https://arxiv.org/abs/1705.09056>`_, 2017
  """
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  _check_size(
    'torus',
    num_nodes,
    'a product of two sides of at least 2',
    lambda n: n == 1 or _shorter_side(n) > 1,
  )
  num_rows = _shorter_side(num_nodes)
  num_columns = num_nodes // num_rows
  row, column = np.divmod(np.arange(num_nodes), num_columns)
  # Sets, since along a side of length 2 both neighbours are the same node.
  up_down = [
    (row + step) % num_rows * num_columns + column
    for step in {1 % num_rows, num_rows - 1}
  ]
  left_right = [
    row * num_columns + (column + step) % num_columns
    for step in {1 % num_columns, num_columns - 1}
  ]
  peers = np.stack([*up_down, *left_right], axis=-1)
  return _topology.from_peers(peers, kind='torus')


@_topology.register
def exponential(num_nodes: int) -> _topology.Topology:
  r"""Node i has the peers i + 1, i + 2, i + 4, i + 8 and so on, modulo n.

  .. math:: W_{i, i + 2^k \bmod n} = 1 / (1 + \lceil \log_2 n \rceil)

  The graph is directed, but W is doubly stochastic. For even n the spectral gap
  is :math:`2 / (1 + \lceil \log_2 n \rceil)`.

  Args:
    num_nodes: Number of nodes, n, at least 1.

  Returns:
    A static, directed topology whose degree is log2(n), rounded up.

  Raises:
    ValueError: if num_nodes is below 1.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> print(topologies.exponential(6).peer_table()[0][0])
    [1 2 4]

  References:
    Ying et al., `Exponential Graph is Provably Efficient for Decentralized Deep
    Training <https://arxiv.org/abs/2110.13363>`_, 2021
  """
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  num_offsets = (num_nodes - 1).bit_length()
  offsets = [2**k for k in range(num_offsets)]
  return _circulant('exponential', num_nodes, offsets)


@_topology.register
def hypercube(num_nodes: int) -> _topology.Topology:
  r"""The peers of a node have numbers that differ from its own in one bit.

  .. math:: W_{i, i \oplus 2^k} = 1 / (1 + \log_2 n)

  The spectral gap is :math:`2 / (1 + \log_2 n)`.

  Args:
    num_nodes: Number of nodes, n, a power of 2.

  Returns:
    A static, symmetric topology of degree log2(n).

  Raises:
    ValueError: if the size is not a power of 2.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> print(topologies.hypercube(8).peer_table()[0][5])
    [1 4 7]

  References:
    Ying et al., `Exponential Graph is Provably Efficient for Decentralized Deep
    Training <https://arxiv.org/abs/2110.13363>`_, 2021
  """
  num_nodes = check_power_of_two('hypercube', num_nodes)
  bits = 2 ** np.arange((num_nodes - 1).bit_length())
  peers = np.arange(num_nodes)[:, None] ^ bits
  return _topology.from_peers(peers, kind='hypercube')


@_topology.register
def star(num_nodes: int) -> _topology.Topology:
  r"""Node 0, the hub, has all other nodes as peers; they have only node 0.

  .. math:: W_{0i} = W_{i0} = 1 / n

  These are the Metropolis weights, which keep the mean; the spectral gap is
  1 / n. `with_uniform_weights` gives the hub a larger weight.

  Args:
    num_nodes: Number of nodes, n, with the hub, at least 1.

  Returns:
    A static, symmetric topology; the hub has n - 1 peers.

  Raises:
    ValueError: if num_nodes is below 1.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> print(topologies.star(4).matrix())
    [[0.25 0.25 0.25 0.25]
     [0.25 0.75 0.   0.  ]
     [0.25 0.   0.75 0.  ]
     [0.25 0.   0.   0.75]]

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004
  """
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  leaves = np.arange(1, num_nodes)
  hub = np.zeros_like(leaves)
  topology = _topology.Topology(
    kind='star',
    num_nodes=num_nodes,
    starts=np.array([0, 2 * len(leaves)]),
    nodes=np.concatenate([hub, leaves]),
    peers=np.concatenate([leaves, hub]),
    weights=np.zeros(2 * len(leaves)),
  )
  return _topology.with_metropolis_weights(topology)


def check_power_of_two(kind: str, num_nodes: int) -> int:
  """Returns the number of nodes; raises a ValueError if no power of 2."""
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  _check_size(kind, num_nodes, 'a power of 2', lambda n: n & (n - 1) == 0)
  return num_nodes


@_topology.register
def random_regular(
  num_nodes: int, degree: int = 3, *, seed: int = 0
) -> _topology.Topology:
  r"""A random connected graph in which every node has the same degree.

  .. math:: W_{ij} = 1 / (1 + d)

  The spectral gap is about :math:`(d - 2 \sqrt{d - 1}) / (d + 1)` for any
  number of nodes. The graph is a union of random Hamiltonian cycles (and one
  random matching, if the degree is odd). Edges that are drawn twice, about d^2
  for any n, are then swapped with random other edges. The first cycle is never
  changed, so that the graph is connected. All nodes are equal in distribution,
  but the graph is not exactly uniform among all regular graphs, since it always
  has a Hamiltonian cycle (as almost all graphs of degree 3 or more have).

  Args:
    num_nodes: Number of nodes, n, above the degree, and even if the degree is
      odd.
    degree: Number of peers of a node, d, at least 2. For degree 1 there is
      `random_matching`.
    seed: Seed of the draw, from 0 to 2^64 - 1.

  Returns:
    A static, symmetric topology.

  Raises:
    ValueError: if there is no such graph.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topologies.random_regular(1000, degree=4, seed=1)
    Topology(random_regular, num_nodes=1000, num_rounds=1, max_degree=4)
    >>> topologies.random_regular(9, degree=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: random_regular of ... num_nodes=9: the nearest are 8 and 10.

  References:
    Wormald, `Models of Random Regular Graphs
    <https://doi.org/10.1017/CBO9780511721335.010>`_, 1999; Friedman, `A proof
    of Alon's second eigenvalue conjecture
    <https://arxiv.org/abs/cs/0405020>`_, 2008
  """
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  degree = protocols.check_count('degree', degree, 2)
  _check_size(
    f'random_regular of degree {degree}',
    num_nodes,
    'more nodes than that, and num_nodes * degree even',
    lambda n: n > degree and n * degree % 2 == 0,
  )
  bits = _draws.make_philox('regular', seed)
  num_missing = num_nodes - 1 - degree
  if num_missing < degree:
    # With half of all edges or more, no edge may be left to swap with. Draw the
    # edges that are *missing* instead. Two nodes without an edge then share a
    # neighbour, so this graph is connected too.
    edges = _draw_edges(num_nodes, num_missing, bits, num_kept=0)
    is_edge = ~np.eye(num_nodes, dtype=bool)
    is_edge[edges[:, 0], edges[:, 1]] = False
    is_edge[edges[:, 1], edges[:, 0]] = False
    peers = np.nonzero(is_edge)[1]
  else:
    edges = _draw_edges(num_nodes, degree, bits, num_kept=num_nodes)
    both = np.concatenate([edges, edges[:, ::-1]])
    peers = both[np.argsort(both[:, 0], kind='stable'), 1]
  return _topology.from_peers(
    peers.reshape(num_nodes, degree), kind='random_regular'
  )


def _circulant(
  kind: str, num_nodes: int, offsets: Iterable[int]
) -> _topology.Topology:
  """Node i has the peers i + offset, modulo n, for all offsets."""
  steps = sorted({offset % num_nodes for offset in offsets})
  own = np.arange(num_nodes)[:, None]
  peers = (own + np.array(steps, dtype=np.int64)) % num_nodes
  return _topology.from_peers(peers, kind=kind)


def _shorter_side(num_nodes: int) -> int:
  """The largest divisor up to the square root."""
  root = math.isqrt(num_nodes)
  return next(side for side in range(root, 0, -1) if num_nodes % side == 0)


def _check_size(
  kind: str, num_nodes: int, rule: str, is_possible: Callable[[int], bool]
) -> None:
  """Raises a ValueError for an impossible size, with the nearest possible ones.

  Args:
    kind: Name of the kind, for the error message.
    num_nodes: Number of nodes.
    rule: Rule for the number of nodes, in words.
    is_possible: Rule as a function; true for some number above `num_nodes`.
  """
  if is_possible(num_nodes):
    return
  below = next(filter(is_possible, range(num_nodes - 1, 0, -1)), None)
  above = next(filter(is_possible, itertools.count(num_nodes + 1)))
  nearest = (
    f'the smallest is {above}'
    if below is None
    else f'the nearest are {below} and {above}'
  )
  raise ValueError(
    f'{kind} needs {rule}, got num_nodes={num_nodes}: {nearest}.'
  )


def _draw_edges(
  num_nodes: int, degree: int, bits: np.random.Philox, num_kept: int
) -> np.ndarray:
  """Edges [num_nodes * degree / 2, 2]; the first `num_kept` stay as drawn."""
  parts = [np.zeros((0, 2), np.int32)]
  for _ in range(degree // 2):
    order = _draws.order_by(bits.random_raw(num_nodes))
    parts.append(np.stack([order, np.roll(order, -1)], axis=-1))
  if degree % 2:
    order = _draws.order_by(bits.random_raw(num_nodes))
    parts.append(order.reshape(-1, 2))
  edges = np.concatenate(parts)
  keys = edges.min(axis=1).astype(np.int64) * num_nodes + edges.max(axis=1)
  is_copy = np.ones(len(edges), dtype=bool)
  is_copy[np.unique(keys, return_index=True)[1]] = False
  if is_copy.any():
    _swap_copies(
      edges, keys, np.flatnonzero(is_copy), bits, num_nodes, num_kept
    )
  return edges


def _swap_copies(
  edges: np.ndarray,
  keys: np.ndarray,
  copies: np.ndarray,
  bits: np.random.Philox,
  num_nodes: int,
  num_kept: int,
) -> None:
  """Replaces each copy (u, v) and some (x, y) by (u, x) and (v, y), in place.

  That keeps all degrees. Of the n d directed edges (x, y) at most 2 d^2 are
  impossible (x is u or a neighbour of u, or y is v or a neighbour of v), so a
  possible one exists while d < n / 2. Without the cycle that is kept, the
  counts n (d - 2) and 2 d (d - 2) lead to the same bound.
  """
  count = collections.Counter(keys.tolist())
  for copy in copies:
    while count[int(keys[copy])] > 1:
      word = bits.random_raw()
      other = num_kept + (word >> 1) % (len(edges) - num_kept)
      u, v = edges[copy].tolist()
      x, y = edges[other].tolist()
      if word & 1:
        x, y = y, x
      first = min(u, x) * num_nodes + max(u, x)
      second = min(v, y) * num_nodes + max(v, y)
      if u == x or v == y or count[first] or count[second]:
        continue
      count[int(keys[copy])] -= 1
      count[int(keys[other])] -= 1
      count[first] += 1
      count[second] += 1
      edges[copy], edges[other] = (u, x), (v, y)
      keys[copy], keys[other] = first, second
