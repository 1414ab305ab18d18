"""The trace: who computed what on which weights, and what became of it."""

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import numpy as np

from jasgd import protocols
from jasgd.traces import _file
from jasgd.traces import _folder
from jasgd.traces import _schema

_Path = str | os.PathLike[str]

_UPDATES = (*_schema.GRADIENTS, _schema.Kind.JOIN, _schema.Kind.LEAVE)
_WORK = (
  *_schema.GRADIENTS,
  _schema.Kind.MIX,
  _schema.Kind.MOVE,
  _schema.Kind.MEAN,
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trace:
  """Everything that happened in a run, in an order that replay can execute.

  A run is a function of its trace. The columns (`worker`, `read_version`, ...)
  are read-only arrays with one entry per gradient, that is per PUSH or STEP.
  They leave out what a restart of the server made void; `records` has
  everything.

  Attributes:
    records: All records, a read-only array of dtype `RECORD`. The array is not
      copied: its maker must not change it any more.
    header: JSON-serialisable description of the run: config, seed, versions,
      device kind, threads, `strategy` (name and arguments), `num_workers`,
      bytes of messages, `in_flight`. The trace has a copy of its own.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     worker=[0, 1, 0], read_version=[0, 0, 1], clock=[0, 1, 2]
    ...   ),
    ...   header={'num_workers': 2},
    ... )
    >>> trace.staleness
    array([0, 1, 1])
    >>> trace.num_updates
    3
  """

  records: np.ndarray
  header: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    records = self.records
    if not isinstance(records, np.ndarray) or records.dtype != _schema.RECORD:
      raise ValueError(
        'records must be an array of dtype RECORD, got '
        f'{getattr(records, "dtype", type(records).__name__)}.'
      )
    if records.ndim != 1:
      raise ValueError(f'records must be flat, got shape {records.shape}.')
    if not records.flags.c_contiguous:
      records = np.ascontiguousarray(records)
    records = records.view()
    records.flags.writeable = False
    object.__setattr__(self, 'records', records)
    header = json.loads(_file.encode_header(self.header))
    object.__setattr__(self, 'header', header)

  @classmethod
  def load(cls, path: _Path, allow_truncated: bool = False) -> 'Trace':
    """Reads a trace: one file, or the folder of a real run without a server.

    A file is memory-mapped: columns are read when they are used. In a folder
    every owner has a file of its own, see `get_file_name`. These are merged:
    every record comes after those before it in its file, and after the versions
    that it reads were made; among records that could be next, by time.

    Args:
      path: Path of the file or folder.
      allow_truncated: Whether a file may end within a record, because its
        writer was killed or is still at work, or have fewer records than were
        saved. Whole records are read.

    Returns:
      The trace.

    Raises:
      TraceError: if there is no file, or it is empty, not a trace, of another
        version or run, damaged in its header, or truncated; or, in a folder, if
        a version is read that was never written.

    Examples:
      >>> import os, tempfile
      >>> from jasgd import traces
      >>> trace = traces.Trace(traces.make_records(step=[0, 1, 2]))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...   path = os.path.join(folder, 'trace')
      ...   trace.save(path)
      ...   traces.Trace.load(path) == trace
      True
    """
    if os.path.isdir(path):
      folder = pathlib.Path(path)
      return cls(*_folder.read_folder(folder, allow_truncated))
    return cls(*_file.read_file(path, allow_truncated))

  def save(self, path: _Path) -> None:
    """Writes a file, whole or not at all; an existing one is replaced.

    Args:
      path: Path of the file.

    Examples:
      See `load`.
    """
    _file.write_file(path, self.header, self.records)

  @functools.cached_property
  def is_void(self) -> np.ndarray:
    """Whether each record is void: its work was lost with the server."""
    is_void = np.zeros(len(self.records), bool)
    end = len(self.records)
    # Backwards: a restart that is void itself makes nothing void.
    for index in self._restarts[::-1]:
      if index < end:
        resumed = int(self.records['stands'][index])
        if not -1 <= resumed < index:
          raise _schema.TraceError(
            f'The restart in record {index} says that record {resumed} is the '
            'last valid one; that must be an earlier one, or -1 for none.'
          )
        is_void[resumed + 1 : index] = True
        end = resumed + 1
    return _freeze(is_void)

  @functools.cached_property
  def has_server(self) -> bool:
    """Whether learners push to a server; otherwise nodes step on their own."""
    kinds = self.records['kind']
    if np.any(kinds == _schema.Kind.PUSH):
      return True
    is_peers = np.isin(kinds, _WORK)
    is_peers |= (kinds == _schema.Kind.JOIN) & (self.records['replica'] >= 0)
    return not np.any(is_peers)

  @property
  def is_recorded(self) -> bool:
    """Whether real processes recorded the run; otherwise it is simulated."""
    header = self.header
    return bool(header.get('is_recorded')) or 'num_present' in header

  @functools.cached_property
  def num_workers(self) -> int:
    """Number of learners or nodes: the header's, or more if more were seen.

    Raises:
      TraceError: if a number is negative, or there are over 2^24.
    """
    num_workers = self.header.get('num_workers') or 0
    if not isinstance(num_workers, int):
      raise _schema.TraceError(
        f"The header's num_workers must be a whole number, got {num_workers!r}."
      )
    kinds = self.records['kind']
    # The restart and the end of a server are no worker's.
    is_owners = (kinds == _schema.Kind.RESTART) | (kinds == _schema.Kind.END)
    is_owners &= self.records['replica'] < 0
    is_workers = ~(is_owners | self.is_void)
    worker = np.where(is_workers, self.records['worker'], 0)
    if np.any(is_workers):
      if not 0 <= worker.min() <= worker.max() < _schema.MAX_WORKERS:
        is_bad = (worker < 0) | (worker >= _schema.MAX_WORKERS)
        index = int(np.argmax(is_bad))
        raise _schema.TraceError(
          f'Record {index} has worker={worker[index]}, which must be from 0 to '
          f'{_schema.MAX_WORKERS - 1}: the records are damaged.'
        )
      num_workers = max(num_workers, int(worker.max()) + 1)
    if len(self.in_flight):
      smallest = int(self.in_flight['worker'].min())
      if smallest < 0:
        raise _schema.TraceError(
          f"The header's in_flight has a worker below 0: {smallest}."
        )
      num_workers = max(num_workers, int(self.in_flight['worker'].max()) + 1)
    if not 0 <= num_workers <= _schema.MAX_WORKERS:
      raise _schema.TraceError(
        f'A run has at most {_schema.MAX_WORKERS} workers, got {num_workers}.'
      )
    return num_workers

  # --- Records.

  def of_kind(self, *kinds: _schema.Kind) -> np.ndarray:
    """The records of some kinds that are not void."""
    is_kind = np.isin(self.records['kind'], kinds)
    return _freeze(np.asarray(self.records)[is_kind & ~self.is_void])

  def of_replica(self, replica: int) -> np.ndarray:
    """The records of one replica that are not void."""
    is_own = self.records['replica'] == replica
    return _freeze(np.asarray(self.records)[is_own & ~self.is_void])

  @property
  def steps(self) -> np.ndarray:
    """The records of workers' steps on their own replicas."""
    return self.of_kind(_schema.Kind.STEP)

  @property
  def mixes(self) -> np.ndarray:
    """The records of mixes and means; a mix has one for each source."""
    return self.of_kind(_schema.Kind.MIX, _schema.Kind.MEAN)

  @functools.cached_property
  def in_flight(self) -> np.ndarray:
    """The gradients that were being computed when the trace ended.

    From the header; fields `worker`, `step`, `read_version`, `start_time`.
    """
    entries = self.header.get('in_flight') or []
    try:
      rows = [tuple(entry) for entry in entries]
      return _freeze(np.array(rows, _schema.IN_FLIGHT))
    except (OverflowError, TypeError, ValueError) as error:
      raise _schema.TraceError(
        "The header's in_flight must be a list of [worker, step, read_version, "
        f'start_time]: {error}.'
      ) from None

  # --- Columns: an entry for each gradient.

  @functools.cached_property
  def worker(self) -> np.ndarray:
    """The worker that computed each gradient."""
    return self._column('worker')

  @functools.cached_property
  def step(self) -> np.ndarray:
    """Minibatches that the worker had computed, each gradient's included."""
    return self._column('step')

  @functools.cached_property
  def read_version(self) -> np.ndarray:
    """The version of the weights that each gradient was computed on."""
    return self._column('read_version')

  @functools.cached_property
  def clock(self) -> np.ndarray:
    """The version just before each gradient was handled."""
    return _freeze(self._column('version') - self._column('updates'))

  @functools.cached_property
  def fate(self) -> np.ndarray:
    """What became of each gradient, as numbers of `Fate`."""
    fate = self._column('fate')
    # A gradient that the protocol took is recorded as applied, and is pending
    # if the update that it was taken for was never made.
    is_pending = (fate == protocols.Fate.APPLIED) & (
      self.clock >= self._find_last_versions()
    )
    is_pending &= self._column('kind') == _schema.Kind.PUSH
    return _freeze(np.where(is_pending, protocols.Fate.PENDING, fate))

  @functools.cached_property
  def samples(self) -> np.ndarray:
    """The samples of all applied gradients so far, each one included."""
    is_applied = self.fate == protocols.Fate.APPLIED
    return _freeze(np.cumsum(self._column('samples') * is_applied))

  @functools.cached_property
  def start_time(self) -> np.ndarray:
    """When the worker had the weights, by the owner's clock."""
    return self._column('start_time')

  @functools.cached_property
  def compute_time(self) -> np.ndarray:
    """How long the worker computed, by its own clock."""
    return self._column('compute_time')

  @functools.cached_property
  def end_time(self) -> np.ndarray:
    """When the server had received each gradient, or the step was done."""
    return self._column('end_time')

  @functools.cached_property
  def release_time(self) -> np.ndarray:
    """When the server let the learner go on; NaN if it never did."""
    return self._column('release_time')

  @functools.cached_property
  def incarnation(self) -> np.ndarray:
    """The incarnation of the owner that received each gradient."""
    return self._column('incarnation')

  @functools.cached_property
  def staleness(self) -> np.ndarray:
    """Tau: updates between a gradient's weights and its own update.

    For a gradient that is in no update, since it was dropped or is pending: the
    updates until it arrived.
    """
    return _freeze(self.clock - self.read_version)

  @functools.cached_property
  def wait_time(self) -> np.ndarray:
    """How long the server held each learner back after its push."""
    return _freeze(self.release_time - self.end_time)

  # --- Numbers.

  @functools.cached_property
  def is_ended(self) -> bool:
    """Whether an owner, such as the server, has recorded its end."""
    return len(self.of_kind(_schema.Kind.END)) > 0

  @functools.cached_property
  def num_updates(self) -> int:
    """Number of updates by optimizers; mixes are not counted."""
    is_update = (self.records['updates'] > 0) & ~self.is_void
    kinds = self.records['kind'][is_update]
    return int(np.count_nonzero(np.isin(kinds, _UPDATES)))

  @functools.cached_property
  def num_gradients(self) -> int:
    """Number of gradients that were received, whatever became of them."""
    return len(self._column('fate'))

  @functools.cached_property
  def duration(self) -> float:
    """Seconds from the first start of a gradient to the last end of work."""
    if not self.num_gradients:
      return 0.0
    start = np.fmin.reduce(self.start_time)
    work = self.of_kind(*_WORK) if not self.has_server else None
    if work is None:
      end = np.fmax.reduce(np.fmax(self.end_time, self.release_time))
    else:
      end = np.fmax.reduce(work['end_time'])
    return float(end - start)

  def __len__(self) -> int:
    return len(self.records)

  def __getitem__(self, key: slice) -> 'Trace':
    """The trace of some consecutive records, with the same header.

    A restart makes records before it in the slice void. A restart after the
    slice's end has no effect, as if the run had been looked at before it.
    """
    if not isinstance(key, slice):
      raise TypeError(
        f'A trace is sliced, trace[a:b], got {key!r}; single records are in '
        'trace.records.'
      )
    start, stop, stride = key.indices(len(self))
    if stride != 1:
      raise ValueError(
        f'A slice of a trace has no gaps, got a step of {key.step}.'
      )
    records = self.records[start:stop]
    restarts = self._restarts if start else np.arange(0)
    restarts = restarts[(restarts >= start) & (restarts < stop)]
    if len(restarts):  # They name a record by its index in the whole trace.
      records = np.array(records)
      resumed = records['stands'][restarts - start] - start
      records['stands'][restarts - start] = np.maximum(resumed, -1)
    trace = Trace(records)
    # Not copied: it can be long, as it lists the gradients in flight.
    object.__setattr__(trace, 'header', self.header)
    return trace

  def __eq__(self, other: object) -> bool:
    """Whether all records, bit for bit, and the headers are the same."""
    if not isinstance(other, Trace):
      return NotImplemented
    return np.array_equal(
      self.records.view(np.int64), other.records.view(np.int64)
    ) and _file.is_same_header(self.header, other.header)

  def __reduce__(self) -> tuple[Any, ...]:
    # Cached columns are left out, and the new trace is read-only, too.
    return Trace, (np.asarray(self.records), self.header)

  def __repr__(self) -> str:
    if not self.num_gradients:
      return f'Trace({len(self)} records, no gradients)'
    counts = np.bincount(self.fate, minlength=len(protocols.Fate))
    fates = ', '.join(
      f'{counts[fate]} {fate.name.lower()}'
      for fate in protocols.Fate
      if counts[fate]
    )
    return (
      f'Trace({len(self)} records, {self.num_gradients} gradients: {fates}; '
      f'{self.num_updates} updates in {self.duration:.6g} s, mean staleness '
      f'{self.staleness.mean():.4g})'
    )

  @functools.cached_property
  def _restarts(self) -> np.ndarray:
    """Indices of a server's restarts: they make no version, but go back."""
    is_restart = self.records['kind'] == _schema.Kind.RESTART
    is_restart &= self.records['updates'] == 0
    return np.flatnonzero(is_restart & (self.records['replica'] < 0))

  def _find_last_versions(self) -> int | np.ndarray:
    """The version at the end of the replica that each gradient was pushed to.

    A number if the server has one replica. For a STEP it has no meaning.
    """
    is_server = (self.records['replica'] < 0) & ~self.is_void
    indices = np.flatnonzero(is_server)
    if not len(indices):
      return 0
    replicas = self.records['replica'][indices]
    versions = self.records['version'][indices]
    if np.all(replicas == replicas[-1]):
      return int(versions[-1])
    # The server is divided into fragments, each with versions of its own. The
    # last version of each is the first one in reverse order.
    numbers, last = np.unique(replicas[::-1], return_index=True)
    own = np.searchsorted(numbers, self._column('replica'))
    return versions[::-1][last][np.minimum(own, len(numbers) - 1)]

  @functools.cached_property
  def _gradients(self) -> slice | np.ndarray:
    """Where the gradients are: a slice if possible, which copies nothing."""
    is_gradient = np.isin(self.records['kind'], _schema.GRADIENTS)
    indices = np.flatnonzero(is_gradient & ~self.is_void)
    if not len(indices):
      return slice(0, 0)
    if indices[-1] - indices[0] + 1 == len(indices):
      return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices

  def _column(self, name: str) -> np.ndarray:
    return _freeze(np.asarray(self.records)[name][self._gradients])


def _freeze(array: np.ndarray) -> np.ndarray:
  """The same array, made read-only."""
  array.flags.writeable = False
  return array
