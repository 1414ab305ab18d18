"""Is there room? Asked before anything is compiled or allocated."""

import math
import os
from typing import Any

import jax


def check_memory(num_versions: int, weights: Any) -> None:
  """Raises a ValueError if so many versions of the weights have no room.

  Args:
    num_versions: How many.
    weights: A tree of arrays, or of their shapes.

  Raises:
    ValueError: if they are larger than what is free.

  Examples:
    >>> import jax.numpy as jnp
    >>> from jasgd import engine
    >>> engine.check_memory(100, jnp.zeros(1000))
  """
  per_version = sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(weights)
  )
  free = _count_free_bytes()
  if free is not None and num_versions * per_version > free:
    raise ValueError(
      f'{num_versions} versions of the weights, of {per_version:,} bytes each, '
      f'are {num_versions * per_version:,} bytes, and {free:,} are free.'
    )


def _count_free_bytes() -> int | None:
  """Bytes that are free on the default device, if that is known."""
  device = jax.devices()[0]
  if device.platform != 'cpu':
    stats = device.memory_stats() or {}
    if 'bytes_limit' in stats:
      return stats['bytes_limit'] - stats.get('bytes_in_use', 0)
    return None
  try:
    return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  except (ValueError, OSError):  # Not on this system.
    return None
