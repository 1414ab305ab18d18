"""All statistics of a trace together, and as a table for people."""

import dataclasses

import numpy as np

from jasgd import protocols
from jasgd.traces import _schema
from jasgd.traces import _trace
from jasgd.traces import statistics


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LearnerSummary:
  """Arrays with an entry for each learner."""

  num_gradients: np.ndarray
  num_applied: np.ndarray
  mean_staleness: np.ndarray  # Of applied gradients; NaN if there are none.
  max_staleness: np.ndarray  # Likewise.
  lag: np.ndarray  # Steps behind the learner with the most, at the end.
  times: statistics.LearnerTimes
  traffic: statistics.Traffic


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Summary:
  """What `summarize` tells; printed, it is a table."""

  num_learners: int
  num_gradients: int
  num_updates: int
  num_missing: int  # Asked for, but all learners were gone for good.
  num_void: int  # Gradients that were lost with a server; in nothing else here.
  num_restarts: int
  clock: int  # The server's, at the end.
  duration: float  # In seconds.
  gradients_per_second: float  # Received, whatever became of them.
  updates_per_second: float
  speedup: float  # In applied gradients, against the fastest learner alone.
  fates: dict[protocols.Fate, int]
  shares: dict[protocols.Fate, float]
  staleness: statistics.StalenessSummary  # Of applied gradients.
  max_lead: int  # In steps, of the fastest learner on the slowest.
  final_lead: int
  learners: LearnerSummary
  in_flight_read_clock: np.ndarray  # Of gradients never received.

  def __str__(self) -> str:
    return format_summary(self)


def summarize(trace: _trace.Trace) -> Summary:
  """Explains a trace in numbers.

  Args:
    trace: A trace.

  Returns:
    A summary.

  Raises:
    TraceError: if records hold what no run can have left.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     learner=[0, 1, 0], read_clock=[0, 0, 1], apply_clock=[0, 1, 2]
    ...   )
    ... )
    >>> summary = traces.summarize(trace)
    >>> print(f'{summary.staleness.mean:.2f}', summary.num_updates)
    0.67 3
  """
  _check_records(trace)
  fates = statistics.count_fates(trace)
  lead = statistics.measure_lead(trace)
  is_applied = trace.fate == protocols.Fate.APPLIED
  kinds = trace.records['kind']
  is_gradient = kinds == _schema.Kind.GRADIENT
  return Summary(
    num_learners=statistics.count_learners(trace),
    num_gradients=trace.num_gradients,
    num_updates=trace.num_updates,
    num_missing=int(trace.header.get('num_missing') or 0),
    num_void=int(np.count_nonzero(is_gradient)) - trace.num_gradients,
    num_restarts=int(np.count_nonzero(kinds == _schema.Kind.RESTART)),
    clock=statistics.get_clock(trace),
    duration=trace.duration,
    gradients_per_second=statistics.divide(trace.num_gradients, trace.duration),
    updates_per_second=statistics.divide(trace.num_updates, trace.duration),
    speedup=statistics.measure_speedup(trace),
    fates=fates,
    shares={
      fate: statistics.divide(count, trace.num_gradients)
      for fate, count in fates.items()
    },
    staleness=statistics.describe_staleness(trace.staleness[is_applied]),
    max_lead=int(lead.max(initial=0)),
    final_lead=int(lead[-1]) if len(lead) else 0,
    learners=_summarize_learners(trace),
    in_flight_read_clock=trace.in_flight['read_clock'],
  )


def format_summary(summary: Summary, max_learners: int = 10) -> str:
  """A summary as a table for people.

  Args:
    summary: What `summarize` returned.
    max_learners: How many learners to list, at least 0.

  Returns:
    Lines of text.

  Raises:
    ValueError: if `max_learners` is negative.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     learner=[0, 1, 0, 1],
    ...     read_clock=[0, 0, 1, 2],
    ...     arrive_clock=[0, 1, 2, 3],
    ...     apply_clock=[0, 1, 2, -1],
    ...     fate=[0, 0, 0, 3],
    ...     start_time=[0, 0, 1, 1],
    ...     compute_time=[1, 1, 1, 2],
    ...     arrive_time=[1, 1, 2, 3],
    ...     release_time=[1, 1, 2, 4],
    ...   )
    ... )
    >>> print(traces.format_summary(traces.summarize(trace)))
    gradients  4 in 4 s: 1 per second
      applied            3   75.0%
      dropped stale      1   25.0%
    updates    3: 0.75 per second
    staleness  mean 0.67, std 0.47, min 0, 50% 1, 95% 1, 99% 1, max 1
    speed-up   0.75 with 2 learners, against the fastest of them alone
    lead       at most 1 steps, 0 at the end
    learner  gradients  applied  staleness   max  busy  waiting  communication
          0          2        2       0.50     1   50%       0%             0%
          1          2        1       1.00     1   75%      25%             0%
  """
  if max_learners < 0:
    raise ValueError(f'max_learners must be at least 0, got {max_learners}.')
  staleness = summary.staleness
  percentiles = ', '.join(
    f'{percent}% {value:g}' for percent, value in staleness.percentiles.items()
  )
  lines = [
    f'gradients  {summary.num_gradients} in {summary.duration:.6g} s: '
    f'{summary.gradients_per_second:.4g} per second',
    *(
      f'  {fate.name.lower().replace("_", " "):<13}{count:>7}  '
      f'{summary.shares[fate]:6.1%}'
      for fate, count in summary.fates.items()
      if count
    ),
    f'updates    {summary.num_updates}: '
    f'{summary.updates_per_second:.4g} per second',
    f'staleness  mean {staleness.mean:.2f}, std {staleness.std:.2f}, '
    f'min {staleness.min:.0f}, {percentiles}, max {staleness.max:.0f}',
    f'speed-up   {summary.speedup:.4g} with {summary.num_learners} learners, '
    'against the fastest of them alone',
    f'lead       at most {summary.max_lead} steps, {summary.final_lead} at the '
    'end',
  ]
  lines += _format_traffic(summary.learners.traffic)
  if summary.num_missing:
    lines.append(
      f'missing    {summary.num_missing} more gradients were asked for, but '
      'all learners were gone'
    )
  if summary.num_restarts:
    lines.append(
      f'restarts   {summary.num_restarts}, which lost {summary.num_void} '
      'gradients (not counted above)'
    )
  if len(summary.in_flight_read_clock):
    lines.append(
      f'in flight  {len(summary.in_flight_read_clock)} at the end, read at '
      f'clock {summary.in_flight_read_clock.min()} to '
      f'{summary.in_flight_read_clock.max()} of {summary.clock}'
    )
  return '\n'.join(lines + _format_learners(summary, max_learners))


def _check_records(trace: _trace.Trace) -> None:
  """Raises a TraceError for numbers that no run can have left."""
  kinds = trace.records['kind']
  is_applied = trace.fate == protocols.Fate.APPLIED
  staleness = trace.staleness[is_applied]
  for what, values, end in (
    ('kind', kinds, len(_schema.Kind)),
    ('fate', trace.fate, len(protocols.Fate)),
    ('staleness of an applied gradient', staleness, statistics.MAX_STALENESS),
  ):
    if len(values) and not 0 <= values.min() <= values.max() < end:
      raise _schema.TraceError(
        f'The {what} must be from 0 to {end - 1}, got {values.min()} to '
        f'{values.max()}: the records are damaged.'
      )


def _summarize_learners(trace: _trace.Trace) -> LearnerSummary:
  """What each learner did."""
  num_learners = statistics.count_learners(trace)
  num_gradients = np.bincount(trace.learner, minlength=num_learners)
  is_applied = trace.fate == protocols.Fate.APPLIED
  learner, staleness = trace.learner[is_applied], trace.staleness[is_applied]
  num_applied = np.bincount(learner, minlength=num_learners)
  total = np.bincount(learner, weights=staleness, minlength=num_learners)
  mean = np.full(num_learners, np.nan)
  np.divide(total, num_applied, out=mean, where=num_applied > 0)
  largest = np.full(num_learners, -np.inf)
  np.maximum.at(largest, learner, staleness.astype(float))
  return LearnerSummary(
    num_gradients=num_gradients,
    num_applied=num_applied,
    mean_staleness=mean,
    max_staleness=np.where(num_applied > 0, largest, np.nan),
    lag=num_gradients.max(initial=0) - num_gradients,
    times=statistics.measure_times(trace),
    traffic=statistics.count_bytes(trace),
  )


def _format_traffic(traffic: statistics.Traffic) -> list[str]:
  """What went through the server's link, as far as it is known."""
  parts = [
    f'{direction} {num_bytes.sum() / 1e6:.4g} MB'
    for direction, num_bytes in (
      ('received', traffic.sent),
      ('sent', traffic.received),
    )
    if num_bytes is not None and num_bytes.any()
  ]
  return [f'server     {", ".join(parts)}'] if parts else []


def _format_learners(summary: Summary, max_learners: int) -> list[str]:
  """A line for each of the first learners; times are shares of the run's."""
  learners, times = summary.learners, summary.learners.times
  num_rows = min(max_learners, summary.num_learners)
  lines = [
    'learner  gradients  applied  staleness   max  busy  waiting  communication'
  ]
  for i in range(num_rows):
    busy, waiting, communication = (
      statistics.divide(float(seconds[i]), summary.duration)
      for seconds in (times.busy, times.waiting, times.communication)
    )
    lines.append(
      f'{i:>7}  {learners.num_gradients[i]:>9}  {learners.num_applied[i]:>7}  '
      f'{learners.mean_staleness[i]:>9.2f}  {learners.max_staleness[i]:>4.0f}  '
      f'{busy:>4.0%}  {waiting:>7.0%}  {communication:>13.0%}'
    )
  if not num_rows:
    return []
  if num_rows < summary.num_learners:
    lines.append(f'    ...  and {summary.num_learners - num_rows} more')
  return lines
