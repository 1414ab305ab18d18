"""Runs every case on several devices, and saves what came out.

python -m tests.gossip.mix_devices FILE                    # All runners.
python -m tests.gossip.mix_devices FILE ADDRESS PROCESS    # One of two.
"""

import sys

import jax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from jasgd import gossip
from tests.gossip import mix_cases

NUM_STEPS = 5  # Of which everything is saved.
NUM_LAST = 100  # After which all should agree.
NUM_KEYS = 400
SEED = 17


def main(path, address=None, process=None):
  if address is None:
    jax.config.update('jax_num_cpu_devices', max(mix_cases.SIZES))
    found = {}
    for num_nodes in mix_cases.SIZES:
      for runner in mix_cases.RUNNERS:
        results = run_all(runner, num_nodes)
        found |= {
          f'{num_nodes}|{runner}|{name}': value
          for name, value in results.items()
        }
  else:
    jax.config.update('jax_num_cpu_devices', 4)
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(
      address, 2, int(process), initialization_timeout=60
    )
    found = run_process()
    jax.distributed.shutdown()
  np.savez(path, **found)


def run_all(runner, num_nodes):
  """All that is measured of one runner."""
  key = jax.random.key(SEED)
  num_traces = 0
  step_all = mix_cases.make_step(num_nodes)

  def count_and_step(states, step, key):
    nonlocal num_traces
    num_traces += 1
    return step_all(states, step, key)

  step_nodes = mix_cases.wrap(count_and_step, runner, num_nodes)
  place = mix_cases.wrap(lambda rows, *_: rows, runner, num_nodes)
  states = place(mix_cases.make_states(num_nodes), 0, key)
  found = {}
  for step in range(1, NUM_LAST + 1):
    # Too many steps at once are more than XLA has threads for on a CPU.
    states = jax.block_until_ready(step_nodes(states, step, key))
    if step <= NUM_STEPS or step == NUM_LAST:
      found |= flatten(f'state|{step}', states)
  found['num_traces'] = np.array(num_traces)
  found |= measure_rates(runner, num_nodes)
  return found


def measure_rates(runner, num_nodes):
  """Factors of the squared distance, for many keys and for every round."""
  found = {}
  x = np.asarray(
    np.random.default_rng(5).normal(size=(num_nodes, 3)), np.float32
  )
  rules = {
    f'Pull|{peers}': gossip.Pull(peers=peers) for peers in gossip.PEERS
  } | {'Push|independent': gossip.Push()}

  def mix_once(x, step, keys):
    def measure(key, rule):
      mixed = gossip.mix(x, mix_cases.AXIS, rule, step=step, key=key)
      return gossip.consensus_distance(mixed, mix_cases.AXIS)

    return {
      name: jax.vmap(lambda key, rule=rule: measure(key, rule))(keys)
      for name, rule in rules.items()
    } | {'start': gossip.consensus_distance(x, mix_cases.AXIS)}

  keys = jax.random.split(jax.random.key(1), NUM_KEYS)
  distances = mix_cases.wrap(mix_once, runner, num_nodes)(x, 1, keys)
  for name, value in distances.items():
    found[f'distance|{name}'] = np.asarray(value)
  topologies = mix_cases.list_topologies(num_nodes)
  starts = {
    kind: find_slowest(topology).astype(np.float32)
    for kind, topology in topologies.items()
  }

  def mix_rounds(starts, step, key):
    del key
    distances = {}
    for kind, topology in topologies.items():
      rule = gossip.Pull(peers=topology)
      mixed = gossip.mix(starts[kind], mix_cases.AXIS, rule, step=step)
      distances[kind] = gossip.consensus_distance(mixed, mix_cases.AXIS)
    return distances

  mix_nodes = mix_cases.wrap(mix_rounds, runner, num_nodes)
  most = max(topology.num_rounds for topology in topologies.values())
  for step in range(1, most + 1):
    for kind, value in mix_nodes(starts, step, np.zeros(2)).items():
      found[f'round|{step}|{kind}'] = np.asarray(value)
  return found


def find_slowest(topology):
  """The values for which `topology_consensus_rate` is an equality."""
  centred = np.eye(topology.num_nodes) - 1 / topology.num_nodes
  matrices = [topology.matrix(r) for r in range(topology.num_rounds)]
  mean = sum(w.T @ centred @ w for w in matrices) / len(matrices)
  return np.linalg.eigh(mean)[1][:, -1]


def run_process():
  """All cases over the devices of two processes; this one's nodes."""
  num_nodes = jax.device_count()
  step_nodes = mix_cases.wrap(
    mix_cases.make_step(num_nodes), 'shard_map', num_nodes
  )
  placed = sharding.NamedSharding(
    mix_cases.make_mesh(jax.devices()), sharding.PartitionSpec(mix_cases.AXIS)
  )
  states = jax.tree.map(
    lambda leaf: jax.make_array_from_callback(
      leaf.shape, placed, lambda index: leaf[index]
    ),
    mix_cases.make_states(num_nodes),
  )
  key = np.asarray(jax.random.key_data(jax.random.key(SEED)))
  found = {}
  for step in range(1, NUM_STEPS + 1):
    states = step_nodes(states, np.int32(step), key)
    found |= flatten(f'state|{step}', jax.tree.map(read_local, states))
  return found


def read_local(leaf):
  """The rows of this process."""
  shards = sorted(
    leaf.addressable_shards, key=lambda shard: shard.index[0].start
  )
  return np.concatenate([np.asarray(shard.data) for shard in shards])


def flatten(prefix, states):
  """Names for all arrays; bfloat16 as float32, which files can hold."""
  found = {}
  for name, (params, other) in states.items():
    for part, tree in (('x', params), ('other', other)):
      for path, leaf in jax.tree.leaves_with_path(tree):
        leaf = np.asarray(leaf)
        if leaf.dtype == jnp.bfloat16:
          leaf = leaf.astype(np.float32)
        found[f'{prefix}|{name}|{part}{jax.tree_util.keystr(path)}'] = leaf
  return found


if __name__ == '__main__':
  main(*sys.argv[1:])
