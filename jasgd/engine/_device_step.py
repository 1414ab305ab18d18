"""One step of one node among others, all at the same time: step, then mix."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from jasgd import gossip
from jasgd.engine import _gradient
from jasgd.engine import _node_functions

_PEERS = 0x70656572  # Keeps the draws of peers apart from other uses of a seed.


class DeviceArrays(NamedTuple):
  """What a node has on its device; for all nodes, with a leading axis."""

  node: _node_functions.NodeState
  mass: Any  # shape=(), float32: of push-sum, else None.
  centre: Any  # (params, stats), the same on all nodes: of elastic, else None.


def make_start(
  work: _node_functions.NodeWork, strategy: gossip.Strategy
) -> Callable[..., DeviceArrays]:
  """How a node begins: `(weights) -> held`, with the same weights for all."""

  def start(weights: tuple[Any, Any]) -> DeviceArrays:
    params, stats = weights
    return DeviceArrays(
      node=_node_functions.NodeState(params, stats, work.init(params)),
      mass=jnp.ones(()) if isinstance(strategy, gossip.PushSum) else None,
      centre=weights if isinstance(strategy, gossip.Elastic) else None,
    )

  return start


def make_step(
  work: _node_functions.NodeWork,
  strategy: gossip.Strategy,
  axis_name: str,
  dtype: Any = None,
) -> Callable[..., tuple[DeviceArrays, jax.Array]]:
  """What a node does in one step.

  Args:
    work: Gradient and update.
    strategy: How it mixes.
    axis_name: Of the axis of nodes.
    dtype: Of what is sent, as in `gossip.mix`.

  Returns:
    `(held, data, seed, step, rate) -> (held, loss)`, with `step` the steps made
    before this one.
  """

  def differentiate(
    weights: tuple[Any, Any], data: Any, seed: Any, step: Any
  ) -> _gradient.Gradient:
    learner = lax.axis_index(axis_name)
    return work.gradient(*weights, data, seed, learner, step)

  def mix(
    tree: Any, seed: Any, step: Any, mass: Any = None, dtype: Any = dtype
  ) -> Any:
    key = jax.random.key(seed, impl='threefry2x32')
    return gossip.mix(
      tree,
      axis_name,
      strategy,
      step=step,
      key=jax.random.fold_in(key, _PEERS),
      mass=mass,
      dtype=dtype,
    )

  def step_and_mix(
    held: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """Gossip; and local SGD, where all are averaged now and then."""
    node = held.node
    result = differentiate((node.params, node.stats), data, seed, step)
    node = work.update(node, result, node.params, rate)
    params, stats = mix((node.params, node.stats), seed, step + 1)
    node = node._replace(params=params, stats=stats)
    return held._replace(node=node), result.loss

  def mix_and_step(
    held: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """All-reduce: the mean of all gradients, then everybody's update."""
    node = held.node
    result = differentiate((node.params, node.stats), data, seed, step)
    grads = mix(result.gradient, seed, step + 1)
    # Rounded at each step, they would stop where a change is too small.
    stats = mix(result.stats, seed, step + 1, dtype=None)
    mean = result._replace(gradient=grads, stats=stats)
    node = work.update(node, mean, node.params, rate)
    return held._replace(node=node), result.loss

  def step_and_push(
    held: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """SGP: weights and statistics are held times the mass."""
    node, mass = held.node, held.mass
    params, stats = scale_floats((node.params, node.stats), 1 / mass)
    result = differentiate((params, stats), data, seed, step)
    result = result._replace(stats=scale_floats(result.stats, mass))
    # The weights are these, whatever is held: a decay is of them, too.
    node = work.update(node, result, params, rate, params)
    (params, stats), mass = mix((node.params, node.stats), seed, step + 1, mass)
    node = node._replace(params=params, stats=stats)
    return held._replace(node=node, mass=mass), result.loss

  if isinstance(strategy, gossip.Elastic):
    return _make_elastic_step(work, strategy, axis_name, differentiate)
  if isinstance(strategy, gossip.PushSum):
    return step_and_push
  if isinstance(strategy, gossip.AllReduce) and strategy.period == 1:
    return mix_and_step
  return step_and_mix


def _make_elastic_step(
  work: _node_functions.NodeWork,
  strategy: gossip.Elastic,
  axis_name: str,
  differentiate: Callable[..., _gradient.Gradient],
) -> Callable[..., tuple[DeviceArrays, jax.Array]]:
  """A step and an exchange with the centre, in the strategy's order."""

  def exchange(held: DeviceArrays, step: Any) -> DeviceArrays:
    node = held.node
    (params, stats), centre = gossip.mix_elastic(
      (node.params, node.stats), held.centre, axis_name, strategy, step=step
    )
    return held._replace(
      node=node._replace(params=params, stats=stats), centre=centre
    )

  def step_a3(
    held: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """The next gradient is that of the mixed weights."""
    node = held.node
    result = differentiate((node.params, node.stats), data, seed, step)
    node = work.update(node, result, node.params, rate)
    return exchange(held._replace(node=node), step + 1), result.loss

  def step_easgd(
    held: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """The gradient of the weights before the mix changes those after it."""
    params, stats, _ = held.node
    result = differentiate((params, stats), data, seed, step)
    # Before the first step all are where the centre is, and nothing moves.
    held = exchange(held, step)
    changed = _node_functions.add_changes(held.node.stats, result.stats, stats)
    result = result._replace(stats=changed)
    node = work.update(held.node, result, params, rate)
    return held._replace(node=node), result.loss

  return step_easgd if strategy.order == 'easgd' else step_a3


def get_weights(held: DeviceArrays) -> tuple[Any, Any]:
  """A node's (params, stats), as gradients and evaluation see them."""
  weights = (held.node.params, held.node.stats)
  return weights if held.mass is None else scale_floats(weights, 1 / held.mass)


def average(held: DeviceArrays, axis_name: str) -> tuple[Any, Any]:
  """The mean of all nodes' (params, stats); by mass, if there is one."""
  weight = jnp.ones(()) if held.mass is None else held.mass
  share = 1 / lax.psum(weight, axis_name)

  def mean(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      return leaf  # Nobody mixes these.
    dtype = jnp.promote_types(leaf.dtype, jnp.float32)
    total = lax.psum(leaf.astype(dtype), axis_name)
    return (total * share.astype(dtype)).astype(leaf.dtype)

  return jax.tree.map(mean, (held.node.params, held.node.stats))


def scale_floats(tree: Any, factor: Any) -> Any:
  """Multiplies the floats of a tree, in their own dtypes."""

  def scale(leaf: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
      return leaf
    dtype = jnp.promote_types(leaf.dtype, jnp.float32)
    return (leaf.astype(dtype) * factor.astype(dtype)).astype(leaf.dtype)

  return jax.tree.map(scale, tree)
