"""One round of a strategy as edges, and the edges as permutations."""

from typing import NamedTuple

import numpy as np

from jasgd.gossip import _peers
from jasgd.gossip import _push
from jasgd.gossip import _push_sum
from jasgd.gossip import _topology


class Round(NamedTuple):
  """x_i <- own_i x_i + the sum of weights_e x_s over the edges (s, i)."""

  own: np.ndarray  # float64 [num_nodes]
  targets: np.ndarray  # int [num_edges]
  sources: np.ndarray  # int [num_edges]
  weights: np.ndarray  # float64 [num_edges], above 0.

  @property
  def num_messages(self) -> int:
    """The most that any node sends, or receives."""
    if not len(self.targets):
      return 0
    ends = (self.targets, self.sources)
    return int(max(np.bincount(end).max() for end in ends))

  @property
  def is_mean(self) -> bool:
    """Whether it gives everybody the mean."""
    num_nodes = len(self.own)
    return len(self.targets) == num_nodes * (num_nodes - 1) and np.allclose(
      np.append(self.own, self.weights), 1 / num_nodes, rtol=1e-12, atol=0
    )


class Permutations(NamedTuple):
  """Rounds as messages, each a permutation: some are sent in vain.

  x_i <- own_ri x_i + the sum over k of weights_rki x_(sources_rki)
  """

  own: np.ndarray  # float64 [num_rounds, num_nodes]
  sources: np.ndarray  # int [num_rounds, num_messages, num_nodes]
  weights: np.ndarray  # float64, of the same shape; 0: in vain.


def list_rounds(
  strategy: _peers.Gossip, topology: _topology.Topology
) -> list[Round]:
  """What a strategy does in each round of a topology."""
  return [
    _make_round(strategy, topology, index)
    for index in range(topology.num_rounds)
  ]


def _make_round(
  strategy: _peers.Gossip, topology: _topology.Topology, index: int
) -> Round:
  edges = slice(*topology.starts[index : index + 2])
  own, weights = topology.own_weights[index], topology.weights[edges]
  targets, sources = topology.nodes[edges], topology.peers[edges]
  if isinstance(strategy, _push.Push | _push_sum.PushSum):
    targets, sources = sources, targets
  if isinstance(strategy, _push.Push):
    totals = own + np.bincount(targets, weights, len(own))
    # Who has given all away and got nothing stays as it is.
    own = np.where(totals > 0, own, 1)
    totals = np.where(totals > 0, totals, 1)
    own, weights = own / totals, weights / totals[targets]
  is_used = weights > 0
  return Round(own, targets[is_used], sources[is_used], weights[is_used])


def split_rounds(rounds: list[Round]) -> Permutations:
  """Splits rounds into as many permutations as any node has messages.

  A graph whose edges go from senders to receivers has a colouring of its edges
  with so few colours that no two of a colour share an end (Kőnig), and those of
  one colour are part of a permutation.

  Args:
    rounds: Of equally many nodes.

  Returns:
    The permutations; the identity where a round has fewer than others.
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
  """Colours edges one by one; those in the way change their colours."""
  targets, sources, num_nodes = edges.targets, edges.sources, len(edges.own)
  # The edge of each colour at each node; -1: none.
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
    # From the target on, edges of the two colours alternate, and never come to
    # the source: they reach sources by the first colour, which it has not.
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
  """Makes part of a permutation a whole one; -1: nothing comes yet."""
  is_open = sources < 0
  is_unused = np.ones(len(sources), bool)
  is_unused[sources[~is_open]] = False
  is_idle = is_open & is_unused  # They send to themselves, which is free.
  sources[is_idle] = np.flatnonzero(is_idle)
  sources[is_open & ~is_idle] = np.flatnonzero(is_unused & ~is_idle)
