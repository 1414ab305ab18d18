"""Peers in virtual time: their traces, executed on numbers."""

import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from jasgd.simulation import _node_records
from tests.simulation import node_cases


@node_cases.every_network
@node_cases.every_strategy
def test_traces_can_be_executed(name, network):
  trace = node_cases.run(name, network)
  assert np.all(np.diff(trace.records['end_time']) >= 0)
  assert np.all(trace.records['start_time'] <= trace.records['end_time'])
  np.testing.assert_array_equal(trace.records['order'], np.arange(len(trace)))
  for node in range(node_cases.NUM_NODES):
    steps = trace.steps[trace.steps['node'] == node]
    np.testing.assert_array_equal(steps['step'], np.arange(1, 31))
  final = node_cases.get_last(node_cases.execute(trace))
  if 'elastic' not in name:  # Two forces at once may move the centre too far.
    assert min(final) >= 0
    assert max(final) <= node_cases.NUM_NODES - 1
  if name != 'elastic, swaps':  # Which agree on nothing.
    assert np.std(final) < 0.5 * np.std(np.arange(node_cases.NUM_NODES))


@node_cases.every_strategy
def test_mixes_come_every_period_steps(name):
  trace = node_cases.run(name, 'slow')
  strategy = node_cases.STRATEGIES[name]
  mixes = trace.mixes[trace.mixes['node'] >= 0]
  # A pair's other half is mixed whenever it is, and so is who has made all its
  # steps and is sent something.
  is_own = (mixes['start_time'] < mixes['end_time']) | (mixes['step'] < 30)
  if not isinstance(strategy, gossip.Pairs):
    assert not np.any(mixes['step'][is_own] % strategy.period)
  assert len(mixes)


@node_cases.every_strategy
def test_the_same_seed_gives_the_same_trace(name):
  first, second = (node_cases.run(name, 'slow') for _ in range(2))
  np.testing.assert_array_equal(first.records, second.records)
  other = node_cases.run(name, 'slow', seed=2)
  assert not np.array_equal(first.records, other.records)


@node_cases.every_strategy
def test_equal_times_are_ordered_by_node(name):
  """All nodes step at once: their steps are noted in order."""
  compute = simulation.constant(1.0)
  trace = node_cases.run(name, num_steps=1, compute=compute)
  nodes = trace.steps['node']
  np.testing.assert_array_equal(nodes, np.arange(node_cases.NUM_NODES))
  assert trace.duration == 1


def test_allreduce_is_the_mean_and_local_sgd_waits_for_its_period():
  for name, period in (('allreduce', 1), ('local sgd', 3)):
    trace = node_cases.run(name, 'slow')
    final = node_cases.get_last(node_cases.execute(trace))
    np.testing.assert_allclose(final, (node_cases.NUM_NODES - 1) / 2)
    np.testing.assert_array_equal(trace.mixes['peer'], traces.ALL)
    assert len(trace.mixes) == node_cases.NUM_NODES * 30 // period


@pytest.mark.parametrize('name', ['elastic', 'elastic, swaps'])
def test_elastic_moves_the_centre_as_much_as_the_node(name):
  """Whenever that is: when all forces are there, the sum is what it was."""
  trace = node_cases.run(name, 'slow')
  history = node_cases.execute(trace)
  start = np.arange(float(node_cases.NUM_NODES))
  total = node_cases.get_last(history).sum() + history[traces.CENTRE][-1]
  assert total == pytest.approx(start.sum() + start.mean())
  moves = trace.of_node(traces.CENTRE)
  np.testing.assert_array_equal(moves['version'], 1 + np.arange(len(moves)))
  rate = node_cases.STRATEGIES[name].rate
  np.testing.assert_allclose(trace.mixes['peer_weight'], rate)
  np.testing.assert_allclose(moves['own_weight'], 1)
  answers = trace.mixes[trace.mixes['peer'] == traces.CENTRE]
  np.testing.assert_allclose(answers['own_weight'], 1 - rate)
  # Each move is that of an answer, which came before it.
  left = answers[['node', 'version', 'end_time']].tolist()
  ends = {(node, version - 1): time for node, version, time in left}
  for move in moves:
    assert ends.pop((move['peer'], move['peer_version'])) < move['start_time']
  assert not ends


def test_the_centre_may_have_moved_before_a_force_arrives():
  """Three nodes ask at once, of the same centre, and it moves three times."""
  trace = simulation.simulate_nodes(
    gossip.Elastic(rate=0.5),
    num_nodes=3,
    num_steps=1,
    network=simulation.Network(latency=0.25),
  )
  answers = trace.mixes[trace.mixes['peer'] == traces.CENTRE]
  np.testing.assert_array_equal(answers['peer_version'], 0)
  np.testing.assert_allclose(answers['end_time'], 1.5)
  history = node_cases.execute(trace, np.array([0.0, 3.0, 9.0]))
  np.testing.assert_allclose(node_cases.get_last(history), [2, 3.5, 6.5])
  np.testing.assert_allclose(history[traces.CENTRE], [4, 2, 1.5, 4])
  np.testing.assert_allclose(trace.of_node(traces.CENTRE)['end_time'], 1.75)


@pytest.mark.parametrize(
  ('num_nodes', 'rate'), [(1, 0.3), (5, 0.3), (3, 0.0), (4, 1.0)]
)
def test_elastic_is_two_lines_on_a_free_network(num_nodes, rate):
  """e = rate (x - c); x -= e; c += e, node after node; they agree in the end.

  All on (sum of x + c) / (p + 1), if they move at all.
  """
  trace = simulation.simulate_nodes(
    gossip.Elastic(rate=rate), num_nodes=num_nodes, num_steps=100
  )
  history = node_cases.execute(trace)
  nodes = np.arange(float(num_nodes))
  start, centre = nodes.copy(), nodes.mean()
  for _ in range(100):
    for node in range(num_nodes):
      force = rate * (nodes[node] - centre)
      nodes[node] -= force
      centre += force
  np.testing.assert_allclose(node_cases.get_last(history), nodes)
  np.testing.assert_allclose(history[traces.CENTRE][-1], centre)
  if 0 < rate < 1:
    mean = (start.sum() + start.mean()) / (num_nodes + 1)
    np.testing.assert_allclose(nodes, mean, atol=1e-6)


@pytest.mark.parametrize('period', [1, 3])
def test_easgd_takes_the_gradient_before_the_mix(period):
  """Zhang's order reads the version before the mix, and A3's the one after."""
  records = {}
  for order in ('a3', 'easgd'):
    trace = simulation.simulate_nodes(
      gossip.Elastic(period=period, order=order),
      num_nodes=2,
      num_steps=7,
      network=simulation.Network(latency=0.1),
    )
    records[order] = trace.records
  first, second = records['a3'].copy(), records['easgd'].copy()
  is_step = first['kind'] == traces.NodeKind.STEP
  follows = is_step & (first['step'] > 1) & ((first['step'] - 1) % period == 0)
  np.testing.assert_array_equal(
    first['peer_version'] - second['peer_version'], follows
  )
  fresh = first['version'][is_step] - 1
  np.testing.assert_array_equal(first['peer_version'][is_step], fresh)
  second['peer_version'] = first['peer_version']
  np.testing.assert_array_equal(first, second)


def test_beta_is_the_weight_of_a_random_peer():
  trace = simulation.simulate_nodes(
    gossip.Pull(beta=0.3), num_nodes=5, num_steps=20
  )
  np.testing.assert_allclose(trace.mixes['peer_weight'], 0.3)
  np.testing.assert_allclose(trace.mixes['own_weight'], 0.7)


def test_the_header_says_what_is_averaged():
  for period, averages in ((1, 'gradients'), (2, 'weights')):
    trace = simulation.simulate_nodes(
      gossip.AllReduce(period=period), num_nodes=2, num_steps=2
    )
    assert trace.header['averages'] == averages


@pytest.mark.parametrize('name', ['pairs', 'pairs, matching'])
def test_pairs_keep_the_sum(name):
  history = node_cases.execute(node_cases.run(name, 'slow'))
  total = node_cases.get_last(history).sum()
  np.testing.assert_allclose(total, sum(range(node_cases.NUM_NODES)))


def test_a_ring_mixes_with_its_neighbours():
  trace = simulation.simulate_nodes(
    gossip.Pull(peers=gossip.ring(5)), num_nodes=5, num_steps=1
  )
  for node in range(5):
    mixes = trace.mixes[trace.mixes['node'] == node]
    assert set(mixes['peer']) == {(node - 1) % 5, (node + 1) % 5}
    np.testing.assert_allclose(mixes['peer_weight'], 1 / 3)
    np.testing.assert_allclose(mixes['own_weight'], 1 / 3)


def test_allreduce_waits_for_the_slowest_and_gossip_does_not():
  times = simulation.with_speeds(simulation.constant(1.0), [1, 1, 0.25])
  ends = {}
  for strategy in (gossip.AllReduce(), gossip.Pull(), gossip.Elastic()):
    trace = simulation.simulate_nodes(
      strategy, num_nodes=3, num_steps=5, compute=times
    )
    own = trace.of_node(0)
    is_end = own['kind'] == traces.NodeKind.END
    ends[type(strategy)] = own['end_time'][~is_end].max()
  assert ends == {gossip.AllReduce: 20, gossip.Pull: 5, gossip.Elastic: 5}


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (
      {'strategy': gossip.Pull(peers=gossip.ring(5))},
      'The topology has 5 nodes, but there are 4',
    ),
    (
      {'strategy': gossip.Pairs(peers=gossip.ring(4))},
      'Pairs need a topology with one peer',
    ),
    ({'strategy': gossip.Pull}, 'strategy is not one that .* called, as in'),
    ({'strategy': protocols.hardsync()}, 'protocols with a server go to'),
    ({'network': 3}, 'network is not one that simulate_nodes knows, got 3'),
    ({'network': simulation.Network(latency=-1)}, 'latency must be finite'),
    ({'num_nodes': 0}, 'num_nodes must be a whole number of at least 1, got 0'),
    ({'num_steps': 1.5}, 'num_steps must be a whole number .* got 1.5'),
    ({'seed': -1}, 'seed must be a whole number of at least 0, got -1'),
    (
      {'failures': [simulation.Failure(1.0, 4)]},
      'names learner 4, but there are 4',
    ),
  ],
)
def test_what_cannot_be(arguments, message):
  arguments = {
    'strategy': gossip.Pull(),
    'num_nodes': 4,
    'num_steps': 1,
    **arguments,
  }
  with pytest.raises(ValueError, match=message):
    simulation.simulate_nodes(arguments.pop('strategy'), **arguments)


def test_numbers_may_be_of_numpy():
  trace = simulation.simulate_nodes(
    gossip.Pull(period=np.int64(2)),
    num_nodes=np.int32(3),
    num_steps=np.int64(4),
    seed=np.uint8(5),
  )
  assert trace.header['num_nodes'] == 3
  assert type(trace.header['num_nodes']) is int
  assert len(trace.steps) == 12


@node_cases.every_strategy
def test_records_are_packed_on_the_way(name, monkeypatch):
  whole = node_cases.run(name, 'slow')
  monkeypatch.setattr(_node_records.Records, 'MAX_ROWS', 10)
  packed = node_cases.run(name, 'slow')
  np.testing.assert_array_equal(packed.records, whole.records)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'seed': 2**64}, r'seed must be below 2\*\*64'),
    ({'failures': [(1.0, 0.5)]}, 'learner of a failure must be a whole'),
    (
      {'compute': simulation.with_speeds(simulation.constant(1.0), [1.0] * 3)},
      'There are 3 speeds, but 4 learners',
    ),
    (
      {'network': simulation.Network(num_shards=1.5)},
      'num_shards must be a whole number',
    ),
  ],
)
def test_arguments_as_those_of_simulate(arguments, message):
  with pytest.raises(ValueError, match=message):
    simulation.simulate_nodes(
      gossip.Pull(), **{'num_nodes': 4, 'num_steps': 3, **arguments}
    )


def test_the_header_says_how_it_was_made():
  trace = simulation.simulate_nodes(
    gossip.Pull(2), num_nodes=4, num_steps=3, failures=[(1.5, 2)]
  )
  assert trace.header['numpy'] == np.__version__
  assert trace.header['num_failures'] == 1
  assert trace.header['network'] == simulation.Network().to_header()
