"""Predictions of runs from their times: against runs whose times are known."""

import dataclasses

import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from tests.experiment import own_strategies
from tests.protocols import cases as protocol_cases
from tests.simulation import cases

NUM_WORKERS = 4
SPEEDS = (1.0, 1.0, 1.0, 1 / 3)


def _simulate(protocol, num_gradients=2000, **arguments):
  """A run of learners with different speeds."""
  return simulation.simulate(
    protocol,
    num_workers=NUM_WORKERS,
    num_gradients=num_gradients,
    **{
      'compute': simulation.with_speeds(simulation.gamma(1.0, 20.0), SPEEDS),
      **arguments,
    },
  )


def _edit(trace, change, **header):
  """The same trace, with other records."""
  records = change(np.array(trace.records))
  return traces.Trace(records, {**trace.header, **header})


@pytest.mark.parametrize('overlap', [False, True])
@cases.every_protocol
def test_a_run_is_predicted_from_its_times(protocol_name, overlap):
  """Equal distributions of times give equal staleness and shares."""
  protocol = cases.PROTOCOLS[protocol_name]()
  if overlap and protocol.needs_current_clock:
    pytest.skip('Such a protocol refuses to overlap.')
  network = simulation.Network(latency=0.02, server_time=0.01)
  trace = _simulate(protocol, overlap=overlap, network=network)
  predicted = simulation.predict(trace, seed=1)
  assert predicted.num_gradients == trace.num_gradients
  others = [simulation.predict(trace, seed) for seed in range(2, 5)]
  comparison = simulation.compare(trace, predicted, *others)
  assert comparison.total_variation < 0.06
  shares = comparison.measured_share, comparison.predicted_share
  np.testing.assert_allclose(*shares, atol=0.015)
  # Most gradients of the slow learner may be dropped.
  has_many = comparison.measured_share > 0.05
  assert has_many.sum() >= 3
  differences = comparison.staleness_difference[has_many]
  np.testing.assert_allclose(differences, 0, atol=0.08)
  assert predicted.header['overlap'] == overlap


def test_a_wrong_protocol_or_overlap_is_seen():
  """The comparison can fail: measured times do not determine the order."""
  trace = _simulate(protocols.asynchronous())
  strategy = protocols.softsync(2).to_config()
  for header in ({'strategy': strategy}, {'overlap': True}):
    other = dataclasses.replace(trace, header={**trace.header, **header})
    comparison = simulation.compare(trace, simulation.predict(other))
    assert comparison.total_variation > 0.3
    assert np.abs(comparison.staleness_difference).max() > 0.2


def test_equal_times_give_the_same_run():
  """Without randomness, the prediction equals the run."""
  trace = _simulate(
    protocols.asynchronous(), 100, compute=simulation.constant(0.5)
  )
  predicted = simulation.predict(trace)
  for name in ('worker', 'step', 'read_version', 'clock', 'end_time'):
    np.testing.assert_array_equal(
      getattr(predicted, name), getattr(trace, name), name
    )


def test_seeds_differ_and_repeat():
  trace = _simulate(protocols.asynchronous(), 200)
  first, again, other = (simulation.predict(trace, seed) for seed in (1, 1, 2))
  assert first == again
  assert not np.array_equal(first.worker, other.worker)


def test_first_gradients_keep_their_times_and_are_not_drawn_later():
  """As if learner l had compiled for 50 + l seconds."""
  firsts = [50.0, 51.0, 52.0, 53.0]
  compute = simulation.resampled([[1.0, 1.1]] * NUM_WORKERS, [firsts])
  trace = _simulate(protocols.asynchronous(), 300, compute=compute)
  predicted = simulation.predict(trace)
  is_first = predicted.step == 1
  order = np.argsort(predicted.worker[is_first])
  np.testing.assert_allclose(predicted.compute_time[is_first][order], firsts)
  assert predicted.compute_time[~is_first].max() < 1.2


def test_a_join_or_an_incarnation_begins_with_a_first_gradient():
  """Long first gradients after a join or restart are left out of the times."""
  trace = _simulate(
    protocols.asynchronous(), 400, compute=simulation.constant(1.0)
  )

  def change(records):
    chosen = np.flatnonzero(records['worker'] == 2)
    records['start_time'][chosen[20]] -= 30.0
    records['incarnation'][chosen[20] :] = 1
    records['start_time'][chosen[40]] -= 70.0
    join = records[chosen[40] : chosen[40] + 1].copy()
    join['kind'] = traces.Kind.JOIN
    return np.insert(records, chosen[40], join)

  predicted = simulation.predict(_edit(trace, change))
  assert predicted.compute_time.max() == pytest.approx(1.0)


def test_void_records_are_not_used():
  trace = _simulate(protocols.asynchronous(), 200)

  def change(records):
    void = records[-40:].copy()
    void['start_time'] -= 1e3
    restart = traces.make_records(
      kind=traces.Kind.RESTART, stands=len(records) - 1, end_time=1e3
    )
    return np.concatenate([records, void, restart])

  assert simulation.predict(_edit(trace, change)) == simulation.predict(trace)


def test_late_joins_and_leaves_are_repeated():
  """Learner 3 joins at 100 s; learner 0 is away from 50 s to 120 s."""
  failures = [(0.0, 3, 100.0), (50.0, 0, 120.0)]
  trace = _simulate(protocols.softsync(2), 1000, failures=failures)
  predicted = simulation.predict(trace)
  members = predicted.of_kind(traces.Kind.JOIN, traces.Kind.LEAVE)
  for worker, start, end in ((3, 0.0, 100.0), (0, 50.0, 120.0)):
    leave, join = members[members['worker'] == worker]
    assert leave['kind'] == traces.Kind.LEAVE
    assert leave['end_time'] == pytest.approx(start, abs=1e-6)
    assert join['kind'] == traces.Kind.JOIN
    assert join['end_time'] == pytest.approx(end, abs=3.0)
  comparison = simulation.compare(trace, predicted)
  np.testing.assert_allclose(comparison.share_difference, 0, atol=0.06)
  assert comparison.total_variation < 0.06


def test_the_end_of_a_real_run_is_no_loss():
  """All learners join at the start, and leave at the end of the run."""
  trace = _simulate(protocols.hardsync(), 100)
  workers = np.arange(NUM_WORKERS)
  end = float(trace.end_time.max())

  def change(records):
    joins = traces.make_records(
      kind=traces.Kind.JOIN, worker=workers, end_time=-1.0
    )
    over = traces.make_records(kind=traces.Kind.END, version=25)
    late = records[-NUM_WORKERS:].copy()
    late['fate'] = traces.Fate.AFTER_END
    late['updates'] = 0
    late['version'] = 25
    leaves = traces.make_records(
      kind=traces.Kind.LEAVE, worker=workers, version=25, end_time=end + 1
    )
    return np.concatenate([joins, records, over, late, leaves])

  real = _edit(trace, change, num_present=0)
  predicted = simulation.predict(real)
  assert predicted.num_gradients == 100
  assert np.all(predicted.records['kind'] == traces.Kind.PUSH)
  assert simulation.compare(real, predicted).total_variation == 0


def test_a_learner_without_gradients_is_absent():
  trace = _simulate(protocols.asynchronous(), 200)
  header = {**trace.header, 'num_workers': NUM_WORKERS + 1}
  predicted = simulation.predict(dataclasses.replace(trace, header=header))
  comparison = simulation.compare(trace, predicted)
  assert comparison.predicted_share[NUM_WORKERS] == 0
  assert np.isnan(comparison.predicted_staleness[NUM_WORKERS])


def test_a_protocol_of_the_user_is_predicted():
  trace = _simulate(protocol_cases.Every(3), 600)
  comparison = simulation.compare(trace, simulation.predict(trace))
  assert comparison.total_variation < 0.1
  assert simulation.predict(trace).num_updates == 200


def test_a_constant_delay_is_predicted_as_asynchronous():
  trace = _simulate(protocols.asynchronous(), 400)
  strategy = protocols.constant_delay(3).to_config()
  header = {**trace.header, 'strategy': strategy}
  delayed = simulation.predict(dataclasses.replace(trace, header=header))
  assert delayed == simulation.predict(trace)


@pytest.mark.parametrize(
  ('header', 'message'),
  [
    (
      {'strategy': 'softsync(2): the server'},
      'config .*is a dict .* got .soft',
    ),
    ({'strategy': None}, 'config .*is a dict .* got None'),
    ({}, 'config .*is a dict'),
    ({'strategy': {'name': 'median'}}, "Unknown strategy 'median'"),
  ],
)
def test_a_header_without_a_protocol_is_refused(header, message):
  trace = _simulate(protocols.asynchronous(), 20)
  with pytest.raises(ValueError, match=message):
    simulation.predict(dataclasses.replace(trace, header=header))


PEERS = {
  'pull': (gossip.Pull(), 0.05),
  'push': (gossip.Push(), 0.0),
  'push-sum': (gossip.PushSum(), 0.0),
  'elastic': (gossip.Elastic(), 0.05),
  'allreduce': (gossip.AllReduce(), 0.01),
  'own': (own_strategies.Neighbour(), 0.05),
}


@pytest.mark.parametrize('has_death', [False, True])
@pytest.mark.parametrize('name', PEERS)
def test_nodes_are_predicted(name, has_death):
  """Node 2 takes twice as long, and dies for a while, without a checkpoint."""
  strategy, latency = PEERS[name]
  trace = simulation.simulate(
    strategy,
    num_workers=4,
    num_gradients=1200,
    compute=simulation.with_speeds(simulation.normal(1.0, 0.1), [1, 1, 0.5, 1]),
    network=simulation.Network(latency=latency),
    failures=[(50.0, 2, 80.0)] if has_death else (),
    detection_seconds=0.5,
  )
  predicted = [simulation.predict(trace, seed) for seed in range(2)]
  comparison = simulation.compare(trace, *predicted)
  measured, expected = comparison.measured, comparison.predicted
  assert measured.keys() == expected.keys()
  for number in ('gradients_per_second', 'mixes_per_step'):
    assert measured[number] == pytest.approx(expected[number], rel=0.1)
  if name != 'allreduce':  # A mean has no age.
    assert measured['age'] == pytest.approx(expected['age'], abs=0.3)
    assert comparison.total_variation < 0.25
  assert measured['lost_mass'] == pytest.approx(expected['lost_mass'], abs=0.6)
  for each in predicted:
    deaths = traces.summarize(each).num_deaths
    assert deaths == traces.summarize(trace).num_deaths


def test_nodes_without_steps_are_not_predicted():
  header = {'strategy': {'name': 'pull'}, 'num_workers': 2}
  records = traces.make_records(kind=traces.Kind.JOIN, replica=0)
  with pytest.raises(ValueError, match='needs steps; the trace has none'):
    simulation.predict(traces.Trace(records, header))


def test_unknown_times_are_refused():
  trace = _simulate(protocols.asynchronous(), 20)

  def change(records):
    for name in ('start_time', 'release_time'):
      records[name] = np.nan
    return records

  for bad in (_edit(trace, change), _edit(trace, lambda records: records[:0])):
    with pytest.raises(ValueError, match='needs gradients whose times are kn'):
      simulation.predict(bad)


def _make_trace(worker, staleness):
  clock = np.arange(len(worker)) + 10
  return traces.Trace(
    traces.make_records(
      worker=worker, read_version=clock - staleness, clock=clock
    )
  )


def test_comparison_in_numbers():
  trace = _make_trace([0, 0, 0, 1], np.array([1, 1, 4, 3]))
  predicted = _make_trace([0, 0, 1, 1], np.array([1, 3, 3, 3]))
  comparison = simulation.compare(trace, predicted)
  for name, expected in {
    'measured_staleness': [2, 3],
    'predicted_staleness': [2, 3],
    'staleness_difference': [0, 0],
    'measured_share': [0.75, 0.25],
    'predicted_share': [0.5, 0.5],
    'share_difference': [0.5, -0.5],
  }.items():
    np.testing.assert_allclose(getattr(comparison, name), expected)
  # 1: 2/4 and 1/4; 3: 1/4 and 3/4; 4: 1/4 and none.
  expected = (1 / 4 + 2 / 4 + 1 / 4) / 2
  assert comparison.total_variation == pytest.approx(expected)


def test_several_predictions_are_taken_together():
  trace = _make_trace([0, 1], np.array([1, 2]))
  first = _make_trace([0, 1], np.array([2, 2]))
  second = _make_trace([0, 0, 0, 1], np.array([4, 4, 4, 0]))
  comparison = simulation.compare(trace, first, second)
  np.testing.assert_allclose(comparison.predicted_staleness, [14 / 4, 1])
  np.testing.assert_allclose(comparison.predicted_share, [4 / 6, 2 / 6])
  with pytest.raises(ValueError, match='one or more predictions'):
    simulation.compare(trace)


def test_differences_from_nothing():
  """Relative to 0 it is 0 or infinite; it is NaN without gradients."""
  trace = _make_trace([0, 1, 2], np.array([0, 1, 1]))
  predicted = _make_trace([0, 1], np.array([0, 0]))
  comparison = simulation.compare(trace, predicted)
  assert comparison.staleness_difference[:2].tolist() == [0, np.inf]
  assert np.isnan(comparison.staleness_difference[2])
  assert comparison.share_difference[2] == np.inf


def test_only_applied_gradients_are_compared():
  trace = _make_trace([0, 0, 1], np.array([1, 9, 1]))
  records = np.array(trace.records)
  records['fate'][1] = traces.Fate.DROPPED_STALE
  comparison = simulation.compare(traces.Trace(records), trace)
  np.testing.assert_allclose(comparison.measured_staleness, [1, 1])
  np.testing.assert_allclose(comparison.measured_share, [0.5, 0.5])
  nothing = traces.Trace(records[:0])
  assert np.isnan(simulation.compare(nothing, trace).total_variation)


def test_resampled_draws_from_each_learners_own_times():
  lists = [[1.0, 2.0, 4.0], [10.0, 30.0]]
  table = simulation.resampled(lists).table(0, 0, 3000, 2)
  for column, own in zip(table.T, lists, strict=True):
    values, counts = np.unique(column, return_counts=True)
    assert values.tolist() == own
    np.testing.assert_allclose(counts / 3000, 1 / len(own), atol=0.04)
  assert abs(np.corrcoef(table.T)[0, 1]) < 0.06


def test_resampled_rows_do_not_depend_on_how_they_are_asked_for():
  time = simulation.resampled([[1.0, 2.0]] * 3, [[5.0] * 3, [6.0] * 3])
  whole = time.table(0, 0, 9000, 3)
  np.testing.assert_array_equal(whole[:2], [[5.0] * 3, [6.0] * 3])
  assert whole[2:].max() == 2.0
  for first, number in ((0, 1), (1, 5), (2, 9), (5000, 4000)):
    part = time.table(0, first, number, 3)
    np.testing.assert_array_equal(part, whole[first : first + number])


def test_resampled_steps_of_a_push_take_the_same():
  time = simulation.resampled([np.arange(1.0, 100.0)], num_steps=3)
  table = time.table(0, 0, 3000, 1).reshape(1000, 3)
  np.testing.assert_array_equal(table, table[:, :1].repeat(3, axis=1))
  assert len(np.unique(table[:, 0])) > 90


@pytest.mark.parametrize(
  ('times', 'firsts', 'message'),
  [
    ([], (), 'a list of durations for each worker'),
    ([[1.0], []], (), 'none of them empty'),
    ([1.0], (), 'a list of durations for each worker'),
    ([[1.0], [0.0]], (), 'finite and above 0'),
    ([[1.0], [np.nan]], (), 'finite and above 0'),
    ([[1.0], [1.0]], [[1.0, np.inf]], 'finite and above 0'),
    ([[1.0], [1.0]], [[1.0]], 'rows of 2 entries'),
    ([[1.0], [1.0]], [1.0, 1.0], 'rows of 2 entries'),
  ],
)
def test_resampled_refuses(times, firsts, message):
  with pytest.raises(ValueError, match=message):
    simulation.resampled(times, firsts)


def test_resampled_is_for_as_many_learners():
  with pytest.raises(ValueError, match='of 2 workers, but there are 3'):
    simulation.resampled([[1.0], [1.0]]).table(0, 0, 1, 3)
