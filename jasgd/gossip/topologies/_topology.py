"""Topologies: which peers a node has in which round, and with what weights.

A topology is stored as a list of edges: a star of 100,000 nodes has 200,000
edges, while a matrix would have 10^10 entries.
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any, ClassVar, ParamSpec

import numpy as np
import numpy.typing as npt

from jasgd import protocols

# Rounding errors that a sum of weights may have.
_ROUNDING = 1e-9

_P = ParamSpec('_P')


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Topology(protocols.Configurable):
  r"""Rounds of weighted edges; after the last round the first one follows.

  Edge e gives the node `nodes[e]` the peer `peers[e]` with weight `weights[e]`.
  A node's own weight is 1 minus the weights of its peers. In matrix form, with
  :math:`W_{ij}` the weight of peer j for node i, the rows of W sum to 1. There
  are two ways to use it:

  - pull, :math:`x \leftarrow W x`: a node averages its own value and those that
    it reads from its peers. All nodes agree in the limit; they agree on the
    mean if the columns of W sum to 1 too.
  - push, :math:`x \leftarrow W^\top x`: a node splits its value into shares and
    sends them to its peers. This keeps the sum for every graph; push-sum is
    based on it.

  Attributes:
    kind: Name of the kind, for messages and reports.
    num_nodes: Number of nodes, n; nodes have the numbers 0 to n - 1.
    starts: int64 [num_rounds + 1]; the edges of round r are those from
      `starts[r]` up to `starts[r + 1]`.
    nodes: int32 [num_edges].
    peers: int32 [num_edges]; within a round, edges are in ascending order of
      (node, peer), each occurs once, and no node is its own peer.
    weights: float64 [num_edges], at least 0; the weights of a node's peers sum
      to at most 1.

  Raises:
    ValueError: if the arrays break these rules.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> ring = topologies.ring(3)
    >>> ring
    Topology(ring, num_nodes=3, num_rounds=1, max_degree=2)
    >>> print(ring.nodes, ring.peers, ring.weights.round(2))
    [0 0 1 1 2 2] [1 2 0 2 0 1] [0.33 0.33 0.33 0.33 0.33 0.33]

  References:
    Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019
  """

  name: ClassVar[str] = 'topology'

  kind: str
  num_nodes: int
  starts: np.ndarray
  nodes: np.ndarray
  peers: np.ndarray
  weights: np.ndarray
  # Config of the factory call that made this topology, set by `register`. None
  # in a copy with other weights: `dataclasses.replace` does not pass it on.
  _config: dict[str, Any] | None = dataclasses.field(default=None, init=False)

  def __post_init__(self) -> None:
    protocols.check_count('num_nodes', self.num_nodes)
    for name, dtype in (
      ('starts', np.int64),
      ('nodes', np.int32),
      ('peers', np.int32),
      ('weights', np.float64),
    ):
      given = np.asarray(getattr(self, name))
      array = given.astype(dtype, copy=False).view()
      if name != 'weights' and not np.array_equal(array, given):
        raise ValueError(f'{name} must be {dtype.__name__}, got {given}.')
      array.setflags(write=False)
      object.__setattr__(self, name, array)
    _check_starts(self)
    _check_edges(self)
    _check_weights(self)

  def arguments(self) -> dict[str, Any]:
    """All fields, with the arrays as lists."""
    return {
      'kind': self.kind,
      'num_nodes': int(self.num_nodes),
      'starts': self.starts.tolist(),
      'nodes': self.nodes.tolist(),
      'peers': self.peers.tolist(),
      'weights': self.weights.tolist(),
    }

  def to_config(self) -> dict[str, Any]:
    """Kind and arguments if a kind's function made it; else all edges.

    Examples:
      >>> from jasgd.gossip import topologies
      >>> topologies.ring(8).to_config()
      {'name': 'ring', 'arguments': {'num_nodes': 8}}
    """
    return self._config or super().to_config()

  def __repr__(self) -> str:
    return (
      f'Topology({self.kind}, num_nodes={self.num_nodes}, '
      f'num_rounds={self.num_rounds}, max_degree={self.max_degree})'
    )

  @property
  def num_rounds(self) -> int:
    """Number of rounds in one period; 1 if the topology is static."""
    return len(self.starts) - 1

  @functools.cached_property
  def rounds(self) -> np.ndarray:
    """The round of each edge: int64 [num_edges]."""
    return np.repeat(np.arange(self.num_rounds), np.diff(self.starts))

  @functools.cached_property
  def degrees(self) -> np.ndarray:
    """Number of peers of each node: int64 [num_rounds, num_nodes]."""
    return self._count(None).astype(np.int64)

  @functools.cached_property
  def own_weights(self) -> np.ndarray:
    """Weight of each node for itself: float64 [num_rounds, num_nodes]."""
    return np.maximum(1 - self._count(self.weights), 0)

  @property
  def max_degree(self) -> int:
    """Largest number of peers of any node in any round."""
    return int(self.degrees.max())

  def matrix(self, round_index: int = 0) -> np.ndarray:
    """The matrix W of one round: float64 [n, n]; its rows sum to 1."""
    round_index, edges = self._edges(round_index)
    matrix = np.diag(self.own_weights[round_index])
    matrix[self.nodes[edges], self.peers[edges]] = self.weights[edges]
    return matrix

  def peer_table(self, round_index: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One round as rectangular arrays, for indexing.

    Args:
      round_index: Number of the round; it may be beyond the first period.

    Returns:
      The peers, int32 [num_nodes, degree], and their weights, float64 of the
      same shape, with the largest degree of this round. The row of a node with
      fewer peers is filled up with the node itself, at weight 0.
    """
    round_index, edges = self._edges(round_index)
    degrees = self.degrees[round_index]
    own = np.arange(self.num_nodes, dtype=np.int32)
    peers = np.repeat(own[:, None], degrees.max(), axis=1)
    weights = np.zeros(peers.shape)
    # Edges are sorted by node, and a mask is filled row by row.
    is_peer = np.arange(peers.shape[1]) < degrees[:, None]
    peers[is_peer] = self.peers[edges]
    weights[is_peer] = self.weights[edges]
    return peers, weights

  def pull(self, values: np.ndarray, round_index: int = 0) -> np.ndarray:
    """Computes W x without the matrix: each node averages over its peers.

    Args:
      values: Values of the nodes, [num_nodes, ...].
      round_index: Number of the round; it may be beyond the first period.

    Returns:
      float64, of the same shape.
    """
    round_index, edges = self._edges(round_index)
    return self._mix(round_index, edges, self.nodes, self.peers, values)

  def push(self, values: np.ndarray, round_index: int = 0) -> np.ndarray:
    """Computes W' x without the matrix: each node sends shares to its peers.

    Args:
      values: Values of the nodes, [num_nodes, ...].
      round_index: Number of the round; it may be beyond the first period.

    Returns:
      float64, of the same shape and with the same sum.
    """
    round_index, edges = self._edges(round_index)
    return self._mix(round_index, edges, self.peers, self.nodes, values)

  def _edges(self, round_index: int) -> tuple[int, slice]:
    """The round's number within the period, and the slice of its edges."""
    round_index = protocols.check_count('round_index', round_index, 0)
    round_index %= self.num_rounds
    start, stop = self.starts[round_index : round_index + 2]
    return round_index, slice(start, stop)

  def _count(self, weights: np.ndarray | None) -> np.ndarray:
    """Number of edges, or sum of weights, of each node in each round."""
    shape = (self.num_rounds, self.num_nodes)
    slots = self.rounds * self.num_nodes + self.nodes
    return np.bincount(slots, weights, shape[0] * shape[1]).reshape(shape)

  def _mix(
    self,
    round_index: int,
    edges: slice,
    targets: np.ndarray,
    sources: np.ndarray,
    values: np.ndarray,
  ) -> np.ndarray:
    """Own values plus, at each target, the weighted values of its sources."""
    values = np.asarray(values, np.float64)
    columns = values.reshape(self.num_nodes, -1).T
    own = self.own_weights[round_index]
    weights, sources = self.weights[edges], sources[edges]
    mixed = [
      own * column
      + np.bincount(targets[edges], weights * column[sources], self.num_nodes)
      for column in columns
    ]
    return np.stack(mixed, axis=-1).reshape(values.shape)


def _check_starts(topology: Topology) -> None:
  starts, num_edges = topology.starts, len(topology.nodes)
  is_valid = (
    len(starts) >= 2
    and starts[0] == 0
    and starts[-1] == num_edges
    and (np.diff(starts) >= 0).all()
  )
  if not is_valid:
    raise ValueError(
      f'starts must ascend from 0 to num_edges={num_edges}, got {starts}.'
    )


def _check_edges(topology: Topology) -> None:
  n, nodes, peers = topology.num_nodes, topology.nodes, topology.peers
  if not nodes.shape == peers.shape == topology.weights.shape:
    raise ValueError(
      'nodes, peers and weights must have one shape, got '
      f'{nodes.shape}, {peers.shape} and {topology.weights.shape}.'
    )
  for name, array in (('nodes', nodes), ('peers', peers)):
    if len(array) and not 0 <= array.min() <= array.max() < n:
      raise ValueError(
        f'{name} must be from 0 to num_nodes - 1 = {n - 1}, got '
        f'{array.min()} to {array.max()}.'
      )
  if (nodes == peers).any():
    node = nodes[nodes == peers][0]
    raise ValueError(
      f'A node must not be its own peer, got the edge ({node}, {node}).'
    )
  keys = (topology.rounds * n + nodes) * n + peers
  if (np.diff(keys) <= 0).any():
    edge = np.flatnonzero(np.diff(keys) <= 0)[0] + 1
    raise ValueError(
      'Within a round, edges must ascend by (node, peer), each once; got '
      f'({nodes[edge - 1]}, {peers[edge - 1]}) before '
      f'({nodes[edge]}, {peers[edge]}).'
    )


def _check_weights(topology: Topology) -> None:
  weights = topology.weights
  if not (weights >= 0).all():  # False for NaN too.
    raise ValueError(
      f'weights must be at least 0, got {weights[~(weights >= 0)][0]}.'
    )
  totals = topology._count(weights)
  if (totals > 1 + _ROUNDING).any():
    round_index, node = np.argwhere(totals > 1 + _ROUNDING)[0]
    raise ValueError(
      'The weights of the peers of one node must sum to at most 1, got '
      f'{totals[round_index, node]} for node {node} in round {round_index}.'
    )


# --- Weights.


def from_peers(
  peers: npt.ArrayLike,
  weights: npt.ArrayLike | None = None,
  kind: str = 'custom',
) -> Topology:
  """Builds a topology of your own from a table of peers.

  Args:
    peers: Integers [num_rounds, num_nodes, degree], or without the first axis
      for a static topology. A row of a node with fewer peers is filled up with
      the node's own number.
    weights: Weights of the peers, of the same shape. By default a node and its
      peers have equal weights (`with_uniform_weights`).
    kind: Name of the kind, for messages and reports.

  Returns:
    The topology.

  Raises:
    ValueError: if the shape or a peer is out of range, a node has the same peer
      twice, or weights are below 0 or sum to more than 1.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> chain = topologies.from_peers([[0, 1], [0, 2], [1, 2]])
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
  topology = Topology(
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


def with_uniform_weights(topology: Topology) -> Topology:
  r"""Gives a node and its d peers equal weights.

  .. math:: W_{ij} = 1 / (1 + d_i)

  A node needs to know only its own degree, and the graph may be directed. The
  columns of W sum to 1 if all in-degrees and out-degrees are equal. On a star
  they do not, and the mean drifts towards the hub.

  Args:
    topology: Topology with the edges to weight.

  Returns:
    The same edges with these weights.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> star = topologies.with_uniform_weights(topologies.star(3))
    >>> print(star.matrix().round(2))
    [[0.33 0.33 0.33]
     [0.5  0.5  0.  ]
     [0.5  0.   0.5 ]]

  References:
    Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019
  """
  degrees = topology.degrees[topology.rounds, topology.nodes]
  return dataclasses.replace(topology, weights=1 / (1 + degrees))


def with_metropolis_weights(topology: Topology) -> Topology:
  r"""Gives each edge the Metropolis weight, equal at both of its ends.

  .. math:: W_{ij} = 1 / (1 + \max(d_i, d_j))

  W is symmetric, hence doubly stochastic: the mean is kept on every undirected
  graph, even if degrees differ. With equal degrees these are the uniform
  weights.

  Args:
    topology: Topology with the edges to weight; undirected in each round.

  Returns:
    The same edges with these weights.

  Raises:
    ValueError: if an edge has no reverse edge in its round.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> chain = topologies.from_peers([[0, 1], [0, 2], [1, 2]])
    >>> print(topologies.with_metropolis_weights(chain).matrix().round(2))
    [[0.67 0.33 0.  ]
     [0.33 0.33 0.33]
     [0.   0.33 0.67]]

  References:
    Xiao et al., `Distributed Average Consensus with Least-Mean-Square Deviation
    <https://stanford.edu/~boyd/papers/lms_consensus.html>`_, 2007
  """
  rounds, nodes, peers = topology.rounds, topology.nodes, topology.peers
  # Sorted by (round, peer, node), an undirected graph is its own reverse.
  order = np.lexsort((nodes, peers, rounds))
  is_one_way = (nodes[order] != peers) | (peers[order] != nodes)
  if is_one_way.any():
    edge = np.flatnonzero(is_one_way)[0]
    raise ValueError(
      'Metropolis weights need an undirected graph: in round '
      f'{rounds[edge]} of {topology!r}, an edge of node {nodes[edge]} or of a '
      'peer of it has no reverse edge. Use with_uniform_weights; push-sum '
      'finds the mean with them.'
    )
  degrees = topology.degrees
  largest = np.maximum(degrees[rounds, nodes], degrees[rounds, peers])
  return dataclasses.replace(topology, weights=1 / (1 + largest))


def with_constant_weights(topology: Topology, weight: float) -> Topology:
  r"""Gives every edge the same weight.

  .. math:: W = I - \beta L

  L is the Laplacian of the graph. With one peer per node this is the gossip of
  Jin et al., :math:`x_i \leftarrow (1 - \beta) x_i + \beta x_j`.

  Args:
    topology: Topology with the edges to weight.
    weight: Weight of an edge, beta, from 0 to 1 / max_degree.

  Returns:
    The same edges with this weight.

  Raises:
    ValueError: if the weight is out of range.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> pair = topologies.with_constant_weights(topologies.ring(2), 0.25)
    >>> print(pair.matrix())
    [[0.75 0.25]
     [0.25 0.75]]

  References:
    Xiao & Boyd, `Fast Linear Iterations for Distributed Averaging
    <https://doi.org/10.1016/j.sysconle.2004.02.022>`_, 2004; Jin et al., `How
    to scale distributed deep learning? <https://arxiv.org/abs/1611.04581>`_,
    2016
  """
  weight = protocols.check_number('weight', weight, 0, 1)
  if weight * topology.max_degree > 1:
    raise ValueError(
      f'weight must be at most 1 / max_degree = 1 / {topology.max_degree}, got '
      f'{weight}.'
    )
  return dataclasses.replace(
    topology, weights=np.full(len(topology.nodes), weight)
  )


# --- Kinds by name.

# Functions of all kinds by name, filled by `register`.
KINDS: dict[str, Callable[..., Topology]] = {}


def register(factory: Callable[_P, Topology]) -> Callable[_P, Topology]:
  """Decorates the function of a kind of topology, whose name is the kind's.

  `make_topology` finds the function by its name. The topology that it returns
  stores name and arguments for `to_config`, instead of all edges.

  Args:
    factory: Function whose arguments are whole numbers.

  Returns:
    The function, with the same signature.
  """
  signature = inspect.signature(factory)

  @functools.wraps(factory)
  def make(*args: _P.args, **kwargs: _P.kwargs) -> Topology:
    topology = factory(*args, **kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = {name: int(value) for name, value in bound.arguments.items()}
    config = {'name': factory.__name__, 'arguments': arguments}
    # The dataclass is frozen; this is the end of its construction.
    object.__setattr__(topology, '_config', config)
    return topology

  KINDS[factory.__name__] = make
  return make


def make_topology(kind: str, num_nodes: int, **arguments: Any) -> Topology:
  """Builds a topology from the name of its kind.

  Args:
    kind: Name of the kind, one of `KINDS`.
    num_nodes: Number of nodes.
    **arguments: Further arguments of the kind, such as `num_rounds`, `degree`
      or `seed`.

  Returns:
    The topology.

  Raises:
    ValueError: if the name is unknown, or the arguments do not fit the kind.

  Examples:
    >>> from jasgd.gossip import topologies
    >>> topologies.make_topology('random_regular', 16, degree=3, seed=1)
    Topology(random_regular, num_nodes=16, num_rounds=1, max_degree=3)

  References:
    Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019
  """
  protocols.check_choice('topology', kind, KINDS)
  factory = KINDS[kind]
  signature = inspect.signature(factory)
  try:
    signature.bind(num_nodes, **arguments)
  except TypeError as error:
    parameters = ', '.join(signature.parameters)
    raise ValueError(
      f'Topology {kind!r} takes ({parameters}), got {arguments}: {error}.'
    ) from None
  return factory(num_nodes, **arguments)
