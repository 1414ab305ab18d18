"""Constant delay: learners of equal speed push in rotation."""

from typing import Any

from jasgd.protocols import _checks
from jasgd.protocols.algorithms import _asynchronous


class ConstantDelay(_asynchronous.Asynchronous):
  r"""d + 1 learners of equal speed in rotation: each gradient d updates late.

  .. math:: x_{t+1} = x_t - \alpha \, g(x_{t-d})

  The paper applies each gradient after a constant delay, since the staleness of
  N learners with similar speeds is close to N - 1. Here d + 1 learners give
  exactly this delay: they push one after another, and none waits.

  References:
    Jain et al., `An Analysis of the Delayed Gradients Problem in Asynchronous
    SGD <https://openreview.net/forum?id=BJLSGcywG>`_, 2018
  """

  name = 'constant_delay'
  needs_equal_times = True

  def __init__(self, delay: int) -> None:
    """Builds the protocol.

    Args:
      delay: Staleness of every gradient, in updates.
    """
    super().__init__()
    self.delay = _checks.check_count('delay', delay, 0)
    self.num_learners = self.delay + 1  # No other number gives this delay.

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'delay': self.delay}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'constant_delay({self.delay}): {self.delay + 1} learners of equal speed '
      'push in rotation, and the server updates with every gradient; no '
      'learner waits.'
    )

  def without_equal_times(self) -> _asynchronous.Asynchronous:
    """The same server; the speeds of the learners then make the delays."""
    return _asynchronous.Asynchronous()

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if this number of learners gives another delay."""
    super().check(num_learners)
    if num_learners != self.num_learners:
      raise ValueError(
        f'A constant delay of {self.delay} needs exactly {self.delay + 1} '
        f'learners, got num_learners={num_learners}.'
      )
