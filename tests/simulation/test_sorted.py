"""One truth: what is vectorised gives the trace of the event loop."""

import hypothesis
from hypothesis import strategies as st
import numpy as np

from jasgd import protocols
from jasgd import simulation
from jasgd.simulation import _events
from jasgd.simulation import _simulate
from jasgd.simulation import _sorted
from tests.simulation import cases


def _simulate_by_events(
  protocol, num_learners, num_gradients, compute, seed, overlap
):
  """The same, always by the event loop."""
  free = simulation.Network()
  loop = _events.EventLoop(
    protocol, num_learners, compute, free, (), seed, overlap
  )
  records, in_flight = loop.run(num_gradients)
  _simulate._settle(records, protocol.clock, protocol.steps_per_push)
  return records, in_flight


SORTED = {
  'asynchronous': protocols.asynchronous,
  'softsync, 1': lambda: protocols.softsync(1),
  'softsync, 3': lambda: protocols.softsync(3),
  'downpour': lambda: protocols.downpour(2, 2),
  'rennala': lambda: protocols.rennala(4),
  'ringmaster': lambda: protocols.ringmaster(5),
}


def _check_same(make, num_learners, num_gradients, compute, seed, overlap):
  assert _simulate._can_be_sorted(make())
  trace = simulation.simulate(
    make(),
    num_learners=num_learners,
    num_gradients=num_gradients,
    compute=compute,
    seed=seed,
    overlap=overlap,
  )
  records, in_flight = _simulate_by_events(
    make(), num_learners, num_gradients, compute, seed, overlap
  )
  for column in records.dtype.names:
    np.testing.assert_array_equal(
      trace.records[column], records[column], err_msg=column
    )
  assert trace.header['in_flight'] == in_flight


@hypothesis.given(
  name=st.sampled_from(sorted(SORTED)),
  time_name=st.sampled_from(sorted(cases.TIMES)),
  num_learners=st.integers(3, 40),
  num_gradients=st.integers(1, 600),
  log_speed=st.floats(0, 3),
  seed=st.integers(0, 10_000),
  overlap=st.booleans(),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_sorting_gives_the_trace_of_the_event_loop(
  name, time_name, num_learners, num_gradients, log_speed, seed, overlap
):
  speeds = np.logspace(0, log_speed, num_learners)
  time = simulation.with_speeds(cases.TIMES[time_name], speeds.tolist())
  overlap = overlap and name != 'rennala'  # It is refused.
  _check_same(SORTED[name], num_learners, num_gradients, time, seed, overlap)


def test_ties_go_by_learner():
  time = simulation.with_speeds(simulation.constant(1.0), [1, 3, 2, 1, 6])
  for make in SORTED.values():
    _check_same(make, 5, 300, time, 0, overlap=False)


def test_what_holds_learners_or_fetches_apart_is_not_sorted():
  for make in (
    protocols.hardsync,
    lambda: protocols.ssp(1),
    lambda: protocols.downpour(1, 2),
    lambda: protocols.ramp_up(protocols.asynchronous(), 5),
  ):
    assert not _simulate._can_be_sorted(make())


def test_very_unequal_learners_are_not_sorted():
  """A table up to the fastest would be 100 times as large as the trace."""
  speeds = [1.0] * 99 + [1000.0]
  time = simulation.with_speeds(simulation.exponential(1.0), speeds)
  arguments = (protocols.asynchronous(), 100, 20_000, time, 0, False)
  assert _sorted.simulate_sorted(*arguments) is None
  _check_same(protocols.asynchronous, 100, 20_000, time, 0, overlap=False)


def test_steps_are_added_one_by_one():
  """numpy's sum is pairwise from 8 on, where it can be."""
  for num_learners in (1, 2, 5):
    _check_same(
      lambda: protocols.downpour(9, 9),
      num_learners,
      200,
      cases.TIMES['lognormal'],
      seed=3,
      overlap=False,
    )
