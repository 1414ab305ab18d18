"""Delay compensation: correction of stale gradients by a Taylor term."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jasgd.transforms import _checks
from jasgd.transforms import _trees


class DelayCompensationState(NamedTuple):
  """State of `delay_compensation`."""

  # Running mean of the squared gradient, like the params; () if not adaptive.
  compensation_mean_square: Any


def delay_compensation(
  strength: jax.typing.ArrayLike | None = None,
  *,
  adaptive: bool = False,
  decay: jax.typing.ArrayLike = 0.95,
  epsilon: jax.typing.ArrayLike = 1e-7,
) -> optax.GradientTransformationExtraArgs:
  r"""Adds a first-order Taylor term to a stale gradient: DC-ASGD.

  .. math::
    g \leftarrow g + \lambda_t\, g \odot g \odot (w_\text{now} - w_\text{read})

  where the outer product of the gradient approximates the Hessian. lambda_t is
  constant or, if adaptive, divided by the root mean square of the gradients:

  .. math::
    v_t = m\, v_{t-1} + (1 - m)\, g \odot g, \quad
    \lambda_t = \lambda_0 / \sqrt{v_t + \epsilon}

  `update` needs the current params and the keyword `stale_params`, the weights
  that the gradient was computed on. It must come first in a chain, and before
  any sum of gradients, since each gradient has its own `stale_params`.

  Args:
    strength: Factor lambda_0, at least 0; 0 is plain ASGD. The default is the
      paper's value for CIFAR-10: 0.04, or 2 if adaptive.
    adaptive: Whether to divide by the root mean square of the gradients.
    decay: Decay m of the running mean, in [0, 1). Only used if adaptive.
    epsilon: Constant in the square root, above 0. Only used if adaptive.

  Returns:
    A transformation.

  Examples:
    >>> import jasgd, jax.numpy as jnp
    >>> compensate = jasgd.delay_compensation(0.5)
    >>> now, read = jnp.array(3.0), jnp.array(2.0)
    >>> gradient, _ = compensate.update(
    ...     jnp.array(4.0), compensate.init(now), now, stale_params=read)
    >>> print(gradient)  # 4 + 0.5 * 4 * 4 * (3 - 2)
    12.0

  References:
    Zheng et al., `Asynchronous Stochastic Gradient Descent with Delay
    Compensation <https://arxiv.org/abs/1609.08326>`_, 2017
  """
  if strength is None:
    strength = 2.0 if adaptive else 0.04
  _checks.check_at_least('strength', strength, 0)
  _checks.check_fraction('decay', decay)
  _checks.check_positive('epsilon', epsilon)

  def init_fn(params: optax.Params) -> DelayCompensationState:
    _trees.require_real('delay_compensation', params)
    return DelayCompensationState(
      compensation_mean_square=_trees.zeros_for_sums(params) if adaptive else ()
    )

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    *,
    stale_params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DelayCompensationState]:
    del extra_args  # For other transformations of the chain.
    params = _trees.require_params('delay_compensation', params)
    stale_params = _trees.require_stale_params(
      'delay_compensation', stale_params
    )
    mean_square = state.compensation_mean_square
    if adaptive:
      mean_square = _trees.update_mean_square(mean_square, updates, decay)
      strengths = _trees.map_unmasked(
        lambda v: strength / jnp.sqrt(v + epsilon), mean_square
      )
    else:
      strengths = _trees.map_unmasked(lambda _: strength, updates)

    def compensate(gradient: Any, now: Any, read: Any, lam: Any) -> jax.Array:
      corrected = gradient + lam * gradient * gradient * (now - read)
      return jnp.astype(corrected, jnp.result_type(gradient))

    updates = _trees.map_unmasked(
      compensate, updates, params, stale_params, strengths
    )
    return updates, DelayCompensationState(compensation_mean_square=mean_square)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
