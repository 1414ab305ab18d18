"""The short way for protocols in which nobody waits: sort the arrivals.

If no learner ever waits, a learner's arrival times are the running sums of its
durations, whatever the others do. Sorted by (time, learner) they are the order
in which the server handles them, and the clock is the number of gradients
before, divided by the gradients per update. No Python runs per gradient.
"""

import numpy as np

from jasgd import traces
from jasgd.simulation import _times


def simulate_sorted(
  num_learners: int,
  num_gradients: int,
  gradients_per_update: int,
  compute: _times.ComputeTime,
  seed: int,
  overlap: bool,
) -> tuple[np.ndarray, list[list[float]]]:
  """The records and what is in flight, as `EventLoop.run` gives them."""
  durations, arrivals = _draw_arrivals(
    num_learners, num_gradients, compute, seed
  )
  order = _sort_arrivals(arrivals, compute.is_constant)[:num_gradients]
  step, learner = np.divmod(order, np.int32(num_learners))
  is_first = step == 0
  # The place in `order` of each learner's previous gradient.
  place = np.zeros(arrivals.size, np.int32)
  place[order] = np.arange(num_gradients, dtype=np.int32)
  before = np.where(is_first, 0, order - num_learners)
  num_before = place[before] + (0 if overlap else 1)
  clock = np.arange(num_gradients) // gradients_per_update
  times = arrivals.ravel()
  arrive_time = times[order]
  records = _make_records(
    {
      'learner': learner,
      'step': step,
      'read_clock': np.where(is_first, 0, num_before // gradients_per_update),
      'arrive_clock': clock,
      'apply_clock': clock,
      'start_time': np.where(is_first, 0, times[before]),
      'compute_time': durations.ravel()[order],
      'arrive_time': arrive_time,
      'release_time': arrive_time,
    }
  )
  return records, _find_in_flight(
    records, num_learners, gradients_per_update, overlap
  )


def _make_records(columns: dict[str, np.ndarray]) -> np.ndarray:
  """Records of applied gradients from their columns."""
  num_records = len(columns['learner'])
  records = np.zeros(num_records, traces.RECORD)  # Kind and fate are 0.
  # Piece by piece, so that a piece is still in the cache for the next column.
  for start in range(0, num_records, 1 << 13):
    piece = slice(start, start + (1 << 13))
    for name, column in columns.items():
      records[name][piece] = column[piece]
  return records


def _draw_arrivals(
  num_learners: int, num_gradients: int, compute: _times.ComputeTime, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """Durations and arrival times, [step, learner], enough for the gradients."""
  num_rows = 2 + int(1.05 * num_gradients / num_learners)
  while True:
    durations = compute.table(seed, 0, num_rows, num_learners)
    arrivals = np.cumsum(durations, axis=0)
    # Enough, once even the last row of the fastest learner comes too late.
    num_within = np.count_nonzero(arrivals <= arrivals[-1].min())
    if num_within >= num_gradients:
      return durations, arrivals
    num_rows = 2 + int(1.1 * num_rows * num_gradients / max(1, num_within))


def _sort_arrivals(arrivals: np.ndarray, is_constant: bool) -> np.ndarray:
  """Places in `arrivals`, row by row, in the order of (time, learner)."""
  if is_constant:
    return np.arange(arrivals.size, dtype=np.int32)
  times = arrivals.ravel()
  order = np.argsort(times)
  ordered = times[order]
  if np.any(ordered[1:] == ordered[:-1]):  # Ties go by learner.
    learners = np.tile(np.arange(arrivals.shape[1]), arrivals.shape[0])
    order = np.lexsort((learners, times))
  return order.astype(np.int32)


def _find_in_flight(
  records: np.ndarray, num_learners: int, per_update: int, overlap: bool
) -> list[list[float]]:
  """[learner, step, read clock, start] of what every learner computes now."""
  steps = np.bincount(records['learner'], minlength=num_learners)
  last = np.full(num_learners, -1)  # Of each learner, the last record.
  last[records['learner']] = np.arange(len(records))
  clocks = np.where(
    steps == 0, 0, (last if overlap else last + 1) // per_update
  )
  starts = np.where(steps == 0, 0.0, records['arrive_time'][last])
  columns = (
    range(num_learners),
    steps.tolist(),
    clocks.tolist(),
    starts.tolist(),
  )
  return [list(row) for row in zip(*columns, strict=True)]
