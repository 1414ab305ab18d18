r"""How fast nodes agree, in mean square: exact factors for random rounds.

One round is x <- W x, with W drawn anew each time. The disagreement is
|(I - J) x|^2, with J the matrix of 1 / n; one round makes its mean

  E |(I - J) W x|^2 = x' S x,   S = E[W' (I - J) W].

S 1 = 0, so only the mean-zero part of x counts, and the largest eigenvalue of
S is the factor that no x exceeds. Where all nodes are equal in distribution, S
is a multiple of I - J: the factor is the same, and exact, for all x.
"""

import numpy as np

from jasgd.gossip import _checks
from jasgd.gossip import _draws
from jasgd.gossip import _spectra
from jasgd.gossip import _topology


def consensus_rate(peers: str, num_nodes: int, weight: float = 0.5) -> float:
  r"""The factor of the mean squared disagreement per round of random peers.

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
  them: `independent` includes the node itself, `permutation` may leave nodes in
  place. With an odd number of nodes one of a `matching` is idle, and that
  makes up exactly for what pairs are better than permutations.

  Args:
    peers: How peers are drawn, as in `draw_peers`.
    num_nodes: n, at least 1.
    weight: beta, from 0 to 1.

  Returns:
    rho; 0 for a single node, which always agrees.

  Raises:
    ValueError: if the name is unknown or a number is out of range.

  Examples:
    >>> from jasgd import gossip
    >>> gossip.consensus_rate('independent', 16)
    0.484375
    >>> gossip.consensus_rate('permutation', 16)
    0.5
    >>> print(round(gossip.consensus_rate('matching', 16), 4))
    0.4667

  References:
    Boyd et al., `Randomized Gossip Algorithms
    <https://doi.org/10.1109/TIT.2006.874516>`_, 2006; Jin et al., `How to scale
    distributed deep learning? <https://arxiv.org/abs/1611.04581>`_, 2016
  """
  _checks.check_choice('peers', peers, _draws.PEERS)
  num_nodes = _checks.check_count('num_nodes', num_nodes)
  weight = _checks.check_weight(weight)
  if num_nodes == 1:
    return 0.0
  # W = (1 - b) I + b P, where P has a 1 in row i for the peer of i. Then
  #   W'W = (1 - b)^2 I + b (1 - b) (P + P') + b^2 P'P.
  # E P'P is diagonal with the mean number of nodes that draw j, which is 1: I.
  # E P is J where a peer is uniform over all nodes. So on mean-zero x,
  #   E W'W = (1 - b)^2 + b^2.
  squares = (1 - weight) ** 2 + weight**2
  if peers == 'independent':
    # The mean moves, and that motion is no disagreement. W'1 is (1 - b) + b c,
    # with c how often each node is drawn: multinomial, of covariance I - J. So
    #   E W'JW = E (W'1)(W'1)' / n = J + b^2 (I - J) / n.
    return squares - weight**2 / num_nodes
  # W is doubly stochastic, W'JW = J: nothing to take away.
  if peers == 'matching' and num_nodes % 2 == 0:
    # Nobody is its own peer, and the others are equally likely:
    #   E P = (1 1' - I) / (n - 1), which is -1 / (n - 1) on mean-zero x.
    # With n odd, a node is idle with probability 1 / n, and E P = J again.
    squares -= 2 * weight * (1 - weight) / (num_nodes - 1)
  return squares


def push_consensus_rate(num_nodes: int) -> float:
  r"""The factor of the mean squared disagreement per round of push-gossip.

  .. math::

    x_i \leftarrow \frac{x_i + \sum_{j: s_j = i} x_j}{1 + C_i}

  Every node sends to a target s, drawn from all nodes, itself included, then
  averages its own value with the C that it received. (So does the code of Jin
  et al., where a node that drew itself has its own value at weight 2.) That is
  slower than to pull, which has 1/2: the limit for many nodes is 1 - 1/e, for
  a share of 1/e of them receives nothing.

  Args:
    num_nodes: n, at least 1.

  Returns:
    The factor, exact for every x; 0 for a single node.

  Raises:
    ValueError: if there is no node.

  Examples:
    >>> from jasgd import gossip
    >>> print(round(gossip.push_consensus_rate(2), 4))
    0.4722
    >>> print(round(gossip.push_consensus_rate(100_000), 4))
    0.6321

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016
  """
  n = _checks.check_count('num_nodes', num_nodes)
  if n == 1:
    return 0.0
  # Let x have mean 0 and |x| = 1, m = 1 + C. Given C, those who sent to i are a
  # random set of C nodes; their sum has mean 0 and variance
  # C (n - C) / (n (n - 1)), so that summed over i
  #   A = E|Wx|^2 = E[(1 + C (n - C) / (n - 1)) / m^2]
  #     = (-1 + (n + 2) E[1/m] - 2 E[1/m^2]) / (n - 1).
  # For two nodes with counts C and D (their senders are disjoint), in the same
  # way, the terms i != k of E(1'Wx)^2 sum to -B, with
  #   B = E[(1 + C D) / ((1 + C)(1 + D))] = 1 - 2 E[1/m] + 2 E[1/((1+C)(1+D))].
  # The result is A - (A - B) / n. The means over (C, D), which are multinomial
  # with probabilities 1/n, follow from sum_c binom(n, c) q^c r^(n-c) / (c+1) =
  # P[at least one of n + 1 hits] / ((n + 1) q), and likewise for pairs.
  miss = 1 - 1 / n
  inverse = (1 - miss ** (n + 1)) * n / (n + 1)
  pair = 1 - 2 * miss ** (n + 2) + (1 - 2 / n) ** (n + 2)
  pair *= n**2 / ((n + 1) * (n + 2))
  inverse_square, probability = 0.0, miss**n
  for count in range(min(n, 64) + 1):  # The rest is below 1 / 64!.
    inverse_square += probability / (count + 1) ** 2
    probability *= (n - count) / ((count + 1) * (n - 1))
  a = (-1 + (n + 2) * inverse - 2 * inverse_square) / (n - 1)
  b = 1 - 2 * inverse + 2 * pair
  return a - (a - b) / n


def topology_consensus_rate(topology: _topology.Topology) -> float:
  r"""The same factor for a topology whose rounds come in random order.

  .. math::

    \rho = \lambda_{\max} \Big( \frac{1}{T} \sum_t W_t^\top (I - J) W_t \Big)

  Each time one of the T rounds is drawn, independently. For a static topology
  this is :math:`(1 - \mathrm{gap})^2`. It bounds the mean for every x, and is
  exact for the eigenvector.

  Args:
    topology: Any.

  Returns:
    rho; 0 for a single node.

  Raises:
    RuntimeError: if n is above 256 and rho too near to 1 to be found.

  Examples:
    >>> from jasgd import gossip
    >>> topology = gossip.one_peer_hypercube(8)
    >>> print(round(gossip.topology_consensus_rate(topology), 4))
    0.6667

  References:
    Boyd et al., `Randomized Gossip Algorithms
    <https://doi.org/10.1109/TIT.2006.874516>`_, 2006
  """
  if topology.num_nodes == 1:
    return 0.0
  moduli = _spectra.find_circulant_moduli(topology)
  if moduli is not None:
    return float((moduli**2).mean(axis=0)[1:].max())

  def multiply(values: np.ndarray) -> np.ndarray:
    total = np.zeros_like(values)
    for index in range(topology.num_rounds):
      mixed = topology.pull(values, index)
      total += topology.push(mixed - mixed.mean(axis=0), index)
    return total / topology.num_rounds

  return _spectra.find_largest_eigenvalue(multiply, topology.num_nodes)
