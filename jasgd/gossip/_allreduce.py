"""All-reduce: all nodes wait for each other, and take their mean."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, ClassVar

from jasgd.gossip import _strategy


class AllReduceNode(_strategy.PeerNode):
  """Takes part in a mean of all nodes after every period.

  A mean is known by its number. A node that is lost stops all: they go back to
  the last checkpoint that all have, and use a number that none has used.

  Attributes:
    number: Number of the next mean.
  """

  number = 0

  def exchange(self, step: int) -> _strategy.Actions:
    """Joins the next mean."""
    del step
    return (_strategy.JoinMean(self.number),)

  def on_replies(self, replies: Sequence[_strategy.Reply]) -> _strategy.Actions:
    """The mean is made, and in this node's weights."""
    del replies
    self.number += 1
    return ()

  def save_state(self) -> dict[str, Any]:
    """The number of the next mean."""
    return {'number': self.number}

  def restore_state(self, state: Mapping[str, Any]) -> None:
    """The inverse of `save_state`."""
    self.number = state['number']


@dataclasses.dataclass(frozen=True)
class AllReduce(_strategy.PeerStrategy):
  r"""All nodes wait for each other and average; with period > 1, local SGD.

  .. math:: x_i \leftarrow \frac1n \sum_{j=1}^{n} x_j

  With period 1 the gradients are averaged, and all nodes make the same update;
  with a longer period the weights.

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016
  """

  node_class: ClassVar[type[_strategy.PeerNode]] = AllReduceNode
  is_collective: ClassVar[bool] = True

  @property
  def averages_gradients(self) -> bool:
    """Whether gradients are averaged, not weights."""
    return self.period == 1

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'allreduce({self.period}): every {self.period} steps all nodes wait for '
      'the slowest, and average.'
    )
