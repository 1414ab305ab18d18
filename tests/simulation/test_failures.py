"""Workers that die and come back: no other worker waits for ever."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from jasgd.protocols import Fate
from tests.simulation import cases


def test_after_a_ramp_learners_come_back_at_once():
  failures = [
    simulation.Failure(20.0 + 5 * i, 1, 20.5 + 5 * i) for i in range(60)
  ]
  trace = simulation.simulate(
    protocols.ramp_up(protocols.asynchronous(), 10),
    num_workers=2,
    num_gradients=600,
    compute=simulation.constant(0.9),
    failures=failures,
  )
  assert np.count_nonzero(trace.worker == 1) > 200


def test_a_leave_that_makes_an_update_takes_the_server_its_time():
  trace = simulation.simulate(
    protocols.hardsync(),
    num_workers=2,
    num_gradients=3,
    compute=simulation.with_speeds(simulation.constant(1.0), [1, 0.1]),
    network=simulation.Network(server_time=5.0),
    failures=[simulation.Failure(3.0, 1)],
  )
  assert trace.release_time[0] == 8.0


def test_the_trace_ends_when_all_learners_are_dead():
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=2,
    num_gradients=1000,
    failures=[simulation.Failure(5.5, 0), simulation.Failure(7.5, 1)],
  )
  assert len(trace.worker) == 5 + 7
  assert trace.header['num_missing'] == 1000 - 12
  assert '988 gradients that were asked for: their workers were gone' in str(
    traces.summarize(trace)
  )


def _check_server(trace, num_workers, clock):
  """Time advances, steps are consecutive, every gradient has one fate."""
  records = trace.records
  assert np.all(np.diff(records['end_time']) >= 0)
  assert np.all(np.diff(records['version']) >= 0)
  alive = set(range(num_workers))
  steps = dict.fromkeys(alive, 0)
  per_push = trace.header['steps_per_push']
  has_fetches = per_push != trace.header['steps_per_fetch']
  for record in records:
    worker = int(record['worker'])
    match traces.Kind(record['kind']):
      case traces.Kind.LEAVE:
        alive.remove(worker)
      case traces.Kind.JOIN:
        alive.add(worker)
      case traces.Kind.PUSH:
        is_orphan = record['fate'] == Fate.DROPPED_GONE
        assert is_orphan or worker in alive
        steps[worker] += per_push
        if not has_fetches:  # With fetches, steps lost with a worker count.
          assert record['step'] == steps[worker]
        assert record['read_version'] <= record['version']
  summary = traces.summarize(trace)
  assert sum(summary.fates.values()) == trace.num_gradients
  applied = trace.clock[trace.fate == Fate.APPLIED]
  # Every update of the protocol took at least one gradient.
  np.testing.assert_array_equal(np.unique(applied), np.arange(clock))


@cases.every_protocol
@cases.every_network
@hypothesis.given(
  seed=st.integers(0, 100_000),
  up=st.floats(2.0, 60.0),
  down=st.floats(0.1, 30.0),
  num_workers=st.integers(2, 6),
)
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
def test_a_run_continues_while_a_learner_is_alive(
  protocol_name, network_name, seed, up, down, num_workers
):
  failures = simulation.draw_failures(num_workers, 60.0, up, down, seed=seed)
  protocol = cases.PROTOCOLS[protocol_name]()
  trace = simulation.simulate(
    protocol,
    num_workers=num_workers,
    num_gradients=150,
    compute=cases.TIMES['exponential'],
    network=cases.NETWORKS[network_name],
    failures=failures,
    seed=seed,
  )
  # All learners come back, so that the run reaches its end.
  assert trace.num_gradients == 150
  _check_server(trace, num_workers, protocol.clock)


def test_a_push_that_arrives_after_its_learners_death_is_dropped():
  """Gradients are on the way for a second; learner 0 dies meanwhile."""
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=2,
    num_gradients=5,
    compute=simulation.with_speeds(simulation.constant(2.0), [2, 1]),
    network=simulation.Network(latency=1.0),
    failures=[simulation.Failure(2.5, 0, 4.0)],
  )
  assert trace.worker.tolist() == [0, 1, 0, 1, 0]
  assert trace.fate[0] == Fate.DROPPED_GONE
  assert trace.end_time[0] == 3.0
  assert trace.clock.tolist() == [0, 0, 1, 2, 3]
  assert np.isnan(trace.release_time[0])
  assert trace.step.tolist() == [1, 1, 2, 2, 3]
  assert set(trace.fate[1:]) == {Fate.APPLIED}


def test_an_unfinished_gradient_of_a_dead_learner_has_no_record():
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=2,
    num_gradients=3,
    compute=simulation.constant(2.0),
    network=simulation.Network(latency=1.0),
    failures=[simulation.Failure(2.5, 0)],
  )
  assert trace.worker.tolist() == [1, 1, 1]


@pytest.mark.parametrize('down', [1.0, 5.0])
def test_the_share_of_the_time_that_learners_are_up(down):
  """Up for exp(5), down for exp(down): the throughput falls by that share."""
  failures = simulation.draw_failures(20, 3000.0, 5.0, down, seed=3)
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=20,
    num_gradients=50_000,
    compute=simulation.constant(0.1),
    failures=failures,
  )
  # The gradient under way at a death is lost too: 0.05 s on average.
  share = (5 - 0.05) / (5 + down)
  end = trace.end_time[-1]
  np.testing.assert_allclose(50_000 / end, 200 * share, rtol=0.03)


def test_same_on_every_machine():
  """A change of these numbers changes all runs."""
  failures = simulation.draw_failures(2, 60.0, 30.0, 5.0, seed=2024)
  assert [failure.worker for failure in failures] == [1, 1, 1]
  np.testing.assert_allclose(
    [(failure.time, failure.until) for failure in failures],
    [
      (23.533678368781963, 25.196863161174424),
      (27.939283906644686, 31.51126580656905),
      (41.899421306704994, 48.69538268509749),
    ],
    rtol=1e-12,
  )


def test_failures_may_be_tuples():
  traces_ = [
    simulation.simulate(
      protocols.asynchronous(),
      num_workers=2,
      num_gradients=20,
      failures=failures,
    )
    for failures in (
      [simulation.Failure(7.5, 1), simulation.Failure(2.5, 0, 4.0)],
      [(2.5, 0, 4.0), (7.5, np.int32(1))],
    )
  ]
  assert traces_[0] == traces_[1]
  assert traces_[0].header['num_failures'] == 2


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'num_workers': 0}, 'num_workers must be .* at least 1, got 0'),
    ({'num_workers': 1.5}, 'num_workers must be a whole number.* got 1.5'),
    ({'horizon': np.inf}, 'horizon must be finite and above 0, got inf'),
    ({'mean_down_time': 'x'}, "mean_down_time must be a number, got 'x'"),
    ({'seed': 2**64}, r'seed must be below 2\*\*64, got 18446744073709551616'),
  ],
)
def test_failures_that_cannot_be_drawn(arguments, message):
  good = {
    'num_workers': 2,
    'horizon': 10.0,
    'mean_time_between': 5.0,
    'mean_down_time': 1.0,
  }
  with pytest.raises(ValueError, match=message):
    simulation.draw_failures(**{**good, **arguments})


def _simulate_one_death(time, **arguments):
  """Learner 0 pulls from 0 to 1, computes to 3, and its push arrives at 4."""
  return simulation.simulate(
    arguments.pop('protocol', protocols.asynchronous()),
    num_workers=2,
    compute=simulation.with_speeds(simulation.constant(2.0), [1, 0.1]),
    network=simulation.Network(
      latency=1.0, bytes_per_push=3.0, bytes_per_pull=5.0
    ),
    failures=[(time, 0)],
    **{'num_gradients': 1, **arguments},
  )


@pytest.mark.parametrize(
  ('time', 'lost_clock', 'num_pulls', 'num_pushes'),
  [
    (0.5, 0, 1, 0),  # It dies while it pulls,
    (2.5, 0, 1, 0),  # while it computes, after its push, and with new weights.
    (3.5, -1, 1, 1),
    (4.5, 1, 2, 1),
  ],
)
def test_a_pull_that_was_lost_with_its_learner_counts(
  time, lost_clock, num_pulls, num_pushes
):
  trace = _simulate_one_death(time, num_gradients=2 if num_pushes else 1)
  (leave,) = trace.of_kind(traces.Kind.LEAVE)
  assert leave['read_version'] == lost_clock
  traffic = traces.statistics.count_traffic(trace)
  assert traffic.received[0] == 5 * num_pulls
  assert traffic.sent[0] == 3 * num_pushes


def test_a_waiting_learner_that_dies_loses_no_gradient():
  trace = _simulate_one_death(
    5.0, protocol=protocols.hardsync(), num_gradients=2
  )
  (leave,) = trace.of_kind(traces.Kind.LEAVE)
  assert leave['read_version'] == -1
  assert traces.statistics.count_traffic(trace).received[0] == 5


def test_the_push_of_a_dead_learner_is_in_flight():
  """Learner 0 dies at 3.5, and the trace ends with 1's push, before 4."""
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=2,
    num_gradients=1,
    compute=simulation.with_speeds(simulation.constant(2.0), [1, 1.1]),
    network=simulation.Network(latency=1.0, bytes_per_pull=5.0),
    failures=[(3.5, 0)],
  )
  assert trace.worker.tolist() == [1]
  assert trace.in_flight.tolist() == [(0, 1, 0, 0.0), (1, 2, 1, trace.duration)]
  assert traces.statistics.count_traffic(trace).received.tolist() == [5, 10]


@cases.every_network
@pytest.mark.parametrize('s', [0, 2])
@pytest.mark.parametrize('seed', range(10))
def test_the_lead_among_the_living_is_bounded_by_ssp(network_name, s, seed):
  trace = simulation.simulate(
    protocols.ssp(s),
    num_workers=5,
    num_gradients=300,
    compute=cases.TIMES['slow minority'],
    network=cases.NETWORKS[network_name],
    failures=simulation.draw_failures(5, 60.0, 20.0, 5.0, seed=seed),
    seed=seed,
  )
  assert len(trace.of_kind(traces.Kind.LEAVE))
  assert traces.summarize(trace).max_lead <= s + 1
