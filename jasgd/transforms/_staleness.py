"""Measuring staleness: the one definition that every transformation shares."""

import jax
import jax.numpy as jnp
import optax

from jasgd.transforms import _checks

Staleness = jax.typing.ArrayLike | None


def resolve_staleness(
  clock: jax.Array, staleness: Staleness, read_clock: Staleness
) -> jax.Array:
  r"""The staleness of a gradient, as a scalar that is never negative.

  .. math:: \tau = \text{clock} - \text{read clock}

  Where both are given, `staleness` wins: it is what a server measured.

  Args:
    clock: Updates made so far.
    staleness: The measured staleness (whole, or the mean of a group), or None.
    read_clock: The clock of the weights that the gradient was computed on, or
      None.

  Returns:
    tau. A jax array below 0 cannot raise without waiting for its value; it
    counts as 0, because a gradient cannot be fresher than fresh.

  Raises:
    ValueError: if neither is given, or a concrete one makes no sense.
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
  # Bounded dtypes, so that x64 mode does not change those of any state.
  is_whole = jnp.issubdtype(tau.dtype, jnp.integer)
  return jnp.maximum(tau, 0).astype(jnp.int32 if is_whole else jnp.float32)


def update_mean(
  mean: jax.Array, value: jax.typing.ArrayLike, count: jax.Array
) -> jax.Array:
  """The mean of `count` + 1 values, from that of the first `count`."""
  value = jnp.asarray(value, mean.dtype)
  return mean + (value - mean) / (count.astype(mean.dtype) + 1)


def zero_clock() -> jax.Array:
  """A clock before the first update."""
  return jnp.zeros((), jnp.int32)


def tick(clock: jax.Array) -> jax.Array:
  """The clock after one more update; stays at its largest value."""
  return jnp.asarray(optax.safe_increment(clock))


def _check_scalar(name: str, value: jax.typing.ArrayLike) -> None:
  """Refuses arrays, and numbers below 0 where they are at hand."""
  if jnp.ndim(value) != 0:
    raise ValueError(
      f'{name} must be a scalar, got shape {jnp.shape(value)}: one gradient '
      'has one staleness (use jax.vmap for many).'
    )
  # A jax.Array may still be computing; looking at it would wait for it.
  if not isinstance(value, jax.Array):
    _checks.check_at_least(name, value, 0)
    _checks.check_at_most(name, value, jnp.iinfo(jnp.int32).max)
