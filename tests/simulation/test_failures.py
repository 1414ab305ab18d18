"""Learners that die and come back: nobody waits for ever."""

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
    num_learners=2,
    num_gradients=600,
    compute=simulation.constant(0.9),
    failures=failures,
  )
  assert np.count_nonzero(trace.learner == 1) > 200


def test_a_leave_that_makes_an_update_takes_the_server_its_time():
  trace = simulation.simulate(
    protocols.hardsync(),
    num_learners=2,
    num_gradients=3,
    compute=simulation.with_speeds(simulation.constant(1.0), [1, 0.1]),
    network=simulation.Network(server_time=5.0),
    failures=[simulation.Failure(3.0, 1)],
  )
  assert trace.release_time[0] == 8.0


def test_everybody_dead_ends_the_trace():
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=2,
    num_gradients=1000,
    failures=[simulation.Failure(5.5, 0), simulation.Failure(7.5, 1)],
  )
  assert len(trace.learner) == 5 + 7


def _check_books(trace, num_learners):
  """Time advances, steps are consecutive, every gradient has one fate."""
  records = trace.records
  assert np.all(np.diff(records['arrive_time']) >= 0)
  assert np.all(np.diff(records['arrive_clock']) >= 0)
  alive = set(range(num_learners))
  steps = dict.fromkeys(alive, 0)
  for record in records:
    learner = int(record['learner'])
    match traces.Kind(record['kind']):
      case traces.Kind.LEAVE:
        alive.remove(learner)
      case traces.Kind.JOIN:
        alive.add(learner)
      case traces.Kind.GRADIENT:
        is_orphan = record['fate'] == Fate.DROPPED_GONE
        assert is_orphan or learner in alive
        assert record['step'] == steps[learner]
        steps[learner] += 1
        assert record['read_clock'] <= record['arrive_clock']
  summary = traces.summarize(trace)
  assert sum(summary.fates.values()) == trace.num_gradients
  applied = trace.apply_clock[trace.fate == Fate.APPLIED]
  # Each update has at least one gradient, but for those that a leave made.
  assert len(np.unique(applied)) == trace.num_updates


@cases.every_protocol
@cases.every_network
@hypothesis.given(
  seed=st.integers(0, 100_000),
  up=st.floats(2.0, 60.0),
  down=st.floats(0.1, 30.0),
  num_learners=st.integers(2, 6),
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_nothing_ever_stops_while_somebody_lives(
  protocol_name, network_name, seed, up, down, num_learners
):
  failures = simulation.draw_failures(num_learners, 60.0, up, down, seed=seed)
  trace = simulation.simulate(
    cases.PROTOCOLS[protocol_name](),
    num_learners=num_learners,
    num_gradients=150,
    compute=cases.TIMES['exponential'],
    network=cases.NETWORKS[network_name],
    failures=failures,
    seed=seed,
  )
  # All come back in the end, so the run comes to its end too.
  assert trace.num_gradients == 150
  _check_books(trace, num_learners)


def test_a_push_under_way_finds_its_learner_gone():
  """Computed at 1 and 2, arriving a second later; learner 0 dies between."""
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=2,
    num_gradients=5,
    compute=simulation.with_speeds(simulation.constant(2.0), [2, 1]),
    network=simulation.Network(latency=1.0),
    failures=[simulation.Failure(2.5, 0, 4.0)],
  )
  assert trace.learner.tolist() == [0, 1, 0, 1, 0]
  assert trace.fate[0] == Fate.DROPPED_GONE
  assert trace.arrive_time[0] == 3.0
  assert trace.apply_clock[0] == -1
  assert np.isnan(trace.release_time[0])
  assert trace.step.tolist() == [0, 0, 1, 1, 2]
  assert set(trace.fate[1:]) == {Fate.APPLIED}


def test_what_was_not_computed_yet_leaves_no_record():
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=2,
    num_gradients=3,
    compute=simulation.constant(2.0),
    network=simulation.Network(latency=1.0),
    failures=[simulation.Failure(2.5, 0)],
  )
  assert trace.learner.tolist() == [1, 1, 1]


@pytest.mark.parametrize('down', [1.0, 5.0])
def test_the_share_of_the_time_that_learners_are_up(down):
  """Up for exp(5), down for exp(down): the throughput falls by that share."""
  failures = simulation.draw_failures(20, 3000.0, 5.0, down, seed=3)
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=20,
    num_gradients=50_000,
    compute=simulation.constant(0.1),
    failures=failures,
  )
  # What is computed when a learner dies, 0.05 in the mean, is lost too.
  share = (5 - 0.05) / (5 + down)
  end = trace.arrive_time[-1]
  np.testing.assert_allclose(50_000 / end, 200 * share, rtol=0.03)
