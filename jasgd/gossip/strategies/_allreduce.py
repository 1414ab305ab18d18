r"""All-reduce: all nodes wait for each other, and take their mean.

.. math:: x_i \leftarrow \frac1n \sum_{j=1}^{n} x_j

With period 1 the gradients are averaged instead of the weights, and all nodes
make the same update: synchronous SGD. With a longer period it is local SGD.

References:
  Jin et al., `How to scale distributed deep learning?
  <https://arxiv.org/abs/1611.04581>`_, 2016; Stich, `Local SGD Converges Fast
  and Communicates Little <https://arxiv.org/abs/1805.09767>`_, 2019
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, ClassVar

from jasgd.gossip.strategies import _base


class AllReduceNode(_base.PeerNode):
  """Node of `AllReduce`: takes part in a mean of all nodes after each period.

  Means have numbers. A lost node stops all others: they go back to the last
  checkpoint that all have, and continue with a number that none has recorded.

  Attributes:
    number: Number of the next mean.
  """

  number = 0

  def exchange(self, step: int) -> _base.Actions:
    """Takes part in the next mean."""
    del step
    return (_base.JoinMean(self.number),)

  def on_replies(self, replies: Sequence[_base.Reply]) -> _base.Actions:
    """Counts the mean, which is in this node's weights now."""
    del replies
    self.number += 1
    return ()

  def on_regroup(self, number: int) -> None:
    """Continues with a number that no node has recorded."""
    self.number = number

  def save_state(self) -> dict[str, Any]:
    """The number of the next mean."""
    return {'number': self.number}

  def restore_state(self, state: Mapping[str, Any]) -> None:
    """Sets the number of the next mean."""
    self.number = state['number']


@dataclasses.dataclass(frozen=True)
class AllReduce(_base.PeerStrategy):
  r"""All nodes wait for each other and average; with period > 1, local SGD.

  .. math:: x_i \leftarrow \frac1n \sum_{j=1}^{n} x_j

  With period 1 the gradients are averaged, and all nodes make the same update;
  with a longer period the weights are averaged.
  """

  name: ClassVar[str] = 'allreduce'
  node_class: ClassVar[type[_base.PeerNode]] = AllReduceNode
  is_collective: ClassVar[bool] = True

  @property
  def averages_gradients(self) -> bool:
    """Whether gradients are averaged, not weights."""
    return self.period == 1

  def describe(self) -> str:
    """The rule in words: which nodes exchange what, and which of them wait."""
    return (
      f'allreduce({self.period}): every {self.period} steps all nodes wait for '
      'the slowest, and average.'
    )
