"""Mixing weights: the same graph may be weighted in several ways."""

import dataclasses

import numpy as np
import numpy.typing as npt

from jasgd.gossip import _checks
from jasgd.gossip import _topology


def from_peers(
  peers: npt.ArrayLike,
  weights: npt.ArrayLike | None = None,
  kind: str = 'custom',
) -> _topology.Topology:
  """Builds a topology from a table of peers: your own kind.

  Args:
    peers: Integers [num_rounds, num_nodes, degree], or without the first axis
      for a static topology; a node's own index where it has no peer.
    weights: Of the same shape, the weight of each peer. Left out, a node and
      its peers count the same (`with_uniform_weights`).
    kind: A name, for messages.

  Returns:
    The topology.

  Raises:
    ValueError: if the shape or a peer is out of range, a node has the same peer
      twice, or weights are below 0 or sum to more than 1.

  Examples:
    >>> from jasgd import gossip
    >>> chain = gossip.from_peers([[0, 1], [0, 2], [1, 2]])
    >>> print(chain.matrix().round(2))
    [[0.5  0.5  0.  ]
     [0.33 0.33 0.33]
     [0.   0.5  0.5 ]]

  References:
    Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019
  """
  table = np.asarray(peers)
  if table.ndim == 2:
    table = table[None]
  is_whole = np.issubdtype(table.dtype, np.integer)
  if table.ndim != 3 or not all(table.shape[:2]) or not is_whole:
    raise ValueError(
      'peers must be integers of shape [num_rounds, num_nodes, degree] or '
      f'[num_nodes, degree], got {table.dtype} {np.shape(peers)}.'
    )
  if weights is not None and np.shape(weights) != np.shape(peers):
    raise ValueError(
      f'weights must have the shape of peers, {np.shape(peers)}, got '
      f'{np.shape(weights)}.'
    )
  order = np.argsort(table, axis=-1, kind='stable')
  table = np.take_along_axis(table, order, axis=-1)
  num_nodes = table.shape[1]
  own = np.arange(num_nodes)[:, None]
  is_edge = table != own
  starts = np.append(0, np.cumsum(is_edge.sum((1, 2))))
  nodes = np.broadcast_to(own, table.shape)[is_edge]
  topology = _topology.Topology(
    kind=kind,
    num_nodes=num_nodes,
    starts=starts,
    nodes=nodes,
    peers=table[is_edge],
    weights=np.zeros(len(nodes)),
  )
  if weights is None:
    return with_uniform_weights(topology)
  given = np.asarray(weights, np.float64).reshape(table.shape)
  given = np.take_along_axis(given, order, axis=-1)
  return dataclasses.replace(topology, weights=given[is_edge])


def with_uniform_weights(topology: _topology.Topology) -> _topology.Topology:
  r"""Gives a node and its d peers the same weight.

  .. math:: W_{ij} = 1 / (1 + d_i)

  Needs no knowledge of the others, and works on directed graphs. The columns
  sum to 1 too, if every node is a peer of as many nodes as it has peers, and
  all have equally many; on a star they do not, and the mean drifts towards the
  hub.

  Args:
    topology: Whose edges to weight.

  Returns:
    The same edges with these weights.

  Examples:
    >>> from jasgd import gossip
    >>> print(gossip.with_uniform_weights(gossip.star(3)).matrix().round(2))
    [[0.33 0.33 0.33]
     [0.5  0.5  0.  ]
     [0.5  0.   0.5 ]]

  References:
    Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019
  """
  degrees = topology.degrees[topology.rounds, topology.nodes]
  return dataclasses.replace(topology, weights=1 / (1 + degrees))


def with_metropolis_weights(topology: _topology.Topology) -> _topology.Topology:
  r"""Gives each edge a weight that both of its ends can agree on.

  .. math:: W_{ij} = 1 / (1 + \max(d_i, d_j))

  W is symmetric, hence doubly stochastic: the mean is kept on every undirected
  graph, also where degrees differ. Where they do not, it is the uniform weight.

  Args:
    topology: Whose edges to weight; undirected in each round.

  Returns:
    The same edges with these weights.

  Raises:
    ValueError: if some edge has no counterpart in its round.

  Examples:
    >>> from jasgd import gossip
    >>> chain = gossip.from_peers([[0, 1], [0, 2], [1, 2]])
    >>> print(gossip.with_metropolis_weights(chain).matrix().round(2))
    [[0.67 0.33 0.  ]
     [0.33 0.33 0.33]
     [0.   0.33 0.67]]

  References:
    Xiao et al., `Distributed Average Consensus with Least-Mean-Square Deviation
    <https://stanford.edu/~boyd/papers/lms_consensus.html>`_, 2007
  """
  rounds, nodes, peers = topology.rounds, topology.nodes, topology.peers
  turned = np.lexsort((nodes, peers, rounds))
  is_lone = (nodes[turned] != peers) | (peers[turned] != nodes)
  if is_lone.any():
    edge = np.flatnonzero(is_lone)[0]
    raise ValueError(
      'Metropolis weights need an undirected graph: in round '
      f'{rounds[edge]} of {topology!r}, node {nodes[edge]} or a peer of it has '
      'an edge one way only. Use with_uniform_weights, with push-sum for the '
      'mean.'
    )
  degrees = topology.degrees
  largest = np.maximum(degrees[rounds, nodes], degrees[rounds, peers])
  return dataclasses.replace(topology, weights=1 / (1 + largest))


def with_constant_weights(
  topology: _topology.Topology, weight: float
) -> _topology.Topology:
  r"""Gives every edge the same weight.

  .. math:: W = I - \beta L

  L is the graph's Laplacian. With one peer per node this is the gossip of Jin
  et al., :math:`x_i \leftarrow (1 - \beta) x_i + \beta x_j`.

  Args:
    topology: Whose edges to weight.
    weight: beta, from 0 to 1 / max_degree.

  Returns:
    The same edges with this weight.

  Raises:
    ValueError: if the weight is out of range.

  Examples:
    >>> from jasgd import gossip
    >>> pair = gossip.with_constant_weights(gossip.ring(2), 0.25)
    >>> print(pair.matrix())
    [[0.75 0.25]
     [0.25 0.75]]

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004; Jin et al., `How
    to scale distributed deep learning? <https://arxiv.org/abs/1611.04581>`_,
    2016
  """
  weight = _checks.check_weight(weight)
  if weight * topology.max_degree > 1:
    raise ValueError(
      f'weight must be at most 1 / max_degree = 1 / {topology.max_degree}, got '
      f'{weight}.'
    )
  return dataclasses.replace(
    topology, weights=np.full(len(topology.nodes), weight)
  )
