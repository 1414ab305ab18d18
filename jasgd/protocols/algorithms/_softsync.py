"""n-softsync: an update per 1/n of the learners; no learner waits."""

from typing import Any

from jasgd.protocols import _checks
from jasgd.protocols.algorithms import _counting


class Softsync(_counting.Counting):
  r"""n-softsync: an update per floor(alive / n) gradients, from any learners.

  .. math::
    c = \lfloor \lambda / n \rfloor, \quad
    x \leftarrow x - \frac1c \sum_{l=1}^{c} \alpha(\tau_l) \, g_l

  lambda is the number of learners. The server takes the first c gradients that
  arrive, of whatever clock and learner, and updates once with all of them. No
  learner waits. The staleness is about n: on average (lambda - 1) / c. The
  factor alpha(tau) of a stale gradient is a policy of `jasgd.transforms`; the
  paper divides the rate by tau.

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """

  name = 'softsync'

  def __init__(self, n: int) -> None:
    """Builds the protocol.

    Args:
      n: Divisor of the number of learners: an update takes as many gradients
        as 1/n of the learners.
    """
    super().__init__()
    self.n = _checks.check_count('n', n, 1)

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'n': self.n}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'softsync({self.n}): the server updates once it has as many gradients '
      f'as 1/{self.n} of the learners, from any of them; no learner waits. A '
      'learner that pushes before the update is due computes its next gradient '
      'on the same weights.'
    )

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if there are fewer than n learners."""
    super().check(num_learners)
    if self.n > num_learners:
      raise ValueError(
        f'n must be at most num_learners={num_learners}, got {self.n}: an '
        'update takes at least one gradient.'
      )

  def _quorum(self) -> int:
    return max(1, len(self.alive) // self.n)
