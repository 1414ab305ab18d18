"""Backup workers: synchronous SGD that skips the slowest learners."""

from typing import Any

from jasgd.protocols import _checks
from jasgd.protocols.algorithms import _hardsync


class Backup(_hardsync.Hardsync):
  r"""Synchronous SGD that skips the `num_backups` slowest learners per update.

  .. math::
    x \leftarrow x - \frac{\alpha}{N - b} \sum_{i=1}^{N - b} g_i(x)

  The server takes the first N - b gradients of the current clock, for N
  learners and b backups. Late gradients are dropped, and their learners
  continue at once with the newest weights.

  References:
    Chen et al., `Revisiting Distributed Synchronous SGD
    <https://arxiv.org/abs/1604.00981>`_, 2016
  """

  name = 'backup'

  def __init__(self, num_backups: int) -> None:
    """Builds the protocol.

    Args:
      num_backups: Number of learners that an update does not wait for.
    """
    super().__init__()
    self.num_backups = _checks.check_count('num_backups', num_backups, 1)

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'num_backups': self.num_backups}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'backup({self.num_backups}): the server updates once all learners but '
      f'{self.num_backups} have pushed a gradient of the current clock; those '
      'wait for that update. Later gradients are dropped, and their learners '
      'continue at once.'
    )

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if an update would wait for no learner."""
    super().check(num_learners)
    if self.num_backups >= num_learners:
      raise ValueError(
        f'num_backups must be below num_learners={num_learners}, got '
        f'{self.num_backups}: an update must wait for at least one gradient.'
      )
