"""Elastic averaging: nodes and a centre attract each other."""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

from jasgd import protocols
from jasgd.gossip import _checks
from jasgd.gossip import _strategy

# Where the gradient after an exchange is computed.
ORDERS = ('a3', 'easgd')


class ElasticNode(_strategy.PeerNode):
  """Asks the centre, moves towards it, and sends it the force.

  It waits for the answer and for nothing else: the centre adds the force when
  it arrives, and may have moved in between.
  """

  def exchange(self, step: int) -> _strategy.Actions:
    """Asks the centre."""
    del step
    return (_strategy.Ask(_strategy.CENTRE),)

  def on_replies(self, replies: Sequence[_strategy.Reply]) -> _strategy.Actions:
    """Moves, if the centre has answered; else tries after the next steps."""
    (reply,) = replies
    if reply.outcome != _strategy.Outcome.TAKEN:
      return ()
    keeps_gradient = self.strategy.order == 'easgd'
    return (_strategy.Attract(reply, self.strategy.rate, keeps_gradient),)

  def list_join_candidates(self) -> list[int]:
    """A joiner takes the centre's weights; the centre does not move."""
    return [_strategy.CENTRE]

  def on_join_reply(self, reply: _strategy.Reply) -> _strategy.Actions:
    """Takes over the centre's weights, and the mean of the nodes' steps.

    The centre moves once per exchange of any node; it counts these moves.
    """
    num_moves = max(reply.step, 0)
    step = num_moves * self._period // self.num_nodes
    return super().on_join_reply(reply._replace(step=step))


@dataclasses.dataclass(frozen=True)
class Elastic(_strategy.PeerStrategy):
  r"""Elastic averaging with a centre: EASGD.

  .. math::
    e = \alpha (x - c), \quad x \leftarrow x - e, \quad c \leftarrow c + e

  With momentum in the nodes' own steps it is EAMSGD; who does what when is the
  same.

  Attributes:
    rate: alpha. 0: nobody moves, and all nodes are on their own.
    order: Where the gradient after an exchange is computed: 'a3' at the mixed
      weights, as Jin et al. do; 'easgd' at those before, as Zhang et al. do.

  References:
    Zhang et al., `Deep learning with Elastic Averaging SGD
    <https://arxiv.org/abs/1412.6651>`_, 2015; Jin et al., `How to scale
    distributed deep learning? <https://arxiv.org/abs/1611.04581>`_, 2016
  """

  rate: float = 0.1
  order: str = 'a3'
  node_class: ClassVar[type[_strategy.PeerNode]] = ElasticNode
  has_centre: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 0 <= protocols.check_number('rate', self.rate) <= 1:
      raise ValueError(f'rate must be from 0 to 1, got {self.rate}.')
    _checks.check_choice('order', self.order, ORDERS)

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'elastic({self.period}, {self.rate}): every {self.period} steps a node '
      'waits for the answer of the centre, for nobody else.'
    )
