"""Gap-Aware: damping of stale gradients by the distance of the weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jasgd.transforms import _checks
from jasgd.transforms import _trees


class GapAwareState(NamedTuple):
  """State of `gap_aware`."""

  gap_decay_product: jax.Array  # shape=(), float32: decay^(gradients seen).
  gap_mean_square: Any  # Running mean of the squared gradient, like params.


def gap_aware(
  rate: jax.typing.ArrayLike,
  *,
  decay: jax.typing.ArrayLike = 0.999,
  epsilon: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
  r"""Damps the gradient of each weight by the distance it moved: Gap-Aware.

  .. math::
    g \leftarrow g / G, \quad
    G = 1 + |w_\text{now} - w_\text{read}| / C, \quad
    C = r\, \sqrt{\hat v + \epsilon^2}

  C is the length of a typical step of the weight: the learning rate times the
  root mean square of its gradients (a running mean with Adam's bias
  correction). If a weight has moved by k such steps, in any number of updates,
  its gradient is divided by 1 + k; the gradient of a weight that has not moved
  is unchanged. The definition of a typical step is our reading of the paper; it
  needs no copy of older weights.

  `update` needs the current params and the keyword `stale_params`, the weights
  that the gradient was computed on. It must come before any sum of gradients.

  Args:
    rate: Learning rate r of the optimizer (the largest one of a schedule),
      above 0. With momentum, steps are longer than C, so the damping is
      stronger than intended, which is safe.
    decay: Decay of the running mean, in [0, 1).
    epsilon: Smallest root mean square, at least 1e-18.

  Returns:
    A transformation.

  Examples:
    >>> import jasgd, jax.numpy as jnp
    >>> damp = jasgd.gap_aware(0.1)
    >>> now, read = jnp.array(1.0), jnp.array(1.6)  # Three steps of 0.1 * 2.
    >>> gradient, _ = damp.update(
    ...     jnp.array(2.0), damp.init(now), now, stale_params=read)
    >>> print(f'{gradient:.3f}')
    0.500

  References:
    Barkai et al., `Gap-Aware Mitigation of Gradient Staleness
    <https://arxiv.org/abs/1909.10802>`_, 2020
  """
  _checks.check_positive('rate', rate)
  _checks.check_fraction('decay', decay)
  _checks.check_at_least('epsilon', epsilon, 1e-18)  # Its square must not be 0.

  def init_fn(params: optax.Params) -> GapAwareState:
    _trees.require_real('gap_aware', params)
    return GapAwareState(
      gap_decay_product=jnp.ones((), jnp.float32),
      gap_mean_square=_trees.zeros_for_sums(params),
    )

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    *,
    stale_params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, GapAwareState]:
    del extra_args  # For other transformations of the chain.
    params = _trees.require_params('gap_aware', params)
    stale_params = _trees.require_stale_params('gap_aware', stale_params)
    mean_square = _trees.update_mean_square(
      state.gap_mean_square, updates, decay
    )
    decay_product = (state.gap_decay_product * decay).astype(jnp.float32)

    def damp(gradient: Any, now: Any, read: Any, v: Any) -> jax.Array:
      # Inside the root: otherwise the derivative at v = 0 would be infinite.
      typical_step = rate * jnp.sqrt(v / (1 - decay_product) + epsilon**2)
      gap = 1 + jnp.abs(now - read) / typical_step
      return jnp.astype(gradient / gap, jnp.result_type(gradient))

    updates = _trees.map_unmasked(
      damp, updates, params, stale_params, mean_square
    )
    return updates, GapAwareState(
      gap_decay_product=decay_product, gap_mean_square=mean_square
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
