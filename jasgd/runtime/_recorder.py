"""Recorders: all trace records and metrics that owners of weights write.

A record is written and flushed before another process can see the change that
it records, so that a trace is complete however its process ends.
"""

import collections
from collections.abc import Callable
import math
import os
import pathlib
import struct
import time as clocks
from typing import Any

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd import workdir as workdirs

# `traces.RECORD` as a struct, which is quicker to fill than an array.
_RECORD = struct.Struct('<4B2H6i4q2i7d')
assert _RECORD.size == traces.RECORD.itemsize

_Kind = traces.Kind
_PUSH = int(_Kind.PUSH)
_CHANGES = (_Kind.STEP, _Kind.MIX, _Kind.MOVE, _Kind.MEAN, _Kind.RESTART)


class ServerRecorder:
  """Writes the trace and the metrics of a server.

  Args:
    workdir: Folder of the files; None: records are kept in memory.
    header: Header of a new trace.
    get_time: Seconds since the run began.
    metrics_position: Bytes of the metrics that a checkpoint knows of; what
      follows them is cut off.

  Attributes:
    incarnation: Incarnation of the server, in each record.
    samples: Samples of the applied gradients that were recorded.
    fates: Numbers of gradients by fate, over the whole run.
    last_metrics: Clock of the last line of metrics.
  """

  def __init__(
    self,
    workdir: workdirs.Workdir | None,
    header: dict[str, Any],
    get_time: Callable[[], float],
    metrics_position: int = 0,
  ) -> None:
    self.incarnation = 0
    self.samples = 0
    self.fates: collections.Counter[int] = collections.Counter()
    self.last_metrics = -1
    self._header = header
    self.get_time = get_time
    self._writer: traces.TraceWriter | None = None
    self._metrics: workdirs.MetricsWriter | None = None
    self._rows: list[bytes] = []
    self._is_closed = False
    self._reset()
    if workdir is not None:
      os.makedirs(workdir, exist_ok=True)
      # A run that is resumed keeps the header that it began with.
      is_new = not workdir.trace.exists()
      self._writer = traces.TraceWriter(
        workdir.trace, header if is_new else None
      )
      self._metrics = workdirs.MetricsWriter(
        workdir, resume_at=metrics_position
      )

  @property
  def num_records(self) -> int:
    """Number of records so far; the next one has this index."""
    return len(self._rows) if self._writer is None else self._writer.num_records

  @property
  def metrics_position(self) -> int:
    """Bytes of the metrics so far."""
    return 0 if self._metrics is None else self._metrics.position

  # --- Records.

  def record_push(
    self,
    *,
    learner: int,
    step: int,
    fate: protocols.Fate,
    updates: bool,
    read_clock: int,
    clock: int,
    loss: float,
    samples: int,
    call: int,
    digest: int,
    start_time: float,
    compute_time: float,
    arrive_time: float,
    release_time: float,
  ) -> None:
    """Records a gradient that arrived. `flush` makes it outlive this process.

    Args:
      learner: Number of the learner.
      step: Minibatches that the learner has computed, this push's included.
      fate: Fate of the gradient.
      updates: Whether it completed an update.
      read_clock: Clock of the weights that it was computed on.
      clock: Clock when it arrived, before any update with it.
      loss: Loss of the minibatch.
      samples: Samples in the push.
      call: Number of the compiled call that it shares with others; 0: alone.
      digest: Digest of the weights after the update; 0: unknown.
      start_time: Time when the learner was given the weights.
      compute_time: Seconds that it computed.
      arrive_time: Time of arrival.
      release_time: Time of the answer; NaN while it is withheld.
    """
    if fate == protocols.Fate.APPLIED:
      self.samples += samples
    self._count(fate, clock - read_clock, loss)
    # Packed here, not by `_write`: this is done for every gradient.
    self._append(
      _RECORD.pack(
        *(_PUSH, fate, updates, 0, digest, 0),
        *(traces.SERVER, learner, 0, call, self.incarnation, samples),
        *(step, clock + updates, read_clock, 0, 0, 0),
        *(0.0, 0.0, 0.0, start_time, compute_time, arrive_time, release_time),
      )
    )

  def record_unused(
    self,
    *,
    learner: int,
    step: int,
    fate: protocols.Fate,
    read_clock: int,
    clock: int,
    loss: float,
    compute_time: float,
    start_time: float = math.nan,
    is_released: bool = False,
  ) -> None:
    """Records, and flushes, a gradient that was lost or not finite."""
    time = self.get_time()
    self._count(fate, 0, loss)
    self._write(
      _Kind.PUSH,
      fate=fate,
      worker=learner,
      step=step,
      version=clock,
      read_version=read_clock,
      start_time=start_time,
      compute_time=compute_time,
      end_time=time,
      release_time=time if is_released else math.nan,
    )
    self.flush()

  def record_join(
    self,
    learner: int,
    step: int,
    clock: int,
    *,
    updates: bool,
    num_devices: int,
  ) -> None:
    """Records, and flushes, that a learner joined.

    Args:
      learner: Number of the learner.
      step: Minibatches that it has computed.
      clock: Clock of the server, after the update that this caused, if any.
      updates: Whether there was one.
      num_devices: Devices that it spreads a minibatch over.
    """
    self._write_now(
      _Kind.JOIN,
      updates=updates,
      num_devices=num_devices,
      worker=learner,
      step=step,
      version=clock,
    )

  def record_leave(
    self,
    learner: int,
    step: int,
    clock: int,
    *,
    updates: bool,
    lost_clock: int,
  ) -> None:
    """Records, and flushes, that a learner left.

    Args:
      learner: Number of the learner.
      step: Minibatches that it has computed.
      clock: Clock of the server, after the update that this caused, if any.
      updates: Whether there was one.
      lost_clock: Clock of the weights that it gave no gradient for; -1: none.
    """
    self._write_now(
      _Kind.LEAVE,
      updates=updates,
      worker=learner,
      step=step,
      version=clock,
      read_version=lost_clock,
    )

  def record_fetch(
    self, learner: int, num_computed: int, read_clock: int, clock: int
  ) -> None:
    """Records, and flushes, that a learner got weights apart from a push."""
    self._write_now(
      _Kind.FETCH,
      worker=learner,
      step=num_computed,
      version=clock,
      read_version=read_clock,
    )

  def record_restart(self, clock: int, num_valid: int) -> None:
    """Records, and flushes, a restart; records from `num_valid` on are void."""
    self._write(
      _Kind.RESTART,
      version=clock,
      read_version=clock,
      stands=num_valid - 1,
      end_time=self.get_time(),
    )
    self.flush()

  def record_end(self, clock: int) -> None:
    """Records, and flushes, the end of the run."""
    self._write(_Kind.END, version=clock, end_time=self.get_time())
    self.flush()

  def _write_now(self, kind: _Kind, **fields: int) -> None:
    """Writes and flushes a record of something that takes no time."""
    time = self.get_time()
    self._write(
      kind, **fields, start_time=time, end_time=time, release_time=time
    )
    self.flush()

  def _write(
    self,
    kind: int,
    *,
    fate: int = 0,
    updates: int = 0,
    num_devices: int = 0,
    worker: int = 0,
    step: int = 0,
    version: int = 0,
    read_version: int = 0,
    stands: int = 0,
    start_time: float = math.nan,
    compute_time: float = 0.0,
    end_time: float = math.nan,
    release_time: float = math.nan,
  ) -> None:
    """Writes a record, of fields that the server's records use."""
    self._append(
      _RECORD.pack(
        *(kind, fate, updates, 0, 0, num_devices),
        *(traces.SERVER, worker, 0, 0, self.incarnation, 0),
        *(step, version, read_version, 0, 0, stands),
        *(0.0, 0.0, 0.0, start_time, compute_time, end_time, release_time),
      )
    )

  def _append(self, row: bytes) -> None:
    if self._writer is None:
      self._rows.append(row)
    else:
      self._writer.append(np.frombuffer(row, traces.RECORD))

  def flush(self) -> None:
    """Hands records to the operating system: they outlive this process."""
    if self._writer is not None:
      self._writer.flush()

  def sync(self) -> None:
    """Waits until flushed records are on disk. Any thread may call it."""
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

  def find_last_incarnation(self) -> int:
    """The last incarnation that has written a record."""
    records = self.get_trace().records
    return int(records['incarnation'].max(initial=0))

  # --- Metrics: means over the gradients since the last line.

  def _count(self, fate: int, staleness: int, loss: float) -> None:
    self.fates[fate] += 1
    if fate == protocols.Fate.APPLIED:
      self._num_counted += 1
      self._staleness += staleness
      self._max_staleness = max(self._max_staleness, staleness)
      self._loss += loss

  def summarize(self) -> dict[str, float]:
    """Mean loss and staleness since the last line; {} if there are none."""
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
    """Starts the sums of the next line, at this clock."""
    self.last_metrics = clock
    self._reset(self.summarize())

  def count_dropped(self) -> int:
    """Number of gradients that were dropped, over the whole run."""
    return sum(
      count
      for fate, count in self.fates.items()
      if protocols.Fate(fate).is_dropped
    )

  def _reset(self, last: dict[str, float] | None = None) -> None:
    self._last = last or {}
    self._num_counted = 0
    self._staleness = 0
    self._max_staleness = 0
    self._loss = 0.0

  # --- Checkpoints, and the end.

  def save(self) -> dict[str, Any]:
    """Counts for a checkpoint."""
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

  def restore(self, state: dict[str, Any], samples: int) -> None:
    """Inverse of `save`; `samples` are those of all applied gradients."""
    self.samples = samples
    self.fates.update(
      {int(fate): count for fate, count in state['fates'].items()}
    )
    self.last_metrics = state['last_metrics']
    self._last = state['last']
    self._num_counted, self._staleness, self._max_staleness, self._loss = state[
      'sums'
    ]

  def close(self) -> None:
    """Closes the files. Closing twice is no error."""
    self._is_closed = True
    if self._writer is not None:
      self._writer.close()
    if self._metrics is not None:
      self._metrics.close()


class NodeRecorder:
  """Writes the trace of a node, or of the centre.

  Args:
    path: The file; an existing one is continued.
    header: Header of a new file.
    node: Number of the node, or `traces.SERVER`.
    origin: Time of day at which the run began: record times count from there.

  Attributes:
    origin: The same; the node may learn of an earlier one.
    last_version: Largest version that was recorded.
    last_mass: Mass in the last record of the node's own weights.
    num_mixes: Number of the last mix; 0: there was none.
    num_means: Number of all-reduces, as far as this node knows.
  """

  def __init__(
    self, path: pathlib.Path, header: dict[str, Any], node: int, origin: float
  ) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that is resumed keeps the header that it began with.
    self._writer = traces.TraceWriter(path, None if path.exists() else header)
    self._node = node
    self.origin = origin
    records = self._writer.read()
    self.last_version = int(records['version'].max(initial=0))
    # A LOST may tell of another node's mass.
    own = records[records['kind'] != _Kind.LOST]
    self.last_mass = float(own['mass'][-1]) if len(own) else 0.0
    is_mean = records['kind'] == _Kind.MEAN
    self.num_mixes = int(records['group'][~is_mean].max(initial=0))
    self.num_means = int(records['group'][is_mean].max(initial=0))

  def get_time(self) -> float:
    """Seconds since the run began."""
    return clocks.time() - self.origin

  def write(self, kind: traces.Kind, rows: list[dict[str, Any]]) -> None:
    """Writes and flushes records, which outlive this process from now on.

    Args:
      kind: Kind of all of them.
      rows: Fields of `traces.RECORD` of each. A time that is not given is now;
        replica and worker are this node; other fields are 0.
    """
    records = np.zeros(len(rows), traces.RECORD)
    records['kind'] = kind
    records['updates'] = kind in _CHANGES
    records['replica'] = records['worker'] = self._node
    records['start_time'] = records['end_time'] = self.get_time()
    for record, row in zip(records, rows, strict=True):
      for name, value in row.items():
        record[name] = value
    self.last_version = max(
      self.last_version, int(records['version'].max(initial=0))
    )
    self._writer.append(records)
    self._writer.flush()

  def flush(self) -> None:
    """Hands records to the operating system: they outlive this process."""
    self._writer.flush()

  def sync(self) -> None:
    """Waits until flushed records are on disk. Any thread may call it."""
    self._writer.sync()

  def close(self) -> None:
    """Closes the file. Closing twice is no error."""
    self._writer.close()
