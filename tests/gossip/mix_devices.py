"""Runs all cases on several devices, and saves the results.

python -m tests.gossip.mix_devices FILE                    # All runners.
python -m tests.gossip.mix_devices FILE few                # A few cases.
python -m tests.gossip.mix_devices FILE ADDRESS PROCESS    # One of two.
"""

import sys

import jax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from tests.gossip import many_devices
from tests.gossip import mix_cases
from tests.gossip import mix_measures

NUM_STEPS = 5  # Steps after which all states are saved.
SEED = 17


def main(path, *arguments):
  if len(arguments) == 2:
    many_devices.begin(*arguments)
    found = run_process()
    jax.distributed.shutdown()
  else:
    many_devices.begin()
    found = run_few() if arguments == ('few',) else run_sizes()
  np.savez(path, **found)


def run_few():
  """The few cases, under the runners that `test_mix.py` does not use."""
  num_nodes = mix_cases.FEW_NODES
  listed = mix_cases.list_few(num_nodes)
  return {
    f'{num_nodes}|{runner}|{name}': value
    for runner in ('pmap', 'shard_map')
    for name, value in run_all(runner, listed, num_nodes).items()
  }


def run_sizes():
  """All cases, under all runners, and gradients."""
  found = {
    f'{num_nodes}|{runner}|{name}': value
    for num_nodes in mix_cases.SIZES
    for runner in mix_cases.RUNNERS
    for name, value in run_all(
      runner, mix_cases.list_cases(num_nodes), num_nodes
    ).items()
  }
  found |= mix_measures.find_gradients(many_devices.NUM_DEVICES)
  return found | mix_measures.mix_on_explicit_mesh(many_devices.NUM_DEVICES)


def run_all(runner, listed, num_nodes):
  """States of all cases after each step, and the number of compilations."""
  key = jax.random.key(SEED)
  num_traces = 0
  step_all = mix_cases.make_step(listed)

  def count_and_step(states, step, key):
    nonlocal num_traces
    num_traces += 1
    return step_all(states, step, key)

  step_nodes = mix_cases.wrap(count_and_step, runner, num_nodes)
  place = mix_cases.wrap(lambda rows, *_: rows, runner, num_nodes)
  states, found = place(mix_cases.make_states(listed, num_nodes), 0, key), {}
  for step in range(1, NUM_STEPS + 1):
    # Too many steps in flight can deadlock on a CPU: see `mix`.
    states = jax.block_until_ready(step_nodes(states, step, key))
    found |= flatten(f'state|{step}', states)
  found['num_traces'] = np.array(num_traces)
  return found


def run_process():
  """A few cases over the devices of two processes; this one's nodes."""
  num_nodes = jax.device_count()
  listed = mix_cases.list_few(num_nodes)
  step_nodes = mix_cases.wrap(
    mix_cases.make_step(listed), 'shard_map', num_nodes
  )
  placed = sharding.NamedSharding(
    mix_cases.make_mesh(jax.devices()), sharding.PartitionSpec(mix_cases.AXIS)
  )
  states = jax.tree.map(
    lambda leaf: jax.make_array_from_callback(
      leaf.shape, placed, lambda index: leaf[index]
    ),
    mix_cases.make_states(listed, num_nodes),
  )
  key = np.asarray(jax.random.key_data(jax.random.key(SEED)))
  found = {}
  for step in range(1, NUM_STEPS + 1):
    states = step_nodes(states, np.int32(step), key)
    local = jax.tree.map(many_devices.read_local, states)
    found |= flatten(f'state|{step}', local)
  return found


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
