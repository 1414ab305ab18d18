"""The records of an event loop, as they come: compact columns that grow."""

import array

import numpy as np

from jasgd import protocols
from jasgd import traces

_CODES = {
  'kind': 'B',
  'fate': 'B',
  'learner': 'i',
  'step': 'q',
  'read_clock': 'q',
  'arrive_clock': 'q',
  'start_time': 'd',
  'compute_time': 'd',
  'arrive_time': 'd',
  'release_time': 'd',
}


class Columns:
  """Records under way; about as large as the array that they become."""

  def __init__(self) -> None:
    """Begins without any."""
    columns = {name: array.array(code) for name, code in _CODES.items()}
    self._columns = columns
    self._appends = tuple(column.append for column in columns.values())
    # Known later than the rest of a record.
    self.release_time = columns['release_time']

  def append(
    self,
    kind: int,
    fate: int,
    learner: int,
    step: int,
    read_clock: int,
    clock: int,
    start: float,
    duration: float,
    time: float,
    release: float,
  ) -> None:
    """Adds a record, of what the server handled at `time` and `clock`."""
    (
      add_kind,
      add_fate,
      add_learner,
      add_step,
      add_read_clock,
      add_clock,
      add_start,
      add_duration,
      add_time,
      add_release,
    ) = self._appends
    add_kind(kind)
    add_fate(fate)
    add_learner(learner)
    add_step(step)
    add_read_clock(read_clock)
    add_clock(clock)
    add_start(start)
    add_duration(duration)
    add_time(time)
    add_release(release)

  def finish(self) -> np.ndarray:
    """All of them, of dtype `RECORD`."""
    records = np.zeros(len(self.release_time), traces.RECORD)
    for name, column in self._columns.items():
      records[name] = np.frombuffer(column, np.dtype(column.typecode))
    is_applied = (records['kind'] == traces.Kind.GRADIENT) & (
      records['fate'] == protocols.Fate.APPLIED
    )
    records['apply_clock'] = np.where(is_applied, records['arrive_clock'], -1)
    return records
