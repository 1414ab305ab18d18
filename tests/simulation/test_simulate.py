"""What `simulate` refuses, and what it costs."""

import json
import tracemalloc

import numpy as np
import pytest

from jasgd import protocols
from jasgd import simulation
from tests.simulation import cases


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'num_learners': 0}, 'num_learners must be .* at least 1, got 0'),
    ({'num_learners': 2.5}, 'num_learners must be a whole number.* got 2.5'),
    ({'num_learners': None}, 'num_learners must be given'),
    ({'num_gradients': 0}, 'num_gradients must be .* at least 1, got 0'),
    ({'batch': 0}, 'batch must be .* at least 1, got 0'),
    ({'seed': -1}, 'seed must be .* at least 0, got -1'),
    ({'seed': 2**64}, r'seed must be below 2\*\*64, got 18446744073709551616'),
    ({'overlap': 1}, 'overlap must be True or False, got 1'),
    ({'overlap': 'no'}, "overlap must be True or False, got 'no'"),
    (
      {'failures': [simulation.Failure(1.0, 1.5)]},
      'learner of a failure must be a whole number.* got 1.5',
    ),
    (
      {'failures': [(1.0,)]},
      r'given as \(time, learner, until\), got \(1.0,\)',
    ),
    ({'failures': [(1.0, 1, 2.0, 3)]}, 'given as .* got .*2.0, 3'),
    ({'failures': [7]}, 'given as .* got 7'),
    ({'failures': [('x', 1)]}, "time of a failure must be a number, got 'x'"),
    (
      {
        'protocol': protocols.ramp_up(protocols.rennala(2), 10),
        'overlap': True,
      },
      'With overlap a learner pulls before',
    ),
    (
      {
        'protocol': protocols.ramp_up(protocols.backup(1), 10),
        'overlap': True,
      },
      'With overlap a learner pulls before',
    ),
    (
      {
        'protocol': protocols.ramp_up(protocols.constant_delay(3), 10),
        'compute': cases.TIMES['normal'],
      },
      'A constant delay comes from equal, constant times',
    ),
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
      {
        'protocol': protocols.constant_delay(3),
        'compute': cases.TIMES['normal'],
      },
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
  ('make', 'num_learners', 'fastest'),
  [
    (protocols.asynchronous, 100, 1.0),
    (protocols.asynchronous, 100, 1000.0),
    (protocols.asynchronous, 20_000, 1.0),
    (protocols.hardsync, 100, 1.0),
    (lambda: protocols.rennala(5), 100, 1.0),
  ],
)
def test_memory_is_about_that_of_the_trace(make, num_learners, fastest):
  speeds = [1.0] * (num_learners - 1) + [fastest]
  compute = simulation.with_speeds(simulation.normal(1.0, 0.2), speeds)
  tracemalloc.start()
  try:
    trace = simulation.simulate(
      make(), num_learners=num_learners, num_gradients=100_000, compute=compute
    )
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  # Blocks of durations that are kept, and a learner's own books.
  fixed = (1 << 26) + 1000 * num_learners
  assert peak < 3.5 * trace.records.nbytes + fixed


def test_the_same_seed_gives_the_same_trace():
  first, second, other = (
    simulation.simulate(
      protocols.ssp(2),
      num_learners=5,
      num_gradients=200,
      compute=cases.TIMES['lognormal'],
      network=cases.NETWORKS['shared'],
      seed=seed,
    )
    for seed in (3, 3, 4)
  )
  assert first == second
  assert not np.array_equal(first.learner, other.learner)


def test_same_on_every_machine():
  """Whoever changes these numbers changes all runs."""
  network = simulation.make_network(
    100,
    latency=0.05,
    bandwidth=1e4,
    server_bandwidth=5e3,
    server_time=simulation.gamma(0.02, 2.0),
  )
  trace = simulation.simulate(
    protocols.ssp(1),
    num_learners=3,
    num_gradients=8,
    compute=simulation.exponential(1.0),
    network=network,
    failures=simulation.draw_failures(3, 5.0, 3.0, 1.0, seed=2024),
    seed=2024,
  )
  assert trace.events[['kind', 'learner']].tolist() == [
    *((2, 2), (1, 2), (2, 2), (1, 2)),
    *((2, 1), (1, 1), (2, 1), (1, 1), (2, 1)),
  ]
  assert trace.learner.tolist() == [1, 1, 2, 0, 0, 1, 0, 2]
  assert trace.read_clock.tolist() == [0, 1, 1, 0, 4, 4, 5, 3]
  assert trace.apply_clock.tolist() == list(range(8))
  nan = float('nan')
  times = [
    (0.9399326850936777, 0.9604366205913585),
    (1.7657238507472102, nan),
    (1.8797437304166091, 1.8933750609263609),
    (2.4432584135486493, 2.4600479050145165),
    (3.756396245375796, 3.7669576782021976),
    (4.0804805864638425, 4.110384049864603),
    (5.042896150903527, 5.864794886335011),
    (5.842329047491107, 5.864794886335011),
  ]
  np.testing.assert_allclose(
    np.stack([trace.arrive_time, trace.release_time], axis=-1),
    times,
    rtol=1e-12,
  )


def test_the_header_says_how_it_was_made():
  network = cases.NETWORKS['slow']._replace(
    server_time=simulation.exponential(0.01)
  )
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=3,
    num_gradients=5,
    network=network,
    failures=[(9.0, 1)],
    overlap=True,
    seed=2**64 - 1,
  )
  header = json.loads(json.dumps(trace.header))
  expected = {**network._asdict(), 'server_time': 'exponential(0.01)'}
  expected |= {'bandwidth': 'inf', 'server_bandwidth': 'inf'}
  assert header['network'] == expected
  assert header['numpy'] == np.__version__
  assert header['num_failures'] == 1
  assert header['num_missing'] == 0
  assert header['overlap'] is True
  assert header['seed'] == 2**64 - 1


def test_overlap_changes_what_is_read_not_when():
  first, second = (
    simulation.simulate(
      protocols.softsync(2),
      num_learners=6,
      num_gradients=100,
      compute=cases.TIMES['normal'],
      network=cases.NETWORKS['shared'],
      overlap=overlap,
    )
    for overlap in (False, True)
  )
  np.testing.assert_array_equal(first.arrive_time, second.arrive_time)
  np.testing.assert_array_equal(first.learner, second.learner)
  assert np.any(first.read_clock != second.read_clock)


@pytest.mark.parametrize(
  ('make', 'per_gradient'),
  [
    (protocols.asynchronous, 7),
    (lambda: protocols.rennala(3), 7),
    (lambda: protocols.downpour(2, 4), 14),
  ],
)
def test_samples_are_counted_in_batches(make, per_gradient):
  trace = simulation.simulate(
    make(),
    num_learners=5,
    num_gradients=100,
    compute=cases.TIMES['exponential'],
    batch=7,
  )
  is_applied = trace.fate == protocols.Fate.APPLIED
  np.testing.assert_array_equal(
    trace.samples, per_gradient * np.cumsum(is_applied)
  )


def test_a_ramp_up_knows_the_learners_of_a_constant_delay():
  trace = simulation.simulate(
    protocols.ramp_up(protocols.constant_delay(3), 10), num_gradients=100
  )
  assert trace.header['num_learners'] == 4
  np.testing.assert_array_equal(trace.staleness[30:], 3)
