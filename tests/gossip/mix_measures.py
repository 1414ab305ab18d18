"""Gradients through a mix, and mixes on an explicit mesh."""

import jax
from jax import lax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from jasgd import gossip
from tests.gossip import mix_cases

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


def make_start(num_nodes):
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
  start = make_start(num_nodes)
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
