"""What a node does to its weights: a step, and a mix, as compiled functions."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jasgd import tasks
from jasgd.engine import _gradient


class Node(NamedTuple):
  """What a node has."""

  params: Any
  stats: Any
  opt_state: optax.OptState


class NodeFunctions(NamedTuple):
  """A node's work, as pure, jitted functions.

  Attributes:
    step: `(node, stale, data, seed, learner, step, rate) -> (node, loss)`. The
      gradient is computed at `stale`, a (params, stats), and applied to the
      node's own weights.
    mix: `(node, others, weights, own_weight) -> node`. `others` are (params,
      stats) with a leading axis; those of weight 0 do not count.
  """

  step: Callable[..., tuple[Node, jax.Array]]
  mix: Callable[..., Node]


def make_node_functions(
  task: tasks.Task, optimizer: optax.GradientTransformation
) -> NodeFunctions:
  r"""Compiles what a node does.

  .. math::
    x_i \leftarrow x_i + r \, \text{optimizer}(\nabla f(x_i)), \quad
    x_i \leftarrow w_{ii} x_i + \sum_j w_{ij} x_j

  Statistics that are not trained are mixed like the weights; what the optimizer
  keeps stays with its node.

  Args:
    task: What is learned.
    optimizer: Any optax optimizer.

  Returns:
    The functions.
  """
  return _compile(
    _gradient.make_gradient(task), optax.with_extra_args_support(optimizer)
  )


@functools.lru_cache(maxsize=32)
def _compile(
  gradient: Callable[..., _gradient.Gradient],
  optimizer: optax.GradientTransformationExtraArgs,
) -> NodeFunctions:
  """The same functions each time, so that nothing is compiled twice."""

  def step(
    node: Node,
    stale: tuple[Any, Any],
    data: Any,
    seed: Any,
    learner: Any,
    step: Any,
    rate: Any,
  ) -> tuple[Node, jax.Array]:
    result = gradient(*stale, data, seed, learner, step)
    updates, opt_state = optimizer.update(
      result.gradient, node.opt_state, node.params, stale_params=stale[0]
    )
    updates = jax.tree.map(
      lambda leaf: leaf * jnp.asarray(rate, leaf.dtype), updates
    )
    params = optax.apply_updates(node.params, updates)
    return Node(params, result.stats, opt_state), result.loss

  def mix(node: Node, others: Any, weights: Any, own_weight: Any) -> Node:
    def average(own: jax.Array, other: jax.Array) -> jax.Array:
      shares = jnp.asarray(weights, jnp.result_type(float))
      # Rows that do not count may hold anything; zero times that might be NaN.
      shape = (-1,) + (1,) * own.ndim
      counted = jnp.where(shares.reshape(shape) == 0, 0, other)
      mixed = own_weight * own + jnp.tensordot(shares, counted, 1)
      return mixed.astype(own.dtype)

    own = (node.params, node.stats)
    params, stats = jax.tree.map(average, own, others)
    return node._replace(params=params, stats=stats)

  return NodeFunctions(jax.jit(step), jax.jit(mix))
