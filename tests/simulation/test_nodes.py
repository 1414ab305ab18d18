"""Peers in virtual time: their traces, executed on numbers."""

import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces

STRATEGIES = {
  'allreduce': gossip.AllReduce(),
  'local sgd': gossip.AllReduce(period=3),
  'elastic': gossip.Elastic(rate=0.2),
  'pull': gossip.Pull(),
  'pull, permutation': gossip.Pull(peers='permutation', period=2),
  'push': gossip.Push(),
  'push-sum': gossip.PushSum(),
  'pairs': gossip.Pairs(peers='permutation'),
  'pull, ring': gossip.Pull(peers=gossip.ring(7)),
  'push-sum, exponential': gossip.PushSum(peers=gossip.exponential(7)),
  'push, one peer': gossip.Push(peers=gossip.one_peer_exponential(7)),
  'pairs, matching': gossip.Pairs(peers=gossip.random_matching(7, 20)),
}
NETWORKS = {
  'free': simulation.Network(),
  'slow': simulation.Network(latency=0.3, bandwidth=10.0, bytes_per_push=4.0),
}
NUM_NODES = 7


def _simulate(name, network, num_steps=30, seed=1):
  return simulation.simulate_nodes(
    STRATEGIES[name],
    num_nodes=NUM_NODES,
    num_steps=num_steps,
    compute=simulation.exponential(1.0),
    network=NETWORKS[network],
    seed=seed,
  )


def _execute(trace):
  """Runs the mixes of a trace on numbers; gives every version of every node."""
  start = np.arange(float(NUM_NODES))
  history = {node: [start[node]] for node in range(NUM_NODES)}
  centre = [start.mean()]
  records = trace.records
  index = 0
  while index < len(records):
    record = records[index]
    node, own = int(record['node']), history[int(record['node'])]
    group = [record]
    if record['kind'] == traces.NodeKind.STEP:
      value = own[-1]
      assert 0 <= record['peer_version'] < len(own)
    else:
      while (
        index + len(group) < len(records)
        and records[index + len(group)]['node'] == node
        and records[index + len(group)]['mix'] == record['mix']
      ):
        group.append(records[index + len(group)])
      value = record['own_weight'] * own[-1]
      total = record['own_weight']
      for part in group:
        if part['peer'] == traces.ALL:
          value = np.mean([versions[-1] for versions in history.values()])
          total = 1.0
        elif part['peer'] == traces.CENTRE:
          old = centre[part['peer_version']]
          value += part['peer_weight'] * old
          centre.append(old + part['peer_weight'] * (own[-1] - old))
          total += part['peer_weight']
        else:
          value += (
            part['peer_weight'] * history[part['peer']][part['peer_version']]
          )
          total += part['peer_weight']
      np.testing.assert_allclose(total, 1)
    own.append(value)
    assert record['version'] == len(own) - 1
    index += len(group)
  return history


@pytest.mark.parametrize('network', NETWORKS)
@pytest.mark.parametrize('name', STRATEGIES)
def test_traces_can_be_executed(name, network):
  trace = _simulate(name, network)
  assert len(trace.steps) == NUM_NODES * 30
  assert np.all(np.diff(trace.records['end_time']) >= 0)
  assert np.all(trace.records['start_time'] <= trace.records['end_time'])
  for node in range(NUM_NODES):
    steps = trace.of_node(node)
    steps = steps[steps['kind'] == traces.NodeKind.STEP]
    np.testing.assert_array_equal(steps['step'], np.arange(1, 31))
  if name != 'allreduce' and name != 'local sgd':
    history = _execute(trace)
    final = [versions[-1] for versions in history.values()]
    assert np.std(final) < 0.5 * np.std(np.arange(NUM_NODES))
    assert min(final) >= 0
    assert max(final) <= NUM_NODES - 1


def test_the_same_seed_gives_the_same_trace():
  first, second = (_simulate('push-sum', 'slow') for _ in range(2))
  np.testing.assert_array_equal(first.records, second.records)
  other = _simulate('push-sum', 'slow', seed=2)
  assert not np.array_equal(first.records, other.records)


def test_one_file_per_node(tmp_path):
  trace = _simulate('push', 'slow')
  trace.save(tmp_path / 'nodes')
  names = {path.name for path in (tmp_path / 'nodes').iterdir()}
  assert names == {f'node-{node}' for node in range(NUM_NODES)}
  loaded = traces.NodeTrace.load(tmp_path / 'nodes')
  np.testing.assert_array_equal(loaded.records, trace.records)
  assert loaded.header == trace.header
  with pytest.raises(traces.TraceError, match='are two things'):
    traces.Trace.load(tmp_path / 'nodes/node-0')
  (tmp_path / 'nodes/node-3').unlink()
  with pytest.raises(traces.TraceError, match='There is no trace'):
    traces.NodeTrace.load(tmp_path / 'nodes')


def test_pairs_keep_the_sum():
  trace = _simulate('pairs', 'slow')
  history = _execute(trace)
  final = [versions[-1] for versions in history.values()]
  np.testing.assert_allclose(sum(final), sum(range(NUM_NODES)))


def test_push_sum_keeps_the_mean_and_push_does_not():
  """Over many seeds the mean of push-sum's consensus is the start's mean."""
  ends = {}
  for name in ('push-sum', 'push'):
    ends[name] = [
      np.mean(
        [
          versions[-1]
          for versions in _execute(
            _simulate(name, 'free', num_steps=60, seed=seed)
          ).values()
        ]
      )
      for seed in range(20)
    ]
  mean = np.mean(range(NUM_NODES))
  # Mass is conserved, so every single run ends near the mean.
  assert np.max(np.abs(np.array(ends['push-sum']) - mean)) < 0.6
  assert np.max(np.abs(np.array(ends['push']) - mean)) > 0.3


def test_a_ring_mixes_with_its_neighbours():
  trace = simulation.simulate_nodes(
    gossip.Pull(peers=gossip.ring(5)), num_nodes=5, num_steps=1
  )
  for node in range(5):
    mixes = trace.of_node(node)
    mixes = mixes[mixes['kind'] == traces.NodeKind.MIX]
    assert set(mixes['peer']) == {(node - 1) % 5, (node + 1) % 5}
    np.testing.assert_allclose(mixes['peer_weight'], 1 / 3)
    np.testing.assert_allclose(mixes['own_weight'], 1 / 3)


def test_allreduce_takes_the_ring_formula():
  network = simulation.Network(latency=0.1, bandwidth=8.0, bytes_per_push=16.0)
  trace = simulation.simulate_nodes(
    gossip.AllReduce(period=2), num_nodes=4, num_steps=6, network=network
  )
  # 2 (n - 1) messages of a quarter of 16 bytes at 8 bytes per second.
  mix_time = 2 * 3 * (0.1 + 4.0 / 8.0)
  np.testing.assert_allclose(trace.duration, 6 + 3 * mix_time)
  np.testing.assert_array_equal(trace.mixes['peer'], traces.ALL)


def test_allreduce_waits_for_the_slowest():
  times = simulation.with_speeds(simulation.constant(1.0), [1, 1, 0.25])
  trace = simulation.simulate_nodes(
    gossip.AllReduce(), num_nodes=3, num_steps=5, compute=times
  )
  assert trace.duration == 20
  gossiping = simulation.simulate_nodes(
    gossip.Pull(), num_nodes=3, num_steps=5, compute=times
  )
  assert gossiping.of_node(0)['end_time'].max() == 5


def test_elastic_counts_the_versions_of_the_centre():
  trace = _simulate('elastic', 'slow')
  versions = np.sort(trace.mixes['peer_version'])
  np.testing.assert_array_equal(versions, np.arange(len(versions)))
  np.testing.assert_allclose(trace.mixes['peer_weight'], 0.2)


def test_pull_contracts_within_a_round():
  """Independent peers, all at once: 1/2 - 1/(4p) per round, on average.

  Equal times make rounds, but a node that mixes later in a round sees what
  others have mixed already, so it contracts at least as fast.
  """
  ratios = []
  for seed in range(200):
    trace = simulation.simulate_nodes(
      gossip.Pull(), num_nodes=NUM_NODES, num_steps=1, seed=seed
    )
    final = [versions[-1] for versions in _execute(trace).values()]
    ratios.append(np.var(final) / np.var(np.arange(NUM_NODES)))
  assert np.mean(ratios) < 0.55


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: gossip.AllReduce(period=0), 'period must be at least 1, got 0'),
    (lambda: gossip.Elastic(rate=0), 'rate must be above 0'),
    (
      lambda: simulation.simulate_nodes(
        gossip.Pull(peers=gossip.ring(5)), num_nodes=4, num_steps=1
      ),
      'The topology has 5 nodes, but there are 4',
    ),
    (
      lambda: simulation.simulate_nodes(
        gossip.Pairs(peers=gossip.ring(5)), num_nodes=5, num_steps=1
      ),
      'Pairs need a topology with one peer',
    ),
    (lambda: gossip.Pull(peers='friends'), "Unknown peers 'friends'. Known"),
    (
      lambda: simulation.simulate_nodes(
        gossip.Pull(), num_nodes=0, num_steps=1
      ),
      'num_nodes must be a whole number of at least 1, got 0',
    ),
  ],
)
def test_what_cannot_be(build, message):
  with pytest.raises(ValueError, match=message):
    build()


@pytest.mark.parametrize('name', STRATEGIES)
def test_describe_says_who_waits(name):
  assert 'wait' in STRATEGIES[name].describe()
