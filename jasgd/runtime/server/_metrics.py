"""Metrics of a server, the weights to be evaluated, and the owner's time."""

import collections
from collections.abc import Callable
import json
import time
from typing import Any

from jasgd import protocols
from jasgd.runtime import _settings
from jasgd.runtime import _snapshots
from jasgd.runtime.server import _weights
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

# Rows in one answer: their text must fit into a message.
_MAX_ANSWER = 100
# Rows that wait for a launcher. Without one the oldest are dropped.
_MAX_ROWS = 10_000
# Purposes that the owner's time is counted for.
_PURPOSES = ('wait', 'decide', 'update', 'record', 'publish', 'send', 'save')


class Stopwatch:
  """Time of the run, and how the thread of the weights' owner spends it.

  Args:
    now: Function that gives the time in seconds.

  Attributes:
    times: Seconds by purpose. 'copy' is the time in which wires copy gradients
      out of streams, in their own threads.
  """

  def __init__(self, now: Callable[[], float]) -> None:
    self.times = dict.fromkeys((*_PURPOSES, 'copy'), 0.0)
    self._now = now
    self._begin = now()
    self._mark = time.perf_counter()

  def get_time(self) -> float:
    """Seconds since the run began; a resumed run goes on counting."""
    return self._now() - self._begin

  def add(self, purpose: str) -> None:
    """Counts the time since the last call for a purpose."""
    now = time.perf_counter()
    self.times[purpose] += now - self._mark
    self._mark = now

  def save(self) -> float:
    """Seconds since the run began, for a checkpoint."""
    return self.get_time()

  def restore(self, seconds: float) -> None:
    """Inverse of `save`."""
    self._begin = self._now() - seconds


class ServerMetrics:
  """Makes a row of metrics every `eval_every` updates, and keeps the weights.

  The server writes no metrics file and never evaluates. The launcher asks for
  the rows, pulls the kept weights, evaluates them, and writes the file.

  Args:
    settings: Settings of the run.
    weights: Weights of the server.
    store: Snapshots of the server.
    get_time: Function that gives the seconds since the run began.
    count_learners: Function that gives the number of connected learners.

  Attributes:
    fates: Numbers of gradients by fate, over the whole run.
    next: Snapshot that is to be evaluated next, with a lease; None: there is
      none, or it was taken.
  """

  def __init__(
    self,
    settings: _settings.ServerSettings,
    weights: _weights.ServerWeights,
    store: _snapshots.SnapshotStore,
    get_time: Callable[[], float],
    count_learners: Callable[[], int],
  ) -> None:
    self.fates: collections.Counter[int] = collections.Counter()
    self.next: _snapshots.Snapshot | None = None
    self._every = settings.eval_every
    self._weights = weights
    self._store = store
    self._get_time = get_time
    self._count_learners = count_learners
    self._last_clock = -1  # Clock of the last row.
    # Rows that the launcher has not written yet.
    self._rows: collections.deque[dict[str, float]] = collections.deque(
      maxlen=_MAX_ROWS
    )
    self._begin_sums({})

  @property
  def next_clock(self) -> int:
    """Clock of the weights that are to be evaluated next; -1: none."""
    return -1 if self.next is None else self.next.version

  def _begin_sums(self, last: dict[str, float]) -> None:
    """Starts the sums of the next row; until then `last` is the summary."""
    self._last = last
    self._num_counted = self._staleness = self._max_staleness = 0
    self._loss = 0.0

  def count(self, fate: protocols.Fate, staleness: int, loss: float) -> None:
    """Counts a gradient."""
    self.fates[fate] += 1
    if fate == protocols.Fate.APPLIED:
      self._num_counted += 1
      self._staleness += staleness
      self._max_staleness = max(self._max_staleness, staleness)
      self._loss += loss

  def summarize(self) -> dict[str, float]:
    """Mean loss and staleness since the last row; {} if there are none."""
    count = self._num_counted
    if not count:
      return self._last
    return {
      'train/loss': self._loss / count,
      'server/staleness_mean': self._staleness / count,
      'server/staleness_max': self._max_staleness,
    }

  def add_row_if_due(self) -> None:
    """Adds a row every `eval_every` updates, after a publication."""
    # A call with several updates may step over the exact clock.
    last = max(self._last_clock, 0)
    if self._weights.clock // self._every > last // self._every:
      self.add_row()

  def add_row(self) -> None:
    """Adds a row, and keeps the newest weights to be evaluated."""
    weights = self._weights
    if self._last_clock == weights.clock:
      return
    summary = self.summarize()
    if summary:
      rate = weights.rate
      is_dropped = [protocols.Fate(fate).is_dropped for fate in self.fates]
      dropped = zip(self.fates.values(), is_dropped, strict=True)
      self._rows.append(
        {
          'clock': weights.clock,
          'epoch': weights.epoch,
          'time': self._get_time(),
          **summary,
          'server/rate': 1.0 if rate is None else rate,
          'server/learners': self._count_learners(),
          'server/dropped': sum(count for count, is_it in dropped if is_it),
        }
      )
    self._last_clock = weights.clock
    self._begin_sums(summary)
    if self.next is not None:
      self._store.end_lease(self.next)
    self.next = self._store.lease_newest()

  def take(self, message: _messages.Message) -> _snapshots.Snapshot | None:
    """The next snapshot, with its lease, if a PULL asks for it."""
    if not message.flags & _messages.Flag.AT_CLOCK:
      return None
    snapshot, self.next = self.next, None
    return snapshot

  def send_rows(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> None:
    """Handles METRICS: sends the oldest rows after the clock in `version`.

    Rows up to that clock are forgotten: the launcher has written them.

    Args:
      channel: Channel of the launcher.
      message: The request.
    """
    clock = self._weights.clock
    if not -1 <= message.version <= clock:
      raise _messages.MessageError(
        'clock',
        f'The version of METRICS must be from -1 to the clock {clock}, got '
        f'{message.version}.',
      )
    rows = self._rows
    while rows and rows[0]['clock'] <= message.version:
      rows.popleft()
    text = json.dumps([rows[i] for i in range(min(len(rows), _MAX_ANSWER))])
    channel.send(_messages.Message(_messages.Verb.ANSWER, text=text))

  def list_leased(self) -> list[_snapshots.Snapshot]:
    """The snapshot that is to be evaluated next, if there is one."""
    return [] if self.next is None else [self.next]

  def save(self, keys: list[tuple[int, int]]) -> dict[str, Any]:
    """Counts and rows for a checkpoint; `next` as its index in `keys`."""
    return {
      'next': None if self.next is None else keys.index(self.next.key),
      'fates': {str(int(fate)): count for fate, count in self.fates.items()},
      'last_clock': self._last_clock,
      'last': self._last,
      'rows': list(self._rows),
      'sums': [
        self._num_counted,
        self._staleness,
        self._max_staleness,
        self._loss,
      ],
    }

  def restore(
    self, state: dict[str, Any], snapshots: list[_snapshots.Snapshot]
  ) -> None:
    """Inverse of `save`; leases the snapshot that is to be evaluated next."""
    self.fates.update(
      {int(fate): count for fate, count in state['fates'].items()}
    )
    self._last_clock = state['last_clock']
    self._last = state['last']
    self._rows.extend(state['rows'])
    self._num_counted, self._staleness, self._max_staleness, self._loss = state[
      'sums'
    ]
    if state['next'] is not None:
      self.next = self._store.lease(snapshots[state['next']])
