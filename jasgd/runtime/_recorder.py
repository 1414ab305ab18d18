"""What the server writes down: the trace, and metrics."""

import collections
import math
import os
import struct
from typing import Any

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd import workdir as workdirs

# `traces.RECORD` as a struct, which is quicker to fill than an array.
_RECORD = struct.Struct('<BBHiiiqqqqqdddd')
assert _RECORD.size == traces.RECORD.itemsize

NOT_KNOWN = math.nan


class Recorder:
  """Appends to trace and metrics, and keeps the numbers of late.

  Args:
    workdir: Where the files are; None: the records are kept in memory.
    header: Of the trace.
    metrics_position: Bytes of the metrics that stand.

  Attributes:
    incarnation: Written into each record.
    fates: How many gradients had which fate, over the whole run.
    last_metrics: The clock of the last line of metrics.
  """

  def __init__(
    self,
    workdir: workdirs.Workdir | None,
    header: dict[str, Any],
    metrics_position: int = 0,
  ) -> None:
    self.incarnation = 0
    self.fates: collections.Counter[int] = collections.Counter()
    self.last_metrics = -1
    self._header = header
    self._writer: traces.TraceWriter | None = None
    self._metrics: workdirs.MetricsWriter | None = None
    self._rows: list[bytes] = []
    self._is_closed = False
    self._reset()
    if workdir is not None:
      os.makedirs(workdir, exist_ok=True)
      # A run that goes on has the header that it began with.
      is_new = not workdir.trace.exists()
      self._writer = traces.TraceWriter(
        workdir.trace, header if is_new else None
      )
      self._metrics = workdirs.MetricsWriter(
        workdir, resume_at=metrics_position
      )

  @property
  def num_records(self) -> int:
    """Records so far; the next has this index."""
    return len(self._rows) if self._writer is None else self._writer.num_records

  @property
  def metrics_position(self) -> int:
    """Bytes of the metrics so far."""
    return 0 if self._metrics is None else self._metrics.position

  def record(
    self,
    kind: int,
    *,
    fate: int = 0,
    digest: int = 0,
    learner: int = 0,
    call: int = 0,
    step: int = 0,
    read_clock: int = 0,
    arrive_clock: int = 0,
    apply_clock: int = -1,
    samples: int = 0,
    start_time: float = NOT_KNOWN,
    compute_time: float = 0.0,
    arrive_time: float = NOT_KNOWN,
    release_time: float = NOT_KNOWN,
  ) -> None:
    """Adds a record; `flush` makes it outlive this process."""
    row = _RECORD.pack(
      kind,
      fate,
      digest,
      self.incarnation,
      learner,
      call,
      step,
      read_clock,
      arrive_clock,
      apply_clock,
      samples,
      start_time,
      compute_time,
      arrive_time,
      release_time,
    )
    if self._writer is None:
      self._rows.append(row)
    else:
      self._writer.append(np.frombuffer(row, traces.RECORD))

  def flush(self) -> None:
    """Hands records to the operating system: they outlive this process."""
    if self._writer is not None:
      self._writer.flush()

  def sync(self) -> None:
    """Waits for the disk, for what was flushed. Any thread may call it."""
    if self._writer is not None:
      self._writer.sync()
    if self._metrics is not None:
      self._metrics.sync()

  def get_trace(self) -> traces.Trace:
    """The trace so far."""
    if self._writer is not None:
      if not self._is_closed:
        self._writer.flush()
      return traces.Trace.load(self._writer.path)
    records = np.frombuffer(b''.join(self._rows), traces.RECORD)
    return traces.Trace(records, self._header)

  # --- The numbers of late, and metrics made of them.

  def count(self, fate: int, staleness: int, loss: float) -> None:
    """Takes in a gradient."""
    self.fates[fate] += 1
    if fate == protocols.Fate.APPLIED:
      self._num_counted += 1
      self._staleness += staleness
      self._max_staleness = max(self._max_staleness, staleness)
      self._loss += loss

  def summarize(self) -> dict[str, float]:
    """Mean loss and staleness since the last metrics; {} if there is none."""
    count = self._num_counted
    if not count:
      return self._last
    return {
      'train/loss': self._loss / count,
      'server/staleness_mean': self._staleness / count,
      'server/staleness_max': self._max_staleness,
    }

  def write_metrics(self, clock: int, metrics: dict[str, Any]) -> None:
    """Appends a line."""
    if self._metrics is not None:
      self._metrics.write(clock, metrics)

  def begin_metrics(self, clock: int) -> None:
    """What comes from this clock on is for the next line."""
    self.last_metrics = clock
    self._reset(self.summarize())

  def count_dropped(self) -> int:
    """How many gradients were dropped, over the whole run."""
    return sum(
      count
      for fate, count in self.fates.items()
      if protocols.Fate(fate).is_dropped
    )

  def save(self) -> dict[str, Any]:
    """The numbers that `restore` wants back."""
    return {
      'fates': {str(int(fate)): count for fate, count in self.fates.items()},
      'last_metrics': self.last_metrics,
      'last': self._last,
      'sums': [
        self._num_counted,
        self._staleness,
        self._max_staleness,
        self._loss,
      ],
    }

  def restore(self, state: dict[str, Any]) -> None:
    """Goes on from what a checkpoint holds."""
    self.fates.update(
      {int(fate): count for fate, count in state['fates'].items()}
    )
    self.last_metrics = state['last_metrics']
    self._last = state['last']
    self._num_counted, self._staleness, self._max_staleness, self._loss = state[
      'sums'
    ]

  def find_incarnation(self) -> int:
    """The last incarnation that has written anything."""
    records = self.get_trace().records
    return int(records['incarnation'].max(initial=0))

  def _reset(self, last: dict[str, float] | None = None) -> None:
    self._last = last or {}
    self._num_counted = 0
    self._staleness = 0
    self._max_staleness = 0
    self._loss = 0.0

  def close(self) -> None:
    """Closes the files. Twice is no error."""
    self._is_closed = True
    if self._writer is not None:
      self._writer.close()
    if self._metrics is not None:
      self._metrics.close()
