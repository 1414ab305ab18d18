"""The recorder: all trace records that an owner of weights writes.

A record is written and flushed before another process can see the change that
it records, so that a trace is complete however its process ends.
"""

from collections.abc import Callable
import pathlib
import struct
from typing import Any

import numpy as np

from jasgd import traces

# `traces.RECORD` as a struct, which is quicker to fill than an array.
_RECORD = struct.Struct('<4B2H6i4q2i7d')
assert _RECORD.size == traces.RECORD.itemsize

_Kind = traces.Kind
_CURE = (
  'Restore the file from a backup, or start the run again in another folder.'
)
_CHANGES = (_Kind.STEP, _Kind.MIX, _Kind.MOVE, _Kind.MEAN, _Kind.RESTART)


class Recorder:
  """Writes the trace of a server, a centre or a node.

  Args:
    path: File of the trace; an existing one is continued. None: records are
      kept in memory.
    header: Header of a new file.
    replica: Number of the node, or `traces.SERVER`.
    get_time: Function that gives the seconds since the run began.
    has_checkpoint: Whether the run has a checkpoint. The file must exist then,
      as the checkpoint refers to its records.

  Attributes:
    get_time: Function that gives the seconds since the run began.
    incarnation: Incarnation of the owner, in each record; at first the last one
      in the file. The owner adds 1 before it records a RESTART.
    last_version: Largest version that was recorded.
    last_mass: Mass in the last record of the node's own weights, when the file
      was opened.
    num_mixes: Number of the last mix; 0: there was none.
    num_means: Number of all-reduces in the file when it was opened.

  Raises:
    TraceError: if the file is missing beside a checkpoint, or is damaged before
      its first record.
  """

  def __init__(
    self,
    path: pathlib.Path | None,
    header: dict[str, Any],
    replica: int,
    get_time: Callable[[], float],
    *,
    has_checkpoint: bool = False,
  ) -> None:
    self.get_time = get_time
    self._header = header
    self._replica = replica
    self._name = 'The trace' if path is None else f'The trace {str(path)!r}'
    self._rows: list[bytes] = []
    self._writer: traces.TraceWriter | None = None
    self._is_closed = False
    records = np.zeros(0, traces.RECORD)
    if path is not None:
      path.parent.mkdir(parents=True, exist_ok=True)
      is_new = not path.exists() or not path.stat().st_size
      if is_new and has_checkpoint:
        raise traces.TraceError(
          f'{self._name} is missing or empty, and there is a '
          f'checkpoint that refers to its records. {_CURE}'
        )
      # A run that is resumed keeps the header that it began with.
      self._writer = traces.TraceWriter(path, header if is_new else None)
      records = self._writer.read()
    self.incarnation = int(records['incarnation'].max(initial=0))
    self.last_version = int(records['version'].max(initial=0))
    # A LOST may tell of another node's mass.
    own = records[records['kind'] != _Kind.LOST]
    self.last_mass = float(own['mass'][-1]) if len(own) else 0.0
    is_mean = records['kind'] == _Kind.MEAN
    self.num_mixes = int(records['group'][~is_mean].max(initial=0))
    self.num_means = int(records['group'][is_mean].max(initial=0))

  @property
  def num_records(self) -> int:
    """Number of records so far; the next one has this index."""
    return len(self._rows) if self._writer is None else self._writer.num_records

  def check_server(self, num_records: int) -> None:
    """Checks the records that a server wants to go on from.

    Args:
      num_records: Number of records that its checkpoint refers to. Those after
        them become void, and are not looked at.

    Raises:
      TraceError: if there are fewer, or one of them is inconsistent.
    """
    if num_records > self.num_records:
      raise traces.TraceError(
        f'{self._name} has {self.num_records} records, and the last checkpoint '
        f'refers to {num_records}. {_CURE}'
      )
    self._check_history(num_records, is_server=True)

  def check_node(self, version: int) -> None:
    """Checks all records of a node or a centre: others may have read any.

    Args:
      version: Version of its last checkpoint.

    Raises:
      TraceError: if there is no such version, or a record is inconsistent.
    """
    self._check_history(self.num_records, is_server=False)
    if version > self.last_version:
      raise traces.TraceError(
        f'{self._name} ends at version {self.last_version}, and the last '
        f'checkpoint is of version {version}. {_CURE}'
      )

  def _check_history(self, num_records: int, *, is_server: bool) -> None:
    trace = self.get_trace()[:num_records]
    try:
      traces.check_history(trace, self._replica, is_server=is_server)
    except traces.TraceError as error:
      raise traces.TraceError(
        f'{self._name} is damaged. {error} {_CURE}'
      ) from None

  def begin_incarnation(self) -> None:
    """Takes the next number that no record has, void ones included."""
    records = self.get_trace().records
    incarnations = records['incarnation']
    # There are no more incarnations than restarts. A record with a larger
    # number is damaged: it is void, or `check` would have refused it.
    num_restarts = np.cumsum(records['kind'] == _Kind.RESTART)
    is_known = incarnations <= num_restarts
    self.incarnation = int(incarnations[is_known].max(initial=0)) + 1

  def write(self, kind: traces.Kind, *rows: dict[str, Any]) -> None:
    """Writes and flushes records, which outlive this process from now on.

    Args:
      kind: Kind of all of them.
      *rows: Arguments of `append` for each.
    """
    for row in rows:
      self.append(kind, **row)
    self.flush()

  def append(
    self,
    kind: traces.Kind,
    *,
    fate: int = 0,
    updates: bool | None = None,
    digest: int = 0,
    num_devices: int = 0,
    worker: int | None = None,
    source: int = 0,
    group: int = 0,
    samples: int = 0,
    step: int = 0,
    version: int = 0,
    read_version: int = 0,
    source_version: int = 0,
    source_step: int = 0,
    stands: int = 0,
    own_weight: float = 0.0,
    weight: float = 0.0,
    mass: float = 0.0,
    start_time: float | None = None,
    compute_time: float = 0.0,
    end_time: float | None = None,
    release_time: float = 0.0,
  ) -> None:
    """Writes a record. `flush` makes it outlive this process.

    The arguments are the fields of `traces.RECORD`.

    Args:
      kind: Kind of the record.
      fate: Fate of a gradient.
      updates: Whether the record makes a version; None: if its kind does so.
      digest: Digest of the new weights; 0: unknown.
      num_devices: Devices of a worker that joins.
      worker: Number of the worker; None: the owner itself.
      source: Replica whose weights were read.
      group: Number that is common to the records of one call, mix or mean.
      samples: Samples of a gradient.
      step: Minibatches that the worker has computed.
      version: Version of the owner's weights after this record.
      read_version: Version of the owner's weights that was read.
      source_version: Version of `source` that was read.
      source_step: Steps in the weights of `source`.
      stands: Index of the last record that a restart leaves valid.
      own_weight: Factor on the owner's weights.
      weight: Factor on the weights of `source`.
      mass: Mass of push-sum.
      start_time: Time when the work began; None: now.
      compute_time: Seconds that a learner computed.
      end_time: Time when the work was done; None: now.
      release_time: Time when a learner was answered.
    """
    if start_time is None or end_time is None:
      now = self.get_time()
      start_time = now if start_time is None else start_time
      end_time = now if end_time is None else end_time
    if version > self.last_version:
      self.last_version = version
    row = _RECORD.pack(
      kind,
      fate,
      kind in _CHANGES if updates is None else updates,
      0,
      digest,
      num_devices,
      self._replica,
      self._replica if worker is None else worker,
      source,
      group,
      self.incarnation,
      samples,
      step,
      version,
      read_version,
      source_version,
      source_step,
      stands,
      own_weight,
      weight,
      mass,
      start_time,
      compute_time,
      end_time,
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
    """Waits until flushed records are on disk. Any thread may call it."""
    if self._writer is not None:
      self._writer.sync()

  def get_trace(self) -> traces.Trace:
    """The trace so far."""
    if self._writer is not None:
      if not self._is_closed:
        self._writer.flush()
      return traces.Trace.load(self._writer.path)
    records = np.frombuffer(b''.join(self._rows), traces.RECORD)
    return traces.Trace(records, self._header)

  def close(self) -> None:
    """Closes the file. Closing twice is no error."""
    self._is_closed = True
    if self._writer is not None:
      self._writer.close()
