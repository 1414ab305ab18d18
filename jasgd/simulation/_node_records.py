"""The records of nodes, as they come."""

from typing import Any

import numpy as np

from jasgd import traces

# What is written down of an event, in this order; a record's `order` is its
# place in the end.
_COLUMNS = tuple(
  name
  for name in traces.NODE_RECORD.names or ()
  if name not in ('reserved', 'order')
)


class Records:
  """Rows, which are packed into arrays now and then.

  Attributes:
    rows: Tuples of all fields of `NODE_RECORD` but `order` and `reserved`, to
      be appended to.
  """

  MAX_ROWS = 1 << 14  # Packed, they need a fifth of the memory.

  def __init__(self) -> None:
    self.rows: list[tuple[Any, ...]] = []
    self._packed: list[np.ndarray] = []

  @property
  def last_time(self) -> float:
    """End of the last record so far; 0 if there is none."""
    if self.rows:
      return self.rows[-1][-1]
    return float(self._packed[-1]['end_time'][-1]) if self._packed else 0.0

  def pack(self) -> None:
    """Makes an array of the rows so far."""
    packed = np.zeros(len(self.rows), traces.NODE_RECORD)
    columns = zip(*self.rows, strict=True)
    for name, column in zip(_COLUMNS, columns, strict=False):
      packed[name] = column
    self._packed.append(packed)
    self.rows.clear()

  def finish(self) -> np.ndarray:
    """All records, numbered."""
    self.pack()
    records = np.concatenate(self._packed)
    records['order'] = np.arange(len(records))
    return records
