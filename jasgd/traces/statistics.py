"""Numbers that explain a trace. Each function is pure and vectorised.

What a restart made void is left out, as in the columns. Arrays over learners
have an entry for each of `count_learners`. Nothing divided by nothing is NaN.
"""

import dataclasses

import numpy as np

from jasgd import protocols
from jasgd.traces import _schema
from jasgd.traces import _trace

PERCENTILES = (50, 95, 99)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StalenessSummary:
  """How stale some gradients were; NaN if there are none."""

  count: int
  mean: float
  std: float
  min: float
  max: float
  percentiles: dict[int, float]  # Of `PERCENTILES`.
  histogram: np.ndarray  # Entry tau: how many had that staleness.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LearnerTimes:
  """Where the time of each learner went, in seconds: arrays over learners."""

  busy: np.ndarray  # Computing.
  waiting: np.ndarray  # Held back by the server, after its push arrived.
  communication: np.ndarray  # From snapshot to arrival, but not computing.
  idle: np.ndarray  # The run's duration without the busy time.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
  """Bytes on the wire: arrays over learners, None where not known."""

  sent: np.ndarray | None  # By a learner. The server received the sum.
  received: np.ndarray | None  # By a learner. The server sent the sum.


def count_learners(trace: _trace.Trace) -> int:
  """The number of learners: the header's, or more if more were seen.

  Args:
    trace: A trace.

  Returns:
    A number that is above the id of each learner in the trace.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(traces.make_records(learner=[0, 2]))
    >>> traces.statistics.count_learners(trace)
    3
  """
  num_learners = int(trace.header.get('num_learners') or 0)
  for learner in (trace.learner, trace.in_flight['learner']):
    if len(learner):
      num_learners = max(num_learners, int(learner.max()) + 1)
  return num_learners


def count_fates(trace: _trace.Trace) -> dict[protocols.Fate, int]:
  """How many gradients had which fate.

  Args:
    trace: A trace.

  Returns:
    A number for every `Fate`, 0 included.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(traces.make_records(fate=[0, 0, 2]))
    >>> traces.statistics.count_fates(trace)[traces.Fate.DROPPED_LATE]
    1
  """
  counts = np.bincount(trace.fate, minlength=len(protocols.Fate))
  return {fate: int(counts[fate]) for fate in protocols.Fate}


def get_clock(trace: _trace.Trace) -> int:
  """The server's clock at the end.

  Args:
    trace: A trace.

  Returns:
    The clock after the last update, or that of a restart after it; 0 if there
    was none.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(traces.make_records(apply_clock=[0, 1]))
    >>> traces.statistics.get_clock(trace)
    2
  """
  is_applied = trace.fate == protocols.Fate.APPLIED
  events = trace.events
  resumed = events['read_clock'][events['kind'] == _schema.Kind.RESTART]
  # Of what stands, a later restart or update never has a smaller clock.
  return max(
    int(trace.apply_clock[is_applied].max(initial=-1)) + 1,
    int(resumed.max(initial=0)),
  )


def describe_staleness(staleness: np.ndarray) -> StalenessSummary:
  """Mean, spread, percentiles and histogram of the staleness of gradients.

  Args:
    staleness: Whole numbers, at least 0: `trace.staleness`, or a part of it.

  Returns:
    A summary.

  Raises:
    ValueError: if a number is negative. (Gradients of an earlier incarnation
      of the server, DROPPED_LOST, may have that, and no staleness is theirs.)

  Examples:
    >>> import numpy as np
    >>> from jasgd import traces
    >>> summary = traces.statistics.describe_staleness(np.array([0, 1, 1, 2]))
    >>> summary.mean, summary.percentiles[50]
    (1.0, 1.0)
    >>> summary.histogram
    array([1, 2, 1])
  """
  staleness = np.ascontiguousarray(staleness, np.int64)
  if not len(staleness):
    nan = float('nan')
    return StalenessSummary(
      count=0,
      mean=nan,
      std=nan,
      min=nan,
      max=nan,
      percentiles=dict.fromkeys(PERCENTILES, nan),
      histogram=np.zeros(0, np.int64),
    )
  minimum = int(staleness.min())
  if minimum < 0:
    raise ValueError(f'A staleness must be at least 0, got {minimum}.')
  values = np.percentile(staleness, PERCENTILES)
  return StalenessSummary(
    count=len(staleness),
    mean=float(staleness.mean()),
    std=float(staleness.std()),
    min=float(minimum),
    max=float(staleness.max()),
    percentiles=dict(zip(PERCENTILES, values.tolist(), strict=True)),
    histogram=np.bincount(staleness),
  )


def measure_times(trace: _trace.Trace) -> LearnerTimes:
  """Where each learner's time went.

  From the snapshot to the release of a learner, its time is computing, or
  waiting at the server (release - arrival), or else communication, with the
  queues on the way. Times that are not known (NaN) count as 0. `idle` is all
  time without computing: also that before a learner came and after it went.

  Args:
    trace: A trace.

  Returns:
    Seconds per learner.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(compute_time=2, arrive_time=3, release_time=7)
    ... )
    >>> times = traces.statistics.measure_times(trace)
    >>> print(*times.busy, *times.communication, *times.waiting, *times.idle)
    2.0 1.0 4.0 5.0
  """
  compute_time = trace.compute_time
  communication = trace.arrive_time - trace.start_time - compute_time
  communication = np.maximum(communication, 0)  # Rounding may go below.
  busy = _sum_by_learner(trace, compute_time)
  return LearnerTimes(
    busy=busy,
    waiting=_sum_by_learner(trace, trace.wait_time),
    communication=_sum_by_learner(trace, communication),
    idle=np.maximum(trace.duration - busy, 0),
  )


def count_bytes(trace: _trace.Trace) -> Traffic:
  """What each learner sent and received.

  Each gradient is a push. Each recorded fetch is a pull; where none are, a
  learner pulls for every gradient, those in flight too. What they weigh is in
  the header, as `bytes_per_push` and `bytes_per_pull`.

  Args:
    trace: A trace.

  Returns:
    Bytes per learner, or None where the header does not know.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(learner=[0, 1, 0]), {'bytes_per_push': 10}
    ... )
    >>> traces.statistics.count_bytes(trace)
    Traffic(sent=array([20, 10]), received=None)
  """
  num_learners = count_learners(trace)
  num_pushes = np.bincount(trace.learner, minlength=num_learners)
  events = trace.events
  fetches = events['learner'][events['kind'] == _schema.Kind.FETCH]
  num_pulls = np.bincount(fetches, minlength=num_learners)
  if not len(fetches):
    num_pulls = num_pushes + np.bincount(
      trace.in_flight['learner'], minlength=num_learners
    )
  push, pull = map(trace.header.get, ('bytes_per_push', 'bytes_per_pull'))
  return Traffic(
    sent=None if push is None else num_pushes * push,
    received=None if pull is None else num_pulls * pull,
  )


def measure_lead(trace: _trace.Trace) -> np.ndarray:
  """By how many steps the fastest learner led the slowest, all along.

  Steps are counted from 0 in this trace; a learner that is not there (yet, or
  any more) stays at the number that it had.

  Args:
    trace: A trace.

  Returns:
    An entry for each gradient: the lead once that one had arrived.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(traces.make_records(learner=[0, 0, 1, 1]))
    >>> traces.statistics.measure_lead(trace)
    array([1, 2, 1, 0])
  """
  learner = np.ascontiguousarray(trace.learner)
  num_gradients = len(learner)
  if not num_gradients:
    return np.zeros(0, np.int64)
  totals = np.bincount(learner, minlength=count_learners(trace))
  order = np.argsort(learner, kind='stable')
  first = np.cumsum(totals) - totals
  rank = np.empty(num_gradients, np.int64)
  rank[order] = np.arange(num_gradients) - np.repeat(first, totals)
  fastest = np.maximum.accumulate(rank + 1)
  # The slowest completes its k-th step when the last learner to do so does.
  position = np.flatnonzero(rank < totals.min())
  completed = np.zeros(totals.min(), np.int64)
  np.maximum.at(completed, rank[position], position)
  slowest = np.cumsum(np.bincount(completed, minlength=num_gradients))
  return fastest - slowest


def measure_speedup(trace: _trace.Trace) -> float:
  """How many learners' worth of applied work was done at a time.

  The time that one learner, which never waits, would compute for the gradients
  that were applied, divided by the time that the run took.

  Args:
    trace: A trace.

  Returns:
    The speed-up in gradients. What staleness costs in convergence is not in it.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(learner=[0, 1], compute_time=3, arrive_time=4)
    ... )
    >>> traces.statistics.measure_speedup(trace)
    1.5
  """
  is_applied = trace.fate == protocols.Fate.APPLIED
  busy = float(np.nansum(trace.compute_time[is_applied]))
  return divide(busy, trace.duration)


def divide(numerator: float, denominator: float) -> float:
  """A quotient that is NaN if the denominator is 0.

  Args:
    numerator: Any number.
    denominator: Any number.

  Returns:
    The quotient, or NaN.

  Examples:
    >>> from jasgd import traces
    >>> traces.statistics.divide(1, 4), traces.statistics.divide(1, 0)
    (0.25, nan)
  """
  return numerator / denominator if denominator else float('nan')


def _sum_by_learner(trace: _trace.Trace, values: np.ndarray) -> np.ndarray:
  """Sums over the gradients of each learner, without those not known."""
  known = np.where(np.isnan(values), 0.0, values)
  return np.bincount(
    trace.learner, weights=known, minlength=count_learners(trace)
  ).astype(float)  # Without any gradients numpy counts in integers.
