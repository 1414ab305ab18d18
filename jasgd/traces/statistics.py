"""Numbers that explain a trace. Each function is pure and vectorised.

What a restart made void is left out, as in the columns. Arrays over learners
have an entry for each of `count_learners`. Nothing divided by nothing is NaN.
"""

import dataclasses

import numpy as np

from jasgd import protocols
from jasgd.traces import _lead
from jasgd.traces import _schema
from jasgd.traces import _trace
from jasgd.traces import _waits

PERCENTILES = (50, 95, 99)
# More learners, or updates between two, than any run has: a record with such a
# number is no record, and arrays of that length would not fit in memory.
MAX_LEARNERS = MAX_STALENESS = 1 << 24


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

  Raises:
    TraceError: if a learner's number is negative, or there are over 2^24.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(traces.make_records(learner=[0, 2]))
    >>> traces.statistics.count_learners(trace)
    3
  """
  num_learners = int(trace.header.get('num_learners') or 0)
  events = trace.events
  is_learners = ~np.isin(events['kind'], _schema.SERVER_KINDS)
  for learner in (
    trace.learner,
    trace.in_flight['learner'],
    events['learner'][is_learners],
  ):
    if len(learner):
      if learner.min() < 0:
        raise _schema.TraceError(
          f'A learner has a number of at least 0, got {learner.min()}.'
        )
      num_learners = max(num_learners, int(learner.max()) + 1)
  if not 0 <= num_learners <= MAX_LEARNERS:
    raise _schema.TraceError(
      f'There are at most {MAX_LEARNERS} learners, got {num_learners}.'
    )
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
      of the server, LOST_HISTORY, may have that, and no staleness is theirs.)

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
  waiting at the server (to what `traces.find_wait_ends` says), or else
  communication, with the queues on the way. Times that are not known (NaN)
  count as 0. `idle` is all time without computing: also that before a learner
  came and after it went.

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
    waiting=_sum_by_learner(
      trace, _waits.find_wait_ends(trace) - trace.arrive_time
    ),
    communication=_sum_by_learner(trace, communication),
    idle=np.maximum(trace.duration - busy, 0),
  )


def count_bytes(trace: _trace.Trace) -> Traffic:
  """What each learner sent and received.

  Each gradient is a push. Each recorded fetch is a pull; where none are, a
  learner pulls for every gradient: for those in flight too, and for those that
  were lost with a learner, as the record of its leave tells. What they weigh is
  in the header, as `bytes_per_push` and `bytes_per_pull`.

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
    is_lost = (events['kind'] == _schema.Kind.LEAVE) & (
      events['read_clock'] >= 0
    )
    unseen = (trace.in_flight['learner'], events['learner'][is_lost])
    num_pulls = num_pushes + np.bincount(
      np.concatenate(unseen), minlength=num_learners
    )
  push, pull = map(trace.header.get, ('bytes_per_push', 'bytes_per_pull'))
  return Traffic(
    sent=None if push is None else num_pushes * push,
    received=None if pull is None else num_pulls * pull,
  )


def measure_lead(trace: _trace.Trace) -> np.ndarray:
  """By how many steps the fastest learner led the slowest, all along.

  Of those who were there: steps are counted from 0 in this trace, and those of
  a learner that joins from the number that the slowest has then.

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
  num_learners = count_learners(trace)
  kinds = trace.events['kind']
  is_member = (kinds == _schema.Kind.JOIN) | (kinds == _schema.Kind.LEAVE)
  if is_member.any() or np.any(trace.fate == protocols.Fate.DROPPED_GONE):
    records = np.asarray(trace.records)[~trace.is_void]
    return _lead.follow_lead(records, num_learners)
  return _lead.count_lead(np.ascontiguousarray(trace.learner), num_learners)


def measure_speedup(trace: _trace.Trace) -> float:
  """How much faster gradients came than from one learner alone.

  speed-up = applied gradients per second * seconds per gradient of the fastest
  learner, alone: one that never waits nor communicates. The fastest is the
  one that computed the shortest on average.

  Args:
    trace: A trace.

  Returns:
    The speed-up in gradients. What staleness costs in convergence is not in it.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     learner=[0, 1, 0], compute_time=[2, 5, 4], arrive_time=[2, 5, 6]
    ...   )
    ... )
    >>> traces.statistics.measure_speedup(trace)  # Learner 0 alone: 3 s each.
    1.5
  """
  num_applied = int(np.count_nonzero(trace.fate == protocols.Fate.APPLIED))
  is_known = ~np.isnan(trace.compute_time)
  counts = np.bincount(trace.learner[is_known])
  totals = np.bincount(
    trace.learner[is_known], weights=trace.compute_time[is_known]
  )
  has_any = np.flatnonzero(counts)
  if not len(has_any):
    return float('nan')
  fastest = float(np.min(totals[has_any] / counts[has_any]))
  return divide(num_applied * fastest, trace.duration)


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
