"""Push-gossip: a node sends its weights, and averages what it was sent."""

import dataclasses
from typing import ClassVar

from jasgd.gossip import _peers
from jasgd.gossip import _strategy

# Messages that may wait to be mixed, times the number of nodes.
_MAX_WAITING = 4

_TAKEN = _strategy.Outcome.TAKEN
_MIX_WAITING = _strategy.MixWaiting()

# The sender keeps what was not taken.
RETURNED = (
  _strategy.Outcome.FULL,
  _strategy.Outcome.DONE,
  _strategy.Outcome.UNREACHABLE,
)


class PushNode(_peers.GossipNode):
  """Sends shares of its weights, and mixes what has come; never waits.

  A message counts in the receiver's mix by its share. The node's own weight is
  what it has kept of 1. A node that has made its steps keeps everything, and
  mixes what comes at once.
  """

  def __init__(
    self, strategy: _peers.Gossip, node: int, num_nodes: int, seed: int
  ) -> None:
    super().__init__(strategy, node, num_nodes, seed)
    self._waiting: list[_strategy.Message] = []
    self._max_waiting = _MAX_WAITING * num_nodes
    self._given: list[float] = []  # Shares that left in the last exchange.

  def exchange(self, step: int) -> _strategy.Actions:
    """Sends to the peers of this round, then mixes what has come."""
    chosen = self.choose_peers(step)
    self._given = [share for _, share in chosen]
    actions: list[_strategy.Action] = [
      _strategy.Send(peer, share, step) for peer, share in chosen
    ]
    actions.append(_MIX_WAITING)
    return actions

  def on_outcome(
    self, send: _strategy.Send, outcome: _strategy.Outcome
  ) -> None:
    """Keeps the share of a message that was not taken, if not mixed yet."""
    if outcome is _TAKEN:
      return
    if outcome in RETURNED and send.step == self.step:
      self._given.remove(send.share)

  def on_message(self, message: _strategy.Message) -> _strategy.Outcome:
    """Lets a message wait for the next mix, if there is room."""
    if self.has_ended:
      return _strategy.Outcome.DONE
    if len(self._waiting) >= self._max_waiting:
      return _strategy.Outcome.FULL
    self._waiting.append(message)
    return _TAKEN

  def mix_waiting(self) -> _strategy.Mix | None:
    """The mean of the own weights and all that has come, by shares."""
    if not self._waiting:
      return None
    kept = 1.0 if self.is_done else max(0.0, 1 - sum(self._given))
    return self.mix_shares(kept)

  def mix_shares(self, own: float) -> _strategy.Mix:
    """Mixes all that has come by shares, with the own weight `own`."""
    waiting, self._waiting = self._waiting, []
    total = own + sum([message.share for message in waiting])
    if not total:  # Nobody has any weight left: nothing changes.
      own = total = 1.0
    return _strategy.Mix(
      own / total,
      tuple([(message, message.share / total) for message in waiting]),
    )


@dataclasses.dataclass(frozen=True)
class Push(_peers.Gossip):
  r"""Push-gossip: sends x to a peer, then averages with all that has come.

  .. math::
    x \leftarrow \frac{w x + \sum_{k} x_k}{w + \text{number of received}}

  w is 1, or 2 if the node drew itself and so sent nothing.

  With a topology a node sends to all peers of that round, and W_ij, the weight
  of peer j for node i, is the weight that i's message has for j. A node's own
  weight is what its peers leave of 1; the mean is divided by the sum of the
  weights that came together. If W is doubly stochastic and all nodes mix at
  once, that is `Topology.push`. A message that its receiver does not take
  leaves its share with the sender.

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016
  """

  node_class: ClassVar[type[_strategy.PeerNode]] = PushNode
  _words: ClassVar[str] = (
    'sends its weights to a peer and averages what has come, and waits for '
    'nobody'
  )
