"""Statistics of nodes that mix: ages, lags, messages, lost mass."""

import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces
from jasgd.traces import statistics
from tests.traces import cases

Kind = traces.Kind

STRATEGIES = {
  'pull': gossip.Pull(),
  'push': gossip.Push(),
  'push-sum': gossip.PushSum(),
  'pairs': gossip.Pairs(),
  'elastic': gossip.Elastic(),
  'allreduce': gossip.AllReduce(),
}
every_strategy = pytest.mark.parametrize('name', STRATEGIES)


def _simulate(name='push', num_workers=4, num_steps=6, **arguments):
  return simulation.simulate(
    STRATEGIES[name],
    num_workers=num_workers,
    num_gradients=num_steps * num_workers,
    **{
      'compute': simulation.exponential(1.0),
      'network': simulation.Network(
        latency=0.1, bandwidth=10.0, bytes_per_push=5.0
      ),
      **arguments,
    },
  )


def _make(*rows, **header):
  """A trace of rows that are dicts of fields."""
  return traces.Trace(cases.make_rows(rows), header)


def test_ages_and_lags_by_hand():
  trace = _make(
    cases.step(1, replica=0),
    cases.step(1, replica=1),
    cases.step(2, replica=1),
    cases.step(3, replica=1),
    # Node 0 mixes weights of node 1 after its first step: two steps old.
    cases.mix(2, 0, 1, 1, 1, replica=0, step=1, source_step=1),
    cases.step(3, replica=0, step=2),
    # Node 1 mixes node 0's newest weights, and the first weights of node 2.
    cases.mix(4, 0, 0, 3, 2, replica=1, step=3, source_step=2),
    cases.mix(4, 0, 2, 0, 2, replica=1, step=3),
    # A record without age and lag.
    cases.mean(5, 0, 3, replica=1, weight=1),
    num_workers=3,
  )
  np.testing.assert_array_equal(statistics.measure_ages(trace), [2, 0, 0])
  np.testing.assert_array_equal(statistics.measure_lags(trace), [0, 1, 3])
  summary = traces.summarize(trace)
  assert not summary.has_server
  assert (summary.age.mean, summary.age.max) == (pytest.approx(2 / 3), 2)
  assert summary.age.values.tolist() == [0, 2]
  assert summary.age.counts.tolist() == [2, 1]
  assert (summary.lag.min, summary.lag.max) == (0, 3)
  assert summary.lag.values.tolist() == [0, 1, 3]
  workers = summary.workers
  assert summary.num_mixes == 3
  assert summary.num_updates == summary.num_gradients == summary.clock == 5
  assert workers.num_gradients.tolist() == [2, 3, 0]
  assert workers.num_mixes.tolist() == [1, 2, 0]
  assert workers.traffic.num_sent.tolist() == [1, 1, 1]
  assert workers.traffic.num_received.tolist() == [1, 2, 0]
  assert workers.traffic.sent is None


def test_the_age_of_the_centre_is_in_its_moves():
  """Before the answer to node 1 arrives, the centre moves by node 0's force."""
  trace = simulation.simulate(
    gossip.Elastic(),
    num_workers=2,
    num_gradients=2,
    compute=simulation.with_speeds(simulation.constant(1.0), [1, 0.5]),
    network=simulation.Network(latency=0.6),
  )
  # Answers at 2.2 and 3.2, the second from 2.6; moves at 2.8 and 3.8.
  assert statistics.measure_ages(trace).tolist() == [0, 1]
  assert not len(traces.summarize(trace).lag.values)


def test_a_peer_that_went_back_is_not_younger_than_its_past():
  trace = _make(
    cases.step(1),
    cases.step(2),
    cases.restart(3, 1, 3.0, step=1),
    cases.mix(1, 4.0, 0, 1, 1, replica=1, source_step=1),
    cases.mix(2, 5.0, 0, 2, 2, replica=1, source_step=2),
  )
  assert statistics.measure_ages(trace).tolist() == [0, 0]


@every_strategy
def test_ages_and_lags_equal_slow_loops(name):
  failures = simulation.draw_failures(4, 10.0, 3.0, 1.0, seed=3)
  trace = _simulate(name, num_steps=12, failures=failures)
  steps, ages, lags = {}, [], []
  for record in trace.records:
    if record['kind'] in (Kind.STEP, Kind.MOVE, Kind.RESTART):
      steps[int(record['replica'])] = int(record['step'])
    elif record['kind'] == Kind.MIX:
      now = steps.get(int(record['source']), 0)
      ages.append(max(0, now - int(record['source_step'])))
      if record['source'] >= 0:
        lags.append(int(record['step']) - int(record['source_step']))
  assert statistics.measure_ages(trace).tolist() == ages
  assert statistics.measure_lags(trace).tolist() == lags


def test_shares_of_time_in_closed_form():
  """A step of 1, then two latencies of 0.1 and a transfer of 0.5."""
  trace = _simulate(
    'allreduce', num_workers=2, num_steps=5, compute=simulation.constant(1.0)
  )
  summary = traces.summarize(trace)
  # 2 (n - 1) messages of 1/n: 2 * (0.1 + 0.25).
  assert summary.duration == pytest.approx(5 * 1.7)
  times, traffic = summary.workers.times, summary.workers.traffic
  np.testing.assert_allclose(times.busy, 5)
  np.testing.assert_allclose(times.waiting, 5 * 0.7)
  np.testing.assert_allclose(times.communication, 0)
  np.testing.assert_allclose(traffic.sent, 5 * 2 * 2.5)
  assert summary.gradients_per_second == pytest.approx(10 / 8.5)
  assert summary.speedup == pytest.approx(10 / 8.5)
  # Another algorithm of means sends other messages.
  header = {**trace.header, 'messages_per_mean': 3}
  traffic = statistics.count_traffic(traces.Trace(trace.records, header))
  np.testing.assert_allclose(traffic.sent, 5 * 3 * 5.0)


@every_strategy
def test_what_is_sent_is_received_or_lost(name):
  failures = simulation.draw_failures(4, 10.0, 3.0, 1.0, seed=3)
  trace = _simulate(name, num_steps=12, failures=failures)
  summary = traces.summarize(trace)
  traffic, times = summary.workers.traffic, summary.workers.times
  assert summary.num_deaths >= summary.num_returns > 0
  if name == 'elastic':  # A force for each mix, but not for a joiner's.
    # A node that is back before the centre has moved starts anew.
    num_joins = np.count_nonzero(trace.records['kind'] == traces.Kind.JOIN)
    assert 0 < num_joins <= summary.num_returns
    assert traffic.num_sent.sum() == summary.num_mixes - num_joins
  else:
    lost = traffic.num_sent.sum() - traffic.num_received.sum()
    assert lost == pytest.approx(summary.num_lost)
  np.testing.assert_allclose(traffic.sent, 5.0 * traffic.num_sent)
  np.testing.assert_allclose(traffic.received, 5.0 * traffic.num_received)
  busy = times.busy + times.waiting
  assert np.all((busy > 0) & (busy <= summary.duration + 1e-9))
  # Joiners take over the steps of others; an all-reduce makes some again.
  num_steps = summary.workers.num_gradients.sum()
  assert 3 * 12 < summary.num_gradients == num_steps < 8 * 12


def test_the_table_of_nodes():
  trace = simulation.simulate(
    gossip.Pull(peers=gossip.topologies.ring(2)),
    num_workers=2,
    num_gradients=8,
    network=simulation.Network(latency=0.25, bytes_per_push=1e6),
    failures=[simulation.Failure(1.1, 1, 3.0)],
  )
  summary = traces.summarize(trace)
  assert str(summary).splitlines() == [
    'gradients  7 in 6.5 s: 1.077 per second',
    'mixes      4',
    'age        mean 0.25, max 1',
    'lag        mean 0.00, min -1, max 1',
    'traffic    sent 5 MB, received 4 MB',
    'speed-up   1.077 with 2 workers, against the fastest of them alone',
    'lead       at most 1 gradients, 1 at the end',
    'deaths     1, returns 1; 1 messages lost, 1 questions refused',
    'worker  gradients  mixes  busy  waiting   sent  received',
    '     0          4      1   62%      15%      4         1',
    '     1          3      3   46%      23%      1         3',
  ]


def test_deaths_and_the_mass_that_is_lost(tmp_path):
  end = {'kind': Kind.END, 'version': 1, 'end_time': 5.0, 'mass': 1.0}
  join = {'kind': Kind.JOIN}
  files = {
    # Ends in good order, goes on later, and ends again.
    0: [
      cases.step(1, 1.0, mass=1.0),
      {**end, 'end_time': 2.0},
      cases.restart(2, 1, 4.0, mass=1.0),
      end,
    ],
    # Dies with 0.5, comes back with the 0.75 of its checkpoint, and dies again.
    1: [
      cases.step(1, 1.0, mass=0.75),
      cases.step(2, 2.0, mass=0.5),
      cases.restart(3, 1, 3.0, mass=0.75),
      cases.step(4, 4.0, mass=0.75),
    ],
    # Is new; then dies with 0.2 and joins anew, and is told of its end.
    2: [
      join,
      cases.mix(1, 1.0, 0, 1, 1, weight=1, mass=0.2),
      {'kind': Kind.LOST, 'replica': 1, 'source': 2, 'mass': 0.125},
      {**join, 'version': 1},
      cases.mix(2, 3.0, 0, 1, 2, weight=1, mass=0.1),
      {**end, 'mass': 0.1},
    ],
  }
  cases.write_files(tmp_path, files, is_recorded=True)
  summary = traces.summarize(traces.Trace.load(tmp_path))
  # Node 0 came back without having died.
  assert (summary.num_deaths, summary.num_returns) == (3, 2)
  assert summary.num_restarts == 2
  lost = 2 - (1.0 + 0.1)  # Two began with 1 each, and two have ended.
  assert summary.lost_mass == pytest.approx(lost)
  assert 'deaths     3, returns 2' in str(summary)
  assert 'mass lost  0.9 of 3' in str(summary)


def _find_last_deaths(*rows, **header):
  """Nodes whose last record is a death, in a run of real nodes."""
  rows = [{'start_time': row['end_time'] - 1, **row} for row in rows]
  trace = _make(*rows, is_recorded=True, **header)
  found = statistics.find_deaths(trace)
  summary = traces.summarize(trace)
  assert summary.num_deaths == np.count_nonzero(found.is_death)
  return found.records['replica'][found.is_death].tolist()


def test_a_node_that_may_be_at_work_has_not_died():
  rows = [
    cases.step(number, float(number), replica=node, mass=1.0)
    for number in (1, 2, 3)
    for node in (0, 1)
  ]
  assert not _find_last_deaths(*rows)
  later = [cases.step(4, 4.0, mass=1.0), cases.step(5, 4.5, mass=1.0)]
  # Node 1 took a second between two records; it is silent for that long.
  assert not _find_last_deaths(*rows, later[0])
  assert _find_last_deaths(*rows, *later) == [1]
  # It is the only one that has not ended, and has recorded nothing since.
  end = {'kind': Kind.END, 'version': 3, 'end_time': 3.25, 'mass': 1.0}
  assert _find_last_deaths(*rows, end) == [1]
  last = cases.step(4, 3.5, replica=1, mass=1.0)
  assert not _find_last_deaths(*rows, end, last)
  # For one record, its duration is known.
  rows = [rows[0], rows[1], rows[2]]
  assert not _find_last_deaths(*rows)
  assert _find_last_deaths(*rows, cases.step(3, 2.5)) == [1]


def test_nodes_at_work_have_not_lost_their_mass():
  rows = [cases.step(1, 1.0, replica=node, mass=1.0) for node in (0, 1)]
  summary = traces.summarize(_make(*rows, is_recorded=True))
  assert (summary.num_deaths, summary.lost_mass) == (0, 0)


def test_all_nodes_restart_when_one_of_an_all_reduce_dies():
  trace = _simulate(
    'allreduce', num_workers=3, num_steps=6, failures=[(2.5, 1, 4.0)]
  )
  kinds = trace.records['kind']
  assert np.count_nonzero(kinds == Kind.RESTART) == 3
  found = statistics.find_deaths(trace)
  assert found.records['replica'][found.is_death].tolist() == [1]
  assert found.records['replica'][found.is_return].tolist() == [1]
  summary = traces.summarize(trace)
  assert (summary.num_deaths, summary.num_returns) == (1, 1)


def test_no_records_and_no_deaths():
  deaths = statistics.count_deaths(_make(num_workers=2))
  assert (deaths.num_deaths, deaths.num_returns, deaths.lost_mass) == (0, 0, 0)


def test_downtimes_of_a_run_that_was_ended():
  """Nothing is written from 2 to 12; node 1 alone is away from 13 to 15."""
  trace = _make(
    cases.step(1, 1.0, replica=0),
    cases.step(1, 2.0, replica=1),
    cases.restart(2, 1, 12.0, replica=0),
    cases.restart(2, 1, 12.5, replica=1),
    cases.step(3, 13.0, replica=1),
    cases.step(3, 14.75, replica=0),
    cases.restart(4, 3, 15.0, replica=1),
  )
  times, seconds = statistics.find_downtimes(trace)
  assert times.tolist() == [12, 12.5, 15]
  assert seconds.tolist() == [10, 0.5, 0.25]
