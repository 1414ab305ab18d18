"""The topology: who has whom for a peer in which round, and at what weight.

It is a list of edges, for a list is as long as there is something to say: a
star of 100,000 nodes has 200,000 entries, where a table of n x degree or a
matrix would have 10^10.
"""

import dataclasses
import functools

import numpy as np

from jasgd.gossip import _checks

# How far above 1 rounding may bring the weights of one node.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Topology:
  r"""Rounds of edges with weights; after the last round comes the first again.

  Edge e says that node `nodes[e]` has the peer `peers[e]` at `weights[e]`. What
  the peers of a node leave of 1 is the node's own weight. In matrix form, with
  :math:`W_{ij}` the weight of j for i, the rows of W sum to 1. It may be used
  in two ways:

  - pull, :math:`x \leftarrow W x`: a node averages what it reads from its
    peers. All nodes agree in the end, on the mean if the columns sum to 1 too.
  - push, :math:`x \leftarrow W^\top x`: a node hands out its value in shares.
    The sum is kept whatever the graph; the step of push-sum.

  Attributes:
    kind: What it is called, for messages.
    num_nodes: n; nodes are 0 to n - 1.
    starts: int64 [num_rounds + 1]; the edges of round r are those from
      `starts[r]` up to `starts[r + 1]`.
    nodes: int32 [num_edges].
    peers: int32 [num_edges]; within a round, edges are in ascending order of
      (node, peer), each at most once, and none from a node to itself.
    weights: float64 [num_edges], at least 0, at most 1 in total for a node.

  Raises:
    ValueError: if the arrays do not fit these rules.

  Examples:
    >>> from jasgd import gossip
    >>> ring = gossip.ring(3)
    >>> ring
    Topology(ring, num_nodes=3, num_rounds=1, max_degree=2)
    >>> print(ring.nodes, ring.peers, ring.weights.round(2))
    [0 0 1 1 2 2] [1 2 0 2 0 1] [0.33 0.33 0.33 0.33 0.33 0.33]

  References:
    Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019
  """

  kind: str
  num_nodes: int
  starts: np.ndarray
  nodes: np.ndarray
  peers: np.ndarray
  weights: np.ndarray

  def __post_init__(self) -> None:
    _checks.check_count('num_nodes', self.num_nodes)
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

  def __repr__(self) -> str:
    return (
      f'Topology({self.kind}, num_nodes={self.num_nodes}, '
      f'num_rounds={self.num_rounds}, max_degree={self.max_degree})'
    )

  @property
  def num_rounds(self) -> int:
    """The rounds in one period; 1 if the topology is static."""
    return len(self.starts) - 1

  @functools.cached_property
  def rounds(self) -> np.ndarray:
    """The round of each edge: int64 [num_edges]."""
    return np.repeat(np.arange(self.num_rounds), np.diff(self.starts))

  @functools.cached_property
  def degrees(self) -> np.ndarray:
    """How many peers a node has in a round: int64 [num_rounds, num_nodes]."""
    return self._count(None).astype(np.int64)

  @functools.cached_property
  def own_weights(self) -> np.ndarray:
    """What a node keeps of itself: float64 [num_rounds, num_nodes]."""
    return np.maximum(1 - self._count(self.weights), 0)

  @property
  def max_degree(self) -> int:
    """The most peers that any node has in any round."""
    return int(self.degrees.max())

  def matrix(self, round_index: int = 0) -> np.ndarray:
    """One round as the matrix W, for small n: float64 [n, n], rows sum to 1."""
    round_index, edges = self._edges(round_index)
    matrix = np.diag(self.own_weights[round_index])
    matrix[self.nodes[edges], self.peers[edges]] = self.weights[edges]
    return matrix

  def push_matrix(self, round_index: int = 0) -> np.ndarray:
    """One round as the matrix of push-sum: W', whose columns sum to 1."""
    return self.matrix(round_index).T

  def peer_table(self, round_index: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One round as rectangular arrays, for whoever gathers with indices.

    Args:
      round_index: The round, counted on over the periods.

    Returns:
      The peers, int32 [num_nodes, degree], and their weights, float64 of the
      same shape; degree is the largest of this round. A node with fewer peers
      has itself in the rest, at weight 0.
    """
    round_index, edges = self._edges(round_index)
    degrees = self.degrees[round_index]
    own = np.arange(self.num_nodes, dtype=np.int32)
    peers = np.repeat(own[:, None], degrees.max(), axis=1)
    weights = np.zeros(peers.shape)
    # Edges are in order of their nodes, so that row-wise filling is enough.
    is_taken = np.arange(peers.shape[1]) < degrees[:, None]
    peers[is_taken] = self.peers[edges]
    weights[is_taken] = self.weights[edges]
    return peers, weights

  def pull(self, values: np.ndarray, round_index: int = 0) -> np.ndarray:
    """Every node averages what it reads: W x, without the matrix.

    Args:
      values: [num_nodes, ...].
      round_index: The round, counted on over the periods.

    Returns:
      float64, of the same shape.
    """
    round_index, edges = self._edges(round_index)
    return self._mix(round_index, edges, self.nodes, self.peers, values)

  def push(self, values: np.ndarray, round_index: int = 0) -> np.ndarray:
    """Every node hands out its value in shares: W' x, without the matrix.

    Args:
      values: [num_nodes, ...].
      round_index: The round, counted on over the periods.

    Returns:
      float64, of the same shape and with the same sum.
    """
    round_index, edges = self._edges(round_index)
    return self._mix(round_index, edges, self.peers, self.nodes, values)

  def _edges(self, round_index: int) -> tuple[int, slice]:
    """The round within the period, and where its edges are."""
    round_index = _checks.check_count('round_index', round_index, 0)
    round_index %= self.num_rounds
    start, stop = self.starts[round_index : round_index + 2]
    return round_index, slice(start, stop)

  def _count(self, weights: np.ndarray | None) -> np.ndarray:
    """Adds up the edges, or their weights, of each node in each round."""
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
    raise ValueError(f'A node is not its own peer, got ({node}, {node}).')
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
  if not (weights >= 0).all():  # So written, NaN does not pass.
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
