"""What a topology is worth: its sums, its connectedness, its spectral gap."""

import numpy as np

from jasgd.gossip import _spectra
from jasgd.gossip import _topology


def row_sums(topology: _topology.Topology) -> np.ndarray:
  r"""The weights that a node gives to its peers and itself: always 1.

  .. math:: \sum_j W_{ij}

  Args:
    topology: Any.

  Returns:
    float64 [num_rounds, num_nodes].

  Examples:
    >>> from jasgd import gossip
    >>> print(gossip.row_sums(gossip.star(4)))
    [[1. 1. 1. 1.]]

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004
  """
  return _sum_over(topology, topology.nodes)


def column_sums(topology: _topology.Topology) -> np.ndarray:
  r"""The weight that each node has with all others: 1 if the mean is kept.

  .. math:: \sum_i W_{ij}

  Args:
    topology: Any.

  Returns:
    float64 [num_rounds, num_nodes].

  Examples:
    >>> from jasgd import gossip
    >>> star = gossip.with_uniform_weights(gossip.star(4))
    >>> print(gossip.column_sums(star))
    [[1.75 0.75 0.75 0.75]]

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004
  """
  return _sum_over(topology, topology.peers)


def is_doubly_stochastic(
  topology: _topology.Topology, tolerance: float = 1e-12
) -> bool:
  r"""Whether columns sum to 1 as rows do, in every round: the mean is kept.

  .. math:: \mathbf{1}^\top W = \mathbf{1}^\top, \quad W \mathbf{1} = \mathbf{1}

  Args:
    topology: Any.
    tolerance: How far a sum may be from 1.

  Returns:
    Whether all are.

  Examples:
    >>> from jasgd import gossip
    >>> star = gossip.star(4)
    >>> gossip.is_doubly_stochastic(star)
    True
    >>> gossip.is_doubly_stochastic(gossip.with_uniform_weights(star))
    False

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004
  """
  sums = np.stack([row_sums(topology), column_sums(topology)])
  return bool((np.abs(sums - 1) <= tolerance).all())


def is_symmetric(topology: _topology.Topology) -> bool:
  r"""Whether peers see each other at the same weight, in every round.

  .. math:: W = W^\top

  Args:
    topology: Any.

  Returns:
    Whether all do.

  Examples:
    >>> from jasgd import gossip
    >>> gossip.is_symmetric(gossip.ring(5))
    True
    >>> gossip.is_symmetric(gossip.exponential(5))
    False

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004
  """
  nodes, peers = topology.nodes, topology.peers
  turned = np.lexsort((nodes, peers, topology.rounds))
  return bool(
    (nodes[turned] == peers).all()
    and (peers[turned] == nodes).all()
    and (topology.weights[turned] == topology.weights).all()
  )


def is_connected(topology: _topology.Topology) -> bool:
  """Whether what any node knows reaches every other, over all rounds.

  Precisely: whether the union of the rounds' graphs, without the edges of
  weight 0, is strongly connected. One round need not be.

  Args:
    topology: Any.

  Returns:
    Whether it is.

  Examples:
    >>> from jasgd import gossip
    >>> gossip.is_connected(gossip.one_peer_hypercube(8))
    True
    >>> gossip.is_connected(gossip.random_matching(8, num_rounds=1))
    False

  References:
    Nedic & Olshevsky, `Distributed Optimization over Time-Varying Directed
    Graphs <https://arxiv.org/abs/1303.2289>`_, 2015
  """
  is_used = topology.weights > 0
  nodes, peers = topology.nodes[is_used], topology.peers[is_used]
  # From node 0 to all, and from all to node 0.
  return _reaches_all(nodes, peers, topology.num_nodes) and _reaches_all(
    peers, nodes, topology.num_nodes
  )


def spectral_gap(topology: _topology.Topology) -> float:
  r"""How much of the disagreement one period takes away, at the least.

  .. math:: 1 - \sigma, \quad \sigma = \| (I - J) W_T \cdots W_2 W_1 \|_2

  J is the matrix of 1 / n, and sigma is the largest factor by which a period of
  T rounds can change :math:`\|x - \bar x\|`. Per round that is
  :math:`\sigma^{1/T}`. It is 1 if all agree after one period, and 0 if some
  never meet.

  Sigma is the second largest *singular value* of the product, if that is doubly
  stochastic. The second largest *modulus of an eigenvalue* is the same number
  where the product is symmetric or circulant, but elsewhere it says only what
  happens in the long run, while sigma holds for every period; and a product of
  symmetric rounds is not symmetric. If columns do not sum to 1, the mean itself
  moves, the deviation may grow at first, and this number may be negative.

  Args:
    topology: Any. Circulant kinds (complete, ring, both exponential ones) cost
      O(n log n), others O(n) per step of Lanczos.

  Returns:
    The gap, from 0 to 1 for doubly stochastic topologies. A single node has 1.

  Raises:
    RuntimeError: if n is above 256 and the gap too small to be found.

  Examples:
    >>> from jasgd import gossip
    >>> print(round(gossip.spectral_gap(gossip.ring(16)), 4))
    0.0507
    >>> print(round(gossip.spectral_gap(gossip.hypercube(16)), 4))
    0.4
    >>> print(round(gossip.spectral_gap(gossip.one_peer_hypercube(16)), 4))
    1.0

  References:
    Boyd et al., `Randomized Gossip Algorithms
    <https://doi.org/10.1109/TIT.2006.874516>`_, 2006; Ying et al., `Exponential
    Graph is Provably Efficient for Decentralized Deep Training
    <https://arxiv.org/abs/2110.13363>`_, 2021
  """
  if topology.num_nodes == 1:
    return 1.0
  moduli = _spectra.find_circulant_moduli(topology)
  if moduli is not None:
    return float(1 - moduli.prod(axis=0)[1:].max())

  def multiply(values: np.ndarray) -> np.ndarray:
    for index in range(topology.num_rounds):
      values = topology.pull(values, index)
    values = values - values.mean(axis=0)
    for index in reversed(range(topology.num_rounds)):
      values = topology.push(values, index)
    return values

  square = _spectra.find_largest_eigenvalue(multiply, topology.num_nodes)
  return float(1 - np.sqrt(max(square, 0)))


def _sum_over(topology: _topology.Topology, ends: np.ndarray) -> np.ndarray:
  """The weights at one end of the edges, plus own ones: [rounds, nodes]."""
  own = topology.own_weights
  slots = topology.rounds * topology.num_nodes + ends
  return own + np.bincount(slots, topology.weights, own.size).reshape(own.shape)


def _reaches_all(
  sources: np.ndarray, targets: np.ndarray, num_nodes: int
) -> bool:
  """Whether every node is reached from node 0: a search, breadth first."""
  targets = targets[np.argsort(sources, kind='stable')]
  counts = np.bincount(sources, minlength=num_nodes)
  stops = np.cumsum(counts)
  is_reached = np.zeros(num_nodes, dtype=bool)
  is_reached[0] = True
  front = np.array([0])
  while len(front):
    # The edges of all nodes of the front: for each, a range that ends at stops.
    sizes = counts[front]
    ends = np.cumsum(sizes)
    edges = np.arange(sizes.sum()) + np.repeat(stops[front] - ends, sizes)
    front = np.unique(targets[edges])
    front = front[~is_reached[front]]
    is_reached[front] = True
  return bool(is_reached.all())
