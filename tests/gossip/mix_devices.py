"""Runs all cases on several devices, and saves the results to a file.

python -m tests.gossip.mix_devices FILE                    # All runners.
python -m tests.gossip.mix_devices FILE few                # A few cases.
python -m tests.gossip.mix_devices FILE ADDRESS PROCESS    # One of two.
"""

import sys

import jax
from jax import lax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from jasgd import gossip
from tests.gossip import many_devices
from tests.gossip import mix_cases

NUM_STEPS = 5  # Steps after which all states are saved.
SEED = 17
AXIS = mix_cases.AXIS
# Strategies with gradients: those that add a fixed number of messages.
DIFFERENTIABLE = {
  'Pull, independent': gossip.Pull(),
  'Pull, permutation': gossip.Pull(peers='permutation', period=2),
  'Push, ring': gossip.Push(peers='ring'),
  'PushSum, matching': gossip.PushSum(peers='matching'),
  'Pairs, matching': gossip.Pairs(peers='matching'),
  'Pull, complete': gossip.Pull(peers='complete'),
  'AllReduce': gossip.AllReduce(),
  'AllReduce, period': gossip.AllReduce(period=2),
  'Elastic': gossip.Elastic(rate=mix_cases.RATE),
}
# One for each kind of collective.
EXPLICIT = (
  'Pull, independent',
  'Push, permutation',
  'Pairs, matching',
  'PushSum, star',
  'Pull, complete',
  'AllReduce',
  'AllReduce, period',
)


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
  """All cases in all programs, gradients, and an explicit mesh."""
  found = {
    f'{num_nodes}|{runner}|{name}': value
    for num_nodes, runner in mix_cases.PROGRAMS
    for name, value in run_all(
      runner, mix_cases.list_cases(num_nodes), num_nodes
    ).items()
  }
  found |= find_gradients(many_devices.NUM_DEVICES)
  return found | mix_on_explicit_mesh(many_devices.NUM_DEVICES)


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


# --- Gradients through a mix, and mixes on an explicit mesh.


def make_values(num_nodes):
  """Values of all nodes: float32 [n, 3]."""
  values = np.random.default_rng(5).normal(size=(num_nodes, 3)) + 1
  return np.asarray(values, np.float32)


def find_gradients(num_nodes):
  """Gradients of a loss of mixed values, computed at each node.

  Args:
    num_nodes: As many as devices.

  Returns:
    By rule, runner, and what is differentiated: a node's own loss, or the mean
    of all nodes' losses, as every node has it.
  """
  generator = np.random.default_rng(8)
  rows = tuple(
    generator.normal(size=(num_nodes, 3)).astype(np.float32) for _ in range(2)
  )

  def differentiate(rows, step, key):
    x, weights = rows
    found = {}
    for name, strategy in DIFFERENTIABLE.items():

      def measure(x, strategy=strategy):
        mixed = _mix(strategy, x, step, key)
        return jnp.sum(weights * mixed**2)

      def measure_mean(x, measure=measure):
        return lax.pmean(measure(x), AXIS)

      found[name] = {
        'own': jax.grad(measure)(x),
        'mean': jax.grad(measure_mean)(x),
      }
    return found

  runners = {
    'vmap': {'runner': 'vmap'},
    'pmap': {'runner': 'pmap'},
    'checked': {'runner': 'shard_map'},
    'unchecked': {'runner': 'shard_map', 'check_vma': False},
  }
  saved = {}
  for runner, arguments in runners.items():
    run = mix_cases.wrap(differentiate, num_nodes=num_nodes, **arguments)
    for name, both in run(rows, 2, jax.random.key(3)).items():
      for what, grads in both.items():
        saved[f'gradient|{name}|{runner}|{what}'] = np.asarray(grads)
  return saved


def mix_on_explicit_mesh(num_nodes):
  """Some cases on a mesh as `jax.make_mesh` makes it, and on the usual one.

  There, `jax.shard_map` wants its inputs to be where it says that they are.
  """
  mesh = jax.make_mesh((num_nodes,), (AXIS,))
  assert mesh.axis_types == (sharding.AxisType.Explicit,)
  listed = mix_cases.list_cases(num_nodes)

  def mix(x, step, key):
    return {
      name: _mix(listed[name].strategy, x, step, key) for name in EXPLICIT
    }

  found = {}
  start = make_values(num_nodes)
  spec = sharding.PartitionSpec(AXIS)
  placed = jax.device_put(start, sharding.NamedSharding(mesh, spec))
  for name, used, rows in (('explicit', mesh, placed), ('usual', None, start)):
    mix_nodes = mix_cases.wrap(mix, 'shard_map', num_nodes, used)
    for case, x in mix_nodes(rows, 3, jax.random.key(4)).items():
      found[f'mesh|{case}|{name}'] = np.asarray(x)
  return found


def _mix(strategy, x, step, key):
  """Values of a node after a mix."""
  if isinstance(strategy, gossip.Elastic):
    centre = jnp.zeros_like(x)
    return gossip.mix_elastic(x, centre, AXIS, strategy, step=step)[0]
  mass = 1.0 if isinstance(strategy, gossip.PushSum) else None
  mixed = gossip.mix(x, AXIS, strategy, step=step, key=key, mass=mass)
  return mixed[0] if isinstance(strategy, gossip.PushSum) else mixed


if __name__ == '__main__':
  main(*sys.argv[1:])
