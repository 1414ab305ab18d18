r"""Symmetric gossip, AD-PSGD: a node and a peer take their mean at one moment.

.. math:: x, x_\text{peer} \leftarrow (x + x_\text{peer}) / 2

After every period of steps a node asks a peer and waits for its answer. Then
both replace their weights by the mean, at the same moment. The peer does not
wait: it finishes the gradient that it is computing, on its old weights.

References:
  Lian et al., `Asynchronous Decentralized Parallel Stochastic Gradient Descent
  <https://arxiv.org/abs/1710.06952>`_, 2018
"""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

from jasgd.gossip import topologies
from jasgd.gossip.strategies import _base
from jasgd.gossip.strategies import _gossip


class PairsNode(_gossip.GossipNode):
  """Node of `Pairs`: asks a peer, and averages with it when it answers."""

  def exchange(self, step: int) -> _base.Actions:
    """Asks the peer of this round."""
    self._chosen = self.choose_peers(step)
    return [_base.Ask(peer) for peer, _ in self._chosen]

  def on_replies(self, replies: Sequence[_base.Reply]) -> _base.Actions:
    """Averages with the peer, if it answered."""
    return [
      _base.Average(reply, weight)
      for reply, (_, weight) in zip(replies, self._chosen, strict=True)
      if reply.outcome == _base.Outcome.TAKEN
    ]


@dataclasses.dataclass(frozen=True)
class Pairs(_gossip.Gossip):
  r"""Symmetric averaging of a node and a peer at one moment: AD-PSGD.

  .. math:: x, x_\text{peer} \leftarrow (x + x_\text{peer}) / 2

  The peer finishes the gradient that it is computing.
  """

  name: ClassVar[str] = 'pairs'
  node_class: ClassVar[type[_base.PeerNode]] = PairsNode
  refusal_of_processes: ClassVar[str] = (
    'Pairs run in the simulator and on devices only: a real process does not '
    'change its weights while it computes a gradient. Use pull, push, push_sum '
    'or elastic.'
  )
  exchange_text: ClassVar[str] = 'waits until it and a peer have averaged'

  def check(self, num_nodes: int) -> None:
    """Raises a ValueError if the topology does not fit, or has no pairs."""
    super().check(num_nodes)
    if self.is_random:
      return
    topology = self.find_topology(num_nodes)
    if topology.max_degree > 1:
      raise ValueError(
        'Pairs need a topology with one peer per node and round, got '
        f'{topology.kind} with {topology.max_degree}.'
      )

  def check_together(self, num_nodes: int) -> None:
    """Raises a ValueError unless both nodes of a pair choose each other."""
    super().check_together(num_nodes)
    if self.peers == 'matching':
      return
    if self.is_random or not topologies.is_symmetric(
      self.find_topology(num_nodes)
    ):
      name = self.peers if isinstance(self.peers, str) else self.peers.kind
      raise ValueError(
        "On devices, Pairs need peers='matching' or a symmetric topology with "
        f'one peer per node and round, got {name!r}.'
      )
