"""How long the messages of nodes take, in closed form."""

import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces


def test_allreduce_takes_the_ring_formula():
  network = simulation.Network(latency=0.1, bandwidth=8.0, bytes_per_push=16.0)
  trace = simulation.simulate_nodes(
    gossip.AllReduce(period=2), num_nodes=4, num_steps=6, network=network
  )
  # 2 (n - 1) messages of a quarter of 16 bytes at 8 bytes per second.
  mix_time = 2 * 3 * (0.1 + 4.0 / 8.0)
  np.testing.assert_allclose(trace.duration, 6 + 3 * mix_time)


@pytest.mark.parametrize(
  ('strategy', 'num_transfers'),
  [
    (gossip.Pull(peers='matching'), 1),
    (gossip.Pairs(peers='matching'), 1),
    (gossip.Pull(peers=gossip.complete(4)), 3),
    (gossip.Push(), 0),
    (gossip.PushSum(peers=gossip.ring(4)), 0),
  ],
)
def test_what_a_node_waits_for(strategy, num_transfers):
  """A question and its answers, that share the node's link."""
  network = simulation.Network(latency=0.1, bandwidth=8.0, bytes_per_push=2.0)
  trace = simulation.simulate_nodes(
    strategy, num_nodes=4, num_steps=5, network=network
  )
  wait = 2 * 0.1 + num_transfers * 0.25 if num_transfers else 0.0
  ends = trace.steps['end_time'][trace.steps['node'] == 0]
  np.testing.assert_allclose(ends, 1 + np.arange(5) * (1 + wait))


@pytest.mark.parametrize('strategy', [gossip.Pull(), gossip.AllReduce()])
def test_peers_do_not_use_the_link_of_a_server(strategy):
  first, second = (
    simulation.simulate_nodes(
      strategy,
      num_nodes=5,
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
  trace = simulation.simulate_nodes(
    gossip.Push(peers=gossip.ring(2)),
    num_nodes=2,
    num_steps=3,
    network=network,
  )
  # Sent at 1, 2 and 3, three seconds each.
  for node in range(2):
    mixes = trace.mixes[trace.mixes['node'] == node]
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
  trace = simulation.simulate_nodes(
    gossip.Elastic(), num_nodes=1, num_steps=3, network=network
  )
  message = 0.1 + 8.0 / min(4.0, 2 * 1.0)
  mixes = trace.mixes[trace.mixes['node'] == 0]
  ends = (1 + 0.1 + message) * np.arange(1, 4)
  np.testing.assert_allclose(mixes['end_time'], ends)
  moves = trace.of_node(traces.CENTRE)
  np.testing.assert_allclose(moves['start_time'], ends + message)
  np.testing.assert_allclose(moves['end_time'], ends + message + 0.6 / 2)


@pytest.mark.parametrize(
  ('network', 'rate'),
  [
    # The link, bytes per second over bytes; each way has its own.
    ({'server_bandwidth': 100.0}, 10.0),
    ({'server_bandwidth': 100.0, 'num_shards': 4}, 40.0),
    ({'server_bandwidth': 100.0, 'latency': 0.2}, 10.0),
    ({'server_bandwidth': 100.0, 'bandwidth': 50.0}, 10.0),
    # The centre's time.
    ({'server_time': 0.25}, 4.0),
    ({'server_time': 0.25, 'num_shards': 2}, 8.0),
    ({'server_time': simulation.constant(0.25)}, 4.0),
    # What is slower of the two.
    ({'server_time': 0.25, 'server_bandwidth': 100.0}, 4.0),
    ({'server_time': 0.05, 'server_bandwidth': 100.0}, 10.0),
  ],
)
def test_a_saturated_centre(network, rate):
  """Many fast nodes: the centre moves as often as its slowest part allows."""
  trace = simulation.simulate_nodes(
    gossip.Elastic(),
    num_nodes=32,
    num_steps=20,
    compute=simulation.constant(0.01),
    network=simulation.Network(bytes_per_push=10.0, **network),
  )
  moves = trace.of_node(traces.CENTRE)
  assert len(moves) == 32 * 20
  # In the middle, where all nodes wait.
  gaps = np.diff(moves['end_time'])[100:500]
  np.testing.assert_allclose(gaps, 1 / rate)


def test_the_centre_serves_who_comes_first():
  """Forces and questions alike; it takes 5 to move, and an answer takes 1."""
  times = simulation.with_speeds(simulation.constant(1.0), [0.5, 1.0, 0.8])
  trace = simulation.simulate_nodes(
    gossip.Elastic(),
    num_nodes=3,
    num_steps=1,
    compute=times,
    network=simulation.Network(
      server_time=5.0, server_bandwidth=1.0, bytes_per_push=1.0
    ),
  )
  # They ask at 1, 1.25 and 2, all before it moves, and its link has a queue.
  answers = trace.mixes[trace.mixes['peer'] == traces.CENTRE]
  assert answers['node'].tolist() == [1, 2, 0]
  np.testing.assert_allclose(answers['end_time'], [2.0, 3.0, 4.0])
  np.testing.assert_array_equal(answers['peer_version'], 0)
  # Forces arrive when the centre is at work.
  moves = trace.of_node(traces.CENTRE)
  assert moves['peer'].tolist() == [1, 2, 0]
  np.testing.assert_allclose(moves['start_time'], [3.0, 4.0, 5.0])
  np.testing.assert_allclose(moves['end_time'], [8.0, 13.0, 18.0])


def test_a_question_waits_while_the_centre_moves():
  """And sees what has come before it, and not what comes after."""
  times = simulation.with_speeds(simulation.constant(1.0), [0.5, 1.0, 0.8])
  trace = simulation.simulate_nodes(
    gossip.Elastic(),
    num_nodes=3,
    num_steps=1,
    compute=times,
    network=simulation.Network(server_time=5.0),
  )
  answers = trace.mixes[trace.mixes['peer'] == traces.CENTRE]
  found = answers[['node', 'end_time', 'peer_version']].tolist()
  # Nodes 0 and 2 ask while it moves by the force of node 1.
  assert found == [(1, 1.0, 0), (0, 6.0, 1), (2, 6.0, 1)]
  moves = trace.of_node(traces.CENTRE)
  np.testing.assert_allclose(moves['end_time'], [6.0, 11.0, 16.0])


def test_each_way_of_the_link_of_the_centre_has_a_queue():
  network = simulation.Network(server_bandwidth=1.0, bytes_per_push=2.0)
  trace = simulation.simulate_nodes(
    gossip.Elastic(), num_nodes=3, num_steps=1, network=network
  )
  answers = trace.mixes[trace.mixes['peer'] == traces.CENTRE]
  np.testing.assert_allclose(answers['end_time'], [3, 5, 7])
  moves = trace.of_node(traces.CENTRE)
  np.testing.assert_allclose(moves['start_time'], [5, 7, 9])
  # Three nodes that come back at once ask with nothing in their hands.
  trace = simulation.simulate_nodes(
    gossip.Elastic(),
    num_nodes=3,
    num_steps=1,
    network=network,
    failures=[simulation.Failure(0.5, node, 1.0) for node in range(3)],
  )
  joins = trace.records[trace.records['kind'] == traces.NodeKind.JOIN]
  assert joins['node'].tolist() == [0, 1, 2]
  np.testing.assert_allclose(joins['end_time'], [3, 5, 7])


def test_who_comes_back_waits_for_its_turn_at_the_centre():
  trace = simulation.simulate_nodes(
    gossip.Elastic(),
    num_nodes=2,
    num_steps=1,
    network=simulation.Network(server_time=5.0),
    failures=[simulation.Failure(0.5, 1, 2.0)],
  )
  (mix,) = trace.mixes[trace.mixes['own_weight'] == 0]
  # The centre works for node 0 from 1 to 6.
  assert (mix['node'], mix['end_time'], mix['peer_version']) == (1, 6, 1)
