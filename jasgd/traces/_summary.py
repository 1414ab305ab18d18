"""All statistics of a trace together, and as a table."""

import dataclasses

import numpy as np

from jasgd import protocols
from jasgd.traces import _checks
from jasgd.traces import _schema
from jasgd.traces import _trace
from jasgd.traces import statistics

_Kind = _schema.Kind


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorkerSummary:
  """Arrays with an entry for each learner or node."""

  num_gradients: np.ndarray
  num_applied: np.ndarray
  num_mixes: np.ndarray
  mean_staleness: np.ndarray  # Of applied gradients; NaN if there are none.
  max_staleness: np.ndarray  # Of applied gradients; NaN if there are none.
  lag: np.ndarray  # Gradients behind the worker with the most, at the end.
  times: statistics.WorkerTimes
  traffic: statistics.Traffic


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Summary:
  """The result of `summarize`; printed, it is a table."""

  has_server: bool
  num_workers: int
  num_gradients: int
  num_updates: int  # By optimizers.
  num_mixes: int  # Of nodes; the centre's moves are not counted.
  num_missing: int  # Gradients not made, as their workers were gone for good.
  num_void: int  # Gradients lost with a server; all other fields omit them.
  num_restarts: int  # Of owners: a server, or nodes.
  clock: int  # The server's at the end, or the steps of all nodes.
  duration: float  # In seconds.
  gradients_per_second: float  # Received, whatever became of them.
  updates_per_second: float
  speedup: float  # In applied gradients, against the fastest worker alone.
  fates: dict[protocols.Fate, int]
  shares: dict[protocols.Fate, float]
  staleness: statistics.Distribution  # Of applied gradients.
  age: statistics.Distribution  # Of mixes.
  lag: statistics.Distribution  # Of mixes with nodes.
  max_lead: int  # In gradients, of the fastest worker on the slowest.
  final_lead: int
  num_deaths: int  # Of nodes.
  num_returns: int  # Of nodes.
  num_lost: int  # Messages that found a dead node.
  num_refused: int  # Questions that found a dead node.
  lost_mass: float  # Push-sum's, with messages and with nodes.
  workers: WorkerSummary
  in_flight_read_version: np.ndarray  # Of gradients never received.

  def __str__(self) -> str:
    return format_summary(self)


def summarize(trace: _trace.Trace) -> Summary:
  """Explains a trace in numbers.

  The *age* of a mix is the number of steps that its source has made when the
  mix is applied, minus those that are in the weights that are mixed in; the
  steps of a centre are its moves. The *lag* is the number of steps that the
  node has made, minus those in its source's weights: below 0, the source is
  ahead. A mix with the centre has no lag; a mean has neither. Ages depend on
  the order of the records of two nodes. Where neither has read the other's
  weights, this order is by their clocks: on several hosts, ages are only as
  exact as these clocks agree.

  Args:
    trace: A trace.

  Returns:
    A summary.

  Raises:
    TraceError: if records hold values that no run can have left.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     worker=[0, 1, 0], read_version=[0, 0, 1], clock=[0, 1, 2]
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
  lost = trace.of_kind(_Kind.LOST)
  is_question = lost['read_version'] < 0
  deaths = statistics.Deaths(num_deaths=0, num_returns=0, lost_mass=0.0)
  if not trace.has_server:
    deaths = statistics.count_deaths(trace)
  workers = _summarize_workers(trace)
  num_all = int(np.count_nonzero(np.isin(kinds, _schema.GRADIENTS)))
  return Summary(
    has_server=trace.has_server,
    num_workers=trace.num_workers,
    num_gradients=trace.num_gradients,
    num_updates=trace.num_updates,
    num_mixes=int(workers.num_mixes.sum()),
    num_missing=int(trace.header.get('num_missing') or 0),
    num_void=num_all - trace.num_gradients,
    num_restarts=int(np.count_nonzero(kinds == _Kind.RESTART)),
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
    staleness=statistics.describe(trace.staleness[is_applied]),
    age=statistics.describe(statistics.measure_ages(trace)),
    lag=statistics.describe(statistics.measure_lags(trace)),
    max_lead=int(lead.max(initial=0)),
    final_lead=int(lead[-1]) if len(lead) else 0,
    num_deaths=deaths.num_deaths,
    num_returns=deaths.num_returns,
    num_lost=int(np.count_nonzero(~is_question)),
    num_refused=int(np.count_nonzero(is_question)),
    lost_mass=deaths.lost_mass,
    workers=workers,
    in_flight_read_version=trace.in_flight['read_version'],
  )


def format_summary(summary: Summary, max_workers: int = 10) -> str:
  """A summary as a table.

  Args:
    summary: The result of `summarize`.
    max_workers: Number of workers to list, at least 0.

  Returns:
    Lines of text.

  Raises:
    ValueError: if `max_workers` is negative.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     worker=[0, 1, 0, 1],
    ...     read_version=[0, 0, 1, 2],
    ...     clock=[0, 1, 2, 3],
    ...     fate=[0, 0, 0, 3],
    ...     start_time=[0, 0, 1, 1],
    ...     compute_time=[1, 1, 1, 2],
    ...     end_time=[1, 1, 2, 3],
    ...     release_time=[1, 1, 2, 4],
    ...   )
    ... )
    >>> print(traces.format_summary(traces.summarize(trace)))
    gradients  4 in 4 s: 1 per second
      applied            3   75.0%
      dropped stale      1   25.0%
    updates    3: 0.75 per second
    staleness  mean 0.67, std 0.47, min 0, 50% 1, 95% 1, 99% 1, max 1
    speed-up   0.75 with 2 workers, against the fastest of them alone
    lead       at most 1 gradients, 0 at the end
    worker  gradients  applied  staleness   max  busy  waiting  communication
         0          2        2       0.50     1   50%       0%             0%
         1          2        1       1.00     1   75%      25%             0%
    >>> records = traces.make_records(
    ...   kind=traces.Kind.STEP, worker=[0, 1], end_time=[1, 2]
    ... )
    >>> print(traces.format_summary(traces.summarize(traces.Trace(records))))
    gradients  2 in 2 s: 1 per second
    mixes      0
    speed-up   1 with 2 workers, against the fastest of them alone
    lead       at most 1 gradients, 0 at the end
    worker  gradients  mixes  busy  waiting   sent  received
         0          1      0   50%       0%      0         0
         1          1      0  100%       0%      0         0
  """
  if max_workers < 0:
    raise ValueError(f'max_workers must be at least 0, got {max_workers}.')
  lines = [
    f'gradients  {summary.num_gradients} in {summary.duration:.6g} s: '
    f'{summary.gradients_per_second:.4g} per second',
  ]
  if summary.has_server:
    lines += _format_updates(summary)
  else:
    lines += _format_mixes(summary)
  lines += [
    f'speed-up   {summary.speedup:.4g} with {summary.num_workers} workers, '
    'against the fastest of them alone',
    f'lead       at most {summary.max_lead} gradients, {summary.final_lead} at '
    'the end',
  ]
  lines += _format_losses(summary)
  return '\n'.join(lines + _format_workers(summary, max_workers))


def _check_records(trace: _trace.Trace) -> None:
  """Raises a TraceError for the first record that no run can have left."""
  _checks.check_records(trace)
  is_gradient = np.isin(trace.records['kind'], _schema.GRADIENTS)
  is_applied = trace.fate == protocols.Fate.APPLIED
  staleness = np.where(is_applied, trace.staleness, 0)
  is_bad = (staleness < 0) | (staleness >= _schema.MAX_STALENESS)
  if np.any(is_bad):
    place = int(np.argmax(is_bad))
    index = int(np.flatnonzero(is_gradient & ~trace.is_void)[place])
    raise _schema.TraceError(
      f'Record {index} has a staleness of {staleness[place]}; that of an '
      f'applied gradient must be from 0 to {_schema.MAX_STALENESS - 1}: the '
      'records are damaged.'
    )


def _summarize_workers(trace: _trace.Trace) -> WorkerSummary:
  """What each worker did."""
  num_workers = trace.num_workers
  num_gradients = np.bincount(trace.worker, minlength=num_workers)
  is_applied = trace.fate == protocols.Fate.APPLIED
  worker, staleness = trace.worker[is_applied], trace.staleness[is_applied]
  num_applied = np.bincount(worker, minlength=num_workers)
  total = np.bincount(worker, weights=staleness, minlength=num_workers)
  mean = np.full(num_workers, np.nan)
  np.divide(total, num_applied, out=mean, where=num_applied > 0)
  largest = np.full(num_workers, -np.inf)
  np.maximum.at(largest, worker, staleness.astype(float))
  mixes = statistics.keep_first_of_mix(trace.mixes)
  return WorkerSummary(
    num_gradients=num_gradients,
    num_applied=num_applied,
    num_mixes=np.bincount(mixes['replica'], minlength=num_workers),
    mean_staleness=mean,
    max_staleness=np.where(num_applied > 0, largest, np.nan),
    lag=num_gradients.max(initial=0) - num_gradients,
    times=statistics.measure_times(trace),
    traffic=statistics.count_traffic(trace),
  )


def _format_updates(summary: Summary) -> list[str]:
  """Lines on the server's updates."""
  staleness = summary.staleness
  percentiles = ', '.join(
    f'{percent}% {value:g}' for percent, value in staleness.percentiles.items()
  )
  parts = _list_megabytes(summary, 'received', 'sent')
  return [
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
    *([f'server     {", ".join(parts)}'] if parts else []),
  ]


def _list_megabytes(summary: Summary, sent: str, received: str) -> list[str]:
  """Total megabytes that workers sent and received, if they are known."""
  traffic = summary.workers.traffic
  return [
    f'{name} {num_bytes.sum() / 1e6:.4g} MB'
    for name, num_bytes in ((sent, traffic.sent), (received, traffic.received))
    if num_bytes is not None and num_bytes.any()
  ]


def _format_mixes(summary: Summary) -> list[str]:
  """Lines on the mixes of nodes."""
  age, lag = summary.age, summary.lag
  lines = [f'mixes      {summary.num_mixes}']
  if age.count:
    lines.append(f'age        mean {age.mean:.2f}, max {age.max:.0f}')
  if lag.count:
    lines.append(
      f'lag        mean {lag.mean:.2f}, min {lag.min:.0f}, max {lag.max:.0f}'
    )
  parts = _list_megabytes(summary, 'sent', 'received')
  return lines + ([f'traffic    {", ".join(parts)}'] if parts else [])


def _format_losses(summary: Summary) -> list[str]:
  """Lines on what was lost, died or is missing."""
  lines = []
  if summary.num_missing:
    lines.append(
      f'missing    {summary.num_missing} gradients that were asked for: their '
      'workers were gone'
    )
  if summary.has_server and summary.num_restarts:
    lines.append(
      f'restarts   {summary.num_restarts}, which lost {summary.num_void} '
      'gradients (not counted above)'
    )
  if summary.num_deaths or summary.num_lost or summary.num_refused:
    lines.append(
      f'deaths     {summary.num_deaths}, returns {summary.num_returns}; '
      f'{summary.num_lost} messages lost, {summary.num_refused} questions '
      'refused'
    )
  if summary.lost_mass:
    lines.append(f'mass lost  {summary.lost_mass:.4g} of {summary.num_workers}')
  in_flight = summary.in_flight_read_version
  if len(in_flight):
    lines.append(
      f'in flight  {len(in_flight)} at the end, read at version '
      f'{in_flight.min()} to {in_flight.max()} of {summary.clock}'
    )
  return lines


def _format_workers(summary: Summary, max_workers: int) -> list[str]:
  """A line for each of the first workers; times are shares of the run's."""
  num_rows = min(max_workers, summary.num_workers)
  if not num_rows:
    return []
  workers, times = summary.workers, summary.workers.times
  lines = [
    'worker  gradients  applied  staleness   max  busy  waiting  communication'
    if summary.has_server
    else 'worker  gradients  mixes  busy  waiting   sent  received'
  ]
  for i in range(num_rows):
    busy, waiting, communication = (
      statistics.divide(float(seconds[i]), summary.duration)
      for seconds in (times.busy, times.waiting, times.communication)
    )
    line = f'{i:>6}  {workers.num_gradients[i]:>9}  '
    if summary.has_server:
      line += (
        f'{workers.num_applied[i]:>7}  {workers.mean_staleness[i]:>9.2f}  '
        f'{workers.max_staleness[i]:>4.0f}  {busy:>4.0%}  {waiting:>7.0%}  '
        f'{communication:>13.0%}'
      )
    else:
      traffic = workers.traffic
      line += (
        f'{workers.num_mixes[i]:>5}  {busy:>4.0%}  {waiting:>7.0%}  '
        f'{traffic.num_sent[i]:>5.4g}  {traffic.num_received[i]:>8.4g}'
      )
    lines.append(line)
  if num_rows < summary.num_workers:
    lines.append(f'   ...  and {summary.num_workers - num_rows} more')
  return lines
