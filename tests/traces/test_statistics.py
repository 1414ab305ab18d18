"""Statistics against slow loops, and where a closed form is known."""

import math
import re
import statistics as python_statistics
import warnings

import hypothesis
import numpy as np
import pytest

from jasgd import traces
from jasgd.traces import statistics
from tests.traces import cases

Kind = traces.Kind
APPLIED, PENDING, LATE, STALE, LOST, GONE, *_ = traces.Fate
examples = hypothesis.given(seed=cases.seeds)


def _rows(trace):
  """The gradients that are valid, as plain Python; `tau` is the staleness."""
  records = trace.records[~trace.is_void]
  last_version = records['version'][-1] if len(records) else 0
  rows = []
  for record in records[records['kind'] == Kind.PUSH]:
    row = dict(zip(record.dtype.names, record, strict=True))
    clock = row['version'] - row['updates']
    row['tau'] = int(clock - row['read_version'])
    if row['fate'] == APPLIED and clock >= last_version:
      row['fate'] = PENDING
    rows.append(row)
  return rows


def _is_known(value):
  return not math.isnan(value)


@examples
def test_summary_equals_slow_loops(seed):
  trace = cases.make_trace(seed)
  summary = traces.summarize(trace)
  rows = _rows(trace)
  applied = [row for row in rows if row['fate'] == APPLIED]
  taus = [row['tau'] for row in applied]
  assert summary.has_server
  assert summary.num_gradients == len(rows)
  valid = trace.records[~trace.is_void]
  assert summary.num_updates == np.count_nonzero(valid['updates'])
  assert summary.clock == (valid['version'][-1] if len(valid) else 0)
  num_all = np.count_nonzero(trace.records['kind'] == Kind.PUSH)
  assert summary.num_void + len(rows) == num_all
  for fate in traces.Fate:
    count = sum(row['fate'] == fate for row in rows)
    assert summary.fates[fate] == count
    if rows:
      assert summary.shares[fate] == count / len(rows)
  assert summary.staleness.count == len(taus)
  assert summary.staleness.histogram.sum() == len(taus)
  for tau, count in enumerate(summary.staleness.histogram):
    assert count == taus.count(tau)
  if taus:
    assert summary.staleness.min == min(taus)
    assert summary.staleness.max == max(taus)
    assert summary.staleness.mean == pytest.approx(sum(taus) / len(taus))
    assert summary.staleness.std == pytest.approx(
      python_statistics.pstdev(taus)
    )
    assert summary.staleness.percentiles[50] == python_statistics.median(taus)
  times = {}
  for row in rows:
    if _is_known(row['compute_time']):
      times.setdefault(row['worker'], []).append(row['compute_time'])
  if times and trace.duration and _is_known(trace.duration):
    alone = min(sum(own) / len(own) for own in times.values())
    speedup = len(applied) / trace.duration * alone
    assert summary.speedup == pytest.approx(speedup)
    assert summary.updates_per_second * trace.duration == pytest.approx(
      summary.num_updates
    )
  assert str(summary) == traces.format_summary(summary)


@examples
def test_workers_equal_slow_loops(seed):
  trace = cases.make_trace(seed)
  summary = traces.summarize(trace)
  workers, times = summary.workers, summary.workers.times
  in_flight = trace.header['in_flight']
  fetchers = trace.of_kind(Kind.FETCH)['worker'].tolist()
  leavers = trace.of_kind(Kind.LEAVE)['worker'].tolist()
  counts = [0] * summary.num_workers
  for row in _rows(trace):
    counts[row['worker']] += 1
  assert workers.num_gradients.tolist() == counts
  for worker in range(summary.num_workers):
    rows = [row for row in _rows(trace) if row['worker'] == worker]
    taus = [row['tau'] for row in rows if row['fate'] == APPLIED]
    assert workers.num_applied[worker] == len(taus)
    if taus:
      mean = sum(taus) / len(taus)
      assert workers.mean_staleness[worker] == pytest.approx(mean)
      assert workers.max_staleness[worker] == max(taus)
    else:
      assert math.isnan(workers.mean_staleness[worker])
      assert math.isnan(workers.max_staleness[worker])
    busy = waiting = communication = 0
    for row in rows:
      if _is_known(row['start_time']):  # In these traces: all, or none.
        busy += row['compute_time']
        if row['fate'] != GONE:  # A learner that is gone does not wait.
          waiting += row['release_time'] - row['end_time']
        communication += row['end_time'] - row['start_time']
        communication -= row['compute_time']
    assert times.busy[worker] == pytest.approx(busy)
    assert times.waiting[worker] == pytest.approx(waiting)
    assert times.communication[worker] == pytest.approx(communication)
    if _is_known(trace.duration):
      idle = max(trace.duration - busy, 0)
      assert times.idle[worker] == pytest.approx(idle)
    assert workers.lag[worker] == max(counts) - len(rows)
    assert workers.traffic.num_sent[worker] == len(rows)
    assert workers.traffic.sent[worker] == 12 * len(rows)
    num_pulls = len(rows) + sum(entry[0] == worker for entry in in_flight)
    num_pulls += leavers.count(worker)  # In these traces all lose a gradient.
    if fetchers:
      num_pulls = fetchers.count(worker)
    assert workers.traffic.received[worker] == 10 * num_pulls


def _follow_lead(trace):
  """Only present workers count; a joiner starts at the slowest's number."""
  told = [
    record
    for record in trace.records[~trace.is_void]
    if record['kind'] in (Kind.PUSH, Kind.STEP, Kind.JOIN, Kind.LEAVE)
  ]
  first = {}
  for record in told:
    first.setdefault(int(record['worker']), record['kind'])
  steps = {
    worker: 0
    for worker in range(trace.num_workers)
    if first.get(worker) != Kind.JOIN
  }
  slowest = 0  # Kept when the last worker leaves.
  leads = []
  for record in told:
    worker = int(record['worker'])
    is_gradient = record['kind'] in (Kind.PUSH, Kind.STEP)
    is_there = is_gradient and record['fate'] != GONE
    if record['kind'] == Kind.LEAVE:
      steps.pop(worker, None)
    elif record['kind'] == Kind.JOIN or is_there:
      steps.setdefault(worker, slowest)
    if is_there:
      steps[worker] += 1
    slowest = min(steps.values(), default=slowest)
    if is_gradient:
      leads.append(max(steps.values(), default=slowest) - slowest)
  return leads


@examples
def test_lead_equals_a_slow_loop(seed):
  trace = cases.make_trace(seed)
  if seed % 2:  # Nodes are followed as learners are.
    records = np.array(trace.records[~trace.is_void])
    records = records[records['kind'] != Kind.RESTART]
    is_push = records['kind'] == Kind.PUSH
    records['replica'][is_push] = records['worker'][is_push]
    records['fate'][is_push & (records['fate'] != GONE)] = 0
    records['read_version'] = 0
    records['kind'][is_push] = Kind.STEP
    trace = traces.Trace(records, trace.header)
  expected = _follow_lead(trace)
  assert statistics.measure_lead(trace).tolist() == expected
  summary = traces.summarize(trace)
  assert summary.max_lead == max(expected, default=0)
  assert summary.final_lead == (expected[-1] if expected else 0)


def _make_rotation(num_workers, num_rounds):
  """Asynchronous learners of equal speed, each staggered by one update."""
  clock = np.arange(num_workers * num_rounds)
  end_time = 1 + clock / num_workers
  return traces.Trace(
    traces.make_records(
      worker=clock % num_workers,
      step=1 + clock // num_workers,
      read_version=np.maximum(clock - num_workers + 1, 0),
      clock=clock,
      start_time=end_time - 1,
      compute_time=1,
      end_time=end_time,
      release_time=end_time,
    ),
    {'num_workers': num_workers, 'bytes_per_push': 8, 'bytes_per_pull': 4},
  )


def test_rotation_has_a_closed_form():
  """N learners in turn: staleness N - 1, speed-up N, after the start."""
  summary = traces.summarize(_make_rotation(num_workers=8, num_rounds=100))
  assert summary.staleness.histogram.tolist() == [1] * 7 + [793]
  assert summary.staleness.max == summary.staleness.percentiles[50] == 7
  # The first learner begins 7/8 before the last, which ends as much later.
  assert summary.duration == 100 + 7 / 8
  assert summary.speedup == pytest.approx(800 / (100 + 7 / 8))
  assert summary.clock == summary.num_updates == 800
  assert (summary.max_lead, summary.final_lead) == (1, 0)
  assert summary.shares[APPLIED] == 1
  np.testing.assert_allclose(summary.workers.times.busy, 100)
  np.testing.assert_allclose(summary.workers.times.waiting, 0)
  np.testing.assert_allclose(summary.workers.times.communication, 0, atol=1e-9)
  assert summary.workers.traffic.sent.tolist() == [800] * 8
  assert summary.workers.traffic.received.tolist() == [400] * 8
  assert 'received 0.0064 MB, sent 0.0032 MB' in str(summary)


@pytest.mark.parametrize(
  'trace',
  [
    traces.Trace(np.zeros(0, traces.RECORD)),
    traces.Trace(np.zeros(0, traces.RECORD), {'num_workers': 3}),
    traces.Trace(traces.make_records(kind=traces.Kind.JOIN)),
    traces.Trace(traces.make_records(fate=[STALE, LATE])),
    traces.Trace(
      traces.make_records(
        start_time=float('nan'),
        compute_time=float('nan'),
        end_time=float('nan'),
        release_time=float('nan'),
      )
    ),
  ],
  ids=['nothing', 'workers', 'events', 'dropped', 'timeless'],
)
def test_nothing_gives_nan_without_warnings(trace):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    summary = traces.summarize(trace)
    assert 'staleness' in str(summary)
    assert repr(trace)
  assert math.isnan(summary.speedup)
  assert math.isnan(summary.gradients_per_second)
  assert summary.max_lead == summary.final_lead == 0
  if not summary.staleness.count:
    assert math.isnan(summary.staleness.mean)
    assert summary.staleness.histogram.shape == (0,)
  assert summary.workers.times.busy.dtype == float
  assert len(summary.workers.times.busy) == summary.num_workers
  assert summary.workers.traffic.sent is None


def test_the_clock_of_a_restart_counts():
  records = traces.make_records(
    kind=[Kind.PUSH] * 3 + [Kind.RESTART],
    version=[1, 2, 3, 2],
    step=[1, 2, 3, 0],
    stands=[0, 0, 0, 1],
  )
  trace = traces.Trace(records, {'in_flight': [[4, 3, 1, 0.0]]})
  assert statistics.get_clock(trace) == 2
  assert statistics.get_clock(trace[:3]) == 3
  assert statistics.get_clock(trace[:0]) == 0
  summary = traces.summarize(trace)
  assert (summary.num_restarts, summary.num_void) == (1, 1)
  assert summary.in_flight_read_version.tolist() == [1]
  assert summary.num_workers == 5
  assert '1, which lost 1 gradients' in str(summary)
  assert '1 at the end, read at version 1 to 1 of 2' in str(summary)


def test_the_table_stays_short():
  summary = traces.summarize(_make_rotation(100, 2))
  lines = traces.format_summary(summary, max_workers=3).splitlines()
  assert lines[-1].strip() == '...  and 97 more'
  assert len(lines) == len(str(summary).splitlines()) - 7
  assert 'worker ' not in traces.format_summary(summary, max_workers=0)
  with pytest.raises(ValueError, match='max_workers must be at least 0, got -'):
    traces.format_summary(summary, max_workers=-1)


def test_a_distribution_of_any_numbers():
  """Also where counting would take more memory than sorting."""
  for numbers in ([3, -2, 3], [3, -2, 2**40, 3]):
    found = statistics.describe(np.array(numbers))
    values, counts = np.unique(numbers, return_counts=True)
    assert found.values.tolist() == values.tolist()
    assert found.counts.tolist() == counts.tolist()
    assert (found.min, found.max) == (min(numbers), max(numbers))


def test_gradients_of_a_lost_server_have_no_staleness():
  trace = traces.Trace(traces.make_records(fate=LOST, read_version=[7]))
  assert traces.summarize(trace).staleness.count == 0


def test_public_names():
  """Sorted as ruff does it: constants, then classes, then the rest."""
  kinds = [
    (not name.isupper(), not name[0].isupper(), name) for name in traces.__all__
  ]
  assert kinds == sorted(kinds)
  for name in traces.__all__:
    value = getattr(traces, name)
    assert value.__doc__ or isinstance(value, np.dtype)


def test_the_speedup_is_against_the_fastest_learner():
  """Learner 0 alone makes a gradient per second, and the two make 1.25."""
  records = traces.make_records(
    worker=[0, 0, 0, 1, 0],
    clock=np.arange(5),
    start_time=[0, 1, 2, 0, 3],
    compute_time=[1, 1, 1, 4, 1],
    end_time=[1, 2, 3, 4, 4],
    release_time=[1, 2, 3, 4, 4],
  )
  summary = traces.summarize(traces.Trace(records))
  assert summary.speedup == 1.25
  assert 'speed-up   1.25 with 2 workers, against the fastest of them' in str(
    summary
  )


def test_waiting_that_never_ended():
  """0 leaves at 5, 1 waits to the end at 9, 2 was gone, 3 gets new weights."""
  nan = float('nan')
  trace = traces.Trace(
    traces.make_records(
      kind=[Kind.PUSH] * 4 + [Kind.LEAVE, Kind.RESTART, Kind.PUSH],
      fate=[PENDING, PENDING, GONE, APPLIED, 0, 0, APPLIED],
      worker=[0, 1, 2, 3, 0, 0, 3],
      stands=[0, 0, 0, 0, 0, 4, 0],
      start_time=[0, 0, 0, 0, 5, 0, 6],
      end_time=[1, 2, 3, 4, 5, 0, 7],
      release_time=[nan, nan, nan, nan, 5, 0, 9],
    )
  )
  ends = statistics.find_wait_ends(trace)
  assert ends.tolist() == [5, 9, 3, 6, 9]
  times = statistics.measure_times(trace)
  assert times.waiting.tolist() == [4, 7, 0, 2 + 2]


def test_messages_without_bytes_are_not_told():
  header = {'bytes_per_push': 0, 'bytes_per_pull': 0}
  trace = traces.Trace(traces.make_records(), header)
  assert 'server' not in str(traces.summarize(trace))


# --- Nonsense.


@pytest.mark.parametrize(
  ('columns', 'message'),
  [
    (
      {'worker': [0, 2**31 - 1]},
      'Record 1 has worker=2147483647, which must be from 0 to 16777215',
    ),
    ({'worker': [0, 0, -1]}, 'Record 2 has worker=-1, which must be from 0'),
    ({'worker': [2**30], 'kind': Kind.LEAVE}, 'Record 0 has worker=1073741824'),
    ({'kind': [0, 77]}, 'Record 1 has kind=77, which must be from 0 to 10'),
    ({'fate': [0, 99]}, 'Record 1 has fate=99, which must be from 0 to 7'),
    ({'updates': [1, 5]}, 'Record 1 has updates=5, which must be from 0 to 1'),
    (
      {'version': [1, 2**60]},
      r'Record 1 has a staleness of \d+; .* must be from 0 to 16777215',
    ),
    (
      {
        'kind': [Kind.JOIN, 0, 0],
        'clock': [0, 6, 6],
        'read_version': [0, 0, 9],
      },
      'Record 2 has a staleness of -3; that of an applied gradient must be',
    ),
    (
      {'kind': Kind.STEP, 'replica': [-1]},
      'Record 0 has replica=-1, which must be from 0 to 0',
    ),
    (
      {'kind': [Kind.STEP, Kind.LOST], 'replica': [1, 2], 'worker': 1},
      'Record 1 has replica=2, which must be from -16777216 to 1',
    ),
    (
      {'kind': Kind.MIX, 'source': [0, 2**30]},
      'Record 1 has source=1073741824, which must be from -16777216 to 0',
    ),
    (
      {'kind': [0, Kind.RESTART], 'stands': 7},
      'restart in record 1 says that record 7 is the last valid one',
    ),
  ],
)
def test_records_of_nonsense(columns, message):
  trace = traces.Trace(traces.make_records(**columns))
  with pytest.raises(traces.TraceError, match=message):
    traces.summarize(trace)


@hypothesis.settings(max_examples=200)
@hypothesis.given(
  records=cases.any_records,
  num_kinds=hypothesis.strategies.integers(1, 255),
  num_workers=hypothesis.strategies.integers(1, 9),
)
@pytest.mark.filterwarnings('ignore::RuntimeWarning')
def test_any_bytes_are_summarized_or_refused(records, num_kinds, num_workers):
  """Some of the fields are valid, so that the others are checked, too."""
  records = records.copy()
  for name, size in {
    'kind': num_kinds,
    'fate': len(traces.Fate),
    'updates': 2,
    'worker': num_workers,
    'replica': num_workers,
    'source': num_workers,
    'read_version': 1 << 40,
  }.items():
    records[name] %= size
  records['version'] = records['read_version'] + records['updates']
  records['stands'] = -1
  for trace in (traces.Trace(records), traces.Trace(records)[1:]):
    message = 'Record 0 is fine.'
    try:
      assert str(traces.summarize(trace))
    except traces.TraceError as error:
      message = str(error)
    assert re.match(r'Record \d+ [^\n]*\.$', message), message


@pytest.mark.parametrize(
  ('header', 'message'),
  [
    ({'num_workers': 2**40}, 'at most 16777216 workers, got 1099511627776'),
    ({'num_workers': 'many'}, "num_workers must be a whole number, got 'many'"),
    ({'in_flight': [[-2, 0, 0, 0.0]]}, 'in_flight has a worker below 0: -2'),
  ],
)
def test_a_header_of_nonsense(header, message):
  trace = traces.Trace(traces.make_records(), header)
  with pytest.raises(traces.TraceError, match=message):
    traces.summarize(trace)
