"""The server's work on gradients: `make_aggregation`, and `softsync`."""

from collections.abc import Callable
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jasgd.transforms import _checks
from jasgd.transforms import _staleness
from jasgd.transforms import _trees
from jasgd.transforms import policies


class AggregationState(NamedTuple):
  """State of `make_aggregation` and of `softsync`."""

  server_clock: jax.Array  # shape=(), int32: number of updates.
  group_size: jax.Array  # shape=(), int32: gradients since the last update.
  group_staleness: jax.Array  # shape=(), float32: sum over these gradients.
  last_group_staleness: jax.Array  # shape=(), float32: mean of the last update.
  gradient_sum: Any  # Sum of these gradients; undefined while group_size is 0.
  per_gradient_state: optax.OptState
  per_update_state: optax.OptState


class Aggregation(NamedTuple):
  """The server's work on gradients, as pure functions.

  Attributes:
    init: Function `(params) -> state`.
    accumulate: Function `(state, gradient, params, *, staleness,
      stale_params=None, **extra_args) -> state`. It runs the per-gradient chain
      and adds the result to the sum. `read_clock` may replace `staleness`.
    update: Function `(state, params, *, like=None, **extra_args) -> (updates,
      state)`. It steps the optimizer once, on the mean of the gradients since
      the last update, in the dtypes of `like`, by default those of the params.
      There must be at least one gradient: the mean of none is NaN, and the
      weights would become NaN too.
  """

  init: Callable[..., AggregationState]
  accumulate: Callable[..., AggregationState]
  update: Callable[..., tuple[optax.Updates, AggregationState]]


def make_aggregation(
  optimizer: optax.GradientTransformation,
  policy: policies.PolicyLike = 'inverse',
  per_gradient: optax.GradientTransformation | None = None,
) -> Aggregation:
  r"""Splits staleness-aware SGD into work per gradient and work per update.

  .. math::
    \bar g = \frac1c \sum_{l=1}^{c} \alpha(\tau_l)\, h(g_l), \quad
    w \leftarrow w + \text{optimizer}(\bar g)

  h is the per-gradient chain. The optimizer is stepped once per update and gets
  the mean staleness of the c gradients as `staleness`. It is not called, and
  gets no zeros, while gradients are gathered.

  Args:
    optimizer: Per-update chain, any optax optimizer.
    policy: Policy alpha, as in `scale_by_staleness`; its count is the server's
      clock.
    per_gradient: Per-gradient chain h, run before the policy: for instance
      `delay_compensation`, `gap_aware`, clipping or `monitor_staleness`.

  Returns:
    Three pure functions: init, accumulate, update.

  Examples:
    >>> import jasgd, jax.numpy as jnp, optax
    >>> server = jasgd.make_aggregation(optax.sgd(0.1), 'inverse')
    >>> params = jnp.array(1.0)
    >>> state = server.init(params)
    >>> for gradient, staleness in ((2.0, 1), (4.0, 2)):
    ...   state = server.accumulate(
    ...       state, jnp.array(gradient), params, staleness=staleness)
    >>> updates, state = server.update(state, params)
    >>> print(f'{updates:.2f} {state.server_clock}')
    -0.20 1

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """
  policy = policies.make_policy(policy)
  optimizer = _checks.check_transform('optimizer', optimizer)
  if per_gradient is None:
    per_gradient = optax.identity()
  per_gradient = _checks.check_transform('per_gradient', per_gradient)

  def init(params: optax.Params) -> AggregationState:
    return AggregationState(
      server_clock=_staleness.zero_clock(),
      group_size=_staleness.zero_clock(),
      group_staleness=jnp.zeros((), jnp.float32),
      last_group_staleness=jnp.zeros((), jnp.float32),
      gradient_sum=_trees.zeros_for_sums(params),
      per_gradient_state=per_gradient.init(params),
      per_update_state=optimizer.init(params),
    )

  def accumulate(
    state: AggregationState,
    gradient: optax.Updates,
    params: optax.Params | None = None,
    *,
    staleness: _staleness.Staleness = None,
    read_clock: _staleness.Staleness = None,
    **extra_args: Any,
  ) -> AggregationState:
    tau = _staleness.resolve_staleness(
      state.server_clock, staleness, read_clock
    )
    gradient, per_gradient_state = per_gradient.update(
      gradient, state.per_gradient_state, params, staleness=tau, **extra_args
    )
    gradient = _trees.scale_tree(gradient, policy(tau, state.server_clock))
    # The first gradient replaces the old sum. Adding it to a sum of zeros would
    # turn -0 into 0, and multiplying an old sum by 0 would keep its NaN.
    is_first = state.group_size == 0

    def add(total: jax.Array, leaf: Any) -> jax.Array:
      leaf = jnp.astype(leaf, total.dtype)
      return jnp.where(is_first, leaf, total + leaf)

    return state._replace(
      group_size=_staleness.tick(state.group_size),
      group_staleness=(
        jnp.where(is_first, 0, state.group_staleness) + tau.astype(jnp.float32)
      ),
      gradient_sum=jax.tree.map(add, state.gradient_sum, gradient),
      per_gradient_state=per_gradient_state,
    )

  def update(
    state: AggregationState,
    params: optax.Params | None = None,
    *,
    like: optax.Updates | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AggregationState]:
    size = state.group_size.astype(jnp.float32)
    mean_staleness = state.group_staleness / size
    mean_gradient = jax.tree.map(
      lambda total, leaf: jnp.astype(total / size, jnp.result_type(leaf)),
      state.gradient_sum,
      params if like is None else like,
    )
    updates, optimizer_state = optimizer.update(
      mean_gradient,
      state.per_update_state,
      params,
      staleness=mean_staleness,
      **extra_args,
    )
    return updates, state._replace(
      server_clock=_staleness.tick(state.server_clock),
      group_size=_staleness.zero_clock(),
      last_group_staleness=mean_staleness,
      per_update_state=_trees.cast_like(
        optimizer_state, state.per_update_state
      ),
    )

  return Aggregation(init, accumulate, update)


def softsync(
  optimizer: optax.GradientTransformation,
  num_gradients: int | jax.Array,
  policy: policies.PolicyLike = 'inverse',
  *,
  per_gradient: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Wraps an optimizer so that c gradients make one update: n-softsync.

  .. math::
    w \leftarrow w + \text{optimizer}\Big(
      \frac1c \sum_{l=1}^{c} \alpha(\tau_l)\, g_l \Big)

  Each gradient gets its own factor, inside the sum. The optimizer's state, with
  its count, changes once per c gradients; the updates in between are zero. Call
  the update inside `jax.jit`: called eagerly, it is compiled in each call.

  Two combinations of optax's own parts look equivalent and are not:

  *   `MultiSteps(chain(scale_by_staleness, sgd), c)` sums first, and then
      scales the mean by the staleness of the last gradient alone.
      `chain(scale_by_staleness, MultiSteps(sgd, c))` keeps each gradient's
      factor and is equivalent, if it is given `staleness` (its own clock counts
      gradients there, not updates).
  *   A transformation that returns zeros until it has c gradients passes those
      zeros to the momentum behind it, which then decays c times per update.

  Args:
    optimizer: Any optax optimizer; stepped once per c gradients.
    num_gradients: Number of gradients per update, c, at least 1. May be traced.
    policy: Policy alpha, as in `scale_by_staleness`.
    per_gradient: Chain that is run on each gradient before the policy and the
      sum, for `delay_compensation`, `gap_aware` and `monitor_staleness`.

  Returns:
    The wrapped optimizer. `update` takes `staleness`, or `read_clock`, which is
    subtracted from the state's clock, a count of updates. For c > 1 the
    optimizer gets no `stale_params`, since each gradient has different ones.

  Raises:
    ValueError: if c is below 1 or not whole.

  Examples:
    >>> import jasgd, jax.numpy as jnp, optax
    >>> optimizer = jasgd.softsync(optax.sgd(0.1), 2)
    >>> params = jnp.array(1.0)
    >>> state = optimizer.init(params)
    >>> for gradient, staleness in ((2.0, 1), (4.0, 2)):
    ...   updates, state = optimizer.update(
    ...       jnp.array(gradient), state, params, staleness=staleness)
    ...   print(f'{updates:.2f}')
    0.00
    -0.20

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """
  _checks.check_at_least('num_gradients', num_gradients, 1)
  if not jnp.issubdtype(jnp.result_type(num_gradients), jnp.integer):
    raise ValueError(f'num_gradients must be whole, got {num_gradients!r}.')
  aggregation = make_aggregation(optimizer, policy, per_gradient)
  # Only a Python int is constant: an array may have another value in the next
  # call, even if it is 1 now.
  is_single = isinstance(num_gradients, numbers.Integral) and (
    num_gradients == 1
  )

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    *,
    staleness: _staleness.Staleness = None,
    read_clock: _staleness.Staleness = None,
    stale_params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AggregationState]:
    state = aggregation.accumulate(
      state,
      updates,
      params,
      staleness=staleness,
      read_clock=read_clock,
      stale_params=stale_params,
      **extra_args,
    )

    def step(
      state: AggregationState,
    ) -> tuple[optax.Updates, AggregationState]:
      return aggregation.update(
        state,
        params,
        like=updates,
        stale_params=stale_params if is_single else None,
        **extra_args,
      )

    if is_single:
      return step(state)
    return _trees.step_or_wait(state.group_size >= num_gradients, step, state)

  return optax.GradientTransformationExtraArgs(aggregation.init, update_fn)
