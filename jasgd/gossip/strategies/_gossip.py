"""Gossip: base classes of strategies that exchange weights with a few peers."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import ClassVar

from jasgd.gossip import topologies
from jasgd.gossip.strategies import _base
from jasgd.gossip.topologies import _draws

# Numbers in a block of random peers that is drawn at once.
_BLOCK_SIZE = 4096

# Peers of one exchange, each with its weight in the mix, or the share it gets.
Choice = list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Gossip(_base.PeerStrategy):
  """Exchange of weights with peers, drawn at random or given by a topology.

  Attributes:
    peers: Kind of random draw, one of `jasgd.gossip.PEERS`; or the name of a
      topology, such as 'ring', one of `jasgd.gossip.topologies.KINDS`, which is
      built for the run's number of nodes; or a topology. Round k of a topology
      is that of a node's k-th exchange.
  """

  peers: str | topologies.Topology = 'independent'
  # Part of `describe`: action of a node in an exchange.
  exchange_text: ClassVar[str] = 'exchanges weights with a peer'

  def __post_init__(self) -> None:
    super().__post_init__()
    is_known = (
      self.peers in _draws.PEERS or self.peers in topologies.KINDS
      if isinstance(self.peers, str)
      else isinstance(self.peers, topologies.Topology)
    )
    if not is_known:
      raise ValueError(
        f'Unknown peers {self.peers!r}. Known: {", ".join(_draws.PEERS)}; the '
        f'topologies {", ".join(sorted(topologies.KINDS))}; or an object that '
        'jasgd.gossip.topologies builds.'
      )

  @property
  def is_random(self) -> bool:
    """Whether peers are drawn at random, not given by a topology."""
    return isinstance(self.peers, str) and self.peers in _draws.PEERS

  def find_topology(self, num_nodes: int) -> topologies.Topology:
    """The topology of a run, if peers are not random.

    Args:
      num_nodes: Number of nodes in the run.

    Returns:
      `peers`, or the topology of that name.
    """
    if isinstance(self.peers, topologies.Topology):
      return self.peers
    return _make_topology(self.peers, num_nodes)

  def check(self, num_nodes: int) -> None:
    """Raises a ValueError if the topology is of another size."""
    if self.is_random:
      return
    found = self.find_topology(num_nodes).num_nodes
    if found != num_nodes:
      raise ValueError(
        f'The topology has {found} nodes, but there are {num_nodes}.'
      )

  def describe(self) -> str:
    """The rule in words: which nodes exchange what, and which of them wait."""
    peers = self.peers if isinstance(self.peers, str) else self.peers.kind
    return (
      f'{self.name}({self.period}): every {self.period} steps a node '
      f'{self.exchange_text}; peers: {peers}.'
    )


class GossipNode(_base.PeerNode):
  """Node that chooses peers among those it believes alive: `choose_peers`."""

  def __init__(
    self, strategy: Gossip, node: int, num_nodes: int, seed: int
  ) -> None:
    super().__init__(strategy, node, num_nodes, seed)
    self._topology: topologies.Topology | None = None
    if not strategy.is_random:
      self._topology = strategy.find_topology(num_nodes)
    self._draw = str(strategy.peers)  # Kind of draw, if there is no topology.
    self._place = node  # Index among the members.
    self._alive: Sequence[int] | frozenset[int] = self.members
    # Random peers of all members in some rounds, from `_first_round` on.
    self._rounds: list[list[int]] = []
    self._first_round = 0

  def on_alive(self, members: Sequence[int]) -> None:
    """Handles a change of the nodes that this node believes alive."""
    super().on_alive(members)
    self._place = members.index(self.node)
    self._alive = frozenset(members)
    self._rounds = []

  def choose_peers(self, step: int, weight: float = 0.5) -> Choice:
    """The peers of the exchange after a step, without the node itself.

    They depend on the seed, the step and the members alone, so that a node that
    repeats a step after a restart chooses the same peers again. A random peer
    is drawn among the members. A topology keeps its edges to members.

    Args:
      step: Number of steps that the node has made, a multiple of the period.
      weight: Weight of a random peer; a topology has its own weights.

    Returns:
      Peers and their weights.
    """
    index = step // self.period - 1
    topology = self._topology
    if topology is None:
      row = index - self._first_round
      if not 0 <= row < len(self._rounds):
        self._rounds, self._first_round = _draw_rounds(
          self._draw, len(self.members), self.seed, index
        )
        row = index - self._first_round
      peer = self.members[self._rounds[row][self._place]]
      return [] if peer == self.node else [(peer, weight)]
    edges = _list_round(topology, index % topology.num_rounds)[self.node]
    if len(self.members) == self.num_nodes:
      return edges
    return [edge for edge in edges if edge[0] in self._alive]


# Nodes of one process share the topology of a name, and its cached rounds.
@functools.lru_cache(maxsize=32)
def _make_topology(kind: str, num_nodes: int) -> topologies.Topology:
  return topologies.make_topology(kind, num_nodes)


def _draw_rounds(
  peers: str, num_members: int, seed: int, index: int
) -> tuple[list[list[int]], int]:
  """A block of rounds that contains a given one, and its first round's number.

  A round holds the peers of all members, as indices among the members.
  """
  num_rounds = max(1, _BLOCK_SIZE // num_members)
  first = index // num_rounds * num_rounds
  return _draw_block(peers, num_members, seed, first, num_rounds), first


# Simulated nodes are in a few rounds at a time, and share the draws.
@functools.lru_cache(maxsize=32)
def _draw_block(
  peers: str, num_members: int, seed: int, first: int, num_rounds: int
) -> list[list[int]]:
  """Consecutive rounds, from `first` on."""
  rows = _draws.draw_peers(
    peers, num_members, num_rounds, seed=seed, first_round=first
  )
  return rows.tolist()


@functools.lru_cache(maxsize=32)
def _list_round(topology: topologies.Topology, index: int) -> list[Choice]:
  """The peers of all nodes in one round of a topology, with their weights."""
  # From the edges: a table of a large star would not fit in memory.
  edges = slice(*topology.starts[index : index + 2].tolist())
  lists: list[Choice] = [[] for _ in range(topology.num_nodes)]
  for node, peer, weight in zip(
    topology.nodes[edges].tolist(),
    topology.peers[edges].tolist(),
    topology.weights[edges].tolist(),
    strict=True,
  ):
    if weight > 0:
      lists[node].append((peer, weight))
  return lists
