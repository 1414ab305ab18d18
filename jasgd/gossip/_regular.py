"""Random regular graphs: sparse, and yet with a gap that does not fall with n.

The graph is a union of random Hamiltonian cycles (and one random matching, if
the degree is odd). Edges that come out twice, of which there are about d^2
whatever n, are then swapped with random others. The first cycle is never
touched, so that the graph is always connected.
"""

import collections

import numpy as np

from jasgd.gossip import _checks
from jasgd.gossip import _draws
from jasgd.gossip import _topology
from jasgd.gossip import _weights


def random_regular(
  num_nodes: int, degree: int, *, seed: int = 0
) -> _topology.Topology:
  r"""A random connected graph in which every node has the same degree.

  .. math:: W_{ij} = 1 / (1 + d)

  A graph like this has a spectral gap of about
  :math:`(d - 2 \sqrt{d - 1}) / (d + 1)`, whatever the number of nodes. All
  nodes are equal in distribution; the graph is not exactly uniform among all
  regular ones, for every graph drawn has a Hamiltonian cycle (as almost all
  have, from a degree of 3 on).

  Args:
    num_nodes: n, above the degree, and even if the degree is odd.
    degree: d, at least 2. What is regular of degree 1 is a matching, for which
      there is `random_matching`.
    seed: From 0 to 2^64 - 1.

  Returns:
    A static, symmetric topology.

  Raises:
    ValueError: if there is no such graph.

  Examples:
    >>> from jasgd import gossip
    >>> gossip.random_regular(1000, degree=4, seed=1)
    Topology(random_regular, num_nodes=1000, num_rounds=1, max_degree=4)
    >>> gossip.random_regular(9, degree=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: random_regular of ... num_nodes=9: the nearest are 8 and 10.

  References:
    Wormald, `Models of Random Regular Graphs
    <https://doi.org/10.1017/CBO9780511721335.010>`_, 1999; Friedman, `A proof
    of Alon's second eigenvalue conjecture
    <https://arxiv.org/abs/cs/0405020>`_, 2008
  """
  num_nodes = _checks.check_count('num_nodes', num_nodes)
  degree = _checks.check_count('degree', degree, 2)
  _checks.check_size(
    f'random_regular of degree {degree}',
    num_nodes,
    'more nodes than that, and num_nodes * degree even',
    lambda n: n > degree and n * degree % 2 == 0,
  )
  bits = _draws.make_philox('regular', seed)
  num_missing = num_nodes - 1 - degree
  if num_missing < degree:
    # Half of all edges or more: there may be nothing left to swap with. Draw
    # the edges that are *not* there. Two nodes without an edge then share a
    # neighbour, so this is connected too.
    edges = _draw_edges(num_nodes, num_missing, bits, num_kept=0)
    is_edge = ~np.eye(num_nodes, dtype=bool)
    is_edge[edges[:, 0], edges[:, 1]] = False
    is_edge[edges[:, 1], edges[:, 0]] = False
    peers = np.nonzero(is_edge)[1]
  else:
    edges = _draw_edges(num_nodes, degree, bits, num_kept=num_nodes)
    both = np.concatenate([edges, edges[:, ::-1]])
    peers = both[np.argsort(both[:, 0], kind='stable'), 1]
  return _weights.from_peers(
    peers.reshape(num_nodes, degree), kind='random_regular'
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
  is_twice = np.ones(len(edges), dtype=bool)
  is_twice[np.unique(keys, return_index=True)[1]] = False
  if is_twice.any():
    _swap_twins(
      edges, keys, np.flatnonzero(is_twice), bits, num_nodes, num_kept
    )
  return edges


def _swap_twins(
  edges: np.ndarray,
  keys: np.ndarray,
  twins: np.ndarray,
  bits: np.random.Philox,
  num_nodes: int,
  num_kept: int,
) -> None:
  """Replaces each twin (u, v) and some (x, y) by (u, x) and (v, y), in place.

  That keeps all degrees. Of the n d edges in both directions at most 2 d^2 are
  no partner (x is u or next to it, or y is v or next to it), so there always is
  one while d < n / 2; the same count without the kept cycle, n (d - 2) against
  2 d (d - 2), says the same.
  """
  count = collections.Counter(keys.tolist())
  for twin in twins:
    while count[int(keys[twin])] > 1:
      word = bits.random_raw()
      other = num_kept + (word >> 1) % (len(edges) - num_kept)
      u, v = edges[twin].tolist()
      x, y = edges[other].tolist()
      if word & 1:
        x, y = y, x
      first = min(u, x) * num_nodes + max(u, x)
      second = min(v, y) * num_nodes + max(v, y)
      if u == x or v == y or count[first] or count[second]:
        continue
      count[int(keys[twin])] -= 1
      count[int(keys[other])] -= 1
      count[first] += 1
      count[second] += 1
      edges[twin], edges[other] = (u, x), (v, y)
      keys[twin], keys[other] = first, second
