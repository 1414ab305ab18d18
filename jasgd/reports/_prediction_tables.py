"""A real run beside its prediction, learner by learner."""

import numpy as np

from jasgd import simulation
from jasgd.reports import _formats
from jasgd.reports import _runs
from jasgd.reports import _tables

_HEADER = (
  'learner',
  'mean staleness, measured',
  'predicted',
  'difference',
  'share of updates, measured',
  'predicted',
  'difference',
)


def make_prediction(run: _runs.Run, title: str) -> _tables.Table | None:
  """Staleness and share of each learner; None if nothing was predicted."""
  if run.prediction is None:
    return None
  comparison = run.prediction.comparison
  number = len(comparison.measured_share)
  rows = [
    _make_row(comparison, learner)
    for learner in range(min(number, _tables.MAX_LEARNERS))
  ]
  return _tables.Table(title, _HEADER, rows, note=_tables.note_rest(number))


def _make_row(
  comparison: simulation.Comparison, learner: int
) -> tuple[str, ...]:
  return (
    str(learner),
    _tables.format_mean(comparison.measured_staleness[learner]),
    _tables.format_mean(comparison.predicted_staleness[learner]),
    _format_difference(comparison.staleness_difference[learner]),
    _formats.format_share(comparison.measured_share[learner]),
    _formats.format_share(comparison.predicted_share[learner]),
    _format_difference(comparison.share_difference[learner]),
  )


def _format_difference(difference: float) -> str:
  """Signed, in percent; a dash where there is nothing to compare with."""
  return f'{difference:+.1%}' if np.isfinite(difference) else _formats.MISSING
