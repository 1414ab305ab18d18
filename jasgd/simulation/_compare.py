"""`compare`: how well a prediction agrees with the run that it is of."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from jasgd import protocols
from jasgd import traces


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
  """A run and its prediction, of applied gradients: arrays over learners.

  A difference is relative to the prediction: 0.1 is 10% more than that.
  """

  measured_staleness: np.ndarray  # Means; NaN of a learner without any.
  predicted_staleness: np.ndarray
  staleness_difference: np.ndarray
  measured_share: np.ndarray  # Of all applied gradients.
  predicted_share: np.ndarray
  share_difference: np.ndarray
  # Of the two distributions of staleness, from 0 (the same) to 1.
  total_variation: float


def compare(trace: traces.Trace, *predicted: traces.Trace) -> Comparison:
  """Compares a run with what was predicted of it.

  The total variation of the shares p(tau) and q(tau) of gradients with
  staleness tau is 1/2 sum |p(tau) - q(tau)|.

  Args:
    trace: The run.
    *predicted: What `predict` made of it. Several, of different seeds, are
      taken together, so that less is left to the chance of one.

  Returns:
    A comparison, with an entry for each learner of any.

  Raises:
    ValueError: if nothing was predicted.
    TraceError: if records hold what no run can have left.

  Examples:
    >>> import jasgd
    >>> from jasgd import protocols, simulation
    >>> trace, other = (
    ...     jasgd.simulate(protocol, num_learners=2, num_gradients=100)
    ...     for protocol in (protocols.asynchronous(), protocols.hardsync()))
    >>> simulation.compare(trace, trace).total_variation
    0.0
    >>> simulation.compare(trace, other).total_variation
    0.99
  """
  if not predicted:
    raise ValueError('A trace is compared with one or more predictions.')
  num_learners = max(map(traces.statistics.count_learners, (trace, *predicted)))
  staleness, share, histogram = _count([trace], num_learners)
  others = _count(predicted, num_learners)
  return Comparison(
    measured_staleness=staleness,
    predicted_staleness=others[0],
    staleness_difference=_relate(staleness, others[0]),
    measured_share=share,
    predicted_share=others[1],
    share_difference=_relate(share, others[1]),
    total_variation=_measure_variation(histogram, others[2]),
  )


def _count(
  together: Sequence[traces.Trace], num_learners: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Per learner mean staleness and share, and the histogram of all."""
  applied = [trace.fate == protocols.Fate.APPLIED for trace in together]
  learner, staleness = (
    np.concatenate(
      [
        getattr(trace, name)[is_applied]
        for trace, is_applied in zip(together, applied, strict=True)
      ]
    )
    for name in ('learner', 'staleness')
  )
  counts = np.bincount(learner, minlength=num_learners)
  totals = np.bincount(learner, weights=staleness, minlength=num_learners)
  mean = np.full(num_learners, np.nan)
  np.divide(totals, counts, out=mean, where=counts > 0)
  summary = traces.statistics.describe_staleness(staleness)
  return mean, counts / max(1, len(learner)), summary.histogram


def _relate(measured: np.ndarray, predicted: np.ndarray) -> np.ndarray:
  """The relative difference; 0 if both are 0, infinite if one is."""
  difference = measured - predicted
  relative = np.where(difference == 0, 0.0, np.copysign(np.inf, difference))
  np.divide(difference, predicted, out=relative, where=predicted != 0)
  return relative


def _measure_variation(first: np.ndarray, second: np.ndarray) -> float:
  """The total variation of two histograms; NaN if one is empty."""
  if not len(first) or not len(second):
    return float('nan')
  shares = np.zeros((2, max(len(first), len(second))))
  shares[0, : len(first)] = first / first.sum()
  shares[1, : len(second)] = second / second.sum()
  return float(np.abs(shares[0] - shares[1]).sum() / 2)
