"""The static kinds: one graph, the same in every round."""

from collections.abc import Iterable
import math

import numpy as np

from jasgd.gossip import _checks
from jasgd.gossip import _topology
from jasgd.gossip import _weights

# A complete graph is stored edge by edge, which has to end somewhere. Beyond,
# an all-reduce or random peers are what one wants anyway.
MAX_COMPLETE = 2048


def complete(num_nodes: int) -> _topology.Topology:
  r"""Everybody with everybody: all agree after one round.

  .. math:: W_{ij} = 1 / n

  Args:
    num_nodes: n, from 1 to 2,048, as there are n^2 edges.

  Returns:
    A static, symmetric topology of degree n - 1.

  Raises:
    ValueError: if the size is out of range.

  Examples:
    >>> from jasgd import gossip
    >>> gossip.complete(8)
    Topology(complete, num_nodes=8, num_rounds=1, max_degree=7)

  References:
    Boyd et al., `Randomized Gossip Algorithms
    <https://doi.org/10.1109/TIT.2006.874516>`_, 2006
  """
  num_nodes = _checks.check_count('num_nodes', num_nodes)
  if num_nodes > MAX_COMPLETE:
    raise ValueError(
      f'complete needs at most {MAX_COMPLETE} nodes, for its edges are '
      f'stored one by one, got num_nodes={num_nodes}. Use an all-reduce, or '
      'random peers (draw_peers).'
    )
  return _circulant('complete', num_nodes, range(1, num_nodes))


def ring(num_nodes: int) -> _topology.Topology:
  r"""Everybody with the two next to it.

  .. math:: W_{i,i} = W_{i,i \pm 1} = 1 / 3

  The spectral gap is :math:`(2 - 2 \cos(2 \pi / n)) / 3`, about 13 / n^2.

  Args:
    num_nodes: n, at least 1. Two nodes are one pair, at weight 1/2.

  Returns:
    A static, symmetric topology of degree 2.

  Raises:
    ValueError: if there is no node.

  Examples:
    >>> from jasgd import gossip
    >>> print(gossip.ring(5).peer_table()[0].tolist())
    [[1, 4], [0, 2], [1, 3], [2, 4], [0, 3]]

  References:
    Lian et al., `Asynchronous Decentralized Parallel Stochastic Gradient
    Descent <https://arxiv.org/abs/1710.06952>`_, 2018
  """
  num_nodes = _checks.check_count('num_nodes', num_nodes)
  return _circulant('ring', num_nodes, (1, num_nodes - 1))


def torus(num_nodes: int) -> _topology.Topology:
  """A grid whose edges meet, as near to a square as possible.

  The number of nodes is a product of two sides of at least 2, which a prime is
  not. Along a side of 2 there is one neighbour, along others two.

  Args:
    num_nodes: n, 1 or not a prime.

  Returns:
    A static, symmetric topology of degree 4, or less with a side of 2.

  Raises:
    ValueError: if the size is a prime.

  Examples:
    >>> from jasgd import gossip
    >>> gossip.torus(12)  # 3 x 4
    Topology(torus, num_nodes=12, num_rounds=1, max_degree=4)
    >>> gossip.torus(13)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: torus needs ... got num_nodes=13: the nearest are 12 and 14.

  References:
    Lian et al., `Can Decentralized Algorithms Outperform Centralized
    Algorithms? <https://arxiv.org/abs/1705.09056>`_, 2017
  """
  num_nodes = _checks.check_count('num_nodes', num_nodes)
  _checks.check_size(
    'torus',
    num_nodes,
    'a product of two sides of at least 2',
    lambda n: n == 1 or _shorter_side(n) > 1,
  )
  num_rows = _shorter_side(num_nodes)
  num_columns = num_nodes // num_rows
  row, column = np.divmod(np.arange(num_nodes), num_columns)
  # Sets, as along a side of 2 both neighbours are the same node.
  up_down = [
    (row + step) % num_rows * num_columns + column
    for step in {1 % num_rows, num_rows - 1}
  ]
  left_right = [
    row * num_columns + (column + step) % num_columns
    for step in {1 % num_columns, num_columns - 1}
  ]
  peers = np.stack([*up_down, *left_right], axis=-1)
  return _weights.from_peers(peers, kind='torus')


def exponential(num_nodes: int) -> _topology.Topology:
  r"""Everybody with those 1, 2, 4, 8 ... places further on.

  .. math:: W_{i, i + 2^k \bmod n} = 1 / (1 + \lceil \log_2 n \rceil)

  Directed, and yet doubly stochastic. For even n the spectral gap is
  :math:`2 / (1 + \lceil \log_2 n \rceil)`.

  Args:
    num_nodes: n, at least 1.

  Returns:
    A static, directed topology whose degree is log2(n), rounded up.

  Raises:
    ValueError: if there is no node.

  Examples:
    >>> from jasgd import gossip
    >>> print(gossip.exponential(6).peer_table()[0][0])
    [1 2 4]

  References:
    Ying et al., `Exponential Graph is Provably Efficient for Decentralized Deep
    Training <https://arxiv.org/abs/2110.13363>`_, 2021
  """
  num_nodes = _checks.check_count('num_nodes', num_nodes)
  num_offsets = (num_nodes - 1).bit_length()
  offsets = [2**k for k in range(num_offsets)]
  return _circulant('exponential', num_nodes, offsets)


def hypercube(num_nodes: int) -> _topology.Topology:
  r"""Everybody with those whose number differs in one bit.

  .. math:: W_{i, i \oplus 2^k} = 1 / (1 + \log_2 n)

  The spectral gap is :math:`2 / (1 + \log_2 n)`.

  Args:
    num_nodes: n, a power of 2.

  Returns:
    A static, symmetric topology of degree log2(n).

  Raises:
    ValueError: if the size is not a power of 2.

  Examples:
    >>> from jasgd import gossip
    >>> print(gossip.hypercube(8).peer_table()[0][5])
    [1 4 7]

  References:
    Ying et al., `Exponential Graph is Provably Efficient for Decentralized Deep
    Training <https://arxiv.org/abs/2110.13363>`_, 2021
  """
  num_nodes = check_power_of_two('hypercube', num_nodes)
  bits = 2 ** np.arange((num_nodes - 1).bit_length())
  peers = np.arange(num_nodes)[:, None] ^ bits
  return _weights.from_peers(peers, kind='hypercube')


def star(num_nodes: int) -> _topology.Topology:
  r"""Node 0 with everybody, the others only with node 0.

  .. math:: W_{0i} = W_{i0} = 1 / n

  These are the Metropolis weights, with which the mean is kept; the spectral
  gap is 1 / n. `with_uniform_weights` gives the hub more say.

  Args:
    num_nodes: n, at least 1, with the hub.

  Returns:
    A static, symmetric topology; the hub has n - 1 peers.

  Raises:
    ValueError: if there is no node.

  Examples:
    >>> from jasgd import gossip
    >>> print(gossip.star(4).matrix())
    [[0.25 0.25 0.25 0.25]
     [0.25 0.75 0.   0.  ]
     [0.25 0.   0.75 0.  ]
     [0.25 0.   0.   0.75]]

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004
  """
  num_nodes = _checks.check_count('num_nodes', num_nodes)
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
  return _weights.with_metropolis_weights(topology)


def check_power_of_two(kind: str, num_nodes: int) -> int:
  """Gives the number of nodes; a ValueError unless it is a power of 2."""
  num_nodes = _checks.check_count('num_nodes', num_nodes)
  _checks.check_size(
    kind, num_nodes, 'a power of 2', lambda n: n & (n - 1) == 0
  )
  return num_nodes


def _circulant(
  kind: str, num_nodes: int, offsets: Iterable[int]
) -> _topology.Topology:
  """Everybody with those at the same distances further on."""
  steps = sorted({offset % num_nodes for offset in offsets})
  own = np.arange(num_nodes)[:, None]
  peers = (own + np.array(steps, dtype=np.int64)) % num_nodes
  return _weights.from_peers(peers, kind=kind)


def _shorter_side(num_nodes: int) -> int:
  """The largest divisor up to the square root."""
  root = math.isqrt(num_nodes)
  return next(side for side in range(root, 0, -1) if num_nodes % side == 0)
