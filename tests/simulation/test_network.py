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
