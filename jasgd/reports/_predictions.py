"""A real run beside the simulator's prediction from its measured times."""

from typing import NamedTuple

import numpy as np

from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from jasgd.reports import _formats

# Short runs are predicted with several seeds, which average out chance.
_NUM_GRADIENTS = 20_000
_MAX_PREDICTIONS = 16


class Prediction(NamedTuple):
  """Simulations of a real run, one for each seed, and how well they agree."""

  traces: tuple[traces.Trace, ...]
  comparison: simulation.Comparison

  @property
  def mean_staleness(self) -> float:
    """Mean over the applied gradients of all simulations."""
    return float(np.mean(list_staleness(self.traces)))


def list_staleness(many: tuple[traces.Trace, ...]) -> np.ndarray:
  """The staleness of the applied gradients of several traces, together."""
  applied = [
    trace.staleness[trace.fate == protocols.Fate.APPLIED] for trace in many
  ]
  return np.concatenate([np.zeros(0, np.int64), *applied])


def predict_run(trace: traces.Trace) -> Prediction:
  """Predicts a real run; raises a ValueError if that is not possible."""
  number = _NUM_GRADIENTS // max(1, trace.num_gradients)
  predicted = tuple(
    simulation.predict(trace, seed)
    for seed in range(min(max(1, number), _MAX_PREDICTIONS))
  )
  return Prediction(predicted, simulation.compare(trace, *predicted))


def tell_prediction(prediction: Prediction, measured: float) -> str:
  """A paragraph on a prediction and the mean staleness that was measured."""
  number = _formats.format_number
  return (
    'From the measured times of each learner and of the server, which say '
    'nothing about the order in which gradients came, the simulator predicts a '
    f'mean staleness of {number(prediction.mean_staleness)}; '
    f'{number(measured)} was measured. The total variation of the two '
    f'distributions is {number(prediction.comparison.total_variation)} (0: '
    'they are the same; 1: they have nothing in common).'
  )


def make_table(prediction: Prediction, title: str) -> _formats.Table:
  """Staleness and share of each learner, measured and predicted."""
  comparison = prediction.comparison
  number = len(comparison.measured_share)
  share, mean = _formats.format_share, _formats.format_mean
  rows = [
    (
      str(learner),
      mean(comparison.measured_staleness[learner]),
      mean(comparison.predicted_staleness[learner]),
      _format_difference(comparison.staleness_difference[learner]),
      share(comparison.measured_share[learner]),
      share(comparison.predicted_share[learner]),
      _format_difference(comparison.share_difference[learner]),
    )
    for learner in range(min(number, _formats.MAX_ROWS))
  ]
  header = (
    'learner',
    'mean staleness, measured',
    'predicted',
    'difference',
    'share of updates, measured',
    'predicted',
    'difference',
  )
  note = _formats.note_rest(number)
  return _formats.Table(title, header, rows, note=note)


def _format_difference(difference: float) -> str:
  """A signed percentage; a dash where there is nothing to compare with."""
  return f'{difference:+.1%}' if np.isfinite(difference) else _formats.MISSING
