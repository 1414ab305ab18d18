"""The simulator against closed forms, and against itself."""

import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import protocols
from jasgd import simulation
from jasgd.protocols import Fate
from jasgd.simulation import _events
from jasgd.simulation import _simulate

TIMES = {
  'constant': simulation.constant(1.0),
  'normal': simulation.normal(1.0, 0.2),
  'lognormal': simulation.lognormal(1.0, 0.8),
  'exponential': simulation.exponential(1.0),
  'gamma': simulation.gamma(1.0, 10.0),
  'pareto': simulation.pareto(1.0, 2.5),
  'recorded': simulation.recorded([1.0, 2.0, 0.5]),
  'slow minority': simulation.with_slow_minority(
    simulation.normal(1.0, 0.2), 0.25, 5.0
  ),
  'slow spells': simulation.with_slow_spells(
    simulation.constant(1.0), 20, 4, 3.0
  ),
}
every_time = pytest.mark.parametrize('name', TIMES)


def _simulate_by_events(
  protocol, num_learners, num_gradients, compute, **kwargs
):
  """The same, always by the event loop."""
  loop = _events.EventLoop(
    protocol,
    num_learners,
    compute,
    simulation.Network(),
    (),
    kwargs.get('seed', 0),
    kwargs.get('overlap', False),
  )
  records, in_flight = loop.run(num_gradients)
  _simulate._settle(records, protocol.clock, 1)
  return records, in_flight


def test_hardsync_is_never_stale():
  trace = simulation.simulate(
    protocols.hardsync(),
    num_learners=8,
    num_gradients=800,
    compute=TIMES['exponential'],
  )
  assert not trace.staleness.any()
  assert trace.num_updates == 100


def test_equal_times_make_a_staleness_of_n_minus_one():
  trace = simulation.simulate(
    protocols.asynchronous(), num_learners=12, num_gradients=500
  )
  np.testing.assert_array_equal(trace.staleness[:12], range(12))
  np.testing.assert_array_equal(trace.staleness[12:], 11)


def test_constant_delay_is_that():
  trace = simulation.simulate(protocols.constant_delay(7), num_gradients=100)
  np.testing.assert_array_equal(trace.staleness[8:], 7)
  np.testing.assert_array_equal(trace.learner, np.arange(100) % 8)
  np.testing.assert_array_equal(trace.step, np.arange(100) // 8)


def test_normal_times_as_in_figure_1_of_jain():
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=16,
    num_gradients=10_000,
    compute=simulation.normal(1.0, 0.2),
  )
  settled = trace.staleness[500:]
  np.testing.assert_allclose(settled.mean(), 15, atol=0.05)
  assert 3.4 <= settled.std() <= 3.5


def test_exponential_times_make_a_geometric_staleness():
  num_learners = 8
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=num_learners,
    num_gradients=200_000,
    compute=simulation.exponential(1.0),
    seed=1,
  )
  # Neighbours overlap; every 50th gradient is as good as independent.
  sample = trace.staleness[1000::50]
  p = 1 / num_learners
  num_bins = 20
  counts = np.bincount(np.minimum(sample, num_bins - 1), minlength=num_bins)
  shares = p * (1 - p) ** np.arange(num_bins)
  shares[-1] = (1 - p) ** (num_bins - 1)
  expected = shares * len(sample)
  chi_square = np.sum((counts - expected) ** 2 / expected)
  assert chi_square < 36.2  # The 1% point at 19 degrees of freedom.
  np.testing.assert_allclose(
    trace.staleness.mean(), num_learners - 1, rtol=0.01
  )


@pytest.mark.parametrize('sigma', [0.05, 0.2])
@pytest.mark.parametrize('n', [1, 2, 5, 6, 10, 15, 30])
def test_softsync_as_in_figure_1_of_zhang(n, sigma):
  num_learners = 30
  per_update = num_learners // n
  for overlap, mean in ((False, 29 / per_update), (True, 30 / per_update)):
    trace = simulation.simulate(
      protocols.softsync(n),
      num_learners=num_learners,
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
  num_learners=st.integers(1, 12),
  n=st.integers(1, 12),
  seed=st.integers(0, 1000),
  speeds=st.lists(st.floats(0.1, 10), min_size=12, max_size=12),
)
@hypothesis.settings(max_examples=20, deadline=None)
def test_staleness_is_conserved(num_learners, n, seed, speeds):
  """Exact in integers, whatever the speeds: every update ages N - 1 others."""
  n = min(n, num_learners)
  trace = simulation.simulate(
    protocols.softsync(n),
    num_learners=num_learners,
    num_gradients=500,
    compute=simulation.with_speeds(
      simulation.exponential(1.0), speeds[:num_learners]
    ),
    seed=seed,
  )
  clock = 500 // max(1, num_learners // n)
  in_flight = np.sum(clock - trace.in_flight['read_clock'])
  total = trace.staleness.sum() + in_flight
  # A gradient in flight after the own push that updated is not aged by it.
  assert total == (num_learners - 1) * clock


@every_time
@pytest.mark.parametrize('overlap', [False, True])
@pytest.mark.parametrize('n', [None, 1, 3, 7])
def test_sorting_gives_the_trace_of_the_event_loop(name, n, overlap):
  protocol = protocols.asynchronous() if n is None else protocols.softsync(n)
  arguments = {'seed': 5, 'overlap': overlap}
  trace = simulation.simulate(
    protocol,
    num_learners=7,
    num_gradients=700,
    compute=TIMES[name],
    **arguments,
  )
  records, in_flight = _simulate_by_events(
    protocol, 7, 700, TIMES[name], **arguments
  )
  for column in records.dtype.names:
    np.testing.assert_array_equal(
      trace.records[column], records[column], err_msg=column
    )
  assert trace.header['in_flight'] == in_flight


@every_time
def test_durations_depend_on_step_and_learner_alone(name):
  time = TIMES[name]
  whole = time.table(3, 0, 4000, 7)
  assert whole.shape == (4000, 7)
  assert np.all(whole > 0)
  np.testing.assert_array_equal(time.table(3, 1000, 50, 7), whole[1000:1050])
  if name not in ('constant', 'recorded', 'slow spells'):
    assert np.any(time.table(4, 0, 10, 7) != whole[:10])


@pytest.mark.parametrize(
  ('time', 'mean'),
  [
    (simulation.normal(2.0, 0.4), 2.0),
    (simulation.lognormal(2.0, 0.5), 2.0),
    (simulation.exponential(2.0), 2.0),
    (simulation.gamma(2.0, 10.0), 2.0),
    (simulation.pareto(1.0, 3.0), 1.5),
    (simulation.with_slow_minority(simulation.constant(1.0), 0.5, 3.0), 2.0),
    (simulation.with_slow_spells(simulation.constant(1.0), 10, 5, 3.0), 2.0),
  ],
)
def test_mean_times(time, mean):
  np.testing.assert_allclose(time.table(0, 0, 5000, 20).mean(), mean, rtol=0.02)


@pytest.mark.parametrize('s', [0, 1, 3])
def test_ssp_bounds_lead_and_staleness(s):
  num_learners = 6
  trace = simulation.simulate(
    protocols.ssp(s),
    num_learners=num_learners,
    num_gradients=3000,
    compute=TIMES['slow minority'],
  )
  completed = np.zeros(num_learners, int)
  for learner in trace.learner:
    completed[learner] += 1
    assert completed.max() - completed.min() <= s + 1
  assert trace.staleness.max() <= (num_learners - 1) * (2 * s + 1)


def test_backup_drops_exactly_the_late_ones():
  trace = simulation.simulate(
    protocols.backup(2),
    num_learners=8,
    num_gradients=2000,
    compute=TIMES['exponential'],
  )
  is_late = trace.read_clock < trace.arrive_clock
  np.testing.assert_array_equal(trace.fate == Fate.DROPPED_LATE, is_late)
  assert is_late.any()
  sizes = np.bincount(trace.apply_clock[trace.fate == Fate.APPLIED])
  assert set(sizes) == {6}


def test_rennala_applies_fresh_gradients_only():
  trace = simulation.simulate(
    protocols.rennala(4),
    num_learners=8,
    num_gradients=2000,
    compute=TIMES['exponential'],
  )
  is_applied = trace.fate == Fate.APPLIED
  assert not trace.staleness[is_applied].any()
  assert np.all(trace.staleness[trace.fate == Fate.DROPPED_STALE] > 0)


def test_downpour_fetches_every_so_often():
  trace = simulation.simulate(
    protocols.downpour(2, 6), num_learners=3, num_gradients=90
  )
  own = trace.read_clock[trace.learner == 0]
  # Three pushes on each fetch.
  assert all(len(set(own[i : i + 3])) == 1 for i in range(0, 30, 3))
  np.testing.assert_allclose(trace.compute_time, 2.0)


def test_between_fetches_nothing_is_communicated():
  """On a free network a downpour learner computes all the time."""
  trace = simulation.simulate(
    protocols.downpour(1, 3), num_learners=2, num_gradients=12, overlap=True
  )
  np.testing.assert_array_equal(
    trace.arrive_time - trace.start_time, trace.compute_time
  )
  # With overlap too, the read clock moves with fetches alone.
  own = trace.read_clock[trace.learner == 0]
  assert len(set(own[:3])) == len(set(own[3:6])) == 1


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


@pytest.mark.parametrize('num_learners', [1, 3, 10, 40])
def test_throughput_with_constant_times(num_learners):
  """min(1 / s, N / (z + s + r)): the server, or the learners, are the limit."""
  z, s, r = 1.0, 0.1, 0.5
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=num_learners,
    num_gradients=5000,
    compute=simulation.constant(z),
    network=simulation.Network(latency=r / 2, server_time=s),
  )
  # From one release to the last: whole cycles in between.
  first, last = 1000, 5000 - 1000 % num_learners - 1
  last -= (last - first) % num_learners
  rate = (last - first) / (trace.release_time[last] - trace.release_time[first])
  expected = min(1 / s, num_learners / (z + s + r))
  np.testing.assert_allclose(rate, expected, rtol=1e-9)


def test_throughput_with_exponential_times_is_the_machine_repairman():
  """N machines that run for exp(z), one repairman who takes exp(s) each.

  With k machines broken, the stationary probability is proportional to
  N! / (N - k)! (s / z)^k, and the repairman works unless k = 0.
  """
  num_learners, z, s = 6, 1.0, 0.3
  weights = [
    math.perm(num_learners, k) * (s / z) ** k for k in range(num_learners + 1)
  ]
  expected = (1 - 1 / sum(weights)) / s
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=num_learners,
    num_gradients=200_000,
    compute=simulation.exponential(z),
    network=simulation.Network(server_time=simulation.exponential(s)),
  )
  rate = trace.num_gradients / trace.release_time[-1]
  np.testing.assert_allclose(rate, expected, rtol=0.01)


@pytest.mark.parametrize(
  'make',
  [
    protocols.hardsync,
    lambda: protocols.backup(1),
    lambda: protocols.softsync(2),
    protocols.asynchronous,
    lambda: protocols.ssp(2),
    lambda: protocols.rennala(3),
    lambda: protocols.ringmaster(3),
    lambda: protocols.ramp_up(protocols.hardsync(), 20),
  ],
)
def test_failures_do_not_stop_the_others(make):
  failures = simulation.draw_failures(6, 400.0, 60.0, 10.0, seed=2)
  assert len(failures) > 10
  trace = simulation.simulate(
    make(),
    num_learners=6,
    num_gradients=1500,
    compute=TIMES['normal'],
    network=simulation.Network(latency=0.05, server_time=0.01),
    failures=failures,
  )
  assert len(trace.learner) == 1500
  assert np.all(np.diff(trace.records['arrive_time']) >= 0)
  steps = {}
  for learner, step in zip(trace.learner, trace.step, strict=True):
    assert step == steps.get(learner, -1) + 1
    steps[learner] = step


def test_everybody_dead_ends_the_trace():
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=2,
    num_gradients=1000,
    failures=[simulation.Failure(5.5, 0), simulation.Failure(7.5, 1)],
  )
  assert len(trace.learner) == 5 + 7


def test_a_shared_link_is_the_bottleneck():
  """Ten learners, 1 s of link time per push: one gradient per second."""
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=10,
    num_gradients=400,
    compute=simulation.constant(1.0),
    network=simulation.Network(
      server_bandwidth=100.0, bytes_per_push=100.0, bytes_per_pull=10.0
    ),
  )
  np.testing.assert_allclose(np.diff(trace.arrive_time[100:]), 1.0)
  halved = simulation.simulate(
    protocols.asynchronous(),
    num_learners=10,
    num_gradients=400,
    network=simulation.Network(
      server_bandwidth=100.0, bytes_per_push=100.0, num_shards=2
    ),
  )
  np.testing.assert_allclose(np.diff(halved.arrive_time[100:]), 0.5)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'num_learners': 0}, 'num_learners must be .* at least 1, got 0'),
    ({'num_learners': 2.5}, 'num_learners must be a whole number.* got 2.5'),
    ({'num_learners': None}, 'num_learners must be given'),
    ({'num_gradients': 0}, 'num_gradients must be .* at least 1, got 0'),
    ({'batch': 0}, 'batch must be .* at least 1, got 0'),
    ({'seed': -1}, 'seed must be .* at least 0, got -1'),
    ({'compute': 1.0}, 'compute must be a ComputeTime, got 1.0'),
    ({'protocol': protocols.asynchronous}, 'protocol must be a Protocol'),
    (
      {'protocol': protocols.hardsync(), 'overlap': True},
      'With overlap a learner pulls before',
    ),
    (
      {'network': simulation.Network(latency=-1.0)},
      'latency must be finite and at least 0, got -1.0',
    ),
    ({'protocol': protocols.softsync(9)}, 'n must be at most num_learners=4'),
    (
      {'failures': [simulation.Failure(1.0, 7)]},
      'names learner 7, but there are 4',
    ),
    (
      {'failures': [simulation.Failure(2.0, 1, 1.0)]},
      'Learner 1 cannot fail from 2.0 to 1.0',
    ),
    (
      {'protocol': protocols.constant_delay(3), 'compute': TIMES['normal']},
      'A constant delay comes from equal, constant times',
    ),
  ],
)
def test_bad_arguments(arguments, message):
  good = {
    'protocol': protocols.asynchronous(),
    'num_learners': 4,
    'num_gradients': 10,
  }
  with pytest.raises(ValueError, match=message):
    simulation.simulate(**{**good, **arguments})


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: simulation.constant(0), 'mean must be finite and above 0, got 0'),
    (lambda: simulation.normal(1, -1), 'std must be .* got -1'),
    (lambda: simulation.pareto(1, 0), 'exponent must be .* got 0'),
    (lambda: simulation.recorded([]), r'shape \(0,\)'),
    (lambda: simulation.recorded([1, -1]), 'finite and above 0'),
    (
      lambda: simulation.with_speeds(simulation.constant(), [1, 0]),
      'speeds must be',
    ),
    (
      lambda: simulation.with_slow_minority(simulation.constant(), 2, 3),
      r'fraction must be in \[0, 1\], got 2',
    ),
    (
      lambda: simulation.with_slow_spells(simulation.constant(), 5, 6, 2),
      'length must be from 0 to period=5, got 6',
    ),
    (lambda: simulation.make_network(0), 'num_parameters must be at least 1'),
  ],
)
def test_bad_times(build, message):
  with pytest.raises(ValueError, match=message):
    build()
