"""Gossip in virtual time, against matrices, sums and rates."""

import dataclasses
import math

import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces
from tests.simulation import node_cases

# Messages arrive half way between two steps: all nodes go in lock-step.
LOCK_STEP = simulation.Network(latency=0.5)
UNEVEN = gossip.from_peers(
  [[1, 2], [2, 0], [0, 1]], [[0.1, 0.3], [0.5, 0.2], [0.25, 0.7]]
)
TOPOLOGIES = {
  'ring': gossip.ring(5),
  'exponential': gossip.exponential(6),
  'one peer, in turn': gossip.one_peer_exponential(8),
  'star, drifting': gossip.with_uniform_weights(gossip.star(5)),
  'uneven': UNEVEN,
  'constant': gossip.with_constant_weights(gossip.ring(4), 0.1),
  'keeps nothing': gossip.with_constant_weights(gossip.ring(4), 0.5),
}
every_topology = pytest.mark.parametrize('kind', TOPOLOGIES)


def _start(num_nodes):
  return np.random.default_rng(0).normal(size=num_nodes)


def _run(strategy, num_steps, network=LOCK_STEP, seed=0):
  return simulation.simulate_nodes(
    strategy,
    num_nodes=strategy.peers.num_nodes,
    num_steps=num_steps,
    network=network,
    seed=seed,
  )


def _receive(topology, values, index):
  """What the others have sent in a round: `push` without what is kept."""
  own = topology.own_weights[index % topology.num_rounds]
  return topology.push(values, index) - own * values


@every_topology
def test_pull_is_the_topology(kind):
  topology, rounds = TOPOLOGIES[kind], 6
  network = simulation.Network(latency=0.25)  # All read before any mixes.
  trace = _run(gossip.Pull(peers=topology), rounds, network)
  values = _start(topology.num_nodes)
  final = node_cases.get_last(node_cases.execute(trace, values))
  for index in range(rounds):
    values = topology.pull(values, index)
  np.testing.assert_allclose(final, values, atol=1e-12)


@every_topology
def test_push_sum_is_the_topology_in_one_round(kind):
  topology = TOPOLOGIES[kind]
  trace = _run(gossip.PushSum(peers=topology), 1)
  values = _start(topology.num_nodes)
  final = node_cases.get_last(node_cases.execute(trace, values))
  sums = topology.push(values)
  masses = topology.push(np.ones(topology.num_nodes))
  np.testing.assert_allclose(final, sums / masses, atol=1e-12)


@every_topology
def test_push_sum_is_the_topology_with_messages_a_round_late(kind):
  """A node sends before it mixes what was sent to it in the last round."""
  topology, rounds = TOPOLOGIES[kind], 6
  trace = _run(gossip.PushSum(peers=topology), rounds)
  n = topology.num_nodes
  values = _start(n)
  final = node_cases.get_last(node_cases.execute(trace, values))
  states = [np.stack([values, np.ones(n)])]
  on_the_way = np.zeros((2, n))
  for index in range(rounds):
    sent = np.stack([_receive(topology, row, index) for row in states[-1]])
    own = topology.own_weights[index % topology.num_rounds]
    states.append(own * states[-1] + on_the_way)
    on_the_way = sent
  sums, masses = states[-1] + on_the_way
  np.testing.assert_allclose(final, sums / masses, atol=1e-12)
  assert sums.sum() == pytest.approx(values.sum())


@every_topology
def test_push_is_the_topology_with_messages_a_round_late(kind):
  topology, rounds = TOPOLOGIES[kind], 6
  trace = _run(gossip.Push(peers=topology), rounds)
  # Without what is still on its way after the last step.
  records = trace.records[trace.records['end_time'] <= rounds]
  trace = dataclasses.replace(trace, records=records)
  n = topology.num_nodes
  values = _start(n)
  final = node_cases.get_last(node_cases.execute(trace, values))
  on_the_way = np.zeros((2, n))
  for index in range(rounds):
    own = topology.own_weights[index % topology.num_rounds]
    both = np.stack([values, np.ones(n)])
    sent = np.stack([_receive(topology, row, index) for row in both])
    sums, weights = own * both + on_the_way
    # Who keeps nothing and has got nothing has what it had.
    values = np.where(weights, sums / np.where(weights, weights, 1), values)
    on_the_way = sent
  np.testing.assert_allclose(final, values, atol=1e-12)


def test_push_with_random_peers_is_the_rule_of_the_paper():
  """(sum of received + w own) / (number + w): w is 2 if it drew itself."""
  n, num_steps = node_cases.NUM_NODES, 40
  trace = node_cases.run('push', 'slow', num_steps, seed=3)
  drawn = gossip.draw_peers('independent', n, num_steps, seed=3)
  mixes = trace.mixes[trace.mixes['step'] < num_steps]
  num_selves = 0
  for node in range(n):
    own = mixes[mixes['node'] == node]
    for mix in np.unique(own['mix']):
      rows = own[own['mix'] == mix]
      is_self = drawn[rows['step'][0] - 1, node] == node
      w, num_selves = 1 + is_self, num_selves + is_self
      np.testing.assert_allclose(rows['own_weight'], w / (w + len(rows)))
      np.testing.assert_allclose(rows['peer_weight'], 1 / (w + len(rows)))
  assert num_selves > 3


@pytest.mark.parametrize('network', node_cases.NETWORKS)
@pytest.mark.parametrize(
  'name', [name for name in node_cases.STRATEGIES if 'push-sum' in name]
)
def test_push_sum_keeps_the_sum(name, network):
  n = node_cases.NUM_NODES
  trace = node_cases.run(name, network, 30, seed=4)
  final = node_cases.get_last(node_cases.execute(trace))
  ends = trace.records[trace.records['kind'] == traces.NodeKind.END]
  assert ends['node'].tolist() == list(range(n))
  assert ends['mass'].sum() == pytest.approx(n)
  if network == 'free':
    # With latencies, mass that a node sent to one that is done comes back when
    # its own weights may have changed.
    assert final @ ends['mass'] == pytest.approx(sum(range(n)))
  assert not np.allclose(ends['mass'], 1)


def test_messages_without_mass_change_nothing():
  """Who gives all its mass away has none left for its next message."""
  times = simulation.with_speeds(simulation.constant(1.0), [1, 0.7])
  swap = gossip.with_constant_weights(gossip.ring(2), 1.0)
  trace = simulation.simulate_nodes(
    gossip.PushSum(peers=swap),
    num_nodes=2,
    num_steps=20,
    compute=times,
    network=simulation.Network(latency=2.9),
  )
  is_empty = trace.mixes['mass'] == 0
  assert np.count_nonzero(is_empty) > 5
  np.testing.assert_array_equal(trace.mixes['own_weight'][is_empty], 1)
  values = node_cases.get_last(node_cases.execute(trace))
  assert np.all((values >= 0) & (values <= 1))  # And not NaN.


@pytest.mark.parametrize('peers', gossip.PEERS)
def test_consensus_contracts_as_the_rate_says(peers):
  """E||x - mean||^2 after a round in which all read before any mixes."""
  n, num_seeds = 8, 600
  values = _start(n)
  factors = []
  for seed in range(num_seeds):
    trace = simulation.simulate_nodes(
      gossip.Pull(peers=peers),
      num_nodes=n,
      num_steps=1,
      network=simulation.Network(latency=0.25),
      seed=seed,
    )
    final = node_cases.get_last(node_cases.execute(trace, values))
    factors.append(final.var() / values.var())
  error = np.std(factors) / math.sqrt(num_seeds)
  rate = gossip.consensus_rate(peers, n)
  assert abs(np.mean(factors) - rate) < 4 * error
  assert error < 0.01


def test_a_large_star_needs_no_table():
  """As an array of n x degree it would have 400 million entries."""
  n = 20_000
  trace = simulation.simulate_nodes(
    gossip.Pull(peers=gossip.star(n)), num_nodes=n, num_steps=1
  )
  assert len(trace.mixes) == 2 * (n - 1)


def test_who_is_done_takes_no_mass_of_the_slower():
  """Or else the fast would have all of it in the end."""
  speeds = simulation.with_speeds(simulation.constant(1.0), [1, 1, 2, 4])
  trace = simulation.simulate_nodes(
    gossip.PushSum(), num_nodes=4, num_steps=100, compute=speeds
  )
  masses = [trace.of_node(node)[-1]['mass'] for node in range(4)]
  assert min(masses) > 0.1
