"""Exchange of values over a named axis, as collectives of jax.

A round of gossip is a list of weighted edges (`Round`). It is sent as a few
permutations (`lax.ppermute`), one message each, or gathered (`lax.all_gather`)
if the messages would be many. Senders and receivers are compiled into the
program, so that permutations drawn at run time come from a set of rounds that
is known at compile time (`make_random_rounds`).

The functions `exchange_rounds`, `exchange_row` and `average` take the values of
this node and the messages that it sends, which are the same values, possibly in
a narrower dtype, as lists of arrays; they return the new values. Sums are
computed in float32 or wider, in the same order under every runner. A value that
arrives with weight 0 is ignored, even if it is NaN.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from jasgd.gossip import topologies
from jasgd.gossip.strategies import _gossip
from jasgd.gossip.strategies import _push
from jasgd.gossip.strategies import _push_sum
from jasgd.gossip.topologies import _draws

# Largest number of rounds that are compiled, one branch of a switch each. With
# more nodes than that, `make_random_rounds` draws a random set of rounds, for
# which `consensus_rate` holds approximately.
MAX_ROUNDS = 64

# Largest number of messages of a node in one round; beyond it, all values are
# gathered at all nodes at once.
_MAX_MESSAGES = 16

Arrays = list[jax.Array]


# --- Rounds as edges, and as permutations.


class Round(NamedTuple):
  """x_i <- own_i x_i + the sum of weights_e x_s over the edges (s, i)."""

  own: np.ndarray  # float64 [num_nodes]
  targets: np.ndarray  # int [num_edges]
  sources: np.ndarray  # int [num_edges]
  weights: np.ndarray  # float64 [num_edges], above 0.

  @property
  def num_messages(self) -> int:
    """Largest number of messages that any node sends or receives."""
    if not len(self.targets):
      return 0
    ends = (self.targets, self.sources)
    return int(max(np.bincount(end).max() for end in ends))

  @property
  def is_mean(self) -> bool:
    """Whether every node gets the mean of all."""
    num_nodes = len(self.own)
    return len(self.targets) == num_nodes * (num_nodes - 1) and np.allclose(
      np.append(self.own, self.weights), 1 / num_nodes, rtol=1e-12, atol=0
    )


class Permutations(NamedTuple):
  """Rounds as permutations, each one message per node.

  In round r: x_i <- own_ri x_i + the sum over k of weights_rki x_(sources_rki).
  Messages of weight 0 only complete a permutation, and are ignored.
  """

  own: np.ndarray  # float64 [num_rounds, num_nodes]
  sources: np.ndarray  # int [num_rounds, num_messages, num_nodes]
  weights: np.ndarray  # float64, of the same shape.


def list_rounds(
  strategy: _gossip.Gossip, topology: topologies.Topology
) -> list[Round]:
  """The rounds of a strategy with a topology."""
  return [
    _make_round(strategy, topology, index)
    for index in range(topology.num_rounds)
  ]


def _make_round(
  strategy: _gossip.Gossip, topology: topologies.Topology, index: int
) -> Round:
  """Makes one round. In a push, node and peer swap their roles."""
  edges = slice(*topology.starts[index : index + 2])
  own, weights = topology.own_weights[index], topology.weights[edges]
  targets, sources = topology.nodes[edges], topology.peers[edges]
  if isinstance(strategy, _push.Push | _push_sum.PushSum):
    targets, sources = sources, targets
  if isinstance(strategy, _push.Push):
    totals = own + np.bincount(targets, weights, len(own))
    # A node that has sent its whole weight and received nothing stays as it is.
    own = np.where(totals > 0, own, 1)
    totals = np.where(totals > 0, totals, 1)
    own, weights = own / totals, weights / totals[targets]
  is_used = weights > 0
  return Round(own, targets[is_used], sources[is_used], weights[is_used])


def split_rounds(rounds: list[Round]) -> Permutations:
  """Splits rounds into as few permutations as possible.

  That number is the largest number of messages of any node. By Kőnig's theorem
  the edges of a bipartite graph (senders, receivers) can be coloured with so
  many colours that no two edges of one colour share an end. The edges of one
  colour are part of a permutation.

  Args:
    rounds: Rounds of equal numbers of nodes.

  Returns:
    The permutations; rounds with fewer messages are filled up with identities.
  """
  own = np.stack([each.own for each in rounds])
  num_messages = max(each.num_messages for each in rounds)
  shape = (len(rounds), num_messages, own.shape[1])
  sources, weights = np.full(shape, -1), np.zeros(shape)
  for index, each in enumerate(rounds):
    colours = _colour(each, num_messages)
    sources[index, colours, each.targets] = each.sources
    weights[index, colours, each.targets] = each.weights
    for row in sources[index]:
      _complete(row)
  return Permutations(own, sources, weights)


def _colour(edges: Round, num_colours: int) -> np.ndarray:
  """Colours edges one by one, swapping two colours along a path if needed."""
  targets, sources, num_nodes = edges.targets, edges.sources, len(edges.own)
  # The edge of each colour at each node; -1 if there is none.
  at_target = np.full((num_nodes, num_colours), -1)
  at_source = np.full((num_nodes, num_colours), -1)
  colours = np.full(len(targets), -1)

  def paint(edges: list[int], new: list[int]) -> None:
    for edge in edges:
      if colours[edge] >= 0:
        at_target[targets[edge], colours[edge]] = -1
        at_source[sources[edge], colours[edge]] = -1
    for edge, colour in zip(edges, new, strict=True):
      colours[edge] = colour
      at_target[targets[edge], colour] = edge
      at_source[sources[edge], colour] = edge

  for edge in range(len(targets)):
    target, source = targets[edge], sources[edge]
    first = int(np.argmax(at_source[source] < 0))  # Free at the source.
    second = int(np.argmax(at_target[target] < 0))  # Free at the target.
    # Follow the path from the target on which edges of the two colours
    # alternate. It never reaches the source of the new edge: it enters sources
    # by the first colour, which this source does not have. Swapping the two
    # colours along the path makes the first colour free at the target as well.
    path, is_second = [], False
    while True:
      table, node = (at_source, source) if is_second else (at_target, target)
      following = table[node, second if is_second else first]
      if following < 0:
        break
      path.append(following)
      target, source = targets[following], sources[following]
      is_second = not is_second
    paint(path, [first if colours[e] == second else second for e in path])
    paint([edge], [first])
  return colours


def _complete(sources: np.ndarray) -> None:
  """Completes a permutation in place; -1 marks targets without a source."""
  is_open = sources < 0
  is_unused = np.ones(len(sources), bool)
  is_unused[sources[~is_open]] = False
  is_idle = is_open & is_unused  # These send to themselves, at no cost.
  sources[is_idle] = np.flatnonzero(is_idle)
  sources[is_open & ~is_idle] = np.flatnonzero(is_unused & ~is_idle)


# --- Random permutations and pairs.


def make_random_rounds(
  peers: str, num_nodes: int, weight: float = 0.5
) -> topologies.Topology:
  """Rounds to draw from, with equal probabilities, instead of all n! of them.

  Over all rounds, every node meets every other node equally often. The mean
  squared deviation after a round depends on nothing else, so that
  `consensus_rate` holds exactly, as for permutations drawn from all of them.

  Args:
    peers: `'permutation'` or `'matching'`.
    num_nodes: Number of nodes, n.
    weight: Weight of the peer.

  Returns:
    A topology: n rounds for permutations; for pairs n - 1, or n if n is odd;
    never more than `MAX_ROUNDS`.
  """
  if num_nodes > MAX_ROUNDS:
    tables = _draws.draw_peers(peers, num_nodes, MAX_ROUNDS)
  elif peers == 'matching':
    tables = _list_pairs(num_nodes)
  else:
    # A Latin square: all shifts of one permutation. That permutation is random,
    # since the shifts of the identity contain a round in which all are idle.
    first = _draws.draw_peers('permutation', num_nodes)
    tables = (first + np.arange(num_nodes)[:, None]) % num_nodes
  topology = topologies.from_peers(tables[:, :, None], kind=f'random {peers}')
  return topologies.with_constant_weights(topology, weight)


def _list_pairs(num_nodes: int) -> np.ndarray:
  """A tournament: in round k, i meets j if i + j = k, modulo an odd number."""
  odd = num_nodes - 1 + num_nodes % 2
  nodes = np.arange(num_nodes)
  peers = (np.arange(odd)[:, None] - nodes) % odd
  if num_nodes % 2:
    return peers
  # The node that would meet itself meets the last one.
  last = num_nodes - 1
  peers[:, last] = np.nonzero(peers[:, :last] == nodes[:last])[1]
  peers[np.arange(odd), peers[:, last]] = last
  return peers


# --- Exchanges.


class Row(NamedTuple):
  """One node's part of a round: own x + the sum of weights_k x_(sources_k)."""

  own: Any  # shape=()
  sources: Any  # shape=(d,), int
  weights: Any  # shape=(d,)
  count: Any  # shape=(), int: the number of sources that are used.


def exchange_rounds(
  values: Arrays,
  messages: Arrays,
  rounds: list[Round],
  index: Any,
  axis_name: str,
) -> Arrays:
  """Exchanges values by one of several rounds, all known at compile time.

  Args:
    values: Values of this node.
    messages: Messages that it sends.
    rounds: All rounds.
    index: Number of the round; may be traced, and must be equal on all nodes.
    axis_name: Name of the axis of nodes.

  Returns:
    The new values.
  """
  node, num_nodes = lax.axis_index(axis_name), len(rounds[0].own)
  most = min(max(1, num_nodes // 2), _MAX_MESSAGES)
  is_sparse = all(each.num_messages <= most for each in rounds)
  if not is_sparse or len(rounds) > MAX_ROUNDS:
    table = jax.tree.map(jnp.asarray, _make_table(rounds))
    row = jax.tree.map(lambda leaf: leaf[index, node], table)
    return exchange_row(values, messages, row, axis_name)
  if isinstance(index, int):
    rounds, index = [rounds[index]], 0
  own, sources, weights = split_rounds(rounds)
  sums = _scale(values, jnp.asarray(own)[index, node])
  for number in range(sources.shape[1]):
    received = _send(messages, sources[:, number], index, axis_name)
    sums = _add(sums, received, jnp.asarray(weights)[index, number, node])
  return _restore(sums, values)


def exchange_row(
  values: Arrays, messages: Arrays, row: Row, axis_name: str
) -> Arrays:
  """Gathers all messages at all nodes; each node adds those of its row."""
  gathered = lax.all_gather(messages, axis_name)

  def add(index: Any, sums: Arrays) -> Arrays:
    received = [leaf[row.sources[index]] for leaf in gathered]
    return _add(sums, received, row.weights[index])

  sums = _scale(values, row.own)
  if row.sources.shape[0] == 1:
    sums = add(0, sums)
  elif row.sources.shape[0]:
    sums = lax.fori_loop(0, row.count, add, sums)
  return _restore(sums, values)


def average(values: Arrays, messages: Arrays, axis_name: str) -> Arrays:
  """The mean of all messages, at all nodes, in the messages' precision."""
  node = lax.axis_index(axis_name)
  num_nodes = lax.axis_size(axis_name)
  # Narrow dtypes are divided before the sum, which could overflow.
  is_narrow = [message.dtype.itemsize < 4 for message in messages]
  sums = lax.psum(
    [
      message / num_nodes if narrow else message
      for message, narrow in zip(messages, is_narrow, strict=True)
    ],
    axis_name,
  )
  means = [
    (total if narrow else total / num_nodes).astype(value.dtype)
    for total, value, narrow in zip(sums, values, is_narrow, strict=True)
  ]
  # jax.shard_map knows that a psum is equal on all nodes, and rejects a branch
  # or a loop that turns values that may differ into equal ones. This marks the
  # means as values that may differ, and is compiled to nothing.
  return [jnp.where(node == node, mean, mean) for mean in means]


def round_to(array: jax.Array, dtype: Any) -> jax.Array:
  """A float array in `dtype`; unchanged if `dtype` is not narrower."""
  if not jnp.issubdtype(array.dtype, jnp.floating):
    return array
  limits = jnp.finfo(dtype)
  if limits.bits >= jnp.finfo(array.dtype).bits:
    return array
  # XLA may remove a conversion together with the one that reverts it; it does
  # not remove reduce_precision.
  rounded = lax.reduce_precision(array, limits.nexp, limits.nmant)
  return rounded.astype(dtype)


def _send(
  messages: Arrays, sources: np.ndarray, index: Any, axis_name: str
) -> Arrays:
  """Sends messages by one of several permutations, [round, node] -> source."""
  branches = [
    functools.partial(
      lax.ppermute,
      axis_name=axis_name,
      perm=[(int(source), node) for node, source in enumerate(row)],
    )
    for row in sources
  ]
  if len(branches) == 1:
    return branches[0](messages)
  return lax.switch(index, branches, messages)


def _scale(values: Arrays, weight: jax.Array) -> Arrays:
  """Own values times the own weight, in float32 or wider."""
  scaled = []
  for value in values:
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    scaled.append(weight.astype(dtype) * value.astype(dtype))
  return scaled


def _add(sums: Arrays, received: Arrays, weight: jax.Array) -> Arrays:
  """Adds weighted messages; those of weight 0 are ignored, even if NaN."""
  added = []
  for total, other in zip(sums, received, strict=True):
    part = weight.astype(total.dtype) * other.astype(total.dtype)
    added.append(total + jnp.where(weight > 0, part, 0))
  return added


def _restore(sums: Arrays, values: Arrays) -> Arrays:
  """The sums in the dtypes of the values."""
  return [
    total.astype(value.dtype) for total, value in zip(sums, values, strict=True)
  ]


def _make_table(rounds: list[Round]) -> Row:
  """The rows of all nodes in all rounds, with the axes [round, node]."""
  num_nodes = len(rounds[0].own)
  counts = np.stack(
    [np.bincount(each.targets, minlength=num_nodes) for each in rounds]
  )
  shape = (*counts.shape, int(counts.max()))
  sources, weights = np.zeros(shape, np.int32), np.zeros(shape)
  for index, each in enumerate(rounds):
    order = np.argsort(each.targets, kind='stable')
    # A mask is filled row by row, and the edges are sorted by target.
    is_edge = np.arange(shape[2]) < counts[index][:, None]
    sources[index][is_edge] = each.sources[order]
    weights[index][is_edge] = each.weights[order]
  own = np.stack([each.own for each in rounds])
  return Row(own, sources, weights, counts.astype(np.int32))
