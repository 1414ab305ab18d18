"""How long messages and updates take: queues and throughput in closed form."""

import math

import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from tests.simulation import cases


@pytest.mark.parametrize('num_workers', [1, 3, 10, 40])
def test_throughput_with_constant_times(num_workers):
  """min(1 / s, N / (z + s + r)): the server, or the learners, are the limit."""
  z, s, r = 1.0, 0.1, 0.5
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=num_workers,
    num_gradients=5000,
    compute=simulation.constant(z),
    network=simulation.Network(latency=r / 2, server_time=s),
  )
  # Between the first and the last release there are whole cycles.
  first, last = 1000, 5000 - 1000 % num_workers - 1
  last -= (last - first) % num_workers
  rate = (last - first) / (trace.release_time[last] - trace.release_time[first])
  expected = min(1 / s, num_workers / (z + s + r))
  np.testing.assert_allclose(rate, expected, rtol=1e-9)


def test_throughput_with_exponential_times_is_the_machine_repairman():
  """N machines that run for exp(z), one repairman who takes exp(s) each.

  With k machines broken, the stationary probability is proportional to
  N! / (N - k)! (s / z)^k, and the repairman works unless k = 0.
  """
  num_workers, z, s = 6, 1.0, 0.3
  weights = [
    math.perm(num_workers, k) * (s / z) ** k for k in range(num_workers + 1)
  ]
  expected = (1 - 1 / sum(weights)) / s
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=num_workers,
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
    num_workers=10,
    num_gradients=400,
    compute=simulation.constant(1.0),
    network=simulation.Network(
      server_bandwidth=100.0, bytes_per_push=100.0, bytes_per_pull=10.0
    ),
  )
  np.testing.assert_allclose(np.diff(trace.end_time[100:]), 1.0)
  halved = simulation.simulate(
    protocols.asynchronous(),
    num_workers=10,
    num_gradients=400,
    network=simulation.Network(
      server_bandwidth=100.0, bytes_per_push=100.0, num_shards=2
    ),
  )
  np.testing.assert_allclose(np.diff(halved.end_time[100:]), 0.5)


@pytest.mark.parametrize('num_shards', [1, 4])
def test_pulls_share_the_other_direction(num_shards):
  """Ten learners; 2 s of link time per pull, divided among the shards."""
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=10,
    num_gradients=400,
    compute=simulation.constant(0.5),
    network=simulation.Network(
      server_bandwidth=50.0,
      bytes_per_push=10.0,
      bytes_per_pull=100.0,
      num_shards=num_shards,
    ),
  )
  np.testing.assert_allclose(np.diff(trace.end_time[100:]), 2 / num_shards)
  # Pushes use the other direction, and do not delay pulls.
  assert trace.header['bytes_per_pull'] == 100.0


def test_a_learners_own_link_is_not_shared():
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=10,
    num_gradients=100,
    network=simulation.make_network(25, bandwidth=100.0, latency=0.5),
  )
  # Half a second and one for the pull, one to compute, the same for the push.
  np.testing.assert_allclose(trace.end_time[:10], 4.0)
  np.testing.assert_allclose(trace.end_time - trace.start_time, 4.0)


def test_shards_divide_the_time_of_an_update():
  for num_shards in (1, 5):
    trace = simulation.simulate(
      protocols.asynchronous(),
      num_workers=20,
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
    protocols.asynchronous(), num_workers=1, num_gradients=2, network=network
  )
  assert trace.end_time.tolist() == [5.0, 10.0]


def test_equal_times_on_a_shared_link_go_by_learner():
  """All learners end at once, each time; the link sends one after the other."""
  trace = simulation.simulate(
    protocols.hardsync(),
    num_workers=4,
    num_gradients=12,
    network=simulation.Network(server_bandwidth=10.0, bytes_per_push=10.0),
  )
  assert trace.worker.tolist() == [0, 1, 2, 3] * 3
  np.testing.assert_allclose(trace.end_time[:4], [2, 3, 4, 5])


def test_gradients_that_wait_for_the_link_are_in_flight():
  """All compute until 1; at 2 one push has arrived, one is sent, two wait."""
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=4,
    num_gradients=1,
    network=simulation.Network(server_bandwidth=10.0, bytes_per_push=10.0),
  )
  assert trace.worker.tolist() == [0]
  assert trace.in_flight.tolist() == [
    (0, 2, 1, 2.0),
    (1, 1, 0, 0.0),
    (2, 1, 0, 0.0),
    (3, 1, 0, 0.0),
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
def test_refused_networks(changes, message):
  with pytest.raises(ValueError, match=message):
    simulation.simulate(
      protocols.asynchronous(),
      num_workers=2,
      num_gradients=5,
      network=simulation.Network(**changes),
    )


@pytest.mark.parametrize('bytes_per_parameter', [0, 0.5])
def test_a_parameter_has_a_byte(bytes_per_parameter):
  message = 'bytes_per_parameter must be a whole number of at least 1, got 0'
  with pytest.raises(ValueError, match=message):
    simulation.make_network(9, bytes_per_parameter=bytes_per_parameter)


# --- Nodes.


def test_allreduce_takes_the_ring_formula():
  network = simulation.Network(latency=0.1, bandwidth=8.0, bytes_per_push=16.0)
  trace = cases.simulate_peers(
    gossip.AllReduce(period=2), num_workers=4, num_steps=6, network=network
  )
  # 2 (n - 1) messages of a quarter of 16 bytes at 8 bytes per second.
  mix_time = 2 * 3 * (0.1 + 4.0 / 8.0)
  np.testing.assert_allclose(trace.duration, 6 + 3 * mix_time)


@pytest.mark.parametrize(
  ('strategy', 'num_transfers'),
  [
    (gossip.Pull(peers='matching'), 1),
    (gossip.Pairs(peers='matching'), 1),
    (gossip.Pull(peers=gossip.topologies.complete(4)), 3),
    (gossip.Push(), 0),
    (gossip.PushSum(peers=gossip.topologies.ring(4)), 0),
  ],
)
def test_waiting_time_of_a_node(strategy, num_transfers):
  """A node waits for a question and its answers, which share its link."""
  network = simulation.Network(latency=0.1, bandwidth=8.0, bytes_per_push=2.0)
  trace = cases.simulate_peers(
    strategy, num_workers=4, num_steps=5, network=network
  )
  wait = 2 * 0.1 + num_transfers * 0.25 if num_transfers else 0.0
  ends = trace.steps['end_time'][trace.steps['replica'] == 0]
  np.testing.assert_allclose(ends, 1 + np.arange(5) * (1 + wait))


@pytest.mark.parametrize('strategy', [gossip.Pull(), gossip.AllReduce()])
def test_peers_do_not_use_the_link_of_a_server(strategy):
  first, second = (
    cases.simulate_peers(
      strategy,
      num_workers=5,
      num_steps=5,
      network=simulation.Network(
        bandwidth=8.0, bytes_per_push=2.0, server_bandwidth=bandwidth
      ),
    )
    for bandwidth in (np.inf, 0.1)
  )
  np.testing.assert_array_equal(first.records, second.records)


def test_pushes_queue_on_the_link_of_their_sender():
  network = simulation.Network(latency=0.5, bandwidth=1.0, bytes_per_push=3.0)
  trace = cases.simulate_peers(
    gossip.Push(peers=gossip.topologies.ring(2)),
    num_workers=2,
    num_steps=3,
    network=network,
  )
  # Sent at 1, 2 and 3, three seconds each.
  for node in range(2):
    mixes = trace.mixes[trace.mixes['replica'] == node]
    np.testing.assert_allclose(mixes['end_time'], [4.5, 7.5, 10.5])


def test_one_exchange_with_the_centre():
  """A question, and weights over the slower link; the force on its own."""
  network = simulation.Network(
    latency=0.1,
    bandwidth=4.0,
    server_bandwidth=1.0,
    num_shards=2,
    bytes_per_push=8.0,
    server_time=0.6,
  )
  trace = cases.simulate_peers(
    gossip.Elastic(), num_workers=1, num_steps=3, network=network
  )
  message = 0.1 + 8.0 / min(4.0, 2 * 1.0)
  mixes = trace.mixes[trace.mixes['replica'] == 0]
  ends = (1 + 0.1 + message) * np.arange(1, 4)
  np.testing.assert_allclose(mixes['end_time'], ends)
  moves = trace.of_replica(traces.SERVER)
  np.testing.assert_allclose(moves['start_time'], ends + message)
  np.testing.assert_allclose(moves['end_time'], ends + message + 0.6 / 2)


@pytest.mark.parametrize(
  ('network', 'rate'),
  [
    # The link: bytes per second / bytes, in each direction.
    ({'server_bandwidth': 100.0}, 10.0),
    ({'server_bandwidth': 100.0, 'num_shards': 4}, 40.0),
    ({'server_bandwidth': 100.0, 'latency': 0.2}, 10.0),
    ({'server_bandwidth': 100.0, 'bandwidth': 50.0}, 10.0),
    # The centre's time.
    ({'server_time': 0.25}, 4.0),
    ({'server_time': 0.25, 'num_shards': 2}, 8.0),
    ({'server_time': simulation.constant(0.25)}, 4.0),
    # The slower of the two.
    ({'server_time': 0.25, 'server_bandwidth': 100.0}, 4.0),
    ({'server_time': 0.05, 'server_bandwidth': 100.0}, 10.0),
  ],
)
def test_a_saturated_centre(network, rate):
  """Many fast nodes: the centre moves as often as its slowest part allows."""
  trace = cases.simulate_peers(
    gossip.Elastic(),
    num_workers=32,
    num_steps=20,
    compute=simulation.constant(0.01),
    network=simulation.Network(bytes_per_push=10.0, **network),
  )
  moves = trace.of_replica(traces.SERVER)
  assert len(moves) == 32 * 20
  # In the middle, where all nodes wait.
  gaps = np.diff(moves['end_time'])[100:500]
  np.testing.assert_allclose(gaps, 1 / rate)


def test_the_centre_serves_requests_in_order_of_arrival():
  """Forces and questions alike: a move takes 5 s, an answer 1 s."""
  times = simulation.with_speeds(simulation.constant(1.0), [0.5, 1.0, 0.8])
  trace = cases.simulate_peers(
    gossip.Elastic(),
    num_workers=3,
    num_steps=1,
    compute=times,
    network=simulation.Network(
      server_time=5.0, server_bandwidth=1.0, bytes_per_push=1.0
    ),
  )
  # They ask at 1, 1.25 and 2, before the centre moves; its link has a queue.
  answers = trace.mixes
  assert answers['replica'].tolist() == [1, 2, 0]
  np.testing.assert_allclose(answers['end_time'], [2.0, 3.0, 4.0])
  np.testing.assert_array_equal(answers['source_version'], 0)
  # Forces arrive while the centre is busy.
  moves = trace.of_replica(traces.SERVER)
  assert moves['source'].tolist() == [1, 2, 0]
  np.testing.assert_allclose(moves['start_time'], [3.0, 4.0, 5.0])
  np.testing.assert_allclose(moves['end_time'], [8.0, 13.0, 18.0])


def test_a_question_waits_while_the_centre_moves():
  """Its answer includes the forces that arrived before it, and no others."""
  times = simulation.with_speeds(simulation.constant(1.0), [0.5, 1.0, 0.8])
  trace = cases.simulate_peers(
    gossip.Elastic(),
    num_workers=3,
    num_steps=1,
    compute=times,
    network=simulation.Network(server_time=5.0),
  )
  answers = trace.mixes
  found = answers[['replica', 'end_time', 'source_version']].tolist()
  # Nodes 0 and 2 ask while it moves by the force of node 1.
  assert found == [(1, 1.0, 0), (0, 6.0, 1), (2, 6.0, 1)]
  moves = trace.of_replica(traces.SERVER)
  np.testing.assert_allclose(moves['end_time'], [6.0, 11.0, 16.0])


def test_each_direction_of_the_centres_link_has_a_queue():
  network = simulation.Network(server_bandwidth=1.0, bytes_per_push=2.0)
  trace = cases.simulate_peers(
    gossip.Elastic(), num_workers=3, num_steps=1, network=network
  )
  answers = trace.mixes
  np.testing.assert_allclose(answers['end_time'], [3, 5, 7])
  moves = trace.of_replica(traces.SERVER)
  np.testing.assert_allclose(moves['start_time'], [5, 7, 9])
  # Three nodes that come back at once ask without sending forces.
  trace = cases.simulate_peers(
    gossip.Elastic(),
    num_workers=4,
    num_steps=1,
    network=network,
    failures=[simulation.Failure(0.5, node, 9.0) for node in range(3)],
  )
  joins = trace.records[trace.records['kind'] == traces.Kind.JOIN]
  assert joins['replica'].tolist() == [0, 1, 2]
  np.testing.assert_allclose(joins['end_time'], [11, 13, 15])


def test_a_returning_node_waits_for_its_turn_at_the_centre():
  trace = cases.simulate_peers(
    gossip.Elastic(),
    num_workers=2,
    num_steps=1,
    network=simulation.Network(server_time=5.0),
    failures=[simulation.Failure(0.5, 1, 2.0)],
  )
  (mix,) = trace.mixes[trace.mixes['own_weight'] == 0]
  # The centre works for node 0 from 1 to 6.
  assert (mix['replica'], mix['end_time'], mix['source_version']) == (1, 6, 1)
