"""The trace: who computed what on which weights, and what became of it."""

import dataclasses
import functools
import json
import os
from typing import Any

import numpy as np

from jasgd import protocols
from jasgd.traces import _file
from jasgd.traces import _schema

_Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trace:
  """What happened in a run, in the order in which the server handled it.

  A run is a function of its trace. The columns (`learner`, `read_clock`, ...)
  are read-only arrays with one entry per gradient. They leave out what a
  restart of the server made void; `records` has everything.

  Attributes:
    records: All records, a read-only array of dtype `RECORD`. It is not
      copied: whoever made it leaves it alone from now on.
    header: What can be written as JSON: config, seed, versions, device kind,
      threads, `num_learners`, `bytes_per_push`, `bytes_per_pull`, `in_flight`.
      The trace has a copy of its own.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     learner=[0, 1, 0], read_clock=[0, 0, 1], apply_clock=[0, 1, 2]
    ...   ),
    ...   header={'num_learners': 2},
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
    """Reads a file, memory-mapped: columns are read when they are used.

    Args:
      path: Where the file is.
      allow_truncated: Whether the file may end within a record, because its
        writer was killed or is still at work, or have fewer records than were
        saved. What is not whole is left out.

    Returns:
      The trace.

    Raises:
      TraceError: if there is no file, or it is empty, not a trace, of another
        version, damaged in its header, or truncated.

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
    return cls(*_file.read_file(path, allow_truncated))

  def save(self, path: _Path) -> None:
    """Writes a file, whole or not at all; one of that name is replaced.

    Args:
      path: Where the file goes.

    Examples:
      See `load`.
    """
    _file.write_file(path, self.header, self.records)

  @functools.cached_property
  def is_void(self) -> np.ndarray:
    """Which records a restart made void: the work was lost with the server."""
    is_void = np.zeros(len(self.records), bool)
    end = len(self.records)
    # Backwards, as history went: a restart that is void itself voids nothing.
    for index in self._restarts[::-1]:
      if index < end:
        resumed = int(self.records['step'][index])
        if not -1 <= resumed < index:
          raise _schema.TraceError(
            f'The restart in record {index} says that record {resumed} is the '
            'last that stands; that must be an earlier one, or -1 for none.'
          )
        is_void[resumed + 1 : index] = True
        end = resumed + 1
    return _freeze(is_void)

  @property
  def events(self) -> np.ndarray:
    """The records of joins, leaves, fetches and restarts that are not void."""
    is_event = self.records['kind'] != _schema.Kind.GRADIENT
    return _freeze(np.asarray(self.records)[is_event & ~self.is_void])

  @property
  def all_gradients(self) -> np.ndarray:
    """The records of all gradients, those that are void too."""
    is_gradient = self.records['kind'] == _schema.Kind.GRADIENT
    return _freeze(np.asarray(self.records)[is_gradient])

  @functools.cached_property
  def in_flight(self) -> np.ndarray:
    """The gradients that were being computed when the trace ended.

    From the header; fields `learner`, `step`, `read_clock`, `start_time`.
    """
    entries = self.header.get('in_flight') or []
    try:
      rows = [tuple(entry) for entry in entries]
      return _freeze(np.array(rows, _schema.IN_FLIGHT))
    except (TypeError, ValueError) as error:
      raise _schema.TraceError(
        "The header's in_flight must be a list of [learner, step, read_clock, "
        f'start_time]: {error}.'
      ) from None

  @functools.cached_property
  def learner(self) -> np.ndarray:
    """Who computed each gradient."""
    return self._column('learner')

  @functools.cached_property
  def step(self) -> np.ndarray:
    """Which of its learner's gradients each one is, from 0."""
    return self._column('step')

  @functools.cached_property
  def read_clock(self) -> np.ndarray:
    """The clock of the weights that each gradient was computed on."""
    return self._column('read_clock')

  @functools.cached_property
  def arrive_clock(self) -> np.ndarray:
    """The server's clock when each gradient was received."""
    return self._column('arrive_clock')

  @functools.cached_property
  def apply_clock(self) -> np.ndarray:
    """The clock just before the update with each gradient; -1 if dropped."""
    return self._column('apply_clock')

  @functools.cached_property
  def fate(self) -> np.ndarray:
    """What became of each gradient, as numbers of `Fate`."""
    fate = self._column('fate')
    if self.end_clock is None:
      return fate
    # Written when they came in; then the run was over before their update.
    is_late = self.apply_clock >= self.end_clock
    is_pending = (fate == protocols.Fate.APPLIED) & is_late
    return _freeze(np.where(is_pending, protocols.Fate.PENDING, fate))

  @functools.cached_property
  def end_clock(self) -> int | None:
    """The clock when the run was over; None if nothing says that it is."""
    is_end = (self.records['kind'] == _schema.Kind.END) & ~self.is_void
    if not np.any(is_end):
      return None
    return int(self.records['read_clock'][is_end][-1])

  @functools.cached_property
  def samples(self) -> np.ndarray:
    """The samples of all applied gradients so far, each one included."""
    return self._column('samples')

  @functools.cached_property
  def start_time(self) -> np.ndarray:
    """When the learner was given its snapshot, by the server's clock."""
    return self._column('start_time')

  @functools.cached_property
  def compute_time(self) -> np.ndarray:
    """How long the learner computed, by its own clock."""
    return self._column('compute_time')

  @functools.cached_property
  def arrive_time(self) -> np.ndarray:
    """When the server had received each gradient."""
    return self._column('arrive_time')

  @functools.cached_property
  def release_time(self) -> np.ndarray:
    """When the server let the learner go on; NaN if it never did."""
    return self._column('release_time')

  @functools.cached_property
  def incarnation(self) -> np.ndarray:
    """Which incarnation of the server received each gradient."""
    return self._column('incarnation')

  @functools.cached_property
  def call(self) -> np.ndarray:
    """Updates with equal numbers were made by one call; 0: of their own."""
    return self._column('call')

  @functools.cached_property
  def staleness(self) -> np.ndarray:
    """Tau: updates between a gradient's weights and its own update.

    Of a gradient that is in no update, dropped or pending, those until it
    arrived.
    """
    is_applied = self.fate == protocols.Fate.APPLIED
    clock = np.where(is_applied, self.apply_clock, self.arrive_clock)
    return _freeze(clock - self.read_clock)

  @functools.cached_property
  def wait_time(self) -> np.ndarray:
    """How long the server held each learner back after it had pushed."""
    return _freeze(self.release_time - self.arrive_time)

  @functools.cached_property
  def num_updates(self) -> int:
    """How many updates were made of the gradients in this trace."""
    is_applied = self.fate == protocols.Fate.APPLIED
    clock = self.apply_clock[is_applied]
    incarnation = self.incarnation[is_applied]
    order = np.lexsort((clock, incarnation))
    is_next = np.diff(clock[order]) != 0
    is_next |= np.diff(incarnation[order]) != 0
    return int(np.count_nonzero(is_next)) + bool(len(clock))

  @functools.cached_property
  def num_gradients(self) -> int:
    """How many gradients the server received, whatever became of them."""
    return len(self.fate)

  @functools.cached_property
  def duration(self) -> float:
    """Seconds from the first start to the last arrival or release."""
    if not self.num_gradients:
      return 0.0
    start = np.fmin.reduce(self.start_time)
    end = np.fmax.reduce(np.fmax(self.arrive_time, self.release_time))
    return float(end - start)

  def __len__(self) -> int:
    return len(self.records)

  def __getitem__(self, key: slice) -> 'Trace':
    """The trace of some consecutive records, with the same header.

    A restart voids what lies before it in the slice. One beyond the slice's end
    is not known to it, as to someone who looked at the run at that time.
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
    if len(restarts):  # They count records from the start of the file.
      records = np.array(records)
      resumed = records['step'][restarts - start] - start
      records['step'][restarts - start] = np.maximum(resumed, -1)
    trace = Trace(records)
    # Not copied: with the work in flight of many learners it can be long.
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
    # Without the columns that were looked at, and read-only again.
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
    """The indices of the restart records."""
    return np.flatnonzero(self.records['kind'] == _schema.Kind.RESTART)

  @functools.cached_property
  def _standing(self) -> slice | np.ndarray:
    """Where the gradients are: a slice if possible, which copies nothing."""
    is_gradient = self.records['kind'] == _schema.Kind.GRADIENT
    indices = np.flatnonzero(is_gradient & ~self.is_void)
    if not len(indices):
      return slice(0, 0)
    if indices[-1] - indices[0] + 1 == len(indices):
      return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices

  def _column(self, name: str) -> np.ndarray:
    return _freeze(np.asarray(self.records)[name][self._standing])


def _freeze(array: np.ndarray) -> np.ndarray:
  """The same array, for reading only."""
  array.flags.writeable = False
  return array
