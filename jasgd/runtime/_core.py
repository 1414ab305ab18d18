"""What all parts of the server share: the run as it stands, and its answers."""

import collections
from collections.abc import Callable, Iterable
import logging
import time as clocks
from typing import Any

from jasgd import protocols
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _books
from jasgd.runtime import _crash
from jasgd.runtime import _journal
from jasgd.runtime import _messages
from jasgd.runtime import _recorder
from jasgd.runtime import _settings
from jasgd.runtime import _snapshots
from jasgd.runtime import _weights
from jasgd.runtime import _wire

_log = logging.getLogger(__name__)
_State = _books.State
_Verb = _messages.Verb

# What the owner's time goes to; but copies out of a stream are made by others.
TIMES = (
  'wait',
  'decide',
  'update',
  'record',
  'publish',
  'send',
  'save',
  'copy',
)


class Core:
  """The run as it stands. It belongs to the owner's thread.

  Attributes:
    settings: What the server was told.
    protocol: When to update.
    weights: The weights and the clock.
    store: The snapshots.
    newest: The last one published.
    to_evaluate: The one that is to be evaluated next, if any; on lease.
    register: The learners.
    recorder: Trace and metrics.
    journal: What is written there.
    incarnation: How often the run was resumed.
    counts: Messages that were accepted, and those that were refused, by reason.
    times: What the owner's time went to, in seconds.
    has_begun: Whether learners may compute; at first they wait for each other.
    end_reason: Why the run is over; None while it is not.
    ended_at: When it was.
    is_interrupted: Whether it can go on another time.
    is_failed: Whether that is no good end.
    is_diverged: Whether the loss was not finite.
    num_bad: Gradients in a row that were not finite.
    last_pid: The process of the learner whose message is handled.
    save_end: Saves, and waits for it, before anybody is told of the end.
  """

  def __init__(
    self,
    settings: _settings.ServerSettings,
    *,
    is_shared: bool,
    now: Callable[[], float],
    crash: _crash.CrashPoints,
  ) -> None:
    self.settings = settings
    self.protocol = settings.protocol
    self.weights = _weights.Weights(settings)
    self.store = _snapshots.SnapshotStore(
      self.weights.layout, is_shared=is_shared
    )
    self.newest: _snapshots.Snapshot
    self.to_evaluate: _snapshots.Snapshot | None = None
    self.recorder: _recorder.Recorder
    self.journal: _journal.Journal
    self.register = _books.Register()
    self.incarnation = 0
    self.counts: collections.Counter[str] = collections.Counter()
    self.times = dict.fromkeys(TIMES, 0.0)
    self.has_begun = False
    self.end_reason: str | None = None
    self.ended_at = 0.0
    self.is_interrupted = False
    self.is_failed = False
    self.is_diverged = False
    self.num_bad = 0
    self.last_pid = 0
    self.save_end: Callable[[], None] = lambda: None
    self._crash = crash
    self._now = now
    self._begin_time = now()
    self._mark = clocks.perf_counter()

  def open_recorder(
    self,
    workdir: workdirs.Workdir | None,
    header: dict[str, Any],
    position: int,
  ) -> None:
    """Begins to write, or goes on."""
    self.recorder = _recorder.Recorder(workdir, header, position)
    self.journal = _journal.Journal(self.recorder, self.weights, self.get_time)

  # --- Time.

  def get_time(self) -> float:
    """Seconds since the run began; a resumed run goes on counting."""
    return self._now() - self._begin_time

  def set_time(self, time: float) -> None:
    """So much had passed before."""
    self._begin_time = self._now() - time

  def spend(self, what: str) -> None:
    """The time since the last call went to this."""
    now = clocks.perf_counter()
    self.times[what] += now - self._mark
    self._mark = now

  def reach(self, point: str) -> None:
    """Passes a place where a test may kill."""
    if self._crash.is_armed:
      self._crash.reach(point, lambda: self.last_pid)

  # --- Weights.

  def copy_weights(self) -> _snapshots.Snapshot:
    """The weights as they are now, which nobody knows of yet."""
    weights = self.weights
    state, rate = weights.state, weights.rate
    snapshot = self.store.copy(
      self.incarnation,
      weights.clock,
      1.0 if rate is None else rate,
      (state.params, state.stats),
    )
    self.spend('publish')
    return snapshot

  def publish(self, snapshot: _snapshots.Snapshot) -> None:
    """Makes these weights the newest."""
    if hasattr(self, 'newest'):
      self.store.end_lease(self.newest)
    self.newest = snapshot
    # A call with several updates may have stepped over the very clock.
    every = self.settings.eval_every
    if snapshot.clock // every > max(self.recorder.last_metrics, 0) // every:
      self.note_metrics()
    self.spend('publish')
    self.reach('published')

  def note_metrics(self) -> None:
    """Writes a line, and keeps these weights for whoever evaluates."""
    recorder, weights = self.recorder, self.weights
    if recorder.last_metrics == weights.clock:
      return
    summary = recorder.summarize()
    if summary:
      rate = weights.rate
      recorder.write_metrics(
        weights.clock,
        {
          'epoch': weights.epoch,
          'time': self.get_time(),
          **summary,
          'server/rate': 1.0 if rate is None else rate,
          'server/learners': self.count_alive(),
          'server/dropped': recorder.count_dropped(),
        },
      )
    recorder.begin_metrics(weights.clock)
    if self.to_evaluate is not None:
      self.store.end_lease(self.to_evaluate)
    self.to_evaluate = self.store.lease(self.newest)

  def take_evaluation(self) -> _snapshots.Snapshot | None:
    """The weights that are to be evaluated next, with their lease."""
    snapshot, self.to_evaluate = self.to_evaluate, None
    return snapshot

  # --- Answers.

  def settle(self, decision: protocols.Decision) -> None:
    """Does what the protocol decided after somebody came or went."""
    if decision.updates:
      self.weights.update_alone()
      self.weights.wait()
      self.spend('update')
      self.reach('updated')
      self.publish(self.copy_weights())
    self.release(decision.released)
    self.check_budget()

  def release(self, learners: Iterable[int]) -> None:
    """Lets learners go on, once the run has begun."""
    if not self.has_begun:
      return
    for learner in learners:
      book = self.register.books[learner]
      if book.state == _State.ABSENT:  # It may go on when it comes back.
        book.was_waiting = False
      elif book.state == _State.WAITING and self.end_reason is None:
        self.answer(book)
      elif book.state == _State.WAITING:
        self.say_end(book)

  def answer(self, book: _books.Book) -> None:
    """A learner gets what it waits for, and computes from now on."""
    book.state = _State.COMPUTING
    book.start_time = self.get_time()
    if not book.keeps_weights:
      self.add_lease(book, self.newest)
    self.keep_last_lease(book)
    if self.settings.has_fetches and not book.keeps_weights:
      self.journal.note_fetch(book, self.newest)
    self.repeat_answer(book)

  def repeat_answer(self, book: _books.Book) -> None:
    """Sends a learner's last answer, for the first time or again."""
    message = _messages.Message(
      _Verb.ANSWER,
      book.fate,
      learner=book.learner,
      step=book.next_step,
      text=book.welcome,
    )
    book.welcome = ''
    buffer = None
    if not book.keeps_weights:
      snapshot = next(iter(book.leases.values()))
      message.verb, buffer = _Verb.SNAPSHOT, snapshot.buffer
      message.incarnation, message.clock = snapshot.version
      message.rate = snapshot.rate
    if book.channel is not None:
      book.channel.send(message, buffer)
    self.spend('send')

  def add_lease(self, book: _books.Book, snapshot: _snapshots.Snapshot) -> None:
    """A learner may use a snapshot, besides the one that it has."""
    if snapshot.version in book.leases:
      return
    while len(book.leases) > 1:  # One that it fetched and did not use.
      self.store.end_lease(book.leases.popitem()[1])
    book.leases[snapshot.version] = self.store.lease(snapshot)

  def keep_last_lease(self, book: _books.Book) -> None:
    """A learner uses nothing any more but what it got last."""
    while len(book.leases) > 1:
      version = next(iter(book.leases))
      self.store.end_lease(book.leases.pop(version))

  # --- Going, and the end.

  def count_alive(self) -> int:
    """How many learners are connected."""
    return len(self.register.list(_State.COMPUTING, _State.WAITING))

  def remove(self, book: _books.Book, lost_clock: int) -> None:
    """A learner is gone, with all that it had; nobody waits for it."""
    self.register.detach(book)
    book.state, book.was_waiting = _State.GONE, False
    while book.leases:
      self.store.end_lease(book.leases.popitem()[1])
    self.journal.note_member(traces.Kind.LEAVE, book, lost_clock)
    # In a run that may go on another time, what it does to others counts.
    if self.end_reason is None or self.is_interrupted:
      self.settle(self.protocol.on_leave(book.learner))

  def say_end(self, book: _books.Book, lost_clock: int = -1) -> None:
    """A learner is told that it is over, and has nothing more to say."""
    channel = book.channel
    self.remove(book, lost_clock)
    if channel is not None:
      self.say_end_on(channel)

  def say_end_on(self, channel: _wire.Channel) -> None:
    """Somebody is told that it is over."""
    channel.send(_messages.Message(_Verb.END, text=self.end_reason or ''))

  def check_budget(self) -> None:
    """Ends the run if it has had its updates or epochs."""
    settings, weights = self.settings, self.weights
    if self.end_reason is not None or weights.group_size:
      return
    if settings.num_updates and weights.clock >= settings.num_updates:
      self.end(f'All {settings.num_updates} updates were made.')
    elif weights.samples >= settings.max_samples:
      self.end(f'All {settings.num_epochs:g} epochs were made.')

  def interrupt(self, reason: str) -> None:
    """No more gradients are taken now; the run can be resumed."""
    self.is_interrupted = True
    self._stop(reason)

  def end(self, reason: str) -> None:
    """No more gradients are taken; learners are told as they ask."""
    self.journal.note_server(traces.Kind.END)
    self.note_metrics()
    self._stop(reason)

  def _stop(self, reason: str) -> None:
    self.end_reason = reason
    _log.info('The run ends at clock %d: %s', self.weights.clock, reason)
    if not self.is_interrupted:  # Nobody may go who could still be needed.
      self.save_end()
      self.spend('save')
    self.ended_at = self.get_time()
    while waiting := self.register.list(_State.WAITING):
      self.say_end(waiting[0])
