"""Properties of topologies: symmetry, connectedness, rate of agreement."""

import numpy as np

from jasgd import protocols
from jasgd.gossip.topologies import _draws
from jasgd.gossip.topologies import _topology

# Nodes up to which the spectral gap is computed, from a matrix of n x n.
_MAX_DENSE = 2048


def is_doubly_stochastic(
  topology: _topology.Topology, tolerance: float = 1e-12
) -> bool:
  r"""Whether the columns of W sum to 1 in every round, which keeps the mean.

  .. math:: \mathbf{1}^\top W = \mathbf{1}^\top, \quad W \mathbf{1} = \mathbf{1}

  Args:
    topology: Topology to check; the rows of its matrices always sum to 1.
    tolerance: Largest allowed distance of a sum from 1.

  Returns:
    Whether the columns of all rounds sum to 1.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> star = topologies.star(4)
    >>> topologies.is_doubly_stochastic(star)
    True
    >>> topologies.is_doubly_stochastic(topologies.with_uniform_weights(star))
    False

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004
  """
  own = topology.own_weights
  slots = topology.rounds * topology.num_nodes + topology.peers
  sums = own.ravel() + np.bincount(slots, topology.weights, own.size)
  return bool((np.abs(sums - 1) <= tolerance).all())


def is_symmetric(topology: _topology.Topology) -> bool:
  r"""Whether the matrix W of every round is symmetric.

  .. math:: W = W^\top

  Args:
    topology: Topology to check.

  Returns:
    Whether all rounds are symmetric.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topologies.is_symmetric(topologies.ring(5))
    True
    >>> topologies.is_symmetric(topologies.exponential(5))
    False

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004
  """
  nodes, peers = topology.nodes, topology.peers
  # Sorted by (round, peer, node), a symmetric topology is its own transpose.
  order = np.lexsort((nodes, peers, topology.rounds))
  return bool(
    (nodes[order] == peers).all()
    and (peers[order] == nodes).all()
    and (topology.weights[order] == topology.weights).all()
  )


def is_connected(topology: _topology.Topology) -> bool:
  """Whether a value can spread from every node to all others.

  That is: whether the union of the graphs of all rounds, without the edges of
  weight 0, is strongly connected. A single round need not be.

  Args:
    topology: Topology to check.

  Returns:
    Whether the union is strongly connected.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topologies.is_connected(topologies.one_peer_hypercube(8))
    True
    >>> topologies.is_connected(topologies.random_matching(8, num_rounds=1))
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
  r"""The smallest fraction by which one period reduces the disagreement.

  .. math:: 1 - \sigma, \quad \sigma = \| (I - J) W_T \cdots W_2 W_1 \|_2

  J is the matrix with all entries 1 / n. Sigma is the largest factor by which
  the T rounds of a period can change :math:`\|x - \bar x\|`; per round that is
  :math:`\sigma^{1/T}`. The gap is 1 if all nodes agree after one period, and 0
  if some nodes never exchange anything.

  Sigma is a *singular value*, and so holds for every period. The second largest
  modulus of an *eigenvalue* of the product describes only the limit of many
  periods; both are equal if the product is symmetric or circulant. If the
  columns of W do not sum to 1, the mean itself moves and the gap may be
  negative.

  Args:
    topology: Topology of at most 2,048 nodes.

  Returns:
    The gap, from 0 to 1 for doubly stochastic topologies; 1 for a single node.

  Raises:
    ValueError: if there are more nodes.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> print(round(topologies.spectral_gap(topologies.ring(16)), 4))
    0.0507
    >>> print(round(topologies.spectral_gap(topologies.hypercube(16)), 4))
    0.4

  References:
    Boyd et al., `Randomized Gossip Algorithms
    <https://doi.org/10.1109/TIT.2006.874516>`_, 2006; Ying et al., `Exponential
    Graph is Provably Efficient for Decentralized Deep Training
    <https://arxiv.org/abs/2110.13363>`_, 2021
  """
  if topology.num_nodes > _MAX_DENSE:
    raise ValueError(
      f'spectral_gap needs at most {_MAX_DENSE} nodes, since it computes with '
      f'an n x n matrix, got {topology!r}. The docstrings of most kinds give '
      'their gap in closed form.'
    )
  product = topology.matrix(0)
  for index in range(1, topology.num_rounds):
    product = topology.matrix(index) @ product
  deviation = product - product.mean(axis=0)
  return float(1 - np.linalg.norm(deviation, 2))


def consensus_rate(peers: str, num_nodes: int, weight: float = 0.5) -> float:
  r"""Factor of the mean squared deviation in one round of random peers.

  .. math::

    \mathrm{E} \|x_{t+1} - \bar x_{t+1}\|^2 = \rho \, \|x_t - \bar x_t\|^2,
    \quad x_i \leftarrow (1 - \beta) x_i + \beta x_{j_i}

  =====================  ===============================  ==================
  peers                  rho, with b for beta             b = 1/2
  =====================  ===============================  ==================
  `'independent'`        (1-b)^2 + b^2 - b^2/n            1/2 - 1/(4n)
  `'permutation'`        (1-b)^2 + b^2                    1/2
  `'matching'`, n even   (1-b)^2 + b^2 - 2b(1-b)/(n-1)    1/2 - 1/(2(n-1))
  `'matching'`, n odd    (1-b)^2 + b^2                    1/2
  =====================  ===============================  ==================

  These are equalities, for every x. They hold for peers as `draw_peers` draws
  them: an `independent` draw may be the node itself, and a `permutation` may
    map nodes to themselves. Push-gossip of Jin et al. is slower: with many
    nodes its factor is 1 - 1/e, since 1/e of the nodes receive nothing in a
    round.

  Args:
    peers: Kind of draw, as in `draw_peers`.
    num_nodes: Number of nodes, n, at least 1.
    weight: Weight of the peer, beta, from 0 to 1.

  Returns:
    The factor rho; 0 for a single node.

  Raises:
    ValueError: if the name is unknown or a number is out of range.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topologies.consensus_rate('independent', 16)
    0.484375
    >>> topologies.consensus_rate('permutation', 16)
    0.5
    >>> print(round(topologies.consensus_rate('matching', 16), 4))
    0.4667

  References:
    Boyd et al., `Randomized Gossip Algorithms
    <https://doi.org/10.1109/TIT.2006.874516>`_, 2006; Jin et al., `How to scale
    distributed deep learning? <https://arxiv.org/abs/1611.04581>`_, 2016
  """
  protocols.check_choice('peers', peers, _draws.PEERS)
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  weight = protocols.check_number('weight', weight, 0, 1)
  if num_nodes == 1:
    return 0.0
  # A round is x <- W x with a random W. With J the matrix of 1 / n,
  #   E |(I - J) W x|^2 = x' S x,   S = E[W' (I - J) W],
  # and S is rho (I - J) here, since all nodes are equal in distribution.
  # W = (1 - b) I + b P, where P has a 1 in row i for the peer of i. Then
  #   W'W = (1 - b)^2 I + b (1 - b) (P + P') + b^2 P'P.
  # E P'P is diagonal with the mean number of nodes that draw j, which is 1: I.
  # E P is J where a peer is uniform over all nodes. So on mean-zero x,
  #   E W'W = (1 - b)^2 + b^2.
  squares = (1 - weight) ** 2 + weight**2
  if peers == 'independent':
    # The motion of the mean is no deviation. W'1 is (1 - b) + b c, with c the
    # number of draws of each node: multinomial, of covariance I - J. So
    #   E W'JW = E (W'1)(W'1)' / n = J + b^2 (I - J) / n.
    return squares - weight**2 / num_nodes
  # W is doubly stochastic, W'JW = J: there is nothing to subtract.
  if peers == 'matching' and num_nodes % 2 == 0:
    # No node is its own peer, and all others are equally likely:
    #   E P = (1 1' - I) / (n - 1), which is -1 / (n - 1) on mean-zero x.
    # With n odd, a node is idle with probability 1 / n, and E P = J again.
    squares -= 2 * weight * (1 - weight) / (num_nodes - 1)
  return squares


def _reaches_all(
  sources: np.ndarray, targets: np.ndarray, num_nodes: int
) -> bool:
  """Whether every node is reached from node 0, by a breadth-first search."""
  targets = targets[np.argsort(sources, kind='stable')]
  counts = np.bincount(sources, minlength=num_nodes)
  stops = np.cumsum(counts)
  is_reached = np.zeros(num_nodes, dtype=bool)
  is_reached[0] = True
  front = np.array([0])
  while len(front):
    # Edges of all nodes of the front: for each node, a range up to its stop.
    sizes = counts[front]
    ends = np.cumsum(sizes)
    edges = np.arange(sizes.sum()) + np.repeat(stops[front] - ends, sizes)
    front = np.unique(targets[edges])
    front = front[~is_reached[front]]
    is_reached[front] = True
  return bool(is_reached.all())
