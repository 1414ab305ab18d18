"""What the simulator says about a real run, from the times in its trace."""

from typing import NamedTuple

import numpy as np

from jasgd import protocols
from jasgd import simulation
from jasgd import traces

# Short runs are predicted several times, so that chance evens out.
_NUM_GRADIENTS = 20_000
_MAX_PREDICTIONS = 16


class Prediction(NamedTuple):
  """What was predicted, by one or more seeds, and how well that agrees."""

  traces: tuple[traces.Trace, ...]
  comparison: simulation.Comparison

  @property
  def mean_staleness(self) -> float:
    """Of all applied gradients that were predicted."""
    applied = [
      trace.staleness[trace.fate == protocols.Fate.APPLIED]
      for trace in self.traces
    ]
    return traces.statistics.describe_staleness(np.concatenate(applied)).mean


def is_real(trace: traces.Trace | traces.NodeTrace | None) -> bool:
  """Whether a trace is of real processes."""
  if trace is None:
    return False
  is_server = isinstance(trace, traces.Trace)
  return ('num_present' if is_server else 'is_recorded') in trace.header


def predict_run(trace: traces.Trace) -> Prediction:
  """Predicts a real run; a ValueError if it cannot be done."""
  number = _NUM_GRADIENTS // max(1, trace.num_gradients)
  predicted = tuple(
    simulation.predict(trace, seed)
    for seed in range(min(max(1, number), _MAX_PREDICTIONS))
  )
  return Prediction(predicted, simulation.compare(trace, *predicted))
