"""Strategies and networks for nodes, and how to run a trace on numbers."""

import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces

NUM_NODES = 7

# Every strategy; a new one is tested by being listed.
STRATEGIES = {
  'allreduce': gossip.AllReduce(),
  'local sgd': gossip.AllReduce(period=3),
  'elastic': gossip.Elastic(rate=0.2),
  'elastic, swaps': gossip.Elastic(rate=1.0, period=2),
  'pull': gossip.Pull(),
  'pull, permutation': gossip.Pull(peers='permutation', period=2),
  'pull, ring': gossip.Pull(peers=gossip.ring(7)),
  'push': gossip.Push(),
  'push, one peer': gossip.Push(peers=gossip.one_peer_exponential(7)),
  'push-sum': gossip.PushSum(),
  'push-sum, rarely': gossip.PushSum(period=4),
  'push-sum, exponential': gossip.PushSum(peers=gossip.exponential(7)),
  'pairs': gossip.Pairs(peers='permutation'),
  'pairs, matching': gossip.Pairs(peers=gossip.random_matching(7, 20)),
}
NETWORKS = {
  'free': simulation.Network(),
  'slow': simulation.Network(
    latency=0.3,
    bandwidth=10.0,
    bytes_per_push=4.0,
    server_bandwidth=20.0,
    server_time=0.05,
  ),
}
every_strategy = pytest.mark.parametrize('name', STRATEGIES)
every_network = pytest.mark.parametrize('network', NETWORKS)


def run(name, network='free', num_steps=30, seed=1, **arguments):
  """Simulates one of the cases."""
  return simulation.simulate_nodes(
    STRATEGIES[name],
    num_nodes=NUM_NODES,
    num_steps=num_steps,
    compute=arguments.pop('compute', simulation.exponential(1.0)),
    network=NETWORKS[network],
    seed=seed,
    **arguments,
  )


def execute(trace, start=None):
  """Runs a trace on numbers, on which steps do nothing.

  Gives every version of every node and of the centre, which moves by the force
  that a node's mix has left. It fails if versions are not consecutive, or if
  one is read that does not exist yet.
  """
  if start is None:
    start = np.arange(float(trace.num_nodes))
  history = {node: [value] for node, value in enumerate(start)}
  history[traces.CENTRE] = [np.mean(start)]
  forces, joined = {}, set()
  for group in _group(trace.records):
    record, values = group[0], {}
    own = history[record['node']]
    if record['kind'] == traces.NodeKind.STEP:
      assert 0 <= record['peer_version'] < len(own)
      values[record['node']] = own[-1]
    elif record['kind'] == traces.NodeKind.MIX and record['peer'] == traces.ALL:
      np.testing.assert_allclose(group['peer_weight'], 1 / trace.num_nodes)
      assert len(set(group['node'])) == len(group)
      mean = np.mean([history[node][-1] for node in group['node']])
      values = dict.fromkeys(group['node'].tolist(), mean)
    elif (record['kind'], record['node']) == (1, traces.CENTRE):
      assert record['own_weight'] == 1
      force = forces.pop((record['peer'], record['peer_version']))
      values[traces.CENTRE] = own[-1] + force
    elif record['kind'] == traces.NodeKind.MIX:
      weights = group['peer_weight']
      assert record['own_weight'] + sum(weights) == pytest.approx(1)
      for part in group:
        assert 0 <= part['peer_version'] < len(history[part['peer']])
      others = [history[part['peer']][part['peer_version']] for part in group]
      value = record['own_weight'] * own[-1] + weights @ others
      values[record['node']] = value
      if record['peer'] == traces.CENTRE and record['node'] not in joined:
        forces[record['node'], record['version'] - 1] = own[-1] - value
      joined.discard(record['node'])
    elif record['kind'] == traces.NodeKind.RESTART:
      values[record['node']] = own[record['peer_version']]
    else:
      if record['kind'] == traces.NodeKind.JOIN:
        joined.add(record['node'])
      continue
    for part in group:
      node = int(part['node'])
      assert part['version'] == len(history[node])
    for node, value in values.items():
      history[node].append(value)
  return history


def get_last(history):
  """The last version of each node."""
  return np.array([history[node][-1] for node in sorted(history) if node >= 0])


def _group(records):
  """Splits records where a new step, mix or all-reduce begins."""
  is_all = records['peer'] == traces.ALL
  keys = np.stack(
    [
      records['kind'],
      np.where(is_all, traces.ALL, records['node']),
      np.where(is_all, records['peer_version'], records['mix']),
      np.where(records['mix'] < 0, records['order'], -1),
    ],
    axis=-1,
  )
  starts = np.flatnonzero((np.diff(keys, axis=0) != 0).any(axis=1)) + 1
  return np.split(records, starts) if len(records) else []
