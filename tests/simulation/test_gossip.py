"""Gossip, elastic averaging and all-reduce in virtual time, on numbers."""

import dataclasses
import math

import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces
from jasgd.gossip import topologies
from tests.simulation import cases

# Messages arrive half way between two steps: all nodes go in lock-step.
LOCK_STEP = simulation.Network(latency=0.5)
UNEVEN = topologies.from_peers(
  [[1, 2], [2, 0], [0, 1]], [[0.1, 0.3], [0.5, 0.2], [0.25, 0.7]]
)
TOPOLOGIES = {
  'ring': topologies.ring(5),
  'exponential': topologies.exponential(6),
  'one peer, in turn': topologies.one_peer_exponential(8),
  'star, drifting': topologies.with_uniform_weights(topologies.star(5)),
  'uneven': UNEVEN,
  'constant': topologies.with_constant_weights(topologies.ring(4), 0.1),
  'keeps nothing': topologies.with_constant_weights(topologies.ring(4), 0.5),
}
every_topology = pytest.mark.parametrize('kind', TOPOLOGIES)


def _start(num_nodes):
  return np.random.default_rng(0).normal(size=num_nodes)


def _run(strategy, num_steps, network=LOCK_STEP, seed=0):
  return cases.simulate_peers(
    strategy,
    num_workers=strategy.peers.num_nodes,
    num_steps=num_steps,
    network=network,
    seed=seed,
  )


def _receive(topology, values, index):
  """The received part of a round: `push` without the shares that nodes keep."""
  own = topology.own_weights[index % topology.num_rounds]
  return topology.push(values, index) - own * values


# --- All strategies.


@cases.every_peer_network
@cases.every_strategy
def test_traces_can_be_executed(name, network):
  trace = cases.run_peers(name, network)
  assert np.all(np.diff(trace.records['end_time']) >= 0)
  assert np.all(trace.records['start_time'] <= trace.records['end_time'])
  for node in range(cases.NUM_NODES):
    steps = trace.steps[trace.steps['replica'] == node]
    np.testing.assert_array_equal(steps['step'], np.arange(1, 31))
  final = cases.get_last(cases.execute(trace))
  if 'elastic' not in name:  # Two simultaneous forces may overshoot.
    assert min(final) >= 0
    assert max(final) <= cases.NUM_NODES - 1
  if name != 'elastic, swaps':  # Nodes that swap never agree.
    assert np.std(final) < 0.5 * np.std(np.arange(cases.NUM_NODES))


@cases.every_strategy
def test_mixes_come_every_period_steps(name):
  trace = cases.run_peers(name, 'slow')
  strategy = cases.STRATEGIES[name]
  mixes = trace.mixes
  # The peer of a pair mixes at any of its steps, and so does a node that has
  # made all its steps and receives a message.
  is_own = (mixes['start_time'] < mixes['end_time']) | (mixes['step'] < 30)
  if not isinstance(strategy, gossip.Pairs):
    assert not np.any(mixes['step'][is_own] % strategy.period)
  assert len(mixes)


def test_allreduce_is_the_mean_and_local_sgd_waits_for_its_period():
  for name, period in (('allreduce', 1), ('local sgd', 3)):
    trace = cases.run_peers(name, 'slow')
    final = cases.get_last(cases.execute(trace))
    np.testing.assert_allclose(final, (cases.NUM_NODES - 1) / 2)
    assert np.all(trace.mixes['kind'] == traces.Kind.MEAN)
    groups, counts = np.unique(trace.mixes['group'], return_counts=True)
    np.testing.assert_array_equal(groups, 1 + np.arange(len(groups)))
    np.testing.assert_array_equal(counts, cases.NUM_NODES)
    assert len(trace.mixes) == cases.NUM_NODES * 30 // period


@pytest.mark.parametrize('name', ['elastic', 'elastic, swaps'])
def test_elastic_moves_the_centre_as_much_as_the_node(name):
  """When all forces have arrived, the sum of nodes and centre is unchanged."""
  trace = cases.run_peers(name, 'slow')
  history = cases.execute(trace)
  start = np.arange(float(cases.NUM_NODES))
  total = cases.get_last(history).sum() + history[traces.SERVER][-1]
  assert total == pytest.approx(start.sum() + start.mean())
  moves = trace.of_replica(traces.SERVER)
  np.testing.assert_array_equal(moves['version'], 1 + np.arange(len(moves)))
  rate = cases.STRATEGIES[name].rate
  np.testing.assert_allclose(trace.mixes['weight'], rate)
  np.testing.assert_allclose(moves['own_weight'], 1)
  answers = trace.mixes
  np.testing.assert_allclose(answers['own_weight'], 1 - rate)
  # Each move follows an answer of the centre to the same node.
  left = answers[['replica', 'version', 'end_time']].tolist()
  ends = {(node, version - 1): time for node, version, time in left}
  for move in moves:
    assert (
      ends.pop((move['source'], move['source_version'])) < move['start_time']
    )
  assert not ends


def test_the_centre_may_have_moved_before_a_force_arrives():
  """Three nodes ask the same centre at once, and it moves three times."""
  trace = cases.simulate_peers(
    gossip.Elastic(rate=0.5),
    num_workers=3,
    num_steps=1,
    network=simulation.Network(latency=0.25),
  )
  answers = trace.mixes
  np.testing.assert_array_equal(answers['source_version'], 0)
  np.testing.assert_allclose(answers['end_time'], 1.5)
  history = cases.execute(trace, np.array([0.0, 3.0, 9.0]))
  np.testing.assert_allclose(cases.get_last(history), [2, 3.5, 6.5])
  np.testing.assert_allclose(history[traces.SERVER], [4, 2, 1.5, 4])
  np.testing.assert_allclose(trace.of_replica(traces.SERVER)['end_time'], 1.75)


@pytest.mark.parametrize(
  ('num_nodes', 'rate'), [(1, 0.3), (5, 0.3), (3, 0.0), (4, 1.0)]
)
def test_elastic_is_two_lines_on_a_free_network(num_nodes, rate):
  """e = rate (x - c); x -= e; c += e, node after node; they agree in the end.

  All on (sum of x + c) / (p + 1), if they move at all.
  """
  trace = cases.simulate_peers(
    gossip.Elastic(rate=rate), num_workers=num_nodes, num_steps=100
  )
  history = cases.execute(trace)
  nodes = np.arange(float(num_nodes))
  start, centre = nodes.copy(), nodes.mean()
  for _ in range(100):
    for node in range(num_nodes):
      force = rate * (nodes[node] - centre)
      nodes[node] -= force
      centre += force
  np.testing.assert_allclose(cases.get_last(history), nodes)
  np.testing.assert_allclose(history[traces.SERVER][-1], centre)
  if 0 < rate < 1:
    mean = (start.sum() + start.mean()) / (num_nodes + 1)
    np.testing.assert_allclose(nodes, mean, atol=1e-6)


@pytest.mark.parametrize('period', [1, 3])
def test_easgd_takes_the_gradient_before_the_mix(period):
  """Zhang's order reads the version before the mix, and A3's the one after."""
  records = {}
  for order in ('a3', 'easgd'):
    trace = cases.simulate_peers(
      gossip.Elastic(period=period, order=order),
      num_workers=2,
      num_steps=7,
      network=simulation.Network(latency=0.1),
    )
    records[order] = trace.records
  first, second = records['a3'].copy(), records['easgd'].copy()
  is_step = first['kind'] == traces.Kind.STEP
  follows = is_step & (first['step'] > 1) & ((first['step'] - 1) % period == 0)
  np.testing.assert_array_equal(
    first['read_version'] - second['read_version'], follows
  )
  fresh = first['version'][is_step] - 1
  np.testing.assert_array_equal(first['read_version'][is_step], fresh)
  second['read_version'] = first['read_version']
  np.testing.assert_array_equal(first, second)


def test_beta_is_the_weight_of_a_random_peer():
  trace = cases.simulate_peers(
    gossip.Pull(beta=0.3), num_workers=5, num_steps=20
  )
  np.testing.assert_allclose(trace.mixes['weight'], 0.3)
  np.testing.assert_allclose(trace.mixes['own_weight'], 0.7)


@pytest.mark.parametrize('name', ['pairs', 'pairs, matching'])
def test_pairs_keep_the_sum(name):
  history = cases.execute(cases.run_peers(name, 'slow'))
  total = cases.get_last(history).sum()
  np.testing.assert_allclose(total, sum(range(cases.NUM_NODES)))


def test_a_ring_mixes_with_its_neighbours():
  trace = cases.simulate_peers(
    gossip.Pull(peers=topologies.ring(5)), num_workers=5, num_steps=1
  )
  for node in range(5):
    mixes = trace.mixes[trace.mixes['replica'] == node]
    assert set(mixes['source']) == {(node - 1) % 5, (node + 1) % 5}
    np.testing.assert_allclose(mixes['weight'], 1 / 3)
    np.testing.assert_allclose(mixes['own_weight'], 1 / 3)


def test_allreduce_waits_for_the_slowest_and_gossip_does_not():
  times = simulation.with_speeds(simulation.constant(1.0), [1, 1, 0.25])
  ends = {}
  for strategy in (gossip.AllReduce(), gossip.Pull(), gossip.Elastic()):
    trace = cases.simulate_peers(
      strategy, num_workers=3, num_steps=5, compute=times
    )
    own = trace.of_replica(0)
    is_end = own['kind'] == traces.Kind.END
    ends[type(strategy)] = own['end_time'][~is_end].max()
  assert ends == {gossip.AllReduce: 20, gossip.Pull: 5, gossip.Elastic: 5}


# --- Gossip, against matrices, sums and rates.


@every_topology
def test_pull_is_the_topology(kind):
  topology, rounds = TOPOLOGIES[kind], 6
  network = simulation.Network(latency=0.25)  # All read before any mixes.
  trace = _run(gossip.Pull(peers=topology), rounds, network)
  values = _start(topology.num_nodes)
  final = cases.get_last(cases.execute(trace, values))
  for index in range(rounds):
    values = topology.pull(values, index)
  np.testing.assert_allclose(final, values, atol=1e-12)


@every_topology
def test_push_sum_is_the_topology_in_one_round(kind):
  topology = TOPOLOGIES[kind]
  trace = _run(gossip.PushSum(peers=topology), 1)
  values = _start(topology.num_nodes)
  final = cases.get_last(cases.execute(trace, values))
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
  final = cases.get_last(cases.execute(trace, values))
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
  # Without the messages that are under way after the last step.
  records = trace.records[trace.records['end_time'] <= rounds]
  trace = dataclasses.replace(trace, records=records)
  n = topology.num_nodes
  values = _start(n)
  final = cases.get_last(cases.execute(trace, values))
  on_the_way = np.zeros((2, n))
  for index in range(rounds):
    own = topology.own_weights[index % topology.num_rounds]
    both = np.stack([values, np.ones(n)])
    sent = np.stack([_receive(topology, row, index) for row in both])
    sums, weights = own * both + on_the_way
    # A node that keeps no share and receives none keeps its weights.
    values = np.where(weights, sums / np.where(weights, weights, 1), values)
    on_the_way = sent
  np.testing.assert_allclose(final, values, atol=1e-12)


def test_push_with_random_peers_is_the_rule_of_the_paper():
  """(sum of received + w own) / (number + w): w is 2 if it drew itself."""
  n, num_steps = cases.NUM_NODES, 40
  trace = cases.run_peers('push', 'slow', num_steps, seed=3)
  drawn = gossip.draw_peers('independent', n, num_steps, seed=3)
  mixes = trace.mixes[trace.mixes['step'] < num_steps]
  num_selves = 0
  for node in range(n):
    own = mixes[mixes['replica'] == node]
    for mix in np.unique(own['group']):
      rows = own[own['group'] == mix]
      is_self = drawn[rows['step'][0] - 1, node] == node
      w, num_selves = 1 + is_self, num_selves + is_self
      np.testing.assert_allclose(rows['own_weight'], w / (w + len(rows)))
      np.testing.assert_allclose(rows['weight'], 1 / (w + len(rows)))
  assert num_selves > 3


@pytest.mark.parametrize('network', cases.PEER_NETWORKS)
@pytest.mark.parametrize(
  'name', [name for name in cases.STRATEGIES if 'push-sum' in name]
)
def test_push_sum_keeps_the_sum(name, network):
  n = cases.NUM_NODES
  trace = cases.run_peers(name, network, 30, seed=4)
  final = cases.get_last(cases.execute(trace))
  ends = trace.records[trace.records['kind'] == traces.Kind.END]
  assert ends['replica'].tolist() == list(range(n))
  assert ends['mass'].sum() == pytest.approx(n)
  if network == 'free':
    # With latencies, a node that is done returns mass to its sender, whose
    # weights may have changed since.
    assert final @ ends['mass'] == pytest.approx(sum(range(n)))
  assert not np.allclose(ends['mass'], 1)


def test_messages_without_mass_change_nothing():
  """A node that has sent all its mass sends its next message without mass."""
  times = simulation.with_speeds(simulation.constant(1.0), [1, 0.7])
  swap = topologies.with_constant_weights(topologies.ring(2), 1.0)
  trace = cases.simulate_peers(
    gossip.PushSum(peers=swap),
    num_workers=2,
    num_steps=20,
    compute=times,
    network=simulation.Network(latency=2.9),
  )
  is_empty = trace.mixes['mass'] == 0
  assert np.count_nonzero(is_empty) > 5
  np.testing.assert_array_equal(trace.mixes['own_weight'][is_empty], 1)
  values = cases.get_last(cases.execute(trace))
  assert np.all((values >= 0) & (values <= 1))  # And not NaN.


@pytest.mark.parametrize('peers', gossip.PEERS)
def test_consensus_contracts_as_the_rate_says(peers):
  """E||x - mean||^2 after a round in which all read before any mixes."""
  n, num_seeds = 8, 200
  values = _start(n)
  factors = []
  for seed in range(num_seeds):
    trace = cases.simulate_peers(
      gossip.Pull(peers=peers),
      num_workers=n,
      num_steps=1,
      network=simulation.Network(latency=0.25),
      seed=seed,
    )
    final = cases.get_last(cases.execute(trace, values))
    factors.append(final.var() / values.var())
  error = np.std(factors) / math.sqrt(num_seeds)
  rate = topologies.consensus_rate(peers, n)
  assert abs(np.mean(factors) - rate) < 4 * error
  assert error < 0.02


def test_a_large_star_needs_no_table():
  """As an array of n x degree it would have 400 million entries."""
  n = 20_000
  trace = cases.simulate_peers(
    gossip.Pull(peers=topologies.star(n)), num_workers=n, num_steps=1
  )
  assert len(trace.mixes) == 2 * (n - 1)


def test_a_node_that_is_done_refuses_mass_of_slower_nodes():
  """Otherwise the fast nodes would hold all mass in the end."""
  speeds = simulation.with_speeds(simulation.constant(1.0), [1, 1, 2, 4])
  trace = cases.simulate_peers(
    gossip.PushSum(), num_workers=4, num_steps=100, compute=speeds
  )
  masses = [trace.of_replica(node)[-1]['mass'] for node in range(4)]
  assert min(masses) > 0.1
