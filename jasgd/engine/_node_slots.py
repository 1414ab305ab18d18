"""Where values are kept: in as few slots as will do."""

from collections.abc import Sequence

import numpy as np

_NEVER = 1 << 62  # When a value that is there at the end is needed no more.


def allocate(
  num_rows: int,
  reads: Sequence[np.ndarray],
  writes: np.ndarray,
  names: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> tuple[np.ndarray, int]:
  """Gives each value a slot, for as long as it is needed.

  That is while a row has it, and until the last operation that reads it. An
  operation may write to where it has read from, and does so, if it can, to
  where its own value was: in place. Value 0 is there from the start, and all
  rows have it.

  Args:
    num_rows: How many have a value at any time.
    reads: What each operation reads, one array for its own value and perhaps
      another; -1: nothing.
    writes: What each makes; -1: nothing.
    names: (row, value, operations before) of each change of what rows have.

  Returns:
    The slot of each value, and how many slots there are.

  Examples:
    >>> import numpy as np
    >>> from jasgd.engine import _node_slots
    >>> # Row 0 changes twice, and then row 1 reads what row 0 was at first.
    >>> slots, num_slots = _node_slots.allocate(
    ...     2,
    ...     [np.array([0, 1, 0]), np.array([0, 1, 1])],
    ...     np.array([1, 2, 3]),
    ...     (np.array([0, 0, 1]), np.array([1, 2, 3]), np.array([1, 2, 3])))
    >>> slots.tolist(), num_slots
    ([0, 1, 2, 0], 3)
  """
  ends = _find_ends(num_rows, reads, writes, names)
  deaths: list[list[int]] = [[] for _ in range(len(writes))]
  is_mortal = (ends >= 0) & (ends < _NEVER)
  values = np.flatnonzero(is_mortal)
  for value, end in zip(values.tolist(), ends[values].tolist(), strict=True):
    deaths[end].append(value)
  slots = [0] * len(ends)
  num_slots, free = 1, []
  for value, own, dead in zip(
    writes.tolist(), reads[0].tolist(), deaths, strict=True
  ):
    is_in_place = value >= 0 and own in dead
    for each in dead:
      if each != value and not (is_in_place and each == own):
        free.append(slots[each])
    if is_in_place:
      slots[value] = slots[own]
    elif value >= 0 and free:
      slots[value] = free.pop()
    elif value >= 0:
      slots[value] = num_slots
      num_slots += 1
    if value >= 0 and value in dead:  # It is of no use to anybody.
      free.append(slots[value])
  return np.array(slots), num_slots


def _find_ends(
  num_rows: int,
  reads: Sequence[np.ndarray],
  writes: np.ndarray,
  names: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> np.ndarray:
  """The last operation that each value is needed by."""
  operations = np.arange(len(writes))
  ends = np.full(max(0, int(writes.max(initial=0))) + 1, -1)
  for values in (*reads, writes):
    is_there = values >= 0
    np.maximum.at(ends, values[is_there], operations[is_there])
  row, value, after = names
  order = np.argsort(row, kind='stable')
  row, value, after = row[order], value[order], after[order]
  is_first = np.diff(row, prepend=-1) != 0
  is_last = np.diff(row, append=-1) != 0
  replaced = np.where(is_first, 0, np.roll(value, 1))
  np.maximum.at(ends, replaced, after - 1)
  ends[value[is_last]] = _NEVER
  if len(np.unique(row)) < num_rows:  # Some never change.
    ends[0] = _NEVER
  return ends
