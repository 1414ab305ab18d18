"""Statistics against slow loops, and where a closed form is known."""

import math
import statistics as python_statistics
import warnings

import hypothesis
import numpy as np
import pytest

from jasgd import traces
from jasgd.traces import statistics
from tests.traces import cases

APPLIED, PENDING, LATE, STALE, LOST, GONE, *_ = traces.Fate
examples = hypothesis.given(seed=cases.seeds)


def _rows(trace):
  """The gradients that stand, as plain Python."""
  is_gradient = trace.records['kind'] == traces.Kind.GRADIENT
  records = trace.records[is_gradient & ~trace.is_void]
  return [dict(zip(records.dtype.names, row, strict=True)) for row in records]


def _is_known(value):
  return not math.isnan(value)


@examples
def test_summary_equals_slow_loops(seed):
  trace = cases.make_trace(seed)
  summary = traces.summarize(trace)
  rows = _rows(trace)
  applied = [row for row in rows if row['fate'] == APPLIED]
  taus = [int(row['apply_clock'] - row['read_clock']) for row in applied]
  assert summary.num_gradients == len(rows)
  assert summary.num_updates == len(
    {(row['incarnation'], row['apply_clock']) for row in applied}
  )
  assert summary.num_void + len(rows) == len(trace.all_gradients)
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
      times.setdefault(row['learner'], []).append(row['compute_time'])
  if times and trace.duration and _is_known(trace.duration):
    alone = min(sum(own) / len(own) for own in times.values())
    speedup = len(applied) / trace.duration * alone
    assert summary.speedup == pytest.approx(speedup)
    assert summary.updates_per_second * trace.duration == pytest.approx(
      summary.num_updates
    )
  assert str(summary) == traces.format_summary(summary)


@examples
def test_learners_equal_slow_loops(seed):
  trace = cases.make_trace(seed)
  summary = traces.summarize(trace)
  learners, times = summary.learners, summary.learners.times
  in_flight = trace.header['in_flight']
  fetchers = [
    event['learner']
    for event in trace.events
    if event['kind'] == traces.Kind.FETCH
  ]
  counts = [0] * summary.num_learners
  for row in _rows(trace):
    counts[row['learner']] += 1
  assert learners.num_gradients.tolist() == counts
  for learner in range(summary.num_learners):
    rows = [row for row in _rows(trace) if row['learner'] == learner]
    taus = [
      row['apply_clock'] - row['read_clock']
      for row in rows
      if row['fate'] == APPLIED
    ]
    assert learners.num_applied[learner] == len(taus)
    if taus:
      mean = sum(taus) / len(taus)
      assert learners.mean_staleness[learner] == pytest.approx(mean)
      assert learners.max_staleness[learner] == max(taus)
    else:
      assert math.isnan(learners.mean_staleness[learner])
      assert math.isnan(learners.max_staleness[learner])
    busy = waiting = communication = 0
    for row in rows:
      if _is_known(row['start_time']):  # In these traces: all, or none.
        busy += row['compute_time']
        if row['fate'] != GONE:  # It was not there to wait.
          waiting += row['release_time'] - row['arrive_time']
        communication += row['arrive_time'] - row['start_time']
        communication -= row['compute_time']
    assert times.busy[learner] == pytest.approx(busy)
    assert times.waiting[learner] == pytest.approx(waiting)
    assert times.communication[learner] == pytest.approx(communication)
    if _is_known(trace.duration):
      idle = max(trace.duration - busy, 0)
      assert times.idle[learner] == pytest.approx(idle)
    assert learners.lag[learner] == max(counts) - len(rows)
    assert learners.traffic.sent[learner] == 12 * len(rows)
    num_pulls = len(rows) + sum(entry[0] == learner for entry in in_flight)
    num_pulls += sum(
      event['kind'] == traces.Kind.LEAVE and event['learner'] == learner
      for event in trace.events  # In these traces all lose a gradient.
    )
    if fetchers:
      num_pulls = fetchers.count(learner)
    assert learners.traffic.received[learner] == 10 * num_pulls


def _follow_lead(trace):
  """Steps of those who are there; who joins starts at the slowest's."""
  told = [
    record
    for record in trace.records[~trace.is_void]
    if record['kind'] <= traces.Kind.LEAVE
  ]
  first = {}
  for record in told:
    first.setdefault(int(record['learner']), record['kind'])
  steps = {
    learner: 0
    for learner in range(statistics.count_learners(trace))
    if first.get(learner) != traces.Kind.JOIN
  }
  slowest = 0  # It outlives the last one to leave.
  leads = []
  for record in told:
    learner = int(record['learner'])
    is_gradient = record['kind'] == traces.Kind.GRADIENT
    is_there = is_gradient and record['fate'] != GONE
    if record['kind'] == traces.Kind.LEAVE:
      steps.pop(learner, None)
    elif record['kind'] == traces.Kind.JOIN or is_there:
      steps.setdefault(learner, slowest)
    if is_there:
      steps[learner] += 1
    slowest = min(steps.values(), default=slowest)
    if is_gradient:
      leads.append(max(steps.values(), default=slowest) - slowest)
  return leads


@examples
def test_lead_equals_a_slow_loop(seed):
  trace = cases.make_trace(seed)
  expected = _follow_lead(trace)
  assert statistics.measure_lead(trace).tolist() == expected
  summary = traces.summarize(trace)
  assert summary.max_lead == max(expected, default=0)
  assert summary.final_lead == (expected[-1] if expected else 0)


def _make_rotation(num_learners, num_rounds):
  """Asynchronous learners of equal speed, each staggered by one update."""
  num_gradients = num_learners * num_rounds
  clock = np.arange(num_gradients)
  arrive_time = 1 + clock / num_learners
  return traces.Trace(
    traces.make_records(
      learner=clock % num_learners,
      step=clock // num_learners,
      read_clock=np.maximum(clock - num_learners + 1, 0),
      arrive_clock=clock,
      apply_clock=clock,
      start_time=arrive_time - 1,
      compute_time=1,
      arrive_time=arrive_time,
      release_time=arrive_time,
    ),
    {'num_learners': num_learners, 'bytes_per_push': 8, 'bytes_per_pull': 4},
  )


def test_rotation_has_a_closed_form():
  """N learners in turn: staleness N - 1, speed-up N, after the start."""
  summary = traces.summarize(_make_rotation(num_learners=8, num_rounds=100))
  assert summary.staleness.histogram.tolist() == [1] * 7 + [793]
  assert summary.staleness.max == summary.staleness.percentiles[50] == 7
  # The first learner begins 7/8 before the last, which ends as much later.
  assert summary.duration == 100 + 7 / 8
  assert summary.speedup == pytest.approx(800 / (100 + 7 / 8))
  assert summary.clock == summary.num_updates == 800
  assert (summary.max_lead, summary.final_lead) == (1, 0)
  assert summary.shares[APPLIED] == 1
  np.testing.assert_allclose(summary.learners.times.busy, 100)
  np.testing.assert_allclose(summary.learners.times.waiting, 0)
  np.testing.assert_allclose(summary.learners.times.communication, 0, atol=1e-9)
  assert summary.learners.traffic.sent.tolist() == [800] * 8
  assert summary.learners.traffic.received.tolist() == [400] * 8
  assert 'received 0.0064 MB, sent 0.0032 MB' in str(summary)


@pytest.mark.parametrize(
  'trace',
  [
    traces.Trace(np.zeros(0, traces.RECORD)),
    traces.Trace(np.zeros(0, traces.RECORD), {'num_learners': 3}),
    traces.Trace(traces.make_records(kind=traces.Kind.JOIN)),
    traces.Trace(traces.make_records(fate=[STALE, LATE], apply_clock=-1)),
    traces.Trace(
      traces.make_records(
        start_time=float('nan'),
        compute_time=float('nan'),
        arrive_time=float('nan'),
        release_time=float('nan'),
      )
    ),
  ],
  ids=['nothing', 'learners', 'events', 'dropped', 'timeless'],
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
  assert summary.learners.times.busy.dtype == float
  assert len(summary.learners.times.busy) == summary.num_learners
  assert summary.learners.traffic.sent is None


def test_the_clock_of_a_restart_counts():
  records = traces.make_records(
    kind=[traces.Kind.GRADIENT] * 3 + [traces.Kind.RESTART],
    apply_clock=[0, 1, 2, 0],
    read_clock=[0, 0, 0, 2],
    step=[0, 1, 2, 1],
  )
  trace = traces.Trace(records, {'in_flight': [[4, 3, 1, 0.0]]})
  assert statistics.get_clock(trace) == 2
  assert statistics.get_clock(trace[:3]) == 3
  assert statistics.get_clock(trace[:0]) == 0
  summary = traces.summarize(trace)
  assert (summary.num_restarts, summary.num_void) == (1, 1)
  assert summary.in_flight_read_clock.tolist() == [1]
  assert summary.num_learners == 5
  assert '1, which lost 1 gradients' in str(summary)
  assert '1 at the end, read at clock 1 to 1 of 2' in str(summary)


def test_the_table_stays_short():
  summary = traces.summarize(_make_rotation(100, 2))
  lines = traces.format_summary(summary, max_learners=3).splitlines()
  assert lines[-1].strip() == '...  and 97 more'
  assert len(lines) == len(str(summary).splitlines()) - 7
  assert 'learner ' not in traces.format_summary(summary, max_learners=0)
  with pytest.raises(ValueError, match='at least 0, got -1'):
    traces.format_summary(summary, max_learners=-1)


def test_a_negative_staleness_is_refused():
  with pytest.raises(ValueError, match='at least 0, got -2'):
    statistics.describe_staleness(np.array([1, -2]))


def test_gradients_of_a_lost_server_have_no_staleness():
  trace = traces.Trace(
    traces.make_records(fate=LOST, read_clock=[7], apply_clock=-1)
  )
  assert traces.summarize(trace).staleness.count == 0


def test_public_names():
  """Sorted as ruff does it: constants, then classes, then the rest."""
  kinds = [
    (not name.isupper(), not name[0].isupper(), name) for name in traces.__all__
  ]
  assert kinds == sorted(kinds)
  for name in (*traces.__all__, 'statistics'):
    value = getattr(traces, name)
    assert value.__doc__ or isinstance(value, np.dtype)


def test_the_speedup_is_against_the_fastest_learner():
  """Learner 0 alone makes a gradient per second, and the two make 1.25."""
  records = traces.make_records(
    learner=[0, 0, 0, 1, 0],
    start_time=[0, 1, 2, 0, 3],
    compute_time=[1, 1, 1, 4, 1],
    arrive_time=[1, 2, 3, 4, 4],
    release_time=[1, 2, 3, 4, 4],
  )
  summary = traces.summarize(traces.Trace(records))
  assert summary.speedup == 1.25
  assert 'speed-up   1.25 with 2 learners, against the fastest of them' in str(
    summary
  )


def test_waiting_that_never_ended():
  """0 leaves at 5, 1 waits to the end at 9, 2 was gone, 3 is given weights."""
  nan = float('nan')
  trace = traces.Trace(
    traces.make_records(
      kind=[0, 0, 0, 0, 2, 3, 0],
      fate=[PENDING, PENDING, GONE, APPLIED, 0, 0, APPLIED],
      learner=[0, 1, 2, 3, 0, 0, 3],
      step=[0, 0, 0, 0, 0, 4, 1],
      start_time=[0, 0, 0, 0, 5, 0, 6],
      arrive_time=[1, 2, 3, 4, 5, 0, 7],
      release_time=[nan, nan, nan, nan, 5, 0, 9],
    )
  )
  ends = traces.find_wait_ends(trace)
  assert ends.tolist() == [5, 9, 3, 6, 9]
  times = statistics.measure_times(trace)
  assert times.waiting.tolist() == [4, 7, 0, 2 + 2]


@pytest.mark.parametrize(
  ('columns', 'message'),
  [
    ({'learner': [2**31 - 1]}, 'at most 16777216 learners, got 2147483648'),
    ({'learner': [-1]}, 'a number of at least 0, got -1'),
    ({'learner': [2**30], 'kind': 2}, 'at most 16777216 learners'),
    ({'kind': [77]}, 'kind must be from 0 to 5, got 77 to 77'),
    ({'fate': [0, 99]}, 'fate must be from 0 to 7, got 0 to 99'),
    ({'apply_clock': [2**60]}, 'staleness .* must be from 0 to 16777215'),
    ({'read_clock': [5]}, 'staleness .* must be from 0 .* got -5'),
  ],
)
def test_records_of_nonsense(columns, message):
  trace = traces.Trace(traces.make_records(**columns))
  with pytest.raises(traces.TraceError, match=message):
    traces.summarize(trace)


def test_a_header_of_nonsense():
  trace = traces.Trace(traces.make_records(), {'num_learners': 2**40})
  with pytest.raises(traces.TraceError, match='at most 16777216 learners'):
    traces.summarize(trace)


def test_messages_without_bytes_are_not_told():
  header = {'bytes_per_push': 0, 'bytes_per_pull': 0}
  trace = traces.Trace(traces.make_records(), header)
  assert 'server' not in str(traces.summarize(trace))
