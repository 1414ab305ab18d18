"""Staleness: the closed forms of the papers."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import protocols
from jasgd import simulation
from jasgd.protocols import Fate
from tests.simulation import cases


def test_hardsync_is_never_stale():
  trace = simulation.simulate(
    protocols.hardsync(),
    num_workers=8,
    num_gradients=800,
    compute=cases.TIMES['exponential'],
  )
  assert not trace.staleness.any()
  assert trace.num_updates == 100


def test_equal_times_make_a_staleness_of_n_minus_one():
  trace = simulation.simulate(
    protocols.asynchronous(), num_workers=12, num_gradients=500
  )
  np.testing.assert_array_equal(trace.staleness[:12], range(12))
  np.testing.assert_array_equal(trace.staleness[12:], 11)


def test_constant_delay_gives_every_gradient_its_delay():
  trace = simulation.simulate(protocols.constant_delay(7), num_gradients=100)
  np.testing.assert_array_equal(trace.staleness[8:], 7)
  np.testing.assert_array_equal(trace.worker, np.arange(100) % 8)
  np.testing.assert_array_equal(trace.step, 1 + np.arange(100) // 8)


def test_normal_times_as_in_figure_1_of_jain():
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=16,
    num_gradients=10_000,
    compute=simulation.normal(1.0, 0.2),
  )
  settled = trace.staleness[500:]
  np.testing.assert_allclose(settled.mean(), 15, atol=0.05)
  assert 3.4 <= settled.std() <= 3.5


def test_exponential_times_make_a_geometric_staleness():
  num_workers = 8
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=num_workers,
    num_gradients=200_000,
    compute=simulation.exponential(1.0),
    seed=1,
  )
  # Neighbours overlap; every 50th gradient is as good as independent.
  sample = trace.staleness[1000::50]
  p = 1 / num_workers
  num_bins = 20
  counts = np.bincount(np.minimum(sample, num_bins - 1), minlength=num_bins)
  shares = p * (1 - p) ** np.arange(num_bins)
  shares[-1] = (1 - p) ** (num_bins - 1)
  expected = shares * len(sample)
  chi_square = np.sum((counts - expected) ** 2 / expected)
  assert chi_square < 36.2  # The 1% point at 19 degrees of freedom.
  np.testing.assert_allclose(trace.staleness.mean(), num_workers - 1, rtol=0.01)


@pytest.mark.parametrize('sigma', [0.05, 0.2])
@pytest.mark.parametrize('n', [1, 2, 5, 6, 10, 15, 30])
def test_softsync_as_in_figure_1_of_zhang(n, sigma):
  num_workers = 30
  per_update = num_workers // n
  for overlap, mean in ((False, 29 / per_update), (True, 30 / per_update)):
    trace = simulation.simulate(
      protocols.softsync(n),
      num_workers=num_workers,
      num_gradients=60_000,
      compute=simulation.normal(1.0, sigma),
      overlap=overlap,
    )
    np.testing.assert_allclose(trace.staleness.mean(), mean, atol=0.02)
    if not overlap:
      assert trace.staleness.max() <= 2 * n
    if n == 1 and sigma == 0.2:
      assert {0, 1, 2} <= set(np.unique(trace.staleness))


@hypothesis.given(
  num_workers=st.integers(1, 12),
  n=st.integers(1, 12),
  seed=st.integers(0, 1000),
  speeds=st.lists(st.floats(0.1, 10), min_size=12, max_size=12),
)
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
def test_staleness_is_conserved(num_workers, n, seed, speeds):
  """Exact, whatever the speeds: every update makes N - 1 gradients staler."""
  n = min(n, num_workers)
  trace = simulation.simulate(
    protocols.softsync(n),
    num_workers=num_workers,
    num_gradients=500,
    compute=simulation.with_speeds(
      simulation.exponential(1.0), speeds[:num_workers]
    ),
    seed=seed,
  )
  clock = 500 // max(1, num_workers // n)
  in_flight = np.sum(clock - trace.in_flight['read_version'])
  total = trace.staleness.sum() + in_flight
  # An update does not add to the staleness of its learner's next gradient.
  assert total == (num_workers - 1) * clock


@pytest.mark.parametrize('s', [0, 1, 3])
def test_ssp_bounds_lead_and_staleness(s):
  num_workers = 6
  trace = simulation.simulate(
    protocols.ssp(s),
    num_workers=num_workers,
    num_gradients=3000,
    compute=cases.TIMES['slow minority'],
  )
  completed = np.zeros(num_workers, int)
  for worker in trace.worker:
    completed[worker] += 1
    assert completed.max() - completed.min() <= s + 1
  assert trace.staleness.max() <= (num_workers - 1) * (2 * s + 1)


def test_backup_drops_exactly_the_late_ones():
  trace = simulation.simulate(
    protocols.backup(2),
    num_workers=8,
    num_gradients=2000,
    compute=cases.TIMES['exponential'],
  )
  is_late = trace.read_version < trace.clock
  np.testing.assert_array_equal(trace.fate == Fate.DROPPED_LATE, is_late)
  assert is_late.any()
  sizes = np.bincount(trace.clock[trace.fate == Fate.APPLIED])
  assert set(sizes) == {6}


def test_rennala_applies_fresh_gradients_only():
  trace = simulation.simulate(
    protocols.rennala(4),
    num_workers=8,
    num_gradients=2000,
    compute=cases.TIMES['exponential'],
  )
  is_applied = trace.fate == Fate.APPLIED
  assert not trace.staleness[is_applied].any()
  assert np.all(trace.staleness[trace.fate == Fate.DROPPED_STALE] > 0)
