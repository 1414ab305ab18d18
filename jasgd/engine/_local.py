"""Learners that step on a copy of the weights between their fetches."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jasgd import tasks
from jasgd.engine import _gradient


class Copy(NamedTuple):
  """A learner's own weights, and what it has gathered since its last push."""

  params: Any
  stats: Any
  gradient_sum: Any
  loss_sum: jax.Array  # shape=()
  num_gathered: jax.Array  # shape=(), int32


def start_copy(params: Any, stats: Any) -> Copy:
  """A learner has fetched weights, and gathered nothing yet."""
  return Copy(
    params=params,
    stats=stats,
    gradient_sum=jax.tree.map(jnp.zeros_like, params),
    loss_sum=jnp.zeros(()),
    num_gathered=jnp.zeros((), jnp.int32),
  )


def make_local_step(
  task: tasks.Task,
) -> Callable[..., Copy]:
  r"""Compiles one step of a learner on its own copy.

  .. math:: s \leftarrow s + g(w), \quad w \leftarrow w - r \, g(w)

  Args:
    task: What is learned.

  Returns:
    A jitted `(copy, data, seed, learner, step, rate) -> copy`.

  References:
    Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012
  """
  return _compile(_gradient.make_gradient(task))


@functools.lru_cache(maxsize=32)
def _compile(
  gradient: Callable[..., _gradient.Gradient],
) -> Callable[..., Copy]:
  """The same function each time, so that nothing is compiled twice."""

  def step_once(
    copy: Copy, data: Any, seed: Any, learner: Any, step: Any, rate: Any
  ) -> Copy:
    result = gradient(copy.params, copy.stats, data, seed, learner, step)
    return Copy(
      params=jax.tree.map(
        lambda leaf, grad: leaf - jnp.asarray(rate, leaf.dtype) * grad,
        copy.params,
        result.gradient,
      ),
      stats=result.stats,
      gradient_sum=jax.tree.map(jnp.add, copy.gradient_sum, result.gradient),
      loss_sum=copy.loss_sum + result.loss.astype(copy.loss_sum.dtype),
      num_gathered=copy.num_gathered + 1,
    )

  return jax.jit(step_once)


def get_push(copy: Copy) -> _gradient.Gradient:
  """What a learner sends: the sum of its gradients, and their mean loss."""
  return _gradient.Gradient(
    copy.gradient_sum, copy.stats, copy.loss_sum / copy.num_gathered
  )


def empty_copy(copy: Copy) -> Copy:
  """The copy after a push: the weights stay, what was gathered is gone."""
  return start_copy(copy.params, copy.stats)
