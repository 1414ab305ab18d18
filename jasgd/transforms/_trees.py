"""Functions of trees of weights: masked leaves, scaling, dtypes, checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def is_masked(node: Any) -> bool:
  """Whether `optax.masked` put this node in place of hidden leaves."""
  return isinstance(node, optax.MaskedNode)


def map_unmasked(
  function: Callable[..., Any], tree: optax.Updates, *others: Any
) -> Any:
  """Maps over the leaves of `tree` that are not masked.

  Inside `optax.masked` and `optax.partition` the updates have a `MaskedNode`
  in place of hidden leaves, while a tree in an extra argument (such as
  `stale_params`) still has all leaves. `jax.tree.map` refuses such a pair; this
  function skips it.
  """
  return jax.tree.map(
    lambda node, *nodes: node if is_masked(node) else function(node, *nodes),
    tree,
    *others,
    is_leaf=is_masked,
  )


def scale_tree(
  tree: optax.Updates, factor: jax.typing.ArrayLike
) -> optax.Updates:
  """Multiplies each leaf by `factor`, in the leaf's own dtype.

  A factor of 0 gives zeros even where the leaf is not finite. NaN * 0 would be
  NaN, and a dropped gradient must not destroy the weights.
  """
  if isinstance(factor, (str, type(None))) or jnp.iscomplexobj(factor):
    raise ValueError(f'A policy must give a real number, got {factor!r}.')
  factor = jnp.asarray(factor)
  if factor.ndim != 0:
    raise ValueError(
      f'A policy must give one number per gradient, got shape {factor.shape}.'
    )

  def scale(leaf: Any) -> jax.Array:
    scaled = jnp.astype(leaf * factor, jnp.result_type(leaf))
    return jnp.where(factor == 0, jnp.zeros_like(scaled), scaled)

  return jax.tree.map(scale, tree)


def zeros_for_sums(tree: optax.Params) -> optax.Params:
  """Zeros to start a sum of such leaves: float32, or the dtype if wider."""
  return jax.tree.map(
    lambda leaf: jnp.zeros_like(
      leaf, jnp.promote_types(jnp.result_type(leaf), jnp.float32)
    ),
    tree,
  )


def cast_like(tree: Any, like: Any) -> Any:
  """Casts each leaf of `tree` to the dtype of the same leaf in `like`.

  Leaves without a dtype (Python numbers) and leaves that have the right dtype
  already (random keys, which cannot be cast) stay unchanged.
  """

  def cast(leaf: Any, like_leaf: Any) -> Any:
    dtype = getattr(like_leaf, 'dtype', None)
    if dtype is None or getattr(leaf, 'dtype', None) == dtype:
      return leaf
    return jnp.astype(leaf, dtype)

  return jax.tree.map(cast, tree, like)


def step_or_wait(
  is_due: jax.typing.ArrayLike,
  step: Callable[[Any], tuple[optax.Updates, Any]],
  state: Any,
) -> tuple[optax.Updates, Any]:
  """Runs `step(state)` if it is due; else zero updates and the same state."""

  def wait(state: Any) -> tuple[optax.Updates, Any]:
    like_updates, _ = jax.eval_shape(step, state)
    return jax.tree.map(jnp.zeros_like, like_updates), state

  return jax.lax.cond(is_due, step, wait, state)


def require_real(name: str, params: optax.Params) -> None:
  """Raises a ValueError if a leaf is complex."""
  for leaf in jax.tree.leaves(params):
    if jnp.iscomplexobj(leaf):
      raise ValueError(
        f'{name} is defined for real weights, got {jnp.result_type(leaf)}.'
      )


def require_params(name: str, params: optax.Params | None) -> optax.Params:
  """Returns the current weights; raises a ValueError that names the caller."""
  if params is None:
    raise ValueError(
      f'{name} needs the current weights: call update(updates, state, params).'
    )
  return params


def require_stale_params(
  name: str, stale_params: optax.Params | None
) -> optax.Params:
  """Returns the weights of the gradient; a ValueError says how to give them."""
  if stale_params is None:
    raise ValueError(
      f'{name} needs the keyword `stale_params`, the weights that the gradient '
      'was computed on. In softsync it goes before the sum (per_gradient=); '
      'delayed() supplies them with keep_params=True.'
    )
  return stale_params


def update_mean_square(
  mean_square: Any, updates: optax.Updates, decay: jax.typing.ArrayLike
) -> Any:
  """Updates the running mean of squared updates, in the mean's dtypes."""

  def mix(v: jax.Array, u: Any) -> jax.Array:
    u = jnp.astype(u, v.dtype)
    return jnp.astype(decay * v + (1 - decay) * u * u, v.dtype)

  return jax.tree.map(mix, mean_square, updates)
