"""Slots: the storage of the values of a plan while they are needed.

A slot holds one set of weights (or a gradient, or a difference), or the state
of one optimizer. In a compiled loop, slots are the rows of arrays.
"""

from collections.abc import Iterator
import itertools
import math
import os
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

_NEVER = 1 << 62  # Last use of a value that a replica has at the end.
_CHUNK = 1 << 16  # Count of numbers that `_list` converts at a time.

# --- Allocation.


def allocate(
  reads: tuple[np.ndarray, ...],
  writes: np.ndarray,
  changes: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
  num_replicas: int = 0,
) -> tuple[np.ndarray, int]:
  """Gives each value a slot while it is needed, with as few slots as possible.

  A value is needed until the last operation that reads it, and while a replica
  has it. An operation may write to a slot that it reads. It writes in place, to
  the slot of its own value, if that value is not needed any more. Value 0
  exists from the start.

  Args:
    reads: Values that each operation reads: an array of own values first, then
      arrays of other values, if any. -1: nothing is read.
    writes: Value that each operation makes, in increasing order. -1: none.
    changes: (replica, value, number of operations before) of each change of
      the value that a replica has. All replicas start with value 0.
    num_replicas: Number of replicas.

  Returns:
    The slot of each value, or -1 if nothing needs it; and the number of slots.

  Examples:
    >>> import numpy as np
    >>> from jasgd.engine import _slots
    >>> # Replica 0 changes twice; then replica 1 reads what 0 had at first.
    >>> slots, num_slots = _slots.allocate(
    ...     (np.array([0, 1, 0]), np.array([0, 1, 1])),
    ...     np.array([1, 2, 3]),
    ...     (np.array([0, 0, 1]), np.array([1, 2, 3]), np.array([1, 2, 3])),
    ...     num_replicas=2)
    >>> slots.tolist(), num_slots
    ([0, 1, 2, 0], 3)
  """
  ends = _find_last_uses(reads, writes, changes, num_replicas)
  makers = np.full(len(ends), -1)
  is_write = writes >= 0
  makers[writes[is_write]] = np.flatnonzero(is_write)
  is_needed = ends > makers
  dying = np.flatnonzero(is_needed & (ends < _NEVER))
  dying = dying[np.argsort(ends[dying], kind='stable')]
  is_needed = np.append(is_needed, False)  # For a write of -1.
  slots = np.full(len(ends), -1, np.int32)
  table = slots.data  # A memoryview: its single items are accessed faster.
  table[0] = 0
  num_slots, free = 1, []
  deaths = zip(_list(ends[dying]), _list(dying), strict=True)
  end, dead = next(deaths, (_NEVER, -1))
  for index, value, own, is_kept in zip(
    itertools.count(),
    _list(writes),
    _list(reads[0]),
    _list(is_needed[writes]),
    strict=False,
  ):
    slot = -1
    # Values whose last use is this operation free their slots before it writes.
    while end == index:
      if is_kept and dead == own:
        slot = table[dead]  # In place.
      else:
        free.append(table[dead])
      end, dead = next(deaths, (_NEVER, -1))
    if is_kept:
      if slot < 0:
        if free:
          slot = free.pop()
        else:
          slot = num_slots
          num_slots += 1
      table[value] = slot
  return slots, num_slots


def _find_last_uses(
  reads: tuple[np.ndarray, ...],
  writes: np.ndarray,
  changes: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
  num_replicas: int,
) -> np.ndarray:
  """Index of the last operation that needs each value; -1 if none does."""
  num_values = 1 + max(
    0, *(int(values.max(initial=0)) for values in (*reads, writes))
  )
  ends = np.full(num_values, -1)
  for values in reads:
    last = np.full(num_values, -1)
    indices = np.flatnonzero(values >= 0)
    last[values[indices]] = indices  # For equal values, the last index stays.
    np.maximum(ends, last, out=ends)
  if changes is None:
    return ends
  replica, value, after = changes
  order = np.argsort(replica, kind='stable')
  replica, value, after = replica[order], value[order], after[order]
  is_first = np.diff(replica, prepend=replica[:1] - 1) != 0
  is_last = np.diff(replica, append=replica[-1:] - 1) != 0
  replaced = np.where(is_first, 0, np.roll(value, 1))
  np.maximum.at(ends, replaced, after - 1)
  ends[value[is_last]] = _NEVER
  if np.count_nonzero(is_first) < num_replicas:  # Some never change.
    ends[0] = _NEVER
  return ends


def _list(values: np.ndarray) -> Iterator[Any]:
  """Yields the numbers of an array as Python ints, in chunks to save memory."""
  for start in range(0, len(values), _CHUNK):
    yield from values[start : start + _CHUNK].tolist()


# --- Rows of arrays.


def read_row(tree: Any, index: Any) -> Any:
  """Reads one row, or several rows, of every leaf."""
  return jax.tree.map(lambda leaf: leaf[index], tree)


def write_row(tree: Any, index: Any, row: Any) -> Any:
  """Replaces one row of every leaf, in place if the leaves are donated."""
  return jax.tree.map(
    lambda leaf, value: lax.dynamic_update_index_in_dim(
      leaf, jnp.astype(value, leaf.dtype), index, 0
    ),
    tree,
    row,
  )


def repeat_row(row: Any, num_rows: int) -> Any:
  """Repeats a row, in new buffers."""
  return jax.tree.map(
    lambda leaf: jnp.broadcast_to(leaf, (num_rows, *jnp.shape(leaf))).copy(),
    row,
  )


def stack_rows(rows: list[Any]) -> Any:
  """Stacks several trees as the rows of one tree."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


# --- Memory.


def check_memory(num_versions: int, weights: Any) -> None:
  """Checks that a number of versions of the weights fits into memory.

  Args:
    num_versions: Number of versions.
    weights: Tree of arrays, or of their shapes.

  Raises:
    ValueError: if the versions are larger than the free memory.

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
  """Free bytes of the default device, if they are known."""
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
