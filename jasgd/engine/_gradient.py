"""A learner's work: the gradient of one minibatch, as a compiled function."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import sharding
import jax.numpy as jnp

from jasgd import tasks


class Gradient(NamedTuple):
  """A gradient, with the statistics and the loss of its minibatch."""

  gradient: Any  # Tree like the params.
  stats: Any  # Statistics after this minibatch.
  loss: jax.Array  # shape=(): loss of this minibatch.


def make_gradient(
  task: tasks.Task, num_devices: int = 1
) -> Callable[..., Gradient]:
  r"""Compiles the gradient of a task.

  .. math:: g = \nabla f(w; \text{seed}, \text{learner}, \text{step})

  On a CPU, a task with a `chunk` has its minibatch computed in parts that fit
  the cache; the gradient is the mean over the parts.

  Args:
    task: Task to learn.
    num_devices: Number of devices of this process that a minibatch is spread
      over. This changes a gradient by rounding only.

  Returns:
    A jitted `gradient(params, stats, data, seed, learner, step) -> Gradient`.
    `data` is `task.data`; if the task is streamed, the minibatch itself.

  Examples:
    >>> import jax
    >>> from jasgd import engine, tasks
    >>> task = tasks.make_task('quadratic', batch=1)
    >>> gradient = engine.make_gradient(task)
    >>> params, stats = task.init(jax.random.key(0))
    >>> result = gradient(params, stats, task.data, 0, 1, 2)
    >>> result.gradient.shape == params.shape
    True
  """
  size = tasks.choose_chunk(task.batch, task.chunk)
  is_whole = jax.default_backend() != 'cpu' or num_devices > 1
  num_parts = 1 if is_whole else task.batch // size
  batches = None if task.is_streamed else task.batches
  return _compile(task.loss, batches, num_parts, num_devices)


# The cache is keyed by functions and not by the task, since it would keep the
# task's data in memory.
@functools.lru_cache(maxsize=32)
def _compile(
  loss: Callable[..., Any],
  batches: Callable[..., Any] | None,
  num_parts: int,
  num_devices: int,
) -> Callable[..., Gradient]:
  """Compiles a gradient, once for equal arguments."""
  differentiate = jax.value_and_grad(loss, has_aux=True)

  def gradient(
    params: Any, stats: Any, data: Any, seed: Any, learner: Any, step: Any
  ) -> Gradient:
    batch = data if batches is None else batches(data, seed, learner, step)
    if num_devices > 1:
      batch = _constrain(batch, num_devices, 'batch')
    key = tasks.fold_key(seed, learner, step)
    if num_parts > 1:
      return _sum_parts(differentiate, num_parts, params, stats, batch, key)
    (value, stats), grads = differentiate(params, stats, batch, key)
    result = Gradient(grads, stats, value)
    return _constrain(result, num_devices) if num_devices > 1 else result

  return jax.jit(gradient)


def _sum_parts(
  differentiate: Callable[..., Any],
  num_parts: int,
  params: Any,
  stats: Any,
  batch: Any,
  key: jax.Array,
) -> Gradient:
  """The gradient of a mean as the mean of the gradients of equal parts."""
  parts = jax.tree.map(
    lambda leaf: leaf.reshape((num_parts, -1, *leaf.shape[1:])), batch
  )

  def differentiate_part(index: Any) -> Any:
    part = jax.tree.map(lambda leaf: leaf[index], parts)
    (loss, _), grads = differentiate(
      params, stats, part, jax.random.fold_in(key, index)
    )
    return loss, grads

  def add(index: Any, total: Any) -> Any:
    return jax.tree.map(jnp.add, total, differentiate_part(index))

  total = lax.fori_loop(1, num_parts, add, differentiate_part(0))
  loss, grads = jax.tree.map(lambda leaf: leaf / num_parts, total)
  return Gradient(grads, stats, loss)


def choose_devices(batch: int) -> int:
  """Number of this process's devices that can share a minibatch evenly."""
  num_devices = jax.local_device_count()
  while batch % num_devices:
    num_devices -= 1
  return num_devices


def place_data(data: Any, num_devices: int) -> Any:
  """Copies a task's data to each device, if there are several."""
  if num_devices == 1:
    return data
  return jax.device_put(data, _make_sharding(num_devices))


def _make_sharding(num_devices: int, *axes: str) -> sharding.NamedSharding:
  """Sharding over the first devices: by `axes`, or without them replicated."""
  mesh = sharding.Mesh(jax.local_devices()[:num_devices], ('batch',))
  return sharding.NamedSharding(mesh, sharding.PartitionSpec(*axes))


def _constrain(tree: Any, num_devices: int, *axes: str) -> Any:
  """Tells the compiler how arrays are placed on the devices."""
  placed = _make_sharding(num_devices, *axes)
  return jax.tree.map(
    lambda leaf: lax.with_sharding_constraint(leaf, placed), tree
  )
