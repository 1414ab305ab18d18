r"""Push-gossip: a node sends its weights to a peer, and averages messages.

.. math:: x \leftarrow \frac{w x + \sum_{k=1}^{r} x_k}{w + r}

After every period of steps a node sends its weights to a peer, and then takes
the mean of its own weights and of the r messages that it has received since its
last mix. It never waits. Its own weight w is 1, or 2 if it drew itself as its
peer and so sent nothing.

References:
  Jin et al., `How to scale distributed deep learning?
  <https://arxiv.org/abs/1611.04581>`_, 2016
"""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

from jasgd.gossip.strategies import _base
from jasgd.gossip.strategies import _gossip

# Messages that may wait to be mixed, per node of the run.
_MAX_WAITING = 4

_TAKEN = _base.Outcome.TAKEN
_MIX_WAITING = _base.MixWaiting()

# Outcomes after which the sender keeps the share of a message.
RETURNED = (
  _base.Outcome.FULL,
  _base.Outcome.DONE,
  _base.Outcome.UNREACHABLE,
)


class PushNode(_gossip.GossipNode):
  """Node of `Push`: sends shares of its weights, and mixes received messages.

  In a mix, a message has the weight of its share, and the node itself has 1
  minus the shares that it has sent. (With one random peer both are 1/2, hence
  equal, as in the equation above.) A node that has made all its steps has the
  weight 1, and mixes messages as they arrive.

  Attributes:
    waiting: Messages that wait to be mixed.
  """

  def __init__(
    self, strategy: _gossip.Gossip, node: int, num_nodes: int, seed: int
  ) -> None:
    super().__init__(strategy, node, num_nodes, seed)
    self.waiting: list[_base.Message] = []
    self._max_waiting = _MAX_WAITING * num_nodes
    self._sent: list[float] = []  # Shares that left in the last exchange.

  def exchange(self, step: int) -> _base.Actions:
    """Sends to the peers of this round, then mixes the messages that wait."""
    chosen = self.choose_peers(step)
    self._sent = [share for _, share in chosen]
    actions: list[_base.Action] = [
      _base.Send(peer, share, step) for peer, share in chosen
    ]
    actions.append(_MIX_WAITING)
    return actions

  def on_outcome(self, send: _base.Send, outcome: _base.Outcome) -> None:
    """Keeps the share of a refused message, if the mix is still to come."""
    if outcome is _TAKEN:
      return
    if outcome in RETURNED and send.step == self.step:
      self._sent.remove(send.share)

  def on_message(self, message: _base.Message) -> _base.Outcome:
    """Lets a message wait for the next mix, if there is room."""
    if self.has_ended:
      return _base.Outcome.DONE
    if len(self.waiting) >= self._max_waiting:
      return _base.Outcome.FULL
    self.waiting.append(message)
    return _TAKEN

  def mix_waiting(self) -> _base.Mix | None:
    """The mean of own weights and messages, by shares."""
    if not self.waiting:
      return None
    kept = 1.0 if self.is_done else max(0.0, 1 - sum(self._sent))
    return self.mix_by(kept, [message.share for message in self.waiting])

  def mix_by(self, own: float, others: Sequence[float]) -> _base.Mix:
    """Mixes the waiting messages.

    Args:
      own: Share, or mass, of the own weights.
      others: Shares, or masses, of the messages, in the order of `waiting`.

    Returns:
      The weighted mean.
    """
    waiting, self.waiting = self.waiting, []
    total = own + sum(others)
    if not total:  # All are 0: the node keeps its weights.
      own = total = 1.0
    weights = [each / total for each in others]
    return _base.Mix(own / total, tuple(zip(waiting, weights, strict=True)))


@dataclasses.dataclass(frozen=True)
class Push(_gossip.Gossip):
  r"""Push-gossip: sends x to a peer, then averages all received messages.

  .. math:: x \leftarrow \frac{w x + \sum_{k=1}^{r} x_k}{w + r}

  r is the number of received messages. The own weight w is 1, or 2 if the node
  drew itself and so sent nothing.

  With a topology a node sends to all peers of a round: node j mixes the message
  of node i with weight :math:`W_{ij}`, and its own weights with
  :math:`W_{jj}`, divided by the sum of all these weights. If W is doubly
  stochastic and all nodes mix at once, this is `Topology.push`. The share of a
  message that its receiver refuses stays with the sender.
  """

  name: ClassVar[str] = 'push'
  node_class: ClassVar[type[_base.PeerNode]] = PushNode
  exchange_text: ClassVar[str] = (
    'sends its weights to a peer and averages received messages, and does not '
    'wait'
  )
