"""Pull-gossip: a node asks a peer for its weights, and averages."""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

from jasgd.gossip import _checks
from jasgd.gossip import _peers
from jasgd.gossip import _strategy

_TAKEN = _strategy.Outcome.TAKEN


class PullNode(_peers.GossipNode):
  """Asks the peers of a round, and waits for their answers.

  A peer that does not answer leaves its weight to the node itself.
  """

  _chosen: _peers.Choice = []  # noqa: RUF012 - replaced, never changed

  def exchange(self, step: int) -> _strategy.Actions:
    """Asks the peers of this round."""
    chosen = self._chosen = self.choose_peers(step, self.strategy.beta)
    return [_strategy.Ask(peer) for peer, _ in chosen]

  def on_replies(self, replies: Sequence[_strategy.Reply]) -> _strategy.Actions:
    """Takes the weighted mean with the answers."""
    answers, own_weight = [], 1.0
    for reply, (_, weight) in zip(replies, self._chosen, strict=False):
      if reply.outcome is _TAKEN:
        answers.append((reply, weight))
        own_weight -= weight
    if not answers:
      return ()
    return (_strategy.Mix(max(0.0, own_weight), tuple(answers)),)


@dataclasses.dataclass(frozen=True)
class Pull(_peers.Gossip):
  r"""Pull-gossip.

  .. math:: x \leftarrow (1 - \beta) x + \beta x_\text{peer}

  The peer's weights are those that it has when the question arrives; the peer
  does not wait. With a topology: the weighted mean with all peers of that
  round. The weight of a peer that does not answer goes to the node itself.

  Attributes:
    beta: Weight of a random peer; a topology has weights of its own.

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016
  """

  beta: float = 0.5
  node_class: ClassVar[type[_strategy.PeerNode]] = PullNode
  _words: ClassVar[str] = 'waits for the weights of a peer and averages'

  def __post_init__(self) -> None:
    super().__post_init__()
    _checks.check_weight(self.beta, 'beta')
    if self.beta != 0.5 and not isinstance(self.peers, str):
      raise ValueError(
        'A topology has weights of its own (see with_constant_weights): leave '
        f'beta at 0.5, got {self.beta}.'
      )
