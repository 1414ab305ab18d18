r"""Elastic averaging, EASGD: nodes and a centre attract each other.

.. math::
  e = \alpha (x - c), \quad x \leftarrow x - e, \quad c \leftarrow c + e

After every period of steps a node asks the centre for its weights c, waits for
the answer, moves towards c and sends the force e to the centre. The node does
not wait until the centre has added e; the centre may have moved since it
answered. With momentum in the nodes' own steps this is EAMSGD.

References:
  Zhang et al., `Deep learning with Elastic Averaging SGD
  <https://arxiv.org/abs/1412.6651>`_, 2015; Jin et al., `How to scale
  distributed deep learning? <https://arxiv.org/abs/1611.04581>`_, 2016
"""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

from jasgd import protocols
from jasgd.gossip.strategies import _base

# Where the gradient after an exchange is computed.
ORDERS = ('a3', 'easgd')


class ElasticNode(_base.PeerNode):
  """Node of `Elastic`: asks the centre, moves towards it, sends the force."""

  def exchange(self, step: int) -> _base.Actions:
    """Asks the centre."""
    del step
    return (_base.Ask(_base.CENTRE),)

  def on_replies(self, replies: Sequence[_base.Reply]) -> _base.Actions:
    """Moves if the centre answered; otherwise tries again next period."""
    (reply,) = replies
    if reply.outcome != _base.Outcome.TAKEN:
      return ()
    keeps_gradient = self.strategy.order == 'easgd'
    return (_base.Attract(reply, self.strategy.rate, keeps_gradient),)

  def list_join_candidates(self) -> list[int]:
    """A joining node takes the centre's weights; the centre does not move."""
    return [_base.CENTRE]

  def on_join_reply(self, reply: _base.Reply) -> _base.Actions:
    """Takes over the centre's weights, and the mean of the nodes' steps.

    The centre's `step` is its number of moves: one per exchange of any node.
    """
    num_moves = max(reply.step, 0)
    step = num_moves * self.period // self.num_nodes
    return super().on_join_reply(reply._replace(step=step))


@dataclasses.dataclass(frozen=True)
class Elastic(_base.PeerStrategy):
  r"""Elastic averaging with a centre: EASGD.

  .. math::
    e = \alpha (x - c), \quad x \leftarrow x - e, \quad c \leftarrow c + e

  With momentum in the nodes' own steps it is EAMSGD.

  Attributes:
    rate: Factor alpha of the force, from 0 to 1. With 0 nothing moves, and each
      node trains alone.
    order: Weights at which the gradient after an exchange is computed: 'a3',
      the weights after the move, as in Jin et al.; 'easgd', the weights before
      it, as in Zhang et al.
  """

  rate: float = 0.1
  order: str = 'a3'
  name: ClassVar[str] = 'elastic'
  node_class: ClassVar[type[_base.PeerNode]] = ElasticNode
  has_centre: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    protocols.check_number('rate', self.rate, 0, 1)
    protocols.check_choice('order', self.order, ORDERS)

  def make_centre(self) -> protocols.Protocol:
    """The centre moves by each force when it arrives."""
    return protocols.asynchronous()

  def describe(self) -> str:
    """The rule in words: which nodes exchange what, and which of them wait."""
    return (
      f'elastic({self.period}, {self.rate}): every {self.period} steps a node '
      'waits for the answer of the centre, and for no other node.'
    )
