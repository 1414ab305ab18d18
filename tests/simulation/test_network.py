"""Queues on the way: throughput in closed form."""

import math

import numpy as np
import pytest

from jasgd import protocols
from jasgd import simulation


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


@pytest.mark.parametrize('num_shards', [1, 4])
def test_pulls_share_the_other_direction(num_shards):
  """Ten learners; 2 s of link time per pull, divided among the shards."""
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=10,
    num_gradients=400,
    compute=simulation.constant(0.5),
    network=simulation.Network(
      server_bandwidth=50.0,
      bytes_per_push=10.0,
      bytes_per_pull=100.0,
      num_shards=num_shards,
    ),
  )
  np.testing.assert_allclose(np.diff(trace.arrive_time[100:]), 2 / num_shards)
  # Pushes go the other way, and are not in the way.
  assert trace.header['bytes_per_pull'] == 100.0


def test_a_learners_own_link_is_not_shared():
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=10,
    num_gradients=100,
    network=simulation.make_network(25, bandwidth=100.0, latency=0.5),
  )
  # Half a second and one for the pull, one to compute, the same for the push.
  np.testing.assert_allclose(trace.arrive_time[:10], 4.0)
  np.testing.assert_allclose(trace.arrive_time - trace.start_time, 4.0)


def test_shards_divide_the_time_of_an_update():
  for num_shards in (1, 5):
    trace = simulation.simulate(
      protocols.asynchronous(),
      num_learners=20,
      num_gradients=400,
      network=simulation.Network(server_time=0.5, num_shards=num_shards),
    )
    rate = 100 / (trace.release_time[399] - trace.release_time[299])
    np.testing.assert_allclose(rate, 2 * num_shards)


def test_bytes_are_those_of_the_wires_dtype():
  """1,000 parameters in bfloat16 at 1 kB/s: two seconds on the wire."""
  network = simulation.make_network(
    1000, bytes_per_parameter=2, bandwidth=1000.0
  )
  assert network.bytes_per_push == network.bytes_per_pull == 2000.0
  trace = simulation.simulate(
    protocols.asynchronous(), num_learners=1, num_gradients=2, network=network
  )
  assert trace.arrive_time.tolist() == [5.0, 10.0]


def test_equal_times_on_a_shared_link_go_by_learner():
  """All are done at once, each time; the link takes one after the other."""
  trace = simulation.simulate(
    protocols.hardsync(),
    num_learners=4,
    num_gradients=12,
    network=simulation.Network(server_bandwidth=10.0, bytes_per_push=10.0),
  )
  assert trace.learner.tolist() == [0, 1, 2, 3] * 3
  np.testing.assert_allclose(trace.arrive_time[:4], [2, 3, 4, 5])


def test_in_flight_are_those_too_who_wait_for_the_link():
  """Computed at 1; one is received by 2, one is on the link, and two wait."""
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_learners=4,
    num_gradients=1,
    network=simulation.Network(server_bandwidth=10.0, bytes_per_push=10.0),
  )
  assert trace.learner.tolist() == [0]
  assert trace.in_flight.tolist() == [
    (0, 1, 1, 2.0),
    (1, 0, 0, 0.0),
    (2, 0, 0, 0.0),
    (3, 0, 0, 0.0),
  ]


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'num_shards': 1.5}, 'num_shards must be a whole number.* got 1.5'),
    ({'num_shards': 0}, 'num_shards must be .* at least 1, got 0'),
    ({'latency': 'fast'}, "latency must be a number, got 'fast'"),
    ({'bandwidth': None}, 'bandwidth must be a number, got None'),
    ({'bandwidth': 0.0}, 'bandwidth must be above 0, got 0.0'),
    ({'server_time': '1'}, "server_time must be a number, got '1'"),
    (
      {'bytes_per_push': 1e300, 'bandwidth': 1e-10},
      r'bytes_per_push=1e\+300 take no finite time with bandwidth=1e-10',
    ),
    (
      {'bytes_per_pull': 1e300, 'server_bandwidth': 1e-10},
      r'bytes_per_pull=1e\+300 take no finite time',
    ),
    (
      {
        'server_time': simulation.with_speeds(
          simulation.constant(1.0), [1.0, 2.0]
        )
      },
      'server_time must be a time model for one.*There are 2 speeds',
    ),
  ],
)
def test_networks_that_cannot_be(changes, message):
  with pytest.raises(ValueError, match=message):
    simulation.simulate(
      protocols.asynchronous(),
      num_learners=2,
      num_gradients=5,
      network=simulation.Network(**changes),
    )


@pytest.mark.parametrize('bytes_per_parameter', [0, 0.5])
def test_a_parameter_has_a_byte(bytes_per_parameter):
  message = 'bytes_per_parameter must be a whole number of at least 1, got 0'
  with pytest.raises(ValueError, match=message):
    simulation.make_network(9, bytes_per_parameter=bytes_per_parameter)
