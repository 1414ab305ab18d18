"""Definition of staleness that all transformations share, and clocks."""

import jax
import jax.numpy as jnp
import optax

from jasgd.transforms import _checks

Staleness = jax.typing.ArrayLike | None


def resolve_staleness(
  clock: jax.Array, staleness: Staleness, read_clock: Staleness
) -> jax.Array:
  r"""Staleness of a gradient, a scalar that is never negative.

  .. math:: \tau = \text{clock} - \text{read clock}

  If both are given, `staleness` is used: a server has measured it.

  Args:
    clock: Number of updates made.
    staleness: Measured staleness (an integer, or a mean of several), or None.
    read_clock: Clock of the weights that the gradient was computed on, or None.

  Returns:
    Staleness tau. A negative jax array counts as 0; raising an error would mean
    waiting for its value.

  Raises:
    ValueError: if neither is given, or a concrete value is out of range.
  """
  if staleness is not None:
    _check_scalar('staleness', staleness)
    tau = jnp.asarray(staleness)
  elif read_clock is not None:
    _check_scalar('read_clock', read_clock)
    if not jnp.issubdtype(jnp.result_type(read_clock), jnp.integer):
      raise ValueError(f'read_clock must be whole, got {read_clock!r}.')
    tau = clock - jnp.asarray(read_clock, clock.dtype)
  else:
    raise ValueError(
      'update() needs the keyword `staleness` (updates made since the weights '
      'of this gradient were read) or `read_clock` (the clock at which they '
      'were read); got neither.'
    )
  # Fixed dtypes, so that jax's x64 mode does not change the dtypes of states.
  is_whole = jnp.issubdtype(tau.dtype, jnp.integer)
  return jnp.maximum(tau, 0).astype(jnp.int32 if is_whole else jnp.float32)


def update_mean(
  mean: jax.Array, value: jax.typing.ArrayLike, count: jax.Array
) -> jax.Array:
  """Mean of `count` + 1 values, from the mean of the first `count`."""
  value = jnp.asarray(value, mean.dtype)
  return mean + (value - mean) / (count.astype(mean.dtype) + 1)


def zero_clock() -> jax.Array:
  """Clock before the first update."""
  return jnp.zeros((), jnp.int32)


def tick(clock: jax.Array) -> jax.Array:
  """Clock after one more update; it stays at its largest value."""
  return jnp.asarray(optax.safe_increment(clock))


def _check_scalar(name: str, value: jax.typing.ArrayLike) -> None:
  """Raises a ValueError for arrays, and for concrete numbers out of range."""
  if jnp.ndim(value) != 0:
    raise ValueError(
      f'{name} must be a scalar, got shape {jnp.shape(value)}: one gradient '
      'has one staleness (use jax.vmap for many).'
    )
  # A jax.Array may not be computed yet; reading its value would wait for it.
  if not isinstance(value, jax.Array):
    _checks.check_at_least(name, value, 0)
    _checks.check_at_most(name, value, jnp.iinfo(jnp.int32).max)
