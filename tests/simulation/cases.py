"""Time models, strategies and networks, and how to execute a trace on numbers.

To test a new one, add it to the lists.
"""

import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from jasgd.gossip import topologies

TIMES = {
  'constant': simulation.constant(1.0),
  'normal': simulation.normal(1.0, 0.2),
  'lognormal': simulation.lognormal(1.0, 0.8),
  'exponential': simulation.exponential(1.0),
  'gamma': simulation.gamma(1.0, 10.0),
  'pareto': simulation.pareto(1.0, 2.5),
  'recorded': simulation.recorded([1.0, 2.0, 0.5]),
  'slow minority': simulation.with_slow_minority(
    simulation.normal(1.0, 0.2), 0.25, 5.0
  ),
  'slow spells': simulation.with_slow_spells(
    simulation.constant(1.0), 20, 4, 3.0
  ),
}
every_time = pytest.mark.parametrize('name', TIMES)

PROTOCOLS = {
  'hardsync': protocols.hardsync,
  'backup': lambda: protocols.backup(1),
  'softsync': lambda: protocols.softsync(2),
  'asynchronous': protocols.asynchronous,
  'downpour': lambda: protocols.downpour(2, 2),
  'downpour, rarely': lambda: protocols.downpour(2, 4),
  'downpour, unevenly': lambda: protocols.downpour(3, 2),
  'ssp': lambda: protocols.ssp(2),
  'rennala': lambda: protocols.rennala(3),
  'ringmaster': lambda: protocols.ringmaster(3),
  'ramp_up': lambda: protocols.ramp_up(protocols.hardsync(), 20),
}
every_protocol = pytest.mark.parametrize('protocol_name', PROTOCOLS)

NETWORKS = {
  'free': simulation.Network(),
  'slow': simulation.Network(latency=0.05, server_time=0.01),
  'shared': simulation.make_network(
    100, latency=0.05, bandwidth=1e4, server_bandwidth=5e3, server_time=0.02
  ),
}
every_network = pytest.mark.parametrize('network_name', NETWORKS)


# --- Peer strategies.

NUM_NODES = 7

# Every strategy; to test a new one, add it here.
STRATEGIES = {
  'allreduce': gossip.AllReduce(),
  'local sgd': gossip.AllReduce(period=3),
  'elastic': gossip.Elastic(rate=0.2),
  'elastic, swaps': gossip.Elastic(rate=1.0, period=2),
  'pull': gossip.Pull(),
  'pull, permutation': gossip.Pull(peers='permutation', period=2),
  'pull, ring': gossip.Pull(peers=topologies.ring(7)),
  'push': gossip.Push(),
  'push, one peer': gossip.Push(peers=topologies.one_peer_exponential(7)),
  'push-sum': gossip.PushSum(),
  'push-sum, rarely': gossip.PushSum(period=4),
  'push-sum, exponential': gossip.PushSum(peers=topologies.exponential(7)),
  'pairs': gossip.Pairs(peers='permutation'),
  'pairs, matching': gossip.Pairs(peers=topologies.random_matching(7, 20)),
}
PEER_NETWORKS = {
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
every_peer_network = pytest.mark.parametrize('network', PEER_NETWORKS)


def simulate_peers(strategy, *, num_workers, num_steps, **arguments):
  """`simulate` with a number of steps for each node."""
  return simulation.simulate(
    strategy,
    num_workers=num_workers,
    num_gradients=num_workers * num_steps,
    **arguments,
  )


def run_peers(name, network='free', num_steps=30, seed=1, **arguments):
  """Simulates one of the cases."""
  return simulate_peers(
    STRATEGIES[name],
    num_workers=NUM_NODES,
    num_steps=num_steps,
    compute=arguments.pop('compute', simulation.exponential(1.0)),
    network=PEER_NETWORKS[network],
    seed=seed,
    **arguments,
  )


def execute(trace, start=None):
  """Runs a trace of nodes on numbers, on which steps do nothing.

  Returns every version of every node and of the centre, which moves by the
  force of a node's mix. Fails if versions are not consecutive, or if a version
  is read that does not exist yet.
  """
  if start is None:
    start = np.arange(float(trace.num_workers))
  history = {node: [value] for node, value in enumerate(start)}
  history[traces.SERVER] = [np.mean(start)]
  forces, joined = {}, set()
  for group in _group(trace.records):
    record, values = group[0], {}
    replica, kind = int(record['replica']), record['kind']
    own = history[replica]
    if kind == traces.Kind.STEP:
      assert 0 <= record['read_version'] < len(own)
      values[replica] = own[-1]
    elif kind == traces.Kind.MEAN:
      np.testing.assert_allclose(group['weight'], 1 / trace.num_workers)
      assert len(set(group['replica'])) == len(group)
      mean = np.mean([history[node][-1] for node in group['replica']])
      values = dict.fromkeys(group['replica'].tolist(), mean)
    elif kind == traces.Kind.MOVE:
      assert (replica, record['own_weight']) == (traces.SERVER, 1)
      force = forces.pop((record['source'], record['source_version']))
      values[replica] = own[-1] + force
    elif kind == traces.Kind.MIX:
      weights = group['weight']
      assert record['own_weight'] + sum(weights) == pytest.approx(1)
      for part in group:
        assert 0 <= part['source_version'] < len(history[part['source']])
      others = [
        history[part['source']][part['source_version']] for part in group
      ]
      value = record['own_weight'] * own[-1] + weights @ others
      values[replica] = value
      if record['source'] == traces.SERVER and replica not in joined:
        forces[replica, record['version'] - 1] = own[-1] - value
      joined.discard(replica)
    elif kind == traces.Kind.RESTART:
      values[replica] = own[record['read_version']]
    else:
      if kind == traces.Kind.JOIN:
        joined.add(replica)
      continue
    for part in group:
      assert part['version'] == len(history[int(part['replica'])])
      assert part['updates'] == 1
    for node, value in values.items():
      history[node].append(value)
  return history


def get_last(history):
  """The last version of each node."""
  return np.array([history[node][-1] for node in sorted(history) if node >= 0])


def _group(records):
  """Splits records where a new step, mix or all-reduce begins."""
  is_mean = records['kind'] == traces.Kind.MEAN
  keys = np.stack(
    [
      records['kind'],
      np.where(is_mean, -2, records['replica']),
      records['group'],
      np.where(records['group'] == 0, np.arange(len(records)), -1),
    ],
    axis=-1,
  )
  starts = np.flatnonzero((np.diff(keys, axis=0) != 0).any(axis=1)) + 1
  return np.split(records, starts) if len(records) else []
