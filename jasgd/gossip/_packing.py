"""Many small arrays as few, for a message has a price whatever its length."""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp

# Numbers: copying fewer is cheaper than sending one more message.
_SMALL = 2**14


def pack(
  arrays: list[jax.Array],
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], list[jax.Array]]]:
  """Puts the small arrays of one dtype together; large ones stay as they are.

  Args:
    arrays: Of any shapes and dtypes.

  Returns:
    The arrays to send, and a function that gives the parts of such arrays back
    in the order and the shapes of those given.
  """
  groups: dict[object, list[int]] = {}
  for index, array in enumerate(arrays):
    is_small = array.size < _SMALL
    groups.setdefault(array.dtype if is_small else index, []).append(index)
  packed = [
    arrays[group[0]]
    if len(group) == 1
    else jnp.concatenate([arrays[index].ravel() for index in group])
    for group in groups.values()
  ]
  shapes = [array.shape for array in arrays]

  def unpack(packed: list[jax.Array]) -> list[jax.Array]:
    found: dict[int, jax.Array] = {}
    for group, whole in zip(groups.values(), packed, strict=True):
      if len(group) == 1:
        found[group[0]] = whole
        continue
      start = 0
      for index in group:
        stop = start + math.prod(shapes[index])
        found[index] = whole[start:stop].reshape(shapes[index])
        start = stop
    return [found[index] for index in range(len(shapes))]

  return packed, unpack
