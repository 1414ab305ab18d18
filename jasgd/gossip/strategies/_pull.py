r"""Pull-gossip: a node asks a peer for its weights, and averages.

.. math:: x \leftarrow (1 - \beta) x + \beta x_\text{peer}

After every period of steps a node asks a peer for its weights, waits for the
answer, and takes the weighted mean. The peer does not wait: it answers with the
weights that it has when the question arrives. The weight of a peer that does
not answer goes to the node itself.

References:
  Jin et al., `How to scale distributed deep learning?
  <https://arxiv.org/abs/1611.04581>`_, 2016
"""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

from jasgd import protocols
from jasgd.gossip.strategies import _base
from jasgd.gossip.strategies import _gossip

_TAKEN = _base.Outcome.TAKEN


class PullNode(_gossip.GossipNode):
  """Node of `Pull`: asks the peers of a round, and averages their answers."""

  _chosen: _gossip.Choice = []  # noqa: RUF012 - replaced, never changed

  def exchange(self, step: int) -> _base.Actions:
    """Asks the peers of this round."""
    chosen = self._chosen = self.choose_peers(step, self.strategy.beta)
    return [_base.Ask(peer) for peer, _ in chosen]

  def on_replies(self, replies: Sequence[_base.Reply]) -> _base.Actions:
    """Takes the weighted mean with the peers that answered."""
    answers, own_weight = [], 1.0
    for reply, (_, weight) in zip(replies, self._chosen, strict=False):
      if reply.outcome is _TAKEN:
        answers.append((reply, weight))
        own_weight -= weight
    if not answers:
      return ()
    return (_base.Mix(max(0.0, own_weight), tuple(answers)),)


@dataclasses.dataclass(frozen=True)
class Pull(_gossip.Gossip):
  r"""Pull-gossip: a node waits for the weights of a peer, and averages.

  .. math:: x \leftarrow (1 - \beta) x + \beta x_\text{peer}

  The peer does not wait. With a topology, a node takes the weighted mean with
  all peers of a round. The weight of a peer that does not answer goes to the
  node itself.

  Attributes:
    beta: Weight of a random peer; a topology has its own weights.
  """

  beta: float = 0.5
  name: ClassVar[str] = 'pull'
  node_class: ClassVar[type[_base.PeerNode]] = PullNode
  exchange_text: ClassVar[str] = 'waits for the weights of a peer and averages'

  def __post_init__(self) -> None:
    super().__post_init__()
    protocols.check_number('beta', self.beta, 0, 1)
    if self.beta != 0.5 and not self.is_random:
      raise ValueError(
        'A topology has its own weights (see with_constant_weights): leave '
        f'beta at 0.5, got {self.beta}.'
      )
