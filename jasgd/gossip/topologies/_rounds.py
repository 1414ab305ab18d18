"""The time-varying kinds: in each round, a node has at most one peer."""

import numpy as np

from jasgd import protocols
from jasgd.gossip.topologies import _draws
from jasgd.gossip.topologies import _static
from jasgd.gossip.topologies import _topology


@_topology.register
def one_peer_exponential(num_nodes: int) -> _topology.Topology:
  r"""In round k, node i has the peer i + 2^k, modulo n.

  .. math:: W^{(k)}_{i, i + 2^k \bmod n} = 1 / 2

  If n is a power of 2, all nodes agree exactly after the log2(n) rounds of a
  period: each round doubles the number of nodes that a value has reached.
  Otherwise a period leaves at most
  :math:`\max_j |\sin(2^T \pi j / n) / (2^T \sin(\pi j / n))|` of the
  disagreement.

  Args:
    num_nodes: Number of nodes, n, at least 1.

  Returns:
    A directed, doubly stochastic topology of T rounds, with T the logarithm
    log2(n), rounded up.

  Raises:
    ValueError: if num_nodes is below 1.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topology = topologies.one_peer_exponential(4)
    >>> x = topology.pull([0.0, 4.0, 0.0, 0.0], 0)
    >>> print(x, topology.pull(x, 1))
    [2. 2. 0. 0.] [1. 1. 1. 1.]

  References:
    Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019; Ying et al., `Exponential Graph
    is Provably Efficient for Decentralized Deep Training
    <https://arxiv.org/abs/2110.13363>`_, 2021
  """
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  peers = (np.arange(num_nodes) + _powers_of_two(num_nodes)) % num_nodes
  return _one_peer(peers, 'one_peer_exponential')


@_topology.register
def one_peer_hypercube(num_nodes: int) -> _topology.Topology:
  r"""In round k, a node's peer is the one whose number differs in bit k.

  .. math:: W^{(k)}_{i, i \oplus 2^k} = 1 / 2

  All nodes agree exactly after the log2(n) rounds of a period. Every round is a
  matching, so that nodes can exchange in pairs.

  Args:
    num_nodes: Number of nodes, n, a power of 2.

  Returns:
    A symmetric topology of log2(n) rounds.

  Raises:
    ValueError: if the size is not a power of 2.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topology = topologies.one_peer_hypercube(4)
    >>> x = topology.pull([0.0, 4.0, 0.0, 0.0], 0)
    >>> print(x, topology.pull(x, 1))
    [2. 2. 0. 0.] [1. 1. 1. 1.]

  References:
    Ying et al., `Exponential Graph is Provably Efficient for Decentralized Deep
    Training <https://arxiv.org/abs/2110.13363>`_, 2021
  """
  num_nodes = _static.check_power_of_two('one_peer_hypercube', num_nodes)
  peers = np.arange(num_nodes) ^ _powers_of_two(num_nodes)
  if num_nodes == 1:
    peers = np.zeros_like(peers)
  return _one_peer(peers, 'one_peer_hypercube')


@_topology.register
def random_independent(
  num_nodes: int, num_rounds: int = 64, *, seed: int = 0
) -> _topology.Topology:
  r"""In each round, every node draws its peer from all nodes, itself included.

  .. math:: x_i \leftarrow (x_i + x_{j_i}) / 2

  The gossip of Jin et al. The columns of W do not sum to 1, so that the mean
  takes a random walk. `draw_peers` draws rounds that never repeat, and
  `consensus_rate` is the rate at which the nodes agree.

  Args:
    num_nodes: Number of nodes, n, at least 1.
    num_rounds: Number of rounds that are drawn; then they repeat.
    seed: Seed of the draws, from 0 to 2^64 - 1.

  Returns:
    A directed topology with rows that sum to 1.

  Raises:
    ValueError: if a number is out of range.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topologies.random_independent(16, num_rounds=10, seed=1)
    Topology(random_independent, num_nodes=16, num_rounds=10, max_degree=1)

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016
  """
  peers = _draws.draw_peers('independent', num_nodes, num_rounds, seed=seed)
  return _one_peer(peers, 'random_independent')


@_topology.register
def random_matching(
  num_nodes: int, num_rounds: int = 64, *, seed: int = 0
) -> _topology.Topology:
  r"""In each round, the nodes meet in random pairs.

  .. math:: x_i, x_j \leftarrow (x_i + x_j) / 2

  With an odd number of nodes one of them is idle. A few rounds may leave the
  graph unconnected; check with `is_connected`.

  Args:
    num_nodes: Number of nodes, n, at least 1.
    num_rounds: Number of rounds that are drawn; then they repeat.
    seed: Seed of the draws, from 0 to 2^64 - 1.

  Returns:
    A symmetric topology.

  Raises:
    ValueError: if a number is out of range.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topology = topologies.random_matching(5, num_rounds=10, seed=1)
    >>> print(topology.matrix(3))
    [[0.5 0.  0.5 0.  0. ]
     [0.  1.  0.  0.  0. ]
     [0.5 0.  0.5 0.  0. ]
     [0.  0.  0.  0.5 0.5]
     [0.  0.  0.  0.5 0.5]]

  References:
    Lian et al., `Asynchronous Decentralized Parallel Stochastic Gradient
    Descent <https://arxiv.org/abs/1710.06952>`_, 2018
  """
  peers = _draws.draw_peers('matching', num_nodes, num_rounds, seed=seed)
  return _one_peer(peers, 'random_matching')


@_topology.register
def random_permutation(
  num_nodes: int, num_rounds: int = 64, *, seed: int = 0
) -> _topology.Topology:
  r"""In each round, every node is the peer of exactly one node.

  .. math:: x_i \leftarrow (x_i + x_{\sigma(i)}) / 2

  A node that the permutation maps to itself is idle.

  Args:
    num_nodes: Number of nodes, n, at least 1.
    num_rounds: Number of rounds that are drawn; then they repeat.
    seed: Seed of the draws, from 0 to 2^64 - 1.

  Returns:
    A directed, doubly stochastic topology.

  Raises:
    ValueError: if a number is out of range.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topologies.random_permutation(16, num_rounds=10, seed=1)
    Topology(random_permutation, num_nodes=16, num_rounds=10, max_degree=1)

  References:
    Boyd et al., `Randomized Gossip Algorithms
    <https://doi.org/10.1109/TIT.2006.874516>`_, 2006
  """
  peers = _draws.draw_peers('permutation', num_nodes, num_rounds, seed=seed)
  return _one_peer(peers, 'random_permutation')


def _one_peer(peers: np.ndarray, kind: str) -> _topology.Topology:
  """The topology of a table of peers, [num_rounds, num_nodes]."""
  return _topology.from_peers(peers[:, :, None], kind=kind)


def _powers_of_two(num_nodes: int) -> np.ndarray:
  """The powers of 2 below n, one per round; a single node has one round too."""
  num_rounds = max(1, (num_nodes - 1).bit_length())
  return 2 ** np.arange(num_rounds)[:, None]
