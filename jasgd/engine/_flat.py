"""A learner's and a server's work on flat buffers, as a real run does it.

A real run, and its exact replay, call these functions and no others: the same
compiled programs on the same numbers give the same bits.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jasgd import tasks
from jasgd.engine import _gradient
from jasgd.engine import _layout
from jasgd.engine import _local
from jasgd.engine import _update


class Push(NamedTuple):
  """What a learner has to say about a minibatch."""

  message: tuple[Any, Any]  # (gradient, stats), which the layout packs.
  loss: jax.Array  # shape=()
  is_finite: jax.Array  # shape=(), bool: gradient and loss.


class Learner(NamedTuple):
  """A learner's work, jitted.

  Attributes:
    compute: `(parts, data, seed, learner, step) -> Push`.
    start_copy: `(parts) -> copy`, for a learner that steps on its own.
    keep_copy: `(copy, parts) -> copy`: new weights; what it has gathered stays.
    step_copy: `(copy, data, seed, learner, step, rate) -> copy`.
    push_copy: `(copy) -> (Push, copy)`: what it gathered, and the copy without.
  """

  compute: Callable[..., Push]
  start_copy: Callable[..., _local.Copy]
  keep_copy: Callable[..., _local.Copy]
  step_copy: Callable[..., _local.Copy]
  push_copy: Callable[..., tuple[Push, _local.Copy]]


class Server(NamedTuple):
  """A server's work on parts of buffers; as `Update`, which see.

  Attributes:
    init: `(params, stats) -> state`.
    accumulate: `(state, parts, staleness, stale_parts) -> state`.
    update: `(state, rate, num_learners) -> state`.
    apply: `(state, parts, staleness, stale_parts, rate, num_learners, *,
      is_single) -> state`.
    apply_many: `(state, pushes) -> state`: an update for each of several
      (parts, staleness, stale_parts, rate, num_learners), in one call.
    measure_gap: `(state, stale_parts) -> |w - w_stale|`.
    get_factor: `(staleness, clock) -> factor` of the policy.
  """

  init: Callable[..., _update.ServerState]
  accumulate: Callable[..., _update.ServerState]
  update: Callable[..., _update.ServerState]
  apply: Callable[..., _update.ServerState]
  apply_many: Callable[..., _update.ServerState]
  measure_gap: Callable[..., jax.Array]
  get_factor: Callable[..., jax.Array]


def make_learner(
  task: tasks.Task, layout: _layout.Layout, num_devices: int = 1
) -> Learner:
  """Compiles what a learner computes.

  Args:
    task: What is learned.
    layout: Of (params, stats).
    num_devices: Over how many of this process's devices a minibatch is spread.

  Returns:
    The functions.

  Raises:
    ValueError: if the minibatch cannot be spread over so many devices.
  """
  if task.batch % num_devices:
    raise ValueError(
      f'A batch of {task.batch} cannot be spread evenly over {num_devices} '
      'devices.'
    )
  return _compile_learner(
    _gradient.make_gradient(task, num_devices),
    _local.make_local_step(task),
    layout,
  )


@functools.lru_cache(maxsize=32)
def _compile_learner(
  gradient: Callable[..., _gradient.Gradient],
  local_step: Callable[..., _local.Copy],
  layout: _layout.Layout,
) -> Learner:
  """The same functions each time, so that nothing is compiled twice."""

  def make_push(result: _gradient.Gradient) -> Push:
    numbers = jax.tree.leaves((result.gradient, result.loss))
    is_finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in numbers])
    return Push(
      (result.gradient, result.stats), result.loss, jnp.all(is_finite)
    )

  def compute(
    parts: Any, data: Any, seed: Any, learner: Any, step: Any
  ) -> Push:
    params, stats = layout.split(parts)
    return make_push(gradient(params, stats, data, seed, learner, step))

  def start_copy(parts: Any) -> _local.Copy:
    return _local.start_copy(*layout.split(parts))

  def keep_copy(copy: _local.Copy, parts: Any) -> _local.Copy:
    params, stats = layout.split(parts)
    return copy._replace(params=params, stats=stats)

  def push_copy(copy: _local.Copy) -> tuple[Push, _local.Copy]:
    return make_push(_local.get_push(copy)), _local.empty_copy(copy)

  return Learner(
    compute=jax.jit(compute),
    start_copy=jax.jit(start_copy),
    keep_copy=jax.jit(keep_copy),
    step_copy=local_step,
    push_copy=jax.jit(push_copy),
  )


@functools.lru_cache(maxsize=32)
def make_server(update: _update.Update, layout: _layout.Layout) -> Server:
  """Compiles what a server does, for gradients that come in buffers.

  Args:
    update: What `make_update` gave.
    layout: Of (params, stats).

  Returns:
    The functions; those that take a state donate it.
  """

  def read_gradient(parts: Any) -> _gradient.Gradient:
    gradient, stats = layout.split(parts)
    return _gradient.Gradient(gradient, stats, jnp.zeros(()))

  def read_params(parts: Any) -> Any:
    params, _ = layout.split(parts)
    return params

  def accumulate(
    state: _update.ServerState, parts: Any, staleness: Any, stale_parts: Any
  ) -> _update.ServerState:
    return update.accumulate(
      state, read_gradient(parts), staleness, read_params(stale_parts)
    )

  def apply(
    state: _update.ServerState,
    parts: Any,
    staleness: Any,
    stale_parts: Any,
    rate: Any,
    num_learners: Any,
    *,
    is_single: bool,
  ) -> _update.ServerState:
    return update.apply(
      state,
      read_gradient(parts),
      staleness,
      read_params(stale_parts),
      rate,
      num_learners,
      is_single=is_single,
    )

  def apply_many(
    state: _update.ServerState, pushes: tuple[tuple[Any, ...], ...]
  ) -> _update.ServerState:
    for push in pushes:
      state = apply(state, *push, is_single=True)
    return state

  def measure_gap(state: _update.ServerState, stale_parts: Any) -> jax.Array:
    return update.measure_gap(state, read_params(stale_parts))

  donated = functools.partial(jax.jit, donate_argnums=0)
  return Server(
    init=update.init,
    accumulate=donated(accumulate),
    update=update.update,
    apply=donated(apply, static_argnames='is_single'),
    apply_many=donated(apply_many),
    measure_gap=jax.jit(measure_gap),
    get_factor=update.get_factor,
  )
