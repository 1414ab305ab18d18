"""The work of a node and of an elastic centre, as compiled functions."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from jasgd import tasks
from jasgd.engine import _gradient
from jasgd.engine import _layout

_Weights = tuple[Any, Any]  # (params, stats)


class NodeState(NamedTuple):
  """Weights of a node, and the state of its optimizer."""

  params: Any
  stats: Any  # Statistics that are not trained.
  opt_state: optax.OptState


class NodeFunctions(NamedTuple):
  """Work of a node and of a centre, as pure, jitted functions.

  They donate their first argument, except `start` and `gradient`. `views` are
  the views of a message (`Layout.view`).

  Attributes:
    start: Function `((params, stats)) -> node`, which copies the weights.
    step: Function `(node, data, seed, learner, step, rate) -> (node, loss)`.
      `rate` is a factor on the optimizer's updates, or None for no factor.
    step_at: Function `(node, views, data, seed, learner, step, rate) -> (node,
      loss)`. It computes the gradient at the weights in `views`, and applies it
      to the node. These are older weights of the node itself, which were never
      sent: their layout rounds nothing.
    join: Function `(node, step) -> node` for a node that has just joined. Its
      optimizer gets a fresh state with counts that begin at `step`.
    mix: Function `(node, views, own_weight, weight) -> node`. Several messages
      need one call each: the first with the own weight, the others with 1.
    pull_centre: Function `(node, views, rate) -> (node, force)`. It moves the
      node towards the centre by the force, a tree like (params, stats).
    move_centre: Function `((params, stats), views, weight) -> (params, stats)`.
      It moves the centre by the force in `views`.
    gradient: Function `(params, stats, data, seed, learner, step) -> Gradient`:
      the first half of a step, if gradients are averaged.
    update: Function `(node, (gradient, stats), rate) -> node`: the second half.
  """

  start: Callable[..., NodeState]
  step: Callable[..., tuple[NodeState, jax.Array]]
  step_at: Callable[..., tuple[NodeState, jax.Array]]
  join: Callable[..., NodeState]
  mix: Callable[..., NodeState]
  pull_centre: Callable[..., tuple[NodeState, _Weights]]
  move_centre: Callable[..., _Weights]
  gradient: Callable[..., _gradient.Gradient]
  update: Callable[..., NodeState]


class NodeWork(NamedTuple):
  """Work of a node on trees, to be compiled as part of a larger program.

  Attributes:
    gradient: Function `(params, stats, data, seed, learner, step) -> Gradient`.
    update: Function `(node, gradient, stale_params, rate, params=None) ->
      node`. The optimizer gets `params`, if given, as the current weights; its
      updates are added to the node's weights. The node gets the gradient's
      statistics.
    init: Function `(params) -> opt_state`.
  """

  gradient: Callable[..., _gradient.Gradient]
  update: Callable[..., NodeState]
  init: Callable[..., optax.OptState]


def make_node_functions(
  task: tasks.Task,
  optimizer: optax.GradientTransformation,
  layout: _layout.Layout,
) -> NodeFunctions:
  r"""Compiles a node's work: real nodes and exact replay call these functions.

  .. math::
    \text{step:} \quad & x \leftarrow x + r \, \text{optimizer}(\nabla f(x)) \\
    \text{mix:} \quad & x \leftarrow w_0 x + w_1 x_1, \quad
      x \leftarrow x + w_k x_k \\
    \text{elastic:} \quad & e = \alpha (x - c), \quad
      x \leftarrow x - e, \quad c \leftarrow c + e

  Statistics that are not trained are mixed like the weights, if they are
  floats; other numbers, and the optimizer's state, stay with their node. The
  force e is first rounded to the dtype of its message, and then subtracted, so
  that the sum of x and c does not change.

  Args:
    task: Task to learn.
    optimizer: Any optax optimizer.
    layout: Layout of (params, stats) in messages.

  Returns:
    The functions.

  Examples:
    >>> import jax, numpy as np, optax
    >>> from jasgd import engine, tasks
    >>> task = tasks.make_task('quadratic', batch=1)
    >>> weights = task.init(jax.random.key(0))
    >>> layout = engine.make_layout(weights)
    >>> functions = engine.make_node_functions(task, optax.sgd(0.1), layout)
    >>> node = functions.start(weights)
    >>> node, loss = functions.step(node, task.data, 0, 0, 0, None)
    >>> buffer = np.empty(layout.size, np.uint8)
    >>> layout.pack(weights, buffer)
    >>> node = functions.mix(node, layout.view(buffer), 0.5, 0.5)

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016; Zhang et al., `Deep learning
    with Elastic Averaging SGD <https://arxiv.org/abs/1412.6651>`_, 2015
  """
  return _compile(make_node_work(task, optimizer), layout)


def make_node_work(
  task: tasks.Task, optimizer: optax.GradientTransformation
) -> NodeWork:
  """Makes the work of a node on trees, as functions to be compiled."""
  return _make_work(_gradient.make_gradient(task), optimizer)


def make_node(weights: _Weights, opt_state: optax.OptState) -> NodeState:
  """Makes a node from its (params, stats) and its optimizer's state."""
  params, stats = weights
  return NodeState(params, stats, opt_state)


def join_at(work: NodeWork, node: NodeState, step: Any) -> NodeState:
  """Gives a node an optimizer with a fresh state that counts from a step.

  Thus the schedule of a joiner continues where that of its peer is. Counts are
  the fields that optax calls `count`: those of schedules, Adam, and others.

  Args:
    work: Work of the node.
    node: Node with the weights that it received.
    step: Number of steps that its peer has made.

  Returns:
    The node with the new state.
  """

  def set_count(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    is_count = bool(path) and getattr(path[-1], 'name', None) == 'count'
    return jnp.full_like(leaf, step) if is_count else leaf

  state = jax.tree.map(jnp.asarray, work.init(node.params))
  return node._replace(
    opt_state=jax.tree_util.tree_map_with_path(set_count, state)
  )


def mix_weights(own: Any, other: Any, own_weight: Any, weight: Any) -> Any:
  """`own_weight * own + weight * other` for all floats, in the own dtypes."""

  def mix(own: jax.Array, other: jax.Array) -> jax.Array:
    if not jnp.issubdtype(own.dtype, jnp.inexact):
      return own
    dtype = jnp.promote_types(own.dtype, jnp.float32)
    mixed = jnp.asarray(own_weight, dtype) * own.astype(dtype)
    mixed += jnp.asarray(weight, dtype) * other.astype(dtype)
    return mixed.astype(own.dtype)

  return jax.tree.map(mix, own, other)


def add_changes(own: Any, new: Any, old: Any) -> Any:
  """Adds the change that a minibatch made to the statistics that it read.

  The node's statistics may have been mixed since they were read; adding keeps
  that mix. Integers are never mixed: the new ones replace the old.
  """

  def add(own: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if not jnp.issubdtype(own.dtype, jnp.inexact):
      return new
    return own + (new - old)

  return jax.tree.map(add, own, new, old)


def measure_force(own: Any, centre: Any, rate: Any) -> Any:
  """`rate * (own - centre)` for floats, in the own dtypes; 0 for integers."""

  def measure(own: jax.Array, centre: jax.Array) -> jax.Array:
    if not jnp.issubdtype(own.dtype, jnp.inexact):
      return jnp.zeros_like(own)
    dtype = jnp.promote_types(own.dtype, jnp.float32)
    force = own.astype(dtype) - centre.astype(dtype)
    return (jnp.asarray(rate, dtype) * force).astype(own.dtype)

  return jax.tree.map(measure, own, centre)


def round_weights(tree: Any, layout: _layout.Layout) -> Any:
  """Rounds weights, or a force, like a message of that layout."""
  leaves = []
  for leaf, array in zip(
    layout.leaves, layout.treedef.flatten_up_to(tree), strict=True
  ):
    stored = layout.parts[leaf.part].dtype
    if stored != leaf.dtype:
      # XLA may remove a conversion together with its inverse; it does not
      # remove reduce_precision.
      info = jnp.finfo(stored)
      array = lax.reduce_precision(array, info.nexp, info.nmant)
    leaves.append(array)
  return layout.treedef.unflatten(leaves)


# The cache is keyed by the gradient and not by the task: it would keep the
# task's data in memory.
@functools.lru_cache(maxsize=32)
def _make_work(
  gradient: Callable[..., _gradient.Gradient],
  optimizer: optax.GradientTransformation,
) -> NodeWork:
  """Makes a node's work, once for equal arguments.

  The result is a key of the caches of compiled functions.
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def update(
    node: NodeState,
    result: _gradient.Gradient,
    stale_params: Any,
    rate: Any,
    params: Any = None,
  ) -> NodeState:
    updates, opt_state = optimizer.update(
      result.gradient,
      node.opt_state,
      node.params if params is None else params,
      stale_params=stale_params,
    )
    if rate is not None:
      updates = jax.tree.map(
        lambda leaf: leaf * jnp.asarray(rate, leaf.dtype), updates
      )
    new_params = optax.apply_updates(node.params, updates)
    return NodeState(new_params, result.stats, opt_state)

  return NodeWork(gradient, update, optimizer.init)


@functools.lru_cache(maxsize=32)
def _compile(work: NodeWork, layout: _layout.Layout) -> NodeFunctions:
  """Compiles a node's functions, once for equal arguments."""
  whole = _make_whole_layout(layout)

  def start(weights: _Weights) -> NodeState:
    # Copies: the node is donated, and two leaves must not share a buffer.
    params, stats = jax.tree.map(jnp.array, weights)
    return NodeState(params, stats, jax.tree.map(jnp.array, work.init(params)))

  def step(
    node: NodeState, data: Any, seed: Any, learner: Any, step: Any, rate: Any
  ) -> tuple[NodeState, jax.Array]:
    result = work.gradient(node.params, node.stats, data, seed, learner, step)
    return work.update(node, result, node.params, rate), result.loss

  def step_at(
    node: NodeState,
    views: Any,
    data: Any,
    seed: Any,
    learner: Any,
    step: Any,
    rate: Any,
  ) -> tuple[NodeState, jax.Array]:
    params, stats = whole.split(views)
    result = work.gradient(params, stats, data, seed, learner, step)
    changed = add_changes(node.stats, result.stats, stats)
    result = result._replace(stats=changed)
    return work.update(node, result, params, rate), result.loss

  def join(node: NodeState, step: Any) -> NodeState:
    return join_at(work, node, step)

  def mix(
    node: NodeState, views: Any, own_weight: Any, weight: Any
  ) -> NodeState:
    own = (node.params, node.stats)
    params, stats = mix_weights(own, layout.split(views), own_weight, weight)
    return node._replace(params=params, stats=stats)

  def pull_centre(
    node: NodeState, views: Any, rate: Any
  ) -> tuple[NodeState, _Weights]:
    own = (node.params, node.stats)
    force = measure_force(own, layout.split(views), rate)
    # Before the node moves: it must move by the same force as the centre.
    force = round_weights(force, layout)
    params, stats = mix_weights(own, force, 1.0, -1.0)
    return node._replace(params=params, stats=stats), force

  def move_centre(centre: _Weights, views: Any, weight: Any) -> _Weights:
    return mix_weights(centre, layout.split(views), 1.0, weight)

  def update(node: NodeState, mean: tuple[Any, Any], rate: Any) -> NodeState:
    result = _gradient.Gradient(*mean, jnp.zeros(()))
    return work.update(node, result, node.params, rate)

  donated = functools.partial(jax.jit, donate_argnums=0)
  return NodeFunctions(
    start=start,
    step=donated(step),
    step_at=donated(step_at),
    join=donated(join),
    mix=donated(mix),
    pull_centre=donated(pull_centre),
    move_centre=donated(move_centre),
    gradient=work.gradient,
    update=donated(update),
  )


def _make_whole_layout(layout: _layout.Layout) -> _layout.Layout:
  """The layout of the same tree without rounding."""
  leaves = [
    jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layout.leaves
  ]
  return _layout.make_layout(layout.treedef.unflatten(leaves))
