"""The end of a run: whether it has come, why, and whether it was a failure."""

from typing import Any

from jasgd.runtime import _settings
from jasgd.runtime.server import _metrics
from jasgd.runtime.server import _sessions
from jasgd.runtime.server import _weights

# A run has diverged if so many gradients in a row were not finite: the first
# number, or the second one times the number of learners, if that is larger.
_MIN_NOT_FINITE, _NOT_FINITE_PER_LEARNER = 3, 2
# Largest number of learners that the explanation of a divergence names.
_MAX_NAMES = 4


class RunEnd:
  """State of the end of a run. The server announces the end to learners.

  Args:
    settings: Settings of the run.

  Attributes:
    reason: Reason for the end, in words; None while the run goes on.
    is_interrupted: Whether the run was stopped, and can be resumed.
    is_failed: Whether a lost learner has ended the run.
    is_diverged: Whether gradients that were not finite have ended the run.
  """

  def __init__(self, settings: _settings.ServerSettings) -> None:
    self.reason: str | None = None
    self.is_interrupted = self.is_failed = self.is_diverged = False
    self._patience = settings.deadlines.end
    self._time = 0.0
    self._num_not_finite = 0  # Gradients in a row.

  @property
  def has_come(self) -> bool:
    """Whether the run has ended, for good or until it is resumed."""
    return self.reason is not None

  def start_deadline(self, time: float) -> None:
    """Starts the deadline for the last messages of clients."""
    self._time = time

  def is_late(self, time: float) -> bool:
    """Whether the deadline for the last messages has passed."""
    return self.has_come and time > self._time + self._patience

  # --- Divergence.

  def note_finite(self) -> None:
    """Notes a finite gradient: the count of non-finite ones starts again."""
    self._num_not_finite = 0

  def note_not_finite(self, num_learners: int) -> bool:
    """Counts a gradient that was not finite.

    Args:
      num_learners: Number of learners in the run.

    Returns:
      Whether the run has diverged.
    """
    self._num_not_finite += 1
    limit = max(_MIN_NOT_FINITE, _NOT_FINITE_PER_LEARNER * num_learners)
    return not self.has_come and self._num_not_finite >= limit

  def explain_divergence(
    self,
    sessions: _sessions.Sessions,
    weights: _weights.ServerWeights,
    metrics: _metrics.ServerMetrics,
  ) -> str:
    """Reason for the end of a run that has diverged, and a cure."""
    summary = metrics.summarize()
    staleness = summary.get('server/staleness_mean', 0.0)
    rate = weights.rate
    rate_text = 'that of the optimizer' if rate is None else f'{rate:g}'
    bad = [each for each in sessions if each.num_not_finite]
    worst = sorted(bad, key=lambda session: -session.num_not_finite)
    names = ', '.join(
      f'{each.num_not_finite} of learner {each.learner}'
      for each in worst[:_MAX_NAMES]
    )
    return (
      f'The loss diverged: the last {self._num_not_finite} gradients were not '
      f'finite (in all, {names}). '
      f'At clock {weights.clock} the mean staleness was {staleness:.1f} '
      f'(at most {summary.get("server/staleness_max", 0):.0f}) and the rate '
      f'{rate_text}. A rule of thumb: divide a rate that is stable without '
      'delay by the staleness; the policy inverse does so.'
    )

  # --- Status and checkpoints.

  def describe(self) -> dict[str, Any]:
    """Entries of the server's status."""
    return {
      'end_reason': self.reason,
      'is_interrupted': self.is_interrupted,
      'is_failed': self.is_failed,
      'is_diverged': self.is_diverged,
    }

  def save(self) -> dict[str, Any] | None:
    """State for a checkpoint; None if the run goes on when it is resumed."""
    if self.is_interrupted or not self.has_come:
      return None
    return {'reason': self.reason, 'is_diverged': self.is_diverged}

  def restore(self, saved: dict[str, Any] | None) -> None:
    """Inverse of `save`."""
    if saved is not None:
      self.reason, self.is_diverged = saved['reason'], saved['is_diverged']
