"""Push-sum: push-gossip in which every message carries a part of a mass."""

import dataclasses
from typing import ClassVar

from jasgd.gossip import _peers
from jasgd.gossip import _push
from jasgd.gossip import _strategy


class PushSumNode(_push.PushNode):
  """Sends parts of its mass; its mass is its own weight in a mix.

  Mass is never made: it is with a node, in a message, or lost with either.
  """

  def exchange(self, step: int) -> _strategy.Actions:
    """Sends mass to the peers of this round, then mixes what has come."""
    mass = self.mass
    sends = [
      _strategy.Send(peer, share * mass, step)
      for peer, share in self.choose_peers(step)
    ]
    self.mass = max(0.0, mass - sum([send.share for send in sends]))
    return [*sends, _strategy.MixWaiting()]

  @property
  def held_mass(self) -> float:
    """The node's own mass, and that of messages which wait to be mixed."""
    return self.mass + sum([message.share for message in self._waiting])

  def on_outcome(
    self, send: _strategy.Send, outcome: _strategy.Outcome
  ) -> None:
    """Takes the mass of a message back that was not taken.

    If the node has mixed since it sent, the mass counts for its new weights.
    """
    if outcome in _push.RETURNED:
      self.mass += send.share

  def on_message(self, message: _strategy.Message) -> _strategy.Outcome:
    """Lets a message wait; but takes no mass of slower nodes when done.

    It would keep that mass, and the steps of the slower nodes would count
    nothing.
    """
    if self.is_done and message.step < self.step:
      return _strategy.Outcome.DONE
    return super().on_message(message)

  def mix_waiting(self) -> _strategy.Mix | None:
    """The mean of the own weights and all that has come, by mass."""
    if not self._waiting:
      return None
    own = self.mass
    self.mass += sum([message.share for message in self._waiting])
    return self.mix_shares(own)


@dataclasses.dataclass(frozen=True)
class PushSum(_peers.Gossip):
  r"""Push-gossip with masses, which keeps the mean: SGP, GoSGD.

  .. math::
    m \leftarrow m / 2, \quad \text{sends } (x, m); \qquad
    x \leftarrow \frac{m x + \sum_k m_k x_k}{m + \sum_k m_k}, \quad
    m \leftarrow m + \sum_k m_k

  All masses start at 1. With a topology, peer j gets the share W_ij of node i's
  mass: all nodes at once do `Topology.push`, on their weights times mass and on
  the masses. The sum of all masses is kept, but for what is lost with a node or
  a message: a joiner begins without mass, and a node that restarts goes on with
  the mass of its last record.

  There are two forms, equal but for what a gradient does. On devices, where all
  nodes are in step, it is SGP: nodes hold x = mass * z, and an update u(z) is
  added to x, so that z moves by u / mass. In virtual time and in real
  processes, where a node may send half of its mass time and again before it is
  sent any, it is GoSGD: nodes hold z, which moves by u itself, however small
  the mass is. The mean that is evaluated is that of z, weighted by mass, in
  both.

  References:
    Assran et al., `Stochastic Gradient Push
    <https://arxiv.org/abs/1811.10792>`_, 2019; Blot et al., `Gossip training
    for deep learning <https://arxiv.org/abs/1611.09726>`_, 2016
  """

  node_class: ClassVar[type[_strategy.PeerNode]] = PushSumNode
  has_mass: ClassVar[bool] = True
  _words: ClassVar[str] = (
    'sends its weights and a part of its mass to a peer, and waits for nobody'
  )
