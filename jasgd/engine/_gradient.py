"""A learner's work: the gradient of one minibatch, as a compiled function."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from jasgd import tasks


class Gradient(NamedTuple):
  """What a learner sends to the server."""

  gradient: Any  # Like the params.
  stats: Any  # The statistics after this minibatch.
  loss: jax.Array  # shape=(), of this minibatch.


def make_gradient(task: tasks.Task) -> Callable[..., Gradient]:
  r"""Compiles the gradient of a task: all that a learner computes.

  .. math:: g = \nabla f(w; \text{seed}, \text{learner}, \text{step})

  On a CPU the minibatch is worked off in parts that fit the cache, if the task
  says so, and the mean is taken.

  Args:
    task: What is learned.

  Returns:
    A jitted `gradient(params, stats, data, seed, learner, step) -> Gradient`.
    `data` is `task.data`, or, if the task is streamed, the minibatch itself.

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
  num_parts = task.batch // size if jax.default_backend() == 'cpu' else 1
  batches = None if task.is_streamed else task.batches
  return _compile(task.loss, batches, num_parts)


# The functions are what counts, and not the task: this keeps no data alive.
@functools.lru_cache(maxsize=32)
def _compile(
  loss: Callable[..., Any], batches: Callable[..., Any] | None, num_parts: int
) -> Callable[..., Gradient]:
  """The same function each time, so that nothing is compiled twice."""
  differentiate = jax.value_and_grad(loss, has_aux=True)

  def gradient(
    params: Any, stats: Any, data: Any, seed: Any, learner: Any, step: Any
  ) -> Gradient:
    batch = data if batches is None else batches(data, seed, learner, step)
    key = tasks.fold_key(seed, learner, step)
    if num_parts > 1:
      return _sum_parts(differentiate, num_parts, params, stats, batch, key)
    (value, stats), grads = differentiate(params, stats, batch, key)
    return Gradient(grads, stats, value)

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
