r"""Push-sum: push-gossip in which every message carries a part of a mass.

.. math::
  m \leftarrow m / 2, \quad \text{sends } (x, m); \qquad
  x \leftarrow \frac{m x + \sum_k m_k x_k}{m + \sum_k m_k}, \quad
  m \leftarrow m + \sum_k m_k

All masses start at 1. Mass is never created, so that the mean of all nodes,
weighted by mass, is kept: mass is held by a node, is in a message, or is lost
with either. A node never waits.

References:
  Assran et al., `Stochastic Gradient Push
  <https://arxiv.org/abs/1811.10792>`_, 2019; Blot et al., `Gossip training for
  deep learning <https://arxiv.org/abs/1611.09726>`_, 2016
"""

import dataclasses
from typing import ClassVar

from jasgd.gossip.strategies import _base
from jasgd.gossip.strategies import _gossip
from jasgd.gossip.strategies import _push


class PushSumNode(_push.PushNode):
  """Node of `PushSum`: its mass is its own weight in a mix."""

  def exchange(self, step: int) -> _base.Actions:
    """Sends mass to the peers of this round, then mixes what waits."""
    mass = self.mass
    sends = [
      _base.Send(peer, 0.0, step, share * mass)
      for peer, share in self.choose_peers(step)
    ]
    self.mass = max(0.0, mass - sum([send.mass for send in sends]))
    return [*sends, _base.MixWaiting()]

  @property
  def held_mass(self) -> float:
    """The node's own mass, and that of messages that wait to be mixed."""
    return self.mass + sum([message.mass for message in self.waiting])

  def on_outcome(self, send: _base.Send, outcome: _base.Outcome) -> None:
    """Takes back the mass of a refused message.

    If the node has mixed since it sent, the mass counts for its new weights.
    """
    if outcome in _push.RETURNED:
      self.mass += send.mass

  def on_message(self, message: _base.Message) -> _base.Outcome:
    """Lets a message wait; a node that is done refuses those of slower nodes.

    It would keep their mass, and the later steps of the slower nodes would
    hardly count in the mean.
    """
    if self.is_done and message.step < self.step:
      return _base.Outcome.DONE
    return super().on_message(message)

  def mix_waiting(self) -> _base.Mix | None:
    """The mean of own weights and messages, by mass."""
    if not self.waiting:
      return None
    own, others = self.mass, [message.mass for message in self.waiting]
    self.mass += sum(others)
    return self.mix_by(own, others)


@dataclasses.dataclass(frozen=True)
class PushSum(_gossip.Gossip):
  r"""Push-gossip with masses, which keeps the mean: SGP, GoSGD.

  .. math::
    m \leftarrow m / 2, \quad \text{sends } (x, m); \qquad
    x \leftarrow \frac{m x + \sum_k m_k x_k}{m + \sum_k m_k}, \quad
    m \leftarrow m + \sum_k m_k

  All masses start at 1. With a topology, peer j gets the share
  :math:`W_{ij}` of node i's mass; if all nodes mix at once, this is
  `Topology.push` on weights times mass and on the masses. The sum of all masses
  is kept, except for mass that is lost with a node or a message. A joining node
  begins without mass, and a node that restarts continues with the mass of its
  last record.

  There are two forms, which differ in the effect of a gradient. On devices,
  where all nodes step together, it is SGP: nodes hold x = mass * z, and an
  update u(z) is added to x, so that z moves by u / mass. In the simulator and
  in real processes it is GoSGD: nodes hold z, which moves by u itself. There a
  node may halve its mass many times before it receives any, and u / mass would
  grow without bound. Both evaluate the mean of z, weighted by mass.
  """

  name: ClassVar[str] = 'push_sum'
  node_class: ClassVar[type[_base.PeerNode]] = PushSumNode
  has_mass: ClassVar[bool] = True
  exchange_text: ClassVar[str] = (
    'sends its weights and a part of its mass to a peer, and does not wait'
  )
