"""The vectorised simulation gives the trace of the event loop."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from jasgd.simulation import _server_loop
from jasgd.simulation import _sorted
from tests.simulation import cases


def _simulate_by_events(
  protocol, num_workers, num_gradients, compute, seed, overlap
):
  """Records and gradients in flight of the event loop."""
  free = simulation.Network()
  loop = _server_loop.ServerLoop(
    protocol, num_workers, compute, free, (), seed, overlap
  )
  records, in_flight = loop.run(num_gradients)
  records['samples'][records['kind'] == traces.Kind.PUSH] = (
    protocol.steps_per_push
  )
  return records, in_flight


class EvenLearners(protocols.asynchronous):
  """Drops the gradients of odd learners: the updates cannot be counted."""

  def handle_push(self, learner, read_clock):
    if learner % 2:
      fate = protocols.Fate.DROPPED_STALE
      return protocols.Decision(fate, False, (learner,))
    return super().handle_push(learner, read_clock)


SORTED = {
  'asynchronous': protocols.asynchronous,
  'softsync, 1': lambda: protocols.softsync(1),
  'softsync, 3': lambda: protocols.softsync(3),
  'downpour': lambda: protocols.downpour(2, 2),
  'rennala': lambda: protocols.rennala(4),
  'ringmaster': lambda: protocols.ringmaster(5),
  'own rule': EvenLearners,
}


def _check_same(make, num_workers, num_gradients, compute, seed, overlap):
  trace = simulation.simulate(
    make(),
    num_workers=num_workers,
    num_gradients=num_gradients,
    compute=compute,
    seed=seed,
    overlap=overlap,
  )
  records, in_flight = _simulate_by_events(
    make(), num_workers, num_gradients, compute, seed, overlap
  )
  for column in records.dtype.names:
    np.testing.assert_array_equal(
      trace.records[column], records[column], err_msg=column
    )
  assert trace.header['in_flight'] == in_flight


@hypothesis.given(
  name=st.sampled_from(sorted(SORTED)),
  time_name=st.sampled_from(sorted(cases.TIMES)),
  num_workers=st.integers(3, 40),
  num_gradients=st.integers(1, 600),
  log_speed=st.floats(0, 3),
  seed=st.integers(0, 10_000),
  overlap=st.booleans(),
)
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_sorting_gives_the_trace_of_the_event_loop(
  name, time_name, num_workers, num_gradients, log_speed, seed, overlap
):
  speeds = np.logspace(0, log_speed, num_workers)
  time = simulation.with_speeds(cases.TIMES[time_name], speeds.tolist())
  overlap = overlap and name != 'rennala'  # It refuses overlap.
  _check_same(SORTED[name], num_workers, num_gradients, time, seed, overlap)


def test_ties_go_by_learner():
  time = simulation.with_speeds(simulation.constant(1.0), [1, 3, 2, 1, 6])
  for make in SORTED.values():
    _check_same(make, 5, 300, time, 0, overlap=False)


def _count_calls(monkeypatch, make, **arguments):
  """The calls of a simulation: 'sorted' or 'events'."""
  calls = []
  simulate_sorted = _sorted.simulate_sorted
  run = _server_loop.ServerLoop.run

  def sort(*arguments):
    calls.append('sorted')
    return simulate_sorted(*arguments)

  def drive(*arguments):
    calls.append('events')
    return run(*arguments)

  monkeypatch.setattr(_sorted, 'simulate_sorted', sort)
  monkeypatch.setattr(_server_loop.ServerLoop, 'run', drive)
  simulation.simulate(make(), num_workers=8, num_gradients=40, **arguments)
  return calls


@pytest.mark.parametrize('name', SORTED)
def test_protocols_without_waiting_are_sorted(name, monkeypatch):
  assert _count_calls(monkeypatch, SORTED[name]) == ['sorted']


@pytest.mark.parametrize(
  ('make', 'arguments'),
  [
    (protocols.hardsync, {}),
    (lambda: protocols.ssp(1), {}),
    (lambda: protocols.downpour(1, 2), {}),
    (lambda: protocols.ramp_up(protocols.asynchronous(), 5), {}),
    (protocols.asynchronous, {'failures': [(3.5, 1)]}),
    (protocols.asynchronous, {'network': simulation.Network(latency=0.1)}),
  ],
)
def test_other_runs_use_the_event_loop(make, arguments, monkeypatch):
  """Learners wait, fetch apart from pushes, die, or share a link."""
  assert _count_calls(monkeypatch, make, **arguments) == ['events']


def test_very_unequal_learners_are_not_sorted():
  """A table for the fastest learner would be 100 times the trace."""
  speeds = [1.0] * 99 + [1000.0]
  time = simulation.with_speeds(simulation.exponential(1.0), speeds)
  arguments = (protocols.asynchronous(), 100, 20_000, time, 0, False, 1)
  assert _sorted.simulate_sorted(*arguments) is None
  _check_same(protocols.asynchronous, 100, 20_000, time, 0, overlap=False)


def test_steps_are_added_one_by_one():
  """numpy's sum is pairwise from 8 on, where it can be."""
  for num_workers in (1, 2, 5):
    _check_same(
      lambda: protocols.downpour(9, 9),
      num_workers,
      200,
      cases.TIMES['lognormal'],
      seed=3,
      overlap=False,
    )
