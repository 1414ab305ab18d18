"""A fast path for protocols in which no learner waits: sort the arrivals.

If no learner ever waits, the arrival times of a learner are the running sums of
its durations, whatever the others do. Sorted by (time, learner), they are the
order in which the server handles gradients. If a protocol only counts
gradients, the clock is the number of gradients before, divided by the gradients
per update, and no Python runs per gradient. Otherwise the protocol is asked,
one gradient at a time.
"""

from typing import Any, NamedTuple

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _times

# Largest number of durations drawn per gradient. If more are needed, learners
# are so unequal that most of the table would never be used.
_MAX_DRAWS = 4


class _Arrivals(NamedTuple):
  """The gradients in the order in which they arrive."""

  learner: np.ndarray
  step: np.ndarray
  time: np.ndarray
  duration: np.ndarray
  start: np.ndarray
  # Place in this order of the same learner's gradient before; -1: none.
  previous: np.ndarray
  # For each learner: number of gradients, and the place of the last of them.
  count: np.ndarray
  last: np.ndarray


def simulate_sorted(
  protocol: protocols.Protocol,
  num_learners: int,
  num_gradients: int,
  compute: _times.ComputeTime,
  seed: int,
  overlap: bool,
  samples: int,
) -> tuple[np.ndarray, list[list[float]]] | None:
  """Records and gradients in flight, as `ServerLoop.run` returns them.

  Args:
    protocol: Protocol that holds no learners; its clock is set to the last one.
    num_learners: Number of learners.
    num_gradients: Number of gradients that arrive.
    compute: Time model of a gradient.
    seed: Seed of the times.
    overlap: Whether a learner pulls before its push is applied.
    samples: Samples of a gradient.

  Returns:
    The result of the event loop, or None if the learners are too unequal.
  """
  table = _draw_arrivals(
    num_learners, num_gradients, protocol.steps_per_push, compute, seed
  )
  if table is None:
    return None
  arrivals = _sort_arrivals(*table, num_gradients, compute.is_constant)
  protocol.init(num_learners)
  per_update = protocol.count_per_update()
  if per_update is not None:
    clock, read_clock = _count_clocks(per_update, arrivals, overlap)
    fate = np.zeros((), np.uint8)
    protocol.clock = num_gradients // per_update
  else:
    fate, clock, read_clock = _ask_protocol(protocol, arrivals, overlap)
  # No learner comes or leaves, so only pushes update. A push has updated if the
  # next one sees another version.
  version = np.append(clock[1:], protocol.clock)
  records = _make_records(
    {
      'fate': fate,
      'updates': (version != clock).view(np.uint8),
      'replica': np.array(traces.SERVER, np.int32),
      'worker': arrivals.learner,
      'samples': np.array(samples, np.int32),
      'step': (arrivals.step + 1) * protocol.steps_per_push,
      'read_version': read_clock,
      'version': version,
      'start_time': arrivals.start,
      'compute_time': arrivals.duration,
      'end_time': arrivals.time,
      'release_time': arrivals.time,
    }
  )
  in_flight = _list_in_flight(
    arrivals, clock, protocol.clock, overlap, protocol.steps_per_push
  )
  return records, in_flight


def _count_clocks(
  per_update: int, arrivals: _Arrivals, overlap: bool
) -> tuple[np.ndarray, np.ndarray]:
  """The clock at each arrival, and the clock of each gradient's weights."""
  num_gradients = len(arrivals.time)
  num_before = arrivals.previous + (0 if overlap else 1)
  read_clock = np.maximum(num_before, 0) // per_update
  return np.arange(num_gradients) // per_update, read_clock


def _ask_protocol(
  protocol: protocols.Protocol, arrivals: _Arrivals, overlap: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """The fate of each gradient, the clock at its arrival, and its read clock."""
  num_gradients = len(arrivals.time)
  fates = bytearray(num_gradients)
  clocks = np.empty(num_gradients, np.int64)
  read_clocks = np.empty(num_gradients, np.int64)
  newest = [0] * len(protocol.alive)  # Learner -> the clock of its weights.
  on_push = protocol.on_push
  # In pieces: lists of all gradients would need several times the memory of
  # the trace.
  for first in range(0, num_gradients, 1 << 16):
    piece = slice(first, first + (1 << 16))
    seen, read = [], []
    steps = arrivals.step[piece].tolist()
    for index, learner in enumerate(arrivals.learner[piece].tolist()):
      clock, read_clock = protocol.clock, newest[learner]
      seen.append(clock)
      read.append(read_clock)
      fate = on_push(learner, steps[index], read_clock).fate
      assert fate is not None  # Every push has a fate.
      fates[first + index] = fate
      newest[learner] = clock if overlap else protocol.clock
    clocks[piece], read_clocks[piece] = seen, read
  return np.frombuffer(fates, np.uint8), clocks, read_clocks


def _draw_arrivals(
  num_learners: int,
  num_gradients: int,
  steps_per_push: int,
  compute: _times.ComputeTime,
  seed: int,
) -> tuple[np.ndarray, np.ndarray] | None:
  """Durations and arrival times, [push, learner], enough for the gradients."""
  num_rows = 2 + int(1.05 * num_gradients / num_learners)
  while (num_rows - 4) * num_learners <= _MAX_DRAWS * num_gradients:
    durations = compute.table(seed, 0, num_rows * steps_per_push, num_learners)
    # One by one, as the event loop adds them: `sum` may add in another order.
    steps = durations.reshape(num_rows, steps_per_push, num_learners)
    durations = steps[:, 0]
    for index in range(1, steps_per_push):
      durations = durations + steps[:, index]
    arrivals = np.cumsum(durations, axis=0)
    # There are enough rows once the fastest learner has made its last push of
    # the table after all the gradients that are needed.
    num_within = np.count_nonzero(arrivals <= arrivals[-1].min())
    if num_within >= num_gradients:
      return durations, arrivals
    num_rows = 2 + int(1.1 * num_rows * num_gradients / max(1, num_within))
  return None


def _sort_arrivals(
  durations: np.ndarray,
  arrivals: np.ndarray,
  num_gradients: int,
  is_constant: bool,
) -> _Arrivals:
  """The first arrivals, in the order of (time, learner)."""
  num_learners = arrivals.shape[1]
  times = arrivals.ravel()
  order = _find_order(times, num_learners, is_constant)[:num_gradients]
  step, learner = np.divmod(order, np.int32(num_learners))
  is_first = step == 0
  before = np.where(is_first, 0, order - np.int32(num_learners))
  place = np.zeros(times.size, np.int32)
  place[order] = np.arange(num_gradients, dtype=np.int32)
  count = np.bincount(learner, minlength=num_learners)
  last = np.maximum(count - 1, 0) * num_learners + np.arange(num_learners)
  return _Arrivals(
    learner=learner,
    step=step,
    time=times[order],
    duration=durations.ravel()[order],
    start=np.where(is_first, 0, times[before]),
    previous=np.where(is_first, -1, place[before]),
    count=count,
    last=place[last],
  )


def _find_order(
  times: np.ndarray, num_learners: int, is_constant: bool
) -> np.ndarray:
  """Places in the table, row by row, in the order of (time, learner)."""
  if is_constant:
    return np.arange(times.size, dtype=np.int32)
  order = np.argsort(times)
  ordered = times[order]
  if np.any(ordered[1:] == ordered[:-1]):  # Equal times: by learner.
    order = np.lexsort((np.arange(times.size) % num_learners, times))
  return order.astype(np.int32)


def _make_records(columns: dict[str, Any]) -> np.ndarray:
  """Records of gradients from their columns."""
  num_records = len(columns['worker'])
  records = np.zeros(num_records, traces.RECORD)
  # Piece by piece, so that a piece is still in the cache for the next column.
  for start in range(0, num_records, 1 << 13):
    piece = slice(start, start + (1 << 13))
    for name, column in columns.items():
      records[name][piece] = column[piece] if column.ndim else column
  return records


def _list_in_flight(
  arrivals: _Arrivals,
  clock: np.ndarray,
  last_clock: int,
  overlap: bool,
  steps_per_push: int,
) -> list[list[float]]:
  """[worker, step, read version, start] of each learner's next gradient."""
  last, has_pushed = arrivals.last, arrivals.count > 0
  if overlap:
    read_clock = clock[last]
  else:  # Read after the own push: the clock that the next arrival saw.
    next_clock = clock[np.minimum(last + 1, len(clock) - 1)]
    read_clock = np.where(last + 1 < len(clock), next_clock, last_clock)
  columns = (
    range(len(last)),
    ((arrivals.count + 1) * steps_per_push).tolist(),
    np.where(has_pushed, read_clock, 0).tolist(),
    np.where(has_pushed, arrivals.time[last], 0.0).tolist(),
  )
  return [list(row) for row in zip(*columns, strict=True)]
