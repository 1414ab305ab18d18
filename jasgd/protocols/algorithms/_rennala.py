"""Rennala SGD: an update takes s gradients of the current clock."""

from typing import Any

from jasgd.protocols import _base
from jasgd.protocols import _checks
from jasgd.protocols.algorithms import _counting


class Rennala(_counting.Counting):
  r"""An update takes s gradients, all of the current clock; others are dropped.

  .. math:: x_{k+1} = x_k - \frac{\alpha}{s} \sum_{i=1}^{s} g_i(x_k)

  A learner may contribute several of the s gradients, since none waits. A
  gradient that was computed on older weights is dropped, and its learner
  continues with the newest weights.

  References:
    Tyurin and Richtarik, `Optimal Time Complexities of Parallel Stochastic
    Optimization Methods <https://arxiv.org/abs/2305.12387>`_, 2023
  """

  name = 'rennala'
  needs_current_clock = True

  def __init__(self, s: int) -> None:
    """Builds the protocol.

    Args:
      s: Gradients per update, all of the current clock.
    """
    super().__init__()
    self.s = _checks.check_count('s', s, 1)

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'s': self.s}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'rennala({self.s}): the server updates once it has {self.s} gradients '
      'of the current clock, from any learners; stale gradients are dropped; '
      'no learner waits.'
    )

  def _quorum(self) -> int:
    return self.s

  def _find_refusal(self, read_clock: int) -> _base.Fate | None:
    return _base.Fate.DROPPED_STALE if read_clock != self.clock else None
