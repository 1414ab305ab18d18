"""Ringmaster ASGD: asynchronous, without gradients that are too stale."""

from typing import Any

from jasgd.protocols import _base
from jasgd.protocols import _checks
from jasgd.protocols.algorithms import _counting


class Ringmaster(_counting.Counting):
  r"""Asynchronous, but gradients of staleness above r are dropped: no update.

  .. math:: x_{k+1} = x_k - \alpha \, g(x_{k-\tau}) \quad \text{if } \tau \le r

  tau is the staleness of the gradient. No learner waits: one whose gradient is
  dropped continues with the newest weights.

  References:
    Maranjyan et al., `Ringmaster ASGD
    <https://arxiv.org/abs/2501.16168>`_, 2025
  """

  name = 'ringmaster'
  updates_each = True

  def __init__(self, r: int) -> None:
    """Builds the protocol.

    Args:
      r: Largest staleness of a gradient that makes an update.
    """
    super().__init__()
    self.r = _checks.check_count('r', r, 0)

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'r': self.r}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'ringmaster({self.r}): the server updates with every gradient of '
      f'staleness {self.r} or less, and drops the others; no learner waits.'
    )

  def _find_refusal(self, read_clock: int) -> _base.Fate | None:
    is_stale = self.clock - read_clock > self.r
    return _base.Fate.DROPPED_STALE if is_stale else None
