"""The parameter server: one thread that owns the weights.

The owner takes one request at a time out of an inbox. It knows nothing of wires
and never evaluates. `Server._commit` shows the contract that real runs and
exact replay rely on: after each change of the weights or of the members, each
fetch and each gradient that was not finite, record, then publish, then answer.
Read it first, then `_push`, which calls it.

The parts have state and contracts of their own: `Sessions` (the state of each
learner, and leases), `Membership` (learners join, leave, are lost, and are
answered), `LearnerRecords` (records of learners), `ServerWeights` (weights,
optimizer state, clock), `SnapshotStore` (published weights), `Recorder` (the
trace), `ServerMetrics`, `Recovery` (checkpoints), `RunEnd` (why the run is
over) and the `FrontDesk` (status, pulls, refusals).
"""

import collections
from collections.abc import Callable, Collection
import logging
import math
import time as clocks
from typing import Any

from jasgd import engine
from jasgd import protocols
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _checkpoints
from jasgd.runtime import _crash
from jasgd.runtime import _front_desk
from jasgd.runtime import _recorder
from jasgd.runtime import _settings
from jasgd.runtime import _snapshots
from jasgd.runtime.server import _ending
from jasgd.runtime.server import _membership
from jasgd.runtime.server import _metrics
from jasgd.runtime.server import _records
from jasgd.runtime.server import _recovery
from jasgd.runtime.server import _sessions
from jasgd.runtime.server import _weights
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

_log = logging.getLogger(__name__)
_Channel = _wire.Channel
_Fate = protocols.Fate
_Kind = traces.Kind
_Message = _messages.Message
_Push = _records.Push
_MessageError = _messages.MessageError
_Session = _sessions.LearnerSession
_Snapshot = _snapshots.Snapshot
_State = _sessions.State
_Verb = _messages.Verb

# Seconds between two looks at deadlines and checkpoints.
_TICK = 0.1


class Server:
  """A parameter server, without its wires.

  `step` handles one request. One thread calls it, the owner; wires put events
  into the inbox from any thread.

  Args:
    settings: Settings of the run.
    workdir: Folder of trace and checkpoints; None: no files. If it contains a
      run, that run is resumed from its last readable checkpoint, as a new
      incarnation.
    is_shared: Whether other processes can map snapshots.
    now: Function that gives the time in seconds.

  Attributes:
    inbox: Inbox of requests.
    layout: Layout of weights and gradients in messages.
    fingerprint: Fingerprint of the run, which learners must have.
  """

  def __init__(
    self,
    settings: _settings.ServerSettings,
    workdir: workdirs.Workdir | None = None,
    *,
    is_shared: bool = False,
    now: Callable[[], float] = clocks.monotonic,
  ) -> None:
    self._settings = settings
    self._protocol = settings.protocol
    self._weights = _weights.ServerWeights(settings)
    self.layout = self._weights.layout
    self.fingerprint = _settings.make_fingerprint(
      settings.task, self.layout, settings.seed
    )
    self.inbox = _wire.Inbox()
    # Events that `_decide_pushes` took out of the inbox, for the next step.
    self._backlog: collections.deque[_wire.Event] = collections.deque()
    self._checked_at = 0.0
    self._crash: _crash.CrashPoints | None = None
    self._watch = _metrics.Stopwatch(now)
    self._end = _ending.RunEnd(settings)
    self._store = _snapshots.SnapshotStore(self.layout, is_shared=is_shared)
    self._sessions = _sessions.Sessions(self._store)
    checkpoint = None
    if workdir is not None:
      if not workdir.trace.exists():  # A resumed run is not killed again.
        self._crash = _crash.make_crash_points(lambda: self._members.last_pid)
      # Before the trace is opened: with a checkpoint, its file must exist.
      checkpoint = _recovery.read_checkpoint(workdir, self._weights)
    self._recorder = _recorder.Recorder(
      None if workdir is None else workdir.trace,
      settings.make_header(self.layout.size),
      traces.SERVER,
      self._watch.get_time,
      has_checkpoint=checkpoint is not None,
    )
    self._metrics = _metrics.ServerMetrics(
      settings,
      self._weights,
      self._store,
      self._watch.get_time,
      self._sessions.count_connected,
    )
    self._records = _records.LearnerRecords(
      settings, self._recorder, self._metrics, self._watch.get_time
    )
    self._members = _membership.Membership(
      settings,
      self.fingerprint,
      self._sessions,
      self._records,
      self._store,
      self._end,
      self._watch,
      apply=self._apply_decision,
      commit=self._commit,
      on_failure=self._fail,
    )
    self._desk = self._make_desk()
    self._recovery = self._make_recovery(workdir)
    try:
      self._start(checkpoint)
    except BaseException:
      self.close()
      raise

  def _make_desk(self) -> _front_desk.FrontDesk:
    return _front_desk.FrontDesk(
      self._store,
      {
        _Verb.EXCHANGE: self._push,
        _Verb.NOTICE: self._handle_not_finite,
        _Verb.FETCH: self._members.fetch,
        _Verb.HELLO: self._members.hello,
        _Verb.METRICS: self._metrics.send_rows,
        _Verb.LOST: self._members.note_death,
      },
      describe=self.describe,
      on_stop=lambda text: self.stop(text or 'It was stopped.'),
      on_gone=self._members.lose_channel,
      pick=self._metrics.take,
    )

  def _make_recovery(
    self, workdir: workdirs.Workdir | None
  ) -> _recovery.Recovery:
    checkpoints = None
    if workdir is not None:
      checkpoints = _checkpoints.Checkpoints(
        workdir,
        self._recorder,
        self._settings.checkpoint_seconds,
        store=self._store,
        get_time=self._watch.get_time,
        crash=self._crash,
      )
    return _recovery.Recovery(
      self._weights,
      {
        'time': self._watch,
        'protocol': self._protocol,
        'has_begun': self._members.attendance,
        'end': self._end,
        'counts': self._desk,
      },
      {'sessions': self._sessions, 'metrics': self._metrics},
      self._store,
      self._recorder,
      checkpoints,
    )

  def _start(self, checkpoint: _recovery.Checkpoint | None) -> None:
    """Begins at clock 0, or resumes from a checkpoint."""
    if checkpoint is None:
      self._protocol.start(self._settings.num_learners)
      self._recovery.begin()
    else:
      self._recovery.resume(checkpoint)
    self._weights.warm_up()
    # Deadlines start after `warm_up`, so that compiling does not count.
    self._members.attendance.open(self._watch.get_time())
    self._publish(self._copy_weights())
    if checkpoint is None:
      self._recovery.save_now()  # There is always a checkpoint to return to.
    elif self._end.reason is not None:
      self._end_run(self._end.reason)
    else:
      self._check_budget()

  # --- Status.

  @property
  def clock(self) -> int:
    """Number of updates made."""
    return self._weights.clock

  @property
  def incarnation(self) -> int:
    """Number of times that the run was resumed."""
    return self._recorder.incarnation

  @property
  def end_reason(self) -> str | None:
    """Reason for the end of the run, in words; None while it goes on."""
    return self._end.reason

  @property
  def state(self) -> engine.ServerState:
    """State of the engine. The next update donates it."""
    return self._weights.state

  @property
  def is_over(self) -> bool:
    """Whether the run has ended and every client knows it, or is late."""
    if not self._end.has_come:
      return False
    if self._end.is_late(self._watch.get_time()):
      return True
    # Learners that were connected before a restart will ask, too.
    pending = self._sessions.list_in(
      _State.COMPUTING, _State.WAITING, _State.ABSENT
    )
    return not pending and not self._desk.num_visitors

  def get_trace(self) -> traces.Trace:
    """The trace so far."""
    return self._recorder.get_trace()

  def describe(self) -> dict[str, Any]:
    """Status, as a JSON-serialisable dict."""
    settings, weights, metrics = self._settings, self._weights, self._metrics
    max_samples, time = settings.max_samples, self._watch.get_time()
    return {
      'clock': weights.clock,
      'incarnation': self.incarnation,
      'samples': weights.samples,
      'max_samples': None if math.isinf(max_samples) else max_samples,
      'num_updates': settings.num_updates,
      'epoch': weights.epoch,
      'time': time,
      'metrics': metrics.summarize(),
      'evaluation_clock': metrics.next_clock,
      'start_clock': self._recovery.start_clock,
      'learners': {
        str(each.learner): each.describe() for each in self._sessions
      },
      'num_alive': self._sessions.count_connected(),
      'waits': self._members.attendance.describe_waits(time),
      'counts': dict(self._desk.counts),
      'fates': {
        _Fate(fate).name.lower(): count for fate, count in metrics.fates.items()
      },
      'times': self._watch.times,
      'num_buffers': len(self._store),
      'checkpoint_clock': self._recovery.last_clock,
      **self._end.describe(),
    }

  # --- The owner's loop.

  def step(self, timeout: float) -> bool:
    """Handles one request, if one comes in time.

    Args:
      timeout: Seconds to wait for one.

    Returns:
      Whether there was one.
    """
    event = self._take_event(timeout)
    self._watch.add('wait')
    if event is not None:
      self._desk.handle(event)
    now = self._watch.get_time()
    if event is None or now - self._checked_at > _TICK:
      self._checked_at = now
      self._members.check_deadlines(now)
      self._recovery.save_if_due()
      self._watch.add('save')
    return event is not None

  def _take_event(self, timeout: float) -> _wire.Event | None:
    if self._backlog:
      return self._backlog.popleft()
    return self.inbox.get(timeout)

  # --- The contract.

  def _commit(
    self,
    record: Callable[[_Snapshot | None], None] | None = None,
    *,
    updates: bool = False,
    released: Collection[int] = (),
  ) -> None:
    """Makes a change known: record, publish, answer.

    The weights, the protocol or a session have changed, and no other process
    knows of it. The order of the parts is the server's contract and must not
    change.

    Args:
      record: Function that appends the records of the change. Its argument is
        the snapshot of the new weights, if there are new weights. None: there
        are no records but those of fetches.
      updates: Whether the weights have changed.
      released: Learners that go on: the protocol lets them, or they fetch.
    """
    # 1. The snapshot is a private copy for now; later updates donate the
    #    weights themselves.
    snapshot = self._copy_weights() if updates else None
    # 2. The records are written and flushed *before* any other process can see
    #    the new weights. If this process is killed now, no learner has seen
    #    weights, or an answer, that the trace does not explain.
    if record is not None:
      record(snapshot)
    # Learners with replicas of their own fetch the weights of this very change,
    # so that their records come after its own.
    self._members.record_fetches(released, self.clock)
    self._recorder.flush()
    self._watch.add('record')
    self._maybe_crash('recorded')
    # 3. The snapshot is published *before* learners are answered, as answers
    #    carry the newest snapshot: a learner must see its own update.
    if snapshot is not None:
      self._publish(snapshot)
    # 4. Learners are answered: the sender unless the protocol withholds its
    #    answer, and all others that it releases.
    self._members.release(released)
    self._maybe_crash('replied')
    # 5. The budget is checked *after* the answers: the learners whose gradients
    #    complete the run are told of the end when they push again.
    self._check_budget()

  def _copy_weights(self) -> _Snapshot:
    """A snapshot of the weights, which is not published yet."""
    weights = self._weights
    rate = weights.rate
    snapshot = self._store.copy(
      (weights.state.params, weights.state.stats),
      self.incarnation,
      weights.clock,
      rate=1.0 if rate is None else rate,
    )
    self._watch.add('publish')
    return snapshot

  def _publish(self, snapshot: _Snapshot) -> None:
    """Makes a snapshot the newest. Its record must have been flushed."""
    self._store.publish(snapshot)
    self._metrics.add_row_if_due()
    self._watch.add('publish')
    self._maybe_crash('published')

  def _maybe_crash(self, point: str) -> None:
    if self._crash:
      self._crash.maybe_crash(point)

  # --- Gradients.

  def _push(self, channel: _Channel, message: _Message) -> None:
    """Handles an EXCHANGE, and those queued behind it that share its call."""
    # Staleness is measured, and the protocol decides, for one gradient after
    # the other. Nothing is computed yet: a message that is refused here has
    # changed nothing.
    pushes = self._decide_pushes(channel, message)
    if not pushes:
      return
    self._watch.add('decide')
    calls = self._apply(pushes)  # The weights change, the clock advances.
    self._commit(
      lambda snapshot: self._record_pushes(pushes, calls, snapshot),
      updates=any(push.decision.updates for push in pushes),
      released=[learner for push in pushes for learner in push.answered],
    )

  def _decide_pushes(self, channel: _Channel, message: _Message) -> list[_Push]:
    """Decides on a gradient, and on those queued behind it for the same call.

    Raises:
      MessageError: if the first one is refused. Later ones are refused here.
    """
    first = self._decide(channel, message)
    pushes = [] if first is None else [first]
    if self._settings.max_group == 1 or not self._protocol.updates_each:
      return pushes
    # At most as many as the budget allows: the protocol decides on all of these
    # gradients before the clock advances.
    room = self._weights.count_affordable()
    while len(pushes) < room:
      event = self._take_event(0)
      if event is None:
        break
      if event.message is None or event.message.verb != _Verb.EXCHANGE:
        self._backlog.appendleft(event)
        break
      try:
        push = self._decide(event.channel, event.message)
        self._desk.counts['accepted'] += 1
        if push is not None:
          pushes.append(push)
      except _MessageError as refusal:
        self._desk.refuse(event.channel, refusal)
    return pushes

  def _decide(self, channel: _Channel, message: _Message) -> _Push | None:
    """Measures the staleness of a gradient, and lets the protocol decide.

    Returns:
      The gradient with the decision; None if it was answered before, and the
      answer is repeated.

    Raises:
      MessageError: if this learner cannot have sent it now.
    """
    self._watch.times['copy'] += message.copy_seconds
    session = self._members.get_sender(channel, message)
    self._maybe_crash('received')
    if message.payload is None or message.payload.nbytes != self.layout.size:
      raise _MessageError(
        'size', f'An EXCHANGE needs a gradient of {self.layout.size} bytes.'
      )
    if session.has_answered(message):  # The answer was lost.
      self._members.repeat_answer(session)
      return None
    stale = session.check_push(message, self.clock)
    if not math.isfinite(message.loss):
      raise _MessageError(
        'number', f'The loss of an EXCHANGE must be finite, got {message.loss}.'
      )
    time = self._watch.get_time()
    session.count_push(time)
    session.keeps_weights = bool(message.flags & _messages.Flag.KEEPS_WEIGHTS)
    # The protocol's clock, not that of the weights: with several updates in a
    # call, the protocol is ahead of the weights.
    clock, num_present = self._protocol.clock, len(self._protocol.alive)
    if self._end.has_come:
      decision = protocols.Decision(_Fate.AFTER_END, False, ())
    else:
      decision = self._protocol.on_push(
        session.learner, message.push, message.version
      )
    self._end.note_finite()
    push = _Push(
      session,
      message,
      stale,
      decision,
      clock,
      num_present,
      time,
      session.start_time,
    )
    session.fate = int(push.fate)
    session.state = _State.WAITING
    return push

  def _apply(self, pushes: list[_Push]) -> list[int]:
    """Applies gradients; gives for each the number of its shared call, or 0."""
    rows = [
      _weights.Gradient(
        self.layout.view(push.message.payload),
        push.stale,
        push.clock - push.message.version,
        push.decision.updates,
        push.num_present,
      )
      for push in pushes
      if push.fate == _Fate.APPLIED and push.message.payload is not None
    ]
    calls = self._weights.apply_all(rows)
    if calls:
      self._watch.add('update')
      self._maybe_crash('accumulated')
      if any(push.decision.updates for push in pushes):
        self._maybe_crash('updated')
    left = iter(calls)
    return [next(left) if push.fate == _Fate.APPLIED else 0 for push in pushes]

  def _record_pushes(
    self,
    pushes: list[_Push],
    calls: list[int],
    snapshot: _Snapshot | None,
  ) -> None:
    """Records gradients, in the order in which they were decided on."""
    time = self._watch.get_time()
    for push, call in zip(pushes, calls, strict=True):
      session, digest = push.session, 0
      # Only the last of several updates in a call has a snapshot.
      if (
        snapshot is not None
        and push.decision.updates
        and push.clock + 1 == snapshot.version
      ):
        digest = self.layout.digest(snapshot.buffer.array)
      session.count_pushed_steps(self._protocol.steps_per_push)
      self._records.record_push(push, call=call, digest=digest, time=time)
      session.num_applied += push.fate == _Fate.APPLIED

  def _handle_not_finite(self, channel: _Channel, message: _Message) -> None:
    """Handles a NOTICE: a gradient was not finite, and was not sent.

    The learner goes on with the newest weights, unless the run has diverged.
    """
    session = self._members.get_sender(channel, message)
    if session.has_answered(message):  # The answer was lost.
      self._members.repeat_answer(session)
      return
    session.check_push(message, self.clock)
    session.count_push(self._watch.get_time())
    session.num_not_finite += 1
    session.fate = int(_Fate.NOT_FINITE)
    session.keeps_weights = False
    _log.warning(
      'Learner %d: the gradient of push %d, at clock %d, was not finite.',
      session.learner,
      message.push,
      message.version,
    )
    # If the run has diverged, no learner is answered between this record and
    # the end.
    is_diverged = self._end.note_not_finite(len(self._protocol.alive))
    # A replica of the learner's own is not finite either: it joins again.
    rejoins = self._settings.has_fetches and not self._end.has_come
    is_answered = not (is_diverged or rejoins)
    if is_answered:
      session.state = _State.WAITING
    self._commit(
      lambda _: self._record_not_finite(session, message),
      released=[session.learner] if is_answered else [],
    )
    if is_diverged:
      self._end.is_diverged = True
      self._end_run(
        self._end.explain_divergence(
          self._sessions, self._weights, self._metrics
        )
      )
      self._members.send_end(session)
    elif rejoins:
      self._members.rejoin(session)

  def _record_not_finite(self, session: _Session, message: _Message) -> None:
    """Records a gradient that was not finite."""
    self._records.record_unused(
      session,
      message,
      _Fate.NOT_FINITE,
      self.clock,
      start_time=session.start_time,
      is_released=True,
    )
    session.count_pushed_steps(self._protocol.steps_per_push)

  def _apply_decision(
    self,
    decision: protocols.Decision,
    session: _Session,
    kind: traces.Kind,
    **fields: int,
  ) -> None:
    """Applies the protocol's decision on a join or a leave.

    Args:
      decision: Decision of the protocol.
      session: Session of the learner.
      kind: JOIN or LEAVE.
      **fields: Fields of the record that only this kind has.
    """
    if decision.updates:
      self._weights.update_alone()
      self._weights.wait()
      self._watch.add('update')
      self._maybe_crash('updated')
    self._commit(
      lambda _: self._records.record_presence(
        session, kind, self.clock, updates=decision.updates, **fields
      ),
      updates=decision.updates,
      released=decision.released,
    )

  # --- The end.

  def _check_budget(self) -> None:
    """Ends the run once it has made its updates or epochs."""
    reason = self._weights.find_end()
    if reason is not None and not self._end.has_come:
      self._end_run(reason)

  def stop(self, reason: str) -> None:
    """Interrupts the run, in the owner's thread. It can be resumed."""
    if not self._end.has_come:
      self._end.is_interrupted = True
      self._announce_end(reason)

  def _fail(self, reason: str) -> None:
    """Interrupts the run because of a lost learner."""
    self._end.is_failed = True
    self.stop(reason)

  def _end_run(self, reason: str) -> None:
    """Ends the run for good."""
    self._record_end()
    self._metrics.add_row()
    self._announce_end(reason)

  def _record_end(self) -> None:
    self._recorder.write(_Kind.END, {'worker': 0, 'version': self.clock})

  def _announce_end(self, reason: str) -> None:
    """Ends the run: learners that wait are told now, others when they ask."""
    self._end.reason = reason
    _log.info('The run ends at clock %d: %s', self.clock, reason)
    if not self._end.is_interrupted:
      # Before any learner is told, and leaves: a server that is killed while it
      # saves is resumed, and needs the learners again.
      self._recovery.save_now()
      self._watch.add('save')
    self._end.start_deadline(self._watch.get_time())
    while waiting := self._sessions.list_in(_State.WAITING):
      self._members.send_end(waiting[0])

  def finish(self) -> None:
    """Saves a checkpoint of unsaved updates, and closes the files."""
    self._recovery.save_now()
    # After the checkpoint: this record is void if the run is resumed.
    if self._end.is_interrupted:
      self._record_end()
    self._recorder.close()

  def close(self) -> None:
    """Closes buffers and file descriptors, without saving."""
    try:
      if self._recovery.checkpoints is not None:
        self._recovery.checkpoints.wait()
    finally:
      self._recorder.close()
      self.inbox.close()
      self._store.close()
