"""Strategies whose nodes exchange weights with a few peers at a time."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import ClassVar

from jasgd.gossip import _draws
from jasgd.gossip import _strategy
from jasgd.gossip import _topology

# Numbers in a block of random peers that is drawn at once.
_BLOCK_SIZE = 4096

# A peer, and the weight it has in the mix or the share that it is sent.
Choice = list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Gossip(_strategy.PeerStrategy):
  """Exchanges weights with peers, drawn at random or given by a topology.

  Attributes:
    peers: A name in `jasgd.gossip.PEERS`, or a topology whose k-th round says
      whom a node's k-th exchange is with.
  """

  peers: str | _topology.Topology = 'independent'
  _words: ClassVar[str] = 'exchanges weights with a peer'

  def __post_init__(self) -> None:
    super().__post_init__()
    is_known = (
      self.peers in _draws.PEERS
      if isinstance(self.peers, str)
      else isinstance(self.peers, _topology.Topology)
    )
    if not is_known:
      raise ValueError(
        f'Unknown peers {self.peers!r}. Known: {", ".join(_draws.PEERS)}; or '
        'give a topology.'
      )

  def check(self, num_nodes: int) -> None:
    """Raises a ValueError if the topology is of another size."""
    if isinstance(self.peers, str):
      return
    if self.peers.num_nodes != num_nodes:
      raise ValueError(
        f'The topology has {self.peers.num_nodes} nodes, but there are '
        f'{num_nodes}.'
      )

  def describe(self) -> str:
    """Who waits for what, in words."""
    peers = self.peers if isinstance(self.peers, str) else self.peers.kind
    return (
      f'{self.name}({self.period}): every {self.period} steps a node '
      f'{self._words}; peers: {peers}.'
    )


class GossipNode(_strategy.PeerNode):
  """A node that chooses peers among those it believes alive."""

  def __init__(
    self, strategy: Gossip, node: int, num_nodes: int, seed: int
  ) -> None:
    super().__init__(strategy, node, num_nodes, seed)
    self._peers = strategy.peers
    self._place = node  # Among the members.
    self._alive: Sequence[int] | frozenset[int] = self.members
    # Random peers of all members in some rounds: those from `_first_round` on.
    self._rounds: list[list[int]] = []
    self._first_round = 0

  def on_alive(self, members: Sequence[int]) -> None:
    """This node's belief about who is alive has changed."""
    super().on_alive(members)
    self._place = members.index(self.node)
    self._alive = frozenset(members)
    self._rounds = []

  def choose_peers(self, step: int, weight: float = 0.5) -> Choice:
    """The peers of the exchange after a step, without the node itself.

    They depend on the seed, the step and the members alone, so that a node
    which repeats a step after a restart chooses the same peers again. A random
    peer is drawn among the members; a topology keeps its edges to them.

    Args:
      step: Steps that the node has made, a multiple of the period.
      weight: Weight of a random peer; a topology has weights of its own.

    Returns:
      Peers and their weights.
    """
    index = step // self._period - 1
    if isinstance(self._peers, str):
      row = index - self._first_round
      if not 0 <= row < len(self._rounds):
        self._rounds, self._first_round = _draw_rounds(
          self._peers, len(self.members), self.seed, index
        )
        row = index - self._first_round
      peer = self.members[self._rounds[row][self._place]]
      return [] if peer == self.node else [(peer, weight)]
    edges = _list_round(self._peers, index % self._peers.num_rounds)[self.node]
    if len(self.members) == self.num_nodes:
      return edges
    return [edge for edge in edges if edge[0] in self._alive]


def _draw_rounds(
  peers: str, num_members: int, seed: int, index: int
) -> tuple[list[list[int]], int]:
  """A block of rounds with a given one in it, and the first round's index.

  A round has the peers that all members draw, as places among them.
  """
  num_rounds = max(1, _BLOCK_SIZE // num_members)
  first = index // num_rounds * num_rounds
  return _draw_block(peers, num_members, seed, first, num_rounds), first


# Nodes of a simulation are in a few rounds at a time, and share the draws.
@functools.lru_cache(maxsize=32)
def _draw_block(
  peers: str, num_members: int, seed: int, first: int, num_rounds: int
) -> list[list[int]]:
  """Some consecutive rounds."""
  rows = _draws.draw_peers(
    peers, num_members, num_rounds, seed=seed, first_round=first
  )
  return rows.tolist()


@functools.lru_cache(maxsize=32)
def _list_round(topology: _topology.Topology, index: int) -> list[Choice]:
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
