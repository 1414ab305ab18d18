"""Trains on several devices, and saves the results.

python -m tests.engine.device_program FILE                    # All runners.
python -m tests.engine.device_program FILE ADDRESS PROCESS    # One of two.

If the environment has IS_QUICK, it runs the quick cases, else all others.
"""

import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import engine
from jasgd import gossip
from tests.engine import device_cases
from tests.gossip import many_devices

NUM_NODES = many_devices.NUM_DEVICES
NUM_STEPS = 6
RUNNERS = ('vmap', 'pmap', 'shard_map')
_OPTIMIZERS = (optax.sgd(0.05, 0.9), optax.adam(0.02))


class Case(NamedTuple):
  """Options of a training: strategy, optimizer, dtype of messages."""

  strategy: gossip.PeerStrategy
  optimizer: optax.GradientTransformation
  dtype: Any = None


CASES = {
  name: Case(strategy, _OPTIMIZERS[index % 2])
  for index, (name, strategy) in enumerate(device_cases.STRATEGIES.items())
  if name != 'Elastic, a3'  # The order has no effect on messages.
}
# Strategies that send gradients, weights, and weights times masses.
NARROW = ('AllReduce', 'Pull', 'PushSum')
CASES |= {
  f'{name}, bfloat16': CASES[name]._replace(dtype=jnp.bfloat16)
  for name in NARROW
}
# Cases of the fast tests: one with a sum over all nodes, one with peers.
QUICK = ('local SGD', 'Push')
IS_QUICK = 'JASGD_TEST_QUICK'  # Name of an environment variable.
# Strategies that use all kinds of collectives.
EXPLICIT = ('AllReduce', 'Elastic, easgd', 'Pull', 'PushSum')
# Arguments that each of two processes refuses.
REFUSED = {
  'pmap': {'runner': 'pmap'},
  'few nodes': {'runner': 'shard_map', 'num_nodes': 6},
}

_num_compiled = 0


def _count(event, duration, **details):
  del duration, details
  global _num_compiled
  _num_compiled += event == '/jax/core/compile/backend_compile_duration'


def main(path, address=None, process=None):
  many_devices.begin(address, process)
  jax.monitoring.register_event_duration_secs_listener(_count)
  is_quick, found = IS_QUICK in os.environ, {}
  names = [name for name in CASES if (name in QUICK) == is_quick]
  if address is None:
    for runner in RUNNERS:
      for name in names:
        found |= train(name, runner, f'{runner}|{name}')
    if not is_quick:
      found |= train_on_explicit_meshes()
  else:
    for name in names:
      found |= train(name, 'shard_map', name)
    if is_quick:
      for name, arguments in REFUSED.items():
        found[f'refused|{name}'] = np.array(find_refusal(arguments))
      found |= average_processes()
    jax.distributed.shutdown()
  np.savez(path, **found)


def train(name, runner, prefix, mesh=None):
  """Trains a network; its state is saved and restored after three steps."""
  case = CASES[name]
  program = engine.make_device_program(
    device_cases.make_network_task(),
    case.optimizer,
    case.strategy,
    num_nodes=NUM_NODES,
    runner=runner,
    seed=device_cases.SEED,
    get_rate=lambda epochs: 1 / (1 + epochs),
    mesh=mesh,
    dtype=case.dtype,
  )
  state, found, num_compiled, are_gone = program.init(), {}, [], []
  for step in range(NUM_STEPS):
    if step == 3:
      state = program.place(program.fetch(state), state.step)
    given, before = jax.tree.leaves(state.arrays), _num_compiled
    state, losses = program.step(state)
    num_compiled.append(_num_compiled - before)
    are_gone.append(all(leaf.is_deleted() for leaf in given))
    shards = jax.device_get([shard.data for shard in losses.addressable_shards])
    local = np.concatenate([np.ravel(shard) for shard in shards])
    found[f'{prefix}|local|loss{step}'] = local
  arrays = program.fetch(state)
  for label, tree in (
    ('local', (arrays.node.params, arrays.node.stats, arrays.mass)),
    ('all', program.mean(state)),
    ('all', {'consensus': program.consensus(state)}),
    ('all', program.centre(state) if arrays.centre else {}),
  ):
    for place, leaf in jax.tree.leaves_with_path(tree):
      key = f'{prefix}|{label}|{len(found)}{jax.tree_util.keystr(place)}'
      found[key] = np.asarray(leaf)
  found[f'{prefix}|local|nodes'] = np.asarray(program.local_nodes)
  found[f'{prefix}|own|num_compiled'] = np.array(num_compiled)
  found[f'{prefix}|own|are_gone'] = np.array(are_gone)
  return found


def train_on_explicit_meshes():
  """Trains on meshes with explicit axes, the default of `jax.make_mesh`."""
  found = {}
  mesh = jax.make_mesh((NUM_NODES,), ('x',))
  assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
  for name in EXPLICIT:
    found |= train(name, 'shard_map', f'explicit|{name}', mesh)
  with jax.set_mesh(mesh):
    given = {'runner': 'shard_map', 'mesh': mesh}
    found['in force'] = np.array(find_refusal(given))
  return found


def make_large_tree(process):
  """Arrays so large that they are averaged in shares, of unequal sizes."""
  rng = np.random.default_rng(process)
  return {
    'wide': jnp.float32(rng.normal(size=2**19 + 3)),
    'narrow': jnp.bfloat16(rng.normal(size=11)),
  }


def average_processes():
  """The mean of the trees of two processes, as an all-reduce computes it."""
  devices = [jax.local_devices(process)[0] for process in range(2)]
  mesh = jax.sharding.Mesh(np.array(devices), ('nodes',))
  average = engine.make_group_average(mesh)
  mean = average(make_large_tree(jax.process_index()))
  return {f'mean|{name}': np.asarray(leaf) for name, leaf in mean.items()}


def find_refusal(arguments):
  """Error message of a program that cannot be made or run; else ''."""
  arguments = {'num_nodes': NUM_NODES} | arguments
  try:
    program = device_cases.make_program(
      device_cases.make_quadratic(),
      device_cases.SGD,
      gossip.Pull(),
      **arguments,
    )
    program.mean(program.step(program.init())[0])
  except ValueError as error:
    return str(error)
  return ''


if __name__ == '__main__':
  main(*sys.argv[1:])
