"""Symmetric gossip: a node and a peer take their mean at the same moment."""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

from jasgd.gossip import _measures
from jasgd.gossip import _peers
from jasgd.gossip import _strategy


class PairsNode(_peers.GossipNode):
  """Asks a peer, and averages with it when the answer is there."""

  def exchange(self, step: int) -> _strategy.Actions:
    """Asks the peer of this round."""
    self._chosen = self.choose_peers(step)
    return [_strategy.Ask(peer) for peer, _ in self._chosen]

  def on_replies(self, replies: Sequence[_strategy.Reply]) -> _strategy.Actions:
    """Averages, if the peer is there."""
    return [
      _strategy.Average(reply, weight)
      for reply, (_, weight) in zip(replies, self._chosen, strict=True)
      if reply.outcome == _strategy.Outcome.TAKEN
    ]


@dataclasses.dataclass(frozen=True)
class Pairs(_peers.Gossip):
  r"""Symmetric averaging, at once: AD-PSGD.

  .. math:: x, x_\text{peer} \leftarrow (x + x_\text{peer}) / 2

  The peer goes on with the gradient that it is computing.

  References:
    Lian et al., `Asynchronous Decentralized Parallel Stochastic Gradient
    Descent <https://arxiv.org/abs/1710.06952>`_, 2018
  """

  node_class: ClassVar[type[_strategy.PeerNode]] = PairsNode
  refusal_of_processes: ClassVar[str] = (
    'Pairs are for virtual time and for devices: processes that wait for '
    'nobody pull, push, push sums, or average with a centre.'
  )
  _words: ClassVar[str] = 'waits until it and a peer have averaged'

  def check(self, num_nodes: int) -> None:
    """Raises a ValueError if the topology does not fit, or makes no pairs."""
    super().check(num_nodes)
    if not isinstance(self.peers, str) and self.peers.max_degree > 1:
      raise ValueError(
        'Pairs need a topology with one peer per node and round, got '
        f'{self.peers.kind} with {self.peers.max_degree}.'
      )

  def check_together(self, num_nodes: int) -> None:
    """Both ends of a pair must have drawn each other."""
    super().check_together(num_nodes)
    peers = self.peers
    if peers == 'matching':
      return
    if isinstance(peers, str) or not _measures.is_symmetric(peers):
      name = repr(peers) if isinstance(peers, str) else peers.kind
      raise ValueError(
        "On devices, Pairs need peers='matching' or a symmetric topology with "
        f'one peer per node and round, got {name}.'
      )
