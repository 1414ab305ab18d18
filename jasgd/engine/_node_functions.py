"""What a node and an elastic centre compute, as compiled functions."""

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
  """A node's weights, and what its optimizer keeps."""

  params: Any
  stats: Any
  opt_state: optax.OptState


class NodeFunctions(NamedTuple):
  """A node's and a centre's work, as pure, jitted functions.

  The first argument, which is changed, is donated. `parts` are views of a
  buffer with other weights, as a message brings them.

  Attributes:
    start: `((params, stats)) -> node`, in buffers of its own.
    step: `(node, data, seed, learner, step, rate) -> (node, loss)`. `rate` is a
      factor on the optimizer's updates; None leaves them alone.
    step_at: `(node, parts, data, seed, learner, step, rate) -> (node, loss)`.
      The gradient is computed at other weights than the node's, and applied to
      the node's. These never were in a message: the parts are of a layout that
      rounds nothing.
    join: `(node, step) -> node`. The optimizer of a node that has just joined
      starts with a fresh state, but counts from the step that it takes over.
    mix: `(node, parts, own_weight, weight) -> node`. For several others, one
      call for each: the own weight in the first one, and 1 in the others.
    pull_centre: `(node, parts, rate) -> (node, force)`. The node moves towards
      the centre by the force, which is like (params, stats).
    move_centre: `((params, stats), parts, weight) -> (params, stats)`. The
      centre moves by the force that is in the parts.
    gradient: `(params, stats, data, seed, learner, step) -> Gradient`. Nothing
      is donated. The first half of a step, if all gradients are averaged.
    update: `(node, (gradient, stats), rate) -> node`. The second half.
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
  """A node's work on trees, to be compiled as part of something larger.

  Attributes:
    gradient: `(params, stats, data, seed, learner, step) -> Gradient`.
    update: `(node, gradient, stale_params, rate, params=None) -> node`. The own
      weights are changed, and the optimizer takes `params` for them, if given.
      The node gets the gradient's statistics.
    init: `(params) -> opt_state`.
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
  force e is rounded as its message will be before the node moves, so that the
  sum of x and c does not change.

  Args:
    task: The task to learn.
    optimizer: Any optax optimizer.
    layout: The layout of (params, stats) in messages.

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
  """A node's work on trees, as functions to be compiled."""
  return _make_work(_gradient.make_gradient(task), optimizer)


def make_node(weights: _Weights, opt_state: optax.OptState) -> NodeState:
  """A node from its (params, stats) and its optimizer's state."""
  params, stats = weights
  return NodeState(params, stats, opt_state)


def join_at(work: NodeWork, node: NodeState, step: Any) -> NodeState:
  """A node whose optimizer has a fresh state that counts from a step.

  So the schedule of a joiner goes on where its peer's is. Counts are the fields
  that optax calls `count`: those of schedules, Adam, and others.

  Args:
    work: The node's work.
    node: The node, with the weights that it has got.
    step: Step that it takes over.

  Returns:
    The node.
  """

  def set_count(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    is_count = bool(path) and getattr(path[-1], 'name', None) == 'count'
    return jnp.full_like(leaf, step) if is_count else leaf

  state = jax.tree.map(jnp.asarray, work.init(node.params))
  return node._replace(
    opt_state=jax.tree_util.tree_map_with_path(set_count, state)
  )


def mix_weights(own: Any, other: Any, own_weight: Any, weight: Any) -> Any:
  """`own_weight * own + weight * other`, of all floats, in the own dtypes."""

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

  Others may have averaged with the node meanwhile, and that must not be lost.
  Integers are never mixed: the new ones are taken.
  """

  def add(own: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if not jnp.issubdtype(own.dtype, jnp.inexact):
      return new
    return own + (new - old)

  return jax.tree.map(add, own, new, old)


def measure_force(own: Any, centre: Any, rate: Any) -> Any:
  """`rate * (own - centre)`, in the own dtypes; of what is no float, 0."""

  def measure(own: jax.Array, centre: jax.Array) -> jax.Array:
    if not jnp.issubdtype(own.dtype, jnp.inexact):
      return jnp.zeros_like(own)
    dtype = jnp.promote_types(own.dtype, jnp.float32)
    force = own.astype(dtype) - centre.astype(dtype)
    return (jnp.asarray(rate, dtype) * force).astype(own.dtype)

  return jax.tree.map(measure, own, centre)


def round_weights(tree: Any, layout: _layout.Layout) -> Any:
  """Weights, or a force, as they come out of a message of that layout."""
  leaves = []
  for leaf, array in zip(
    layout.leaves, layout.treedef.flatten_up_to(tree), strict=True
  ):
    stored = layout.parts[leaf.part].dtype
    if stored != leaf.dtype:
      # A compiler may leave out a conversion and its inverse, but not this.
      info = jnp.finfo(stored)
      array = lax.reduce_precision(array, info.nexp, info.nmant)
    leaves.append(array)
  return layout.treedef.unflatten(leaves)


# The key has the functions, and not the task: this keeps no data alive.
@functools.lru_cache(maxsize=32)
def _make_work(
  gradient: Callable[..., _gradient.Gradient],
  optimizer: optax.GradientTransformation,
) -> NodeWork:
  """Cached, so that nothing is compiled twice."""
  # It must not be made anew for each call either: it is a key as well.
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
  """Cached, so that nothing is compiled twice."""
  whole = _make_whole_layout(layout)

  def start(weights: _Weights) -> NodeState:
    # Copies, as all of it is donated: two leaves must not be one buffer.
    params, stats = jax.tree.map(jnp.array, weights)
    return NodeState(params, stats, jax.tree.map(jnp.array, work.init(params)))

  def step(
    node: NodeState, data: Any, seed: Any, learner: Any, step: Any, rate: Any
  ) -> tuple[NodeState, jax.Array]:
    result = work.gradient(node.params, node.stats, data, seed, learner, step)
    return work.update(node, result, node.params, rate), result.loss

  def step_at(
    node: NodeState,
    parts: Any,
    data: Any,
    seed: Any,
    learner: Any,
    step: Any,
    rate: Any,
  ) -> tuple[NodeState, jax.Array]:
    params, stats = whole.split(parts)
    result = work.gradient(params, stats, data, seed, learner, step)
    changed = add_changes(node.stats, result.stats, stats)
    result = result._replace(stats=changed)
    return work.update(node, result, params, rate), result.loss

  def join(node: NodeState, step: Any) -> NodeState:
    return join_at(work, node, step)

  def mix(
    node: NodeState, parts: Any, own_weight: Any, weight: Any
  ) -> NodeState:
    own = (node.params, node.stats)
    params, stats = mix_weights(own, layout.split(parts), own_weight, weight)
    return node._replace(params=params, stats=stats)

  def pull_centre(
    node: NodeState, parts: Any, rate: Any
  ) -> tuple[NodeState, _Weights]:
    own = (node.params, node.stats)
    force = measure_force(own, layout.split(parts), rate)
    force = round_weights(force, layout)
    params, stats = mix_weights(own, force, 1.0, -1.0)
    return node._replace(params=params, stats=stats), force

  def move_centre(centre: _Weights, parts: Any, weight: Any) -> _Weights:
    return mix_weights(centre, layout.split(parts), 1.0, weight)

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
  """The layout of the same tree that rounds nothing."""
  leaves = [
    jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layout.leaves
  ]
  return _layout.make_layout(layout.treedef.unflatten(leaves))
