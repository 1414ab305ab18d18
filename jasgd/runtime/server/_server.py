"""The parameter server: one thread that owns the weights.

The owner takes one request at a time out of an inbox. It knows nothing of wires
and never evaluates. `Server._push` shows the contract that real runs and exact
replay rely on: decide, update, record, publish, answer. Read it first; then the
sections on answers, on learners that join or leave, on checkpoints, on the end.

Its parts have state and contracts of their own: `Sessions` (what is known of
each learner, and leases), `Attendance` (which learners are to come, or late),
`LearnerRecords` (what learners did), `ServerWeights` (weights, optimizer state,
clock), `SnapshotStore` (published weights), `Recorder` (the trace),
`ServerMetrics`, `Checkpoints` and the `FrontDesk` (status, pulls, refusals).
"""

import collections
from collections.abc import Callable, Iterable
import json
import logging
import math
import time as clocks
from typing import Any

import numpy as np

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
from jasgd.runtime.server import _attendance
from jasgd.runtime.server import _metrics
from jasgd.runtime.server import _records
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
# Purposes that the owner's time is counted for.
_PURPOSES = ('wait', 'decide', 'update', 'record', 'publish', 'send', 'save')


class Server:
  """A parameter server, without its wires.

  `step` handles one request. One thread calls it, the owner; wires put events
  into the inbox from any thread.

  Args:
    settings: Settings of the run.
    workdir: Folder of trace and checkpoints; None: no files. A run
      that is there is resumed from its last readable checkpoint, as a new
      incarnation.
    is_shared: Whether other processes can map snapshots.
    now: Time in seconds.

  Attributes:
    inbox: Inbox of requests.
    layout: Layout of weights and gradients in messages.
    fingerprint: Fingerprint of the run, which learners must have.
    incarnation: Number of times that the run was resumed.
    end_reason: Why the run is over, in words; None while it is not.
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
    self.incarnation = 0
    self._start_clock = 0  # Of the checkpoint that this incarnation began with.
    self.end_reason: str | None = None
    self._is_interrupted = self._is_failed = self._is_diverged = False
    self._now = now
    self._begin_time = now()
    self._end_time = 0.0
    self._times = dict.fromkeys(_PURPOSES, 0.0)
    # Time in which wires copy gradients out of streams, in their own threads.
    self._times['copy'] = 0.0
    self._time_mark = clocks.perf_counter()
    self._store = _snapshots.SnapshotStore(self.layout, is_shared=is_shared)
    self._sessions = _sessions.Sessions(self._store)
    self._attendance = _attendance.Attendance(settings, self._sessions)
    # Events that `_decide_pushes` took out of the inbox, for the next step.
    self._backlog: collections.deque[_wire.Event] = collections.deque()
    self._num_not_finite = 0  # In a row.
    self._last_pid = 0  # Process of the learner whose message is handled.
    self._checked_at = 0.0
    self._crash: _crash.CrashPoints | None = None
    self._checkpoints: _checkpoints.Checkpoints | None = None
    found = None
    if workdir is not None:
      if not workdir.trace.exists():  # A resumed run is not killed again.
        self._crash = _crash.make_crash_points(lambda: self._last_pid)
      workdirs.set_aside_broken(workdir)
      found = _checkpoints.restore(
        workdir, self._weights.state, self.layout.size
      )
    self._recorder = _recorder.Recorder(
      None if workdir is None else workdir.trace,
      self._make_header(),
      traces.SERVER,
      self._get_time,
    )
    self._metrics = _metrics.ServerMetrics(
      settings,
      self._weights,
      self._store,
      self._get_time,
      self._sessions.count_connected,
    )
    self._records = _records.LearnerRecords(
      settings, self._recorder, self._metrics, self._get_time
    )
    self._desk = self._make_desk()
    if workdir is not None:
      self._checkpoints = _checkpoints.Checkpoints(
        workdir,
        self._recorder,
        settings.checkpoint_seconds,
        store=self._store,
        get_time=self._get_time,
        crash=self._crash,
      )
    self._start(found)

  def _start(
    self, found: tuple[Any, list[np.ndarray], dict[str, Any]] | None
  ) -> None:
    """Begins at clock 0, or resumes from a checkpoint."""
    if found is None:
      self._protocol.start(self._settings.num_learners)
    else:
      self._resume(*found)
    self._weights.warm_up()
    # After compiling, which is no part of any deadline.
    self._attendance.open(self._get_time())
    self._publish(self._copy_weights())
    if found is None:
      self._save_now()  # So that there is always a checkpoint to return to.
    elif found[2]['end_reason'] is not None:
      self._is_failed = found[2]['is_failed']
      self._is_diverged = found[2]['is_diverged']
      self._end(found[2]['end_reason'])
    else:
      self._check_budget()

  def _make_desk(self) -> _front_desk.FrontDesk:
    return _front_desk.FrontDesk(
      self._store,
      {
        _Verb.EXCHANGE: self._push,
        _Verb.NOTICE: self._handle_not_finite,
        _Verb.FETCH: self._fetch,
        _Verb.HELLO: self._hello,
        _Verb.METRICS: self._metrics.send_rows,
        _Verb.LOST: self._note_death,
      },
      describe=self.describe,
      on_stop=lambda text: self.stop(text or 'It was stopped.'),
      on_gone=self._lose_channel,
      pick=self._metrics.take,
    )

  def _make_header(self) -> dict[str, Any]:
    """Header of the trace: what replay and reports need."""
    settings, protocol = self._settings, self._protocol
    return {
      **settings.header,
      'is_recorded': True,
      'strategy': protocol.to_config(),
      'description': protocol.describe(),
      'num_workers': settings.num_learners,
      'num_present': 0,  # At the beginning: each learner joins by a record.
      'overlap': settings.overlap,
      'batch': settings.task.batch,
      'steps_per_push': protocol.steps_per_push,
      'steps_per_fetch': protocol.steps_per_fetch,
      'bytes_per_push': self.layout.size,
      'bytes_per_pull': self.layout.size,
      'wire_dtype': settings.wire_dtype,
    }

  # --- Status.

  @property
  def clock(self) -> int:
    """Number of updates made."""
    return self._weights.clock

  @property
  def state(self) -> engine.ServerState:
    """State of the engine. The next update donates it."""
    return self._weights.state

  @property
  def is_over(self) -> bool:
    """Whether the run has ended and every client has been told, or is late."""
    if self.end_reason is None:
      return False
    if self._get_time() > self._end_time + self._settings.deadlines.end:
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
    settings, weights = self._settings, self._weights
    max_samples = settings.max_samples
    saved = -1 if self._checkpoints is None else self._checkpoints.last_version
    return {
      'clock': weights.clock,
      'incarnation': self.incarnation,
      'samples': weights.samples,
      'max_samples': None if math.isinf(max_samples) else max_samples,
      'num_updates': settings.num_updates,
      'epoch': weights.epoch,
      'time': self._get_time(),
      'metrics': self._metrics.summarize(),
      'evaluation_clock': self._metrics.next_clock,
      'start_clock': self._start_clock,
      'learners': {
        str(session.learner): {
          'state': str(session.state),
          'step': session.next_step,
          'num_applied': session.num_applied,
          'num_not_finite': session.num_not_finite,
        }
        for session in self._sessions
      },
      'num_alive': self._sessions.count_connected(),
      'waits': self._attendance.describe_waits(self._get_time()),
      'counts': dict(self._desk.counts),
      'fates': {
        _Fate(fate).name.lower(): count
        for fate, count in self._metrics.fates.items()
      },
      'times': self._times,
      'num_buffers': len(self._store),
      'checkpoint_clock': saved,
      'end_reason': self.end_reason,
      'is_interrupted': self._is_interrupted,
      'is_failed': self._is_failed,
      'is_diverged': self._is_diverged,
    }

  def _get_time(self) -> float:
    """Seconds since the run began; a resumed run goes on counting."""
    return self._now() - self._begin_time

  def _add_time(self, purpose: str) -> None:
    """Counts the time since the last call for a purpose."""
    now = clocks.perf_counter()
    self._times[purpose] += now - self._time_mark
    self._time_mark = now

  # --- The owner's loop.

  def step(self, timeout: float) -> bool:
    """Handles one request, if one comes in time.

    Args:
      timeout: Seconds to wait for one.

    Returns:
      Whether there was one.
    """
    event = self._take_event(timeout)
    self._add_time('wait')
    if event is not None:
      self._desk.handle(event)
    now = self._get_time()
    if event is None or now - self._checked_at > _TICK:
      self._checked_at = now
      self._check_deadlines(now)
      if self._checkpoints and self._checkpoints.is_ready(self.clock):
        self._save()
      self._add_time('save')
    return event is not None

  def _take_event(self, timeout: float) -> _wire.Event | None:
    if self._backlog:
      return self._backlog.popleft()
    return self.inbox.get(timeout)

  # --- Gradients.

  def _push(self, channel: _Channel, message: _Message) -> None:
    """Handles an EXCHANGE, and those behind it that the same call may apply.

    This is the server's contract. The order of its parts must not change.
    """
    # 1. Staleness is measured, and the protocol decides, for one gradient after
    #    the other. Nothing is computed yet: a message that is refused here has
    #    changed nothing.
    pushes = self._decide_pushes(channel, message)
    if not pushes:
      return
    self._add_time('decide')
    # 2. The weights change and the clock advances. The snapshot is a private
    #    copy for now; later updates donate the weights themselves.
    calls = self._apply(pushes)
    snapshot = None
    if any(push.decision.updates for push in pushes):
      snapshot = self._copy_weights()
    # 3. The records are written and flushed *before* any other process can see
    #    the new weights. If this process is killed now, no learner has seen
    #    weights, or an answer, that the trace does not explain.
    self._record_pushes(pushes, calls, snapshot)
    self._recorder.flush()
    self._add_time('record')
    if self._crash:
      self._crash.maybe_crash('recorded')
    # 4. The snapshot is published *before* learners are answered, as answers
    #    carry the newest snapshot: a learner must see its own update.
    if snapshot is not None:
      self._publish(snapshot)
    # 5. Learners are answered: the sender unless the protocol withholds its
    #    answer, and all others that it releases.
    for push in pushes:
      if push.fate == _Fate.AFTER_END:
        self._send_end(push.session)
      self._release(push.decision.released)
    if self._crash:
      self._crash.maybe_crash('replied')
    self._check_budget()

  def _decide_pushes(self, channel: _Channel, message: _Message) -> list[_Push]:
    """Decides on a gradient, and on those behind it that may share its call.

    Raises:
      MessageError: if the first one is refused. Later ones are refused here.
    """
    first = self._decide(channel, message)
    pushes = [] if first is None else [first]
    if self._settings.max_group == 1 or not self._protocol.updates_each:
      return pushes
    # No more than the budget allows: these gradients are decided on before
    # the clock advances.
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
    self._times['copy'] += message.copy_seconds
    session = self._get_sender(channel, message)
    if self._crash:
      self._crash.maybe_crash('received')
    if message.payload is None or message.payload.nbytes != self.layout.size:
      raise _MessageError(
        'size', f'An EXCHANGE needs a gradient of {self.layout.size} bytes.'
      )
    if message.step == session.next_step - 1:  # The answer was lost.
      self._send_answer(session)
      return None
    stale = session.check_push(message, self.clock)
    if not math.isfinite(message.loss):
      raise _MessageError(
        'number', f'The loss of an EXCHANGE must be finite, got {message.loss}.'
      )
    time = self._get_time()
    session.count_push(time)
    session.keeps_weights = bool(message.flags & _messages.Flag.KEEPS_WEIGHTS)
    # The protocol's clock, not that of the weights: with several updates in a
    # call, the protocol is ahead of the weights.
    clock, num_present = self._protocol.clock, len(self._protocol.alive)
    if self.end_reason is not None:
      decision = protocols.Decision(_Fate.AFTER_END, False, ())
    else:
      decision = self._protocol.on_push(
        session.learner, message.step, message.version
      )
    self._num_not_finite = 0
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
      self._add_time('update')
      if self._crash:
        self._crash.maybe_crash('accumulated')
        if any(push.decision.updates for push in pushes):
          self._crash.maybe_crash('updated')
    left = iter(calls)
    return [next(left) if push.fate == _Fate.APPLIED else 0 for push in pushes]

  def _record_pushes(
    self,
    pushes: list[_Push],
    calls: list[int],
    snapshot: _Snapshot | None,
  ) -> None:
    """Records gradients, in the order in which they were decided on."""
    time = self._get_time()
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
    self._add_time('publish')
    return snapshot

  def _publish(self, snapshot: _Snapshot) -> None:
    """Makes a snapshot the newest. Its record must have been flushed."""
    self._store.publish(snapshot)
    self._metrics.add_row_if_due()
    self._add_time('publish')
    if self._crash:
      self._crash.maybe_crash('published')

  def _handle_not_finite(self, channel: _Channel, message: _Message) -> None:
    """Handles a NOTICE: a gradient was not finite, and was not sent.

    The learner goes on with the newest weights, unless the run has diverged.
    """
    session = self._get_sender(channel, message)
    if message.step == session.next_step - 1:  # The answer was lost.
      self._send_answer(session)
      return
    session.check_push(message, self.clock)
    session.count_push(self._get_time())
    session.num_not_finite += 1
    session.fate = int(_Fate.NOT_FINITE)
    session.keeps_weights = False
    self._num_not_finite += 1
    self._records.record_unused(
      session,
      message,
      _Fate.NOT_FINITE,
      self.clock,
      start_time=session.start_time,
      is_released=True,
    )
    _log.warning(
      'Learner %d: the gradient of step %d, at clock %d, was not finite.',
      session.learner,
      message.step,
      message.version,
    )
    session.count_pushed_steps(self._protocol.steps_per_push)
    limit = max(3, 2 * len(self._protocol.alive))
    if self.end_reason is None and self._num_not_finite >= limit:
      self._is_diverged = True
      self._end(self._explain_divergence())
    if self.end_reason is not None:
      self._send_end(session)
    elif self._settings.has_fetches:  # Its own replica is not finite either.
      self._rejoin(session)
    else:
      self._answer(session)

  def _explain_divergence(self) -> str:
    """Why the run ends whose gradients are not finite, and what to try."""
    summary = self._metrics.summarize()
    staleness = summary.get('server/staleness_mean', 0.0)
    rate = self._weights.rate
    rate_text = 'that of the optimizer' if rate is None else f'{rate:g}'
    bad = [each for each in self._sessions if each.num_not_finite]
    worst = sorted(bad, key=lambda session: -session.num_not_finite)[:4]
    names = ', '.join(
      f'{each.num_not_finite} of learner {each.learner}' for each in worst
    )
    return (
      f'The loss diverged: the last {self._num_not_finite} gradients were not '
      f'finite (in all, {names}). '
      f'At clock {self.clock} the mean staleness was {staleness:.1f} '
      f'(at most {summary.get("server/staleness_max", 0):.0f}) and the rate '
      f'{rate_text}. A rule of thumb: divide a rate that is stable without '
      'delay by the staleness; the policy inverse does so.'
    )

  def _fetch(self, channel: _Channel, message: _Message) -> None:
    """Handles a FETCH: a learner wants weights, and has no gradient to give."""
    session, settings = self._get_sender(channel, message), self._settings
    # With overlap a gradient is on its way, whose answer will say the end.
    if self.end_reason is not None and settings.has_fetches:
      self._send_end(session, session.lost_version)
      return
    snapshot = self._store.newest
    if settings.has_fetches:
      session.count_fetched_steps(
        message.step,
        self._protocol.steps_per_push,
        self._protocol.steps_per_fetch,
      )
      session.start_time = self._get_time()
    self._sessions.add_lease(session, snapshot)
    if settings.has_fetches:
      self._sessions.keep_last_lease(session)
      self._records.record_fetch(session, snapshot.version, self.clock)
    channel.send(
      snapshot.make_message(worker=session.learner, step=session.next_step),
      snapshot.buffer,
    )
    self._add_time('send')

  # --- Answers.

  def _get_sender(self, channel: _Channel, message: _Message) -> _Session:
    session = self._sessions.get_sender(channel, message)
    self._last_pid = channel.pid
    return session

  def _release(self, learners: Iterable[int]) -> None:
    """Answers learners that the protocol lets go on, once the run has begun."""
    if not self._attendance.has_begun:
      return
    for learner in learners:
      session = self._sessions[learner]
      if session.state == _State.ABSENT:  # Answered when it comes back.
        session.was_waiting = False
      elif session.state == _State.WAITING and self.end_reason is None:
        self._answer(session)
      elif session.state == _State.WAITING:
        self._send_end(session)

  def _answer(self, session: _Session) -> None:
    """Answers a learner, which computes from now on."""
    session.state = _State.COMPUTING
    session.start_time = self._get_time()
    if not session.keeps_weights:
      self._sessions.add_lease(session, self._store.newest)
    self._sessions.keep_last_lease(session)
    if self._settings.has_fetches and not session.keeps_weights:
      version = self._store.newest.version
      self._records.record_fetch(session, version, self.clock)
    self._send_answer(session)

  def _send_answer(self, session: _Session) -> None:
    """Sends a learner's last answer, for the first time or again."""
    session.send_answer()
    self._add_time('send')

  # --- Learners join and come back.

  def _hello(self, channel: _Channel, message: _Message) -> None:
    """Handles the HELLO of a learner that is new, or comes back."""
    said = _front_desk.read_hello(message.text, self.fingerprint)
    hello = _sessions.check_hello(message, said, self._settings.task.batch)
    self._sessions.check_free(channel, hello)
    if self.end_reason is None:
      self._admit(channel, message, hello)
    if self.end_reason is not None and self._sessions.find(channel) is None:
      self._send_end_on(channel)
      session = self._sessions.find_instance(hello.instance)
      if session is not None and session.state == _State.ABSENT:
        self._remove(session, session.lost_version)  # It has been told now.

  def _admit(
    self,
    channel: _Channel,
    message: _Message,
    hello: _sessions.Hello,
  ) -> None:
    """Finds the learner's session, and lets it join or go on."""
    session = self._sessions.choose(hello.instance)
    is_known = session.belongs_to(hello.instance)
    if session.channel is not None:
      # Its old channel is dead, but the wire has not noticed yet.
      self._lose(session, 'it came back on another channel')
      if self.end_reason is not None:
        return
    channel.pid = channel.pid or hello.pid
    self._attendance.add_pid(hello.pid)
    self._last_pid = channel.pid
    self._sessions.attach(session, channel, hello.instance)
    session.welcome = json.dumps(self._describe_run(session))
    # A gradient that it computed for an earlier connection, or incarnation.
    is_usable = self._is_usable(session, message)
    if not is_usable and message.step >= (session.next_step if is_known else 0):
      is_old = message.incarnation < self.incarnation
      fate = _Fate.LOST_HISTORY if is_old else _Fate.DROPPED_GONE
      self._records.record_unused(session, message, fate, self.clock)
    if session.state == _State.ABSENT:
      self._take_back(session, is_usable)
    else:
      session.num_devices = hello.num_devices
      if not is_known:
        session.is_warm, session.longest = False, 0.0
      self._join(session)
    if self.end_reason is None:
      self._begin_if_complete()
      if self._sessions.count_connected() >= self._settings.num_learners:
        for absent in self._sessions.list_in(_State.ABSENT):
          self._lose(absent, 'others have joined', is_failure=False)

  def _describe_run(self, session: _Session) -> dict[str, Any]:
    """What a learner is told with its first answer."""
    return {
      'learner': session.learner,
      'seed': self._settings.seed,
      'steps_per_push': self._protocol.steps_per_push,
      'steps_per_fetch': self._protocol.steps_per_fetch,
      'num_computed': session.num_computed,
      'local_rate': self._settings.local_rate,
      'overlap': self._settings.overlap,
      'silence': self._settings.deadlines.silence,
    }

  def _is_usable(self, session: _Session, message: _Message) -> bool:
    """Whether an absent learner comes back with a gradient that counts."""
    if session.state != _State.ABSENT or session.was_waiting:
      return False
    if self._settings.has_fetches:  # Its own replica was lost.
      return False
    key = (message.incarnation, message.version)
    return message.step == session.next_step and key in session.leases

  def _join(self, session: _Session) -> None:
    """Lets a learner join: it starts from the newest weights."""
    self._attendance.add_join()
    session.state = _State.WAITING
    session.keeps_weights = False
    session.num_gathered = 0
    session.start_time = self._get_time()
    _log.info('Learner %d joined.', session.learner)
    self._apply_decision(
      self._protocol.on_join(session.learner),
      session,
      _Kind.JOIN,
      num_devices=session.num_devices,
    )

  def _rejoin(self, session: _Session) -> None:
    """Lets a learner leave and join: what it has gathered is lost."""
    self._leave(session, -1)
    self._join(session)

  def _leave(
    self, session: _sessions.LearnerSession, lost_version: int
  ) -> None:
    """Does what the leave of a learner means for the others."""
    self._apply_decision(
      self._protocol.on_leave(session.learner),
      session,
      _Kind.LEAVE,
      read_version=lost_version,
    )

  def _take_back(self, session: _Session, is_usable: bool) -> None:
    """Lets a learner go on that was connected before the server's restart."""
    was_waiting, session.was_waiting = session.was_waiting, False
    _log.info('Learner %d came back.', session.learner)
    session.start_time = self._get_time()
    session.state = _State.WAITING if was_waiting else _State.COMPUTING
    if self._settings.has_fetches:  # No checkpoint has its own replica.
      self._rejoin(session)
    elif is_usable:
      assert session.channel is not None  # It has just connected.
      session.channel.send(
        _Message(
          _Verb.ANSWER,
          flags=_messages.Flag.RESEND,
          worker=session.learner,
          step=session.next_step,
          text=session.welcome,
        )
      )
      session.welcome = ''
    else:
      session.keeps_weights = False  # It needs weights to go on.
      if not was_waiting:
        self._answer(session)

  def _begin_if_complete(self) -> None:
    """Begins once all expected learners have joined, or are dead."""
    if self._attendance.can_begin:
      self._begin()

  def _begin(self) -> None:
    """Answers all learners that have joined."""
    self._attendance.has_begun = True
    self._release(sorted(self._protocol.inside))

  def _note_death(self, channel: _Channel, message: _Message) -> None:
    """Handles a LOST: a launcher says that the process of a learner is dead.

    If it had not joined yet, the others need not wait for it.
    """
    if not (message.text.isascii() and message.text.isdecimal()):
      raise _MessageError(
        'pid', f'The text of a LOST must be a pid, got {message.text[:20]!r}.'
      )
    self._attendance.add_death(int(message.text))
    if self.end_reason is None:
      self._begin_if_complete()
    channel.send(_Message(_Verb.ANSWER))

  def _apply_decision(
    self,
    decision: protocols.Decision,
    session: _Session,
    kind: traces.Kind,
    **fields: int,
  ) -> None:
    """Does what the protocol decided when a learner joined or left.

    The order is that of `_push`: the weights change, the record is flushed, the
    snapshot is published, learners are answered.

    Args:
      decision: Decision of the protocol.
      session: Session of the learner.
      kind: JOIN or LEAVE.
      **fields: Fields of the record that only this kind has.
    """
    snapshot = None
    if decision.updates:
      self._weights.update_alone()
      self._weights.wait()
      self._add_time('update')
      if self._crash:
        self._crash.maybe_crash('updated')
      snapshot = self._copy_weights()
    self._records.record_presence(
      session, kind, self.clock, updates=decision.updates, **fields
    )
    if snapshot is not None:
      self._publish(snapshot)
    self._release(decision.released)
    self._check_budget()

  # --- Learners leave, or are lost.

  def _lose_channel(self, channel: _Channel, has_said_so: bool) -> None:
    """A channel has ended, and with it the learner at its other end."""
    session = self._sessions.find(channel)
    if session is not None and has_said_so:
      self._lose(session, 'it said so', is_failure=False)
    elif session is not None:
      self._lose(session, 'its connection is gone')

  def _lose(
    self,
    session: _Session,
    why: str,
    *,
    is_failure: bool = True,
  ) -> None:
    """Removes a learner, so that the others do not wait for it."""
    channel = session.channel
    was_over = self.end_reason is not None
    self._remove(session, session.lost_version)
    if channel is not None:
      channel.close()
    if was_over:
      return
    _log.log(
      logging.WARNING if is_failure else logging.INFO,
      'Learner %d left at clock %d: %s. %d are there.',
      session.learner,
      self.clock,
      why,
      self._sessions.count_connected(),
    )
    if self.end_reason is None:
      self._begin_if_complete()
    is_fatal = is_failure and self._settings.on_learner_lost == 'fail'
    if is_fatal and self.end_reason is None:
      self._is_failed = True
      self._interrupt(f'Learner {session.learner} was lost: {why}.')

  def _remove(self, session: _Session, lost_version: int) -> None:
    """Removes a learner, and does what its leave means for the others."""
    self._sessions.remove(session)
    # A run that was interrupted may be resumed, so the protocol must know.
    if self.end_reason is None or self._is_interrupted:
      self._leave(session, lost_version)
    else:
      self._records.record_presence(
        session, _Kind.LEAVE, self.clock, read_version=lost_version
      )

  def _check_deadlines(self, time: float) -> None:
    """Gives up on learners that are late, and sends WAITs to the others."""
    if self.end_reason is not None:
      return
    attendance = self._attendance
    if attendance.must_begin(time):
      self._begin()
    for session in attendance.list_not_returned(time):
      self._lose(session, 'it did not come back after the restart')
    for session, limit in attendance.iterate_late(time):
      self._lose(session, f'no gradient came within {limit:.3g} s')
    attendance.send_waits_if_due(time)
    attendance.warn_if_alone(time, self.clock)

  # --- Checkpoints.

  def _save(self) -> None:
    """Begins a checkpoint: state, protocol, sessions and their snapshots."""
    assert self._checkpoints is not None
    weights = self._weights
    needed = {
      snapshot.key: snapshot
      for session in self._sessions
      for snapshot in session.leases.values()
    }
    evaluated = self._metrics.next
    if evaluated is not None:
      needed[evaluated.key] = evaluated
    keys = list(needed)
    position = {
      **weights.save(),
      'protocol': self._protocol.save(),
      'sessions': self._sessions.save(keys),
      'snapshots': [[*each.key, each.rate] for each in needed.values()],
      'snapshot_size': self.layout.size,
      'evaluation': -1 if evaluated is None else keys.index(evaluated.key),
      'records': self._recorder.num_records,
      'metrics': self._metrics.save(),
      'time': self._get_time(),
      'counts': dict(self._desk.counts),
      'has_begun': self._attendance.has_begun,
      'end_reason': None if self._is_interrupted else self.end_reason,
      'is_failed': self._is_failed,
      'is_diverged': self._is_diverged,
    }
    self._checkpoints.save(weights.state, position, list(needed.values()))

  def _save_now(self) -> None:
    """Saves what is not saved yet, and waits until it is written."""
    if self._checkpoints is not None:
      self._checkpoints.wait()
      if self._checkpoints.last_version < self.clock:
        self._save()
        self._checkpoints.wait()

  def _resume(
    self, state: Any, buffers: list[np.ndarray], position: dict[str, Any]
  ) -> None:
    """Goes on from a checkpoint, as a new incarnation."""
    self._begin_time = self._now() - position['time']
    self._weights.restore(state, position)
    self._protocol.restore(position['protocol'])
    snapshots = [
      self._store.restore(buffer, incarnation, version, rate=rate)
      for (incarnation, version, rate), buffer in zip(
        position['snapshots'], buffers, strict=True
      )
    ]
    self._sessions.restore(position['sessions'], snapshots)
    index = position['evaluation']
    self._metrics.restore(
      position['metrics'], None if index < 0 else snapshots[index]
    )
    for snapshot in snapshots:  # The lease that `restore` gave to the caller.
      self._store.end_lease(snapshot)
    self._desk.counts.update(position['counts'])
    self._attendance.has_begun = position['has_begun']
    self._start_clock = self.clock
    recorder, num_valid = self._recorder, position['records']
    num_lost = recorder.num_records - num_valid
    records = recorder.get_trace().records
    self.incarnation = int(records['incarnation'].max(initial=0)) + 1
    recorder.incarnation = self.incarnation
    recorder.write(
      _Kind.RESTART,
      {
        'worker': 0,
        'updates': False,
        'version': self.clock,
        'read_version': self.clock,
        'stands': num_valid - 1,
      },
    )
    _log.warning(
      'Incarnation %d goes on from the checkpoint of clock %d; %d records that '
      'came after it are void.',
      self.incarnation,
      self.clock,
      num_lost,
    )

  # --- The end.

  def _check_budget(self) -> None:
    """Ends the run once it has made its updates or epochs."""
    reason = self._weights.find_end()
    if self.end_reason is None and reason is not None:
      self._end(reason)

  def stop(self, reason: str) -> None:
    """Interrupts the run, in the owner's thread. It can be resumed."""
    if self.end_reason is None:
      self._interrupt(reason)

  def _interrupt(self, reason: str) -> None:
    self._is_interrupted = True
    self._announce_end(reason)

  def _end(self, reason: str) -> None:
    """Ends the run for good."""
    self._record_end()
    self._metrics.add_row()
    self._announce_end(reason)

  def _record_end(self) -> None:
    self._recorder.write(_Kind.END, {'worker': 0, 'version': self.clock})

  def _announce_end(self, reason: str) -> None:
    """Takes no more gradients. Learners are told when they ask."""
    self.end_reason = reason
    _log.info('The run ends at clock %d: %s', self.clock, reason)
    if not self._is_interrupted:
      # Before any learner is told, and goes: a server that is killed while it
      # saves needs them again.
      self._save_now()
      self._add_time('save')
    self._end_time = self._get_time()
    while waiting := self._sessions.list_in(_State.WAITING):
      self._send_end(waiting[0])

  def _send_end(self, session: _Session, lost_version: int = -1) -> None:
    """Tells a learner that the run is over, and removes it."""
    channel = session.channel
    self._remove(session, lost_version)
    if channel is not None:
      self._send_end_on(channel)

  def _send_end_on(self, channel: _Channel) -> None:
    channel.send(_Message(_Verb.END, text=self.end_reason or ''))

  def finish(self) -> None:
    """Saves what is not saved yet, and closes the files."""
    self._save_now()
    # After the checkpoint: this record is void if the run is resumed.
    if self._is_interrupted:
      self._record_end()
    self._recorder.close()

  def close(self) -> None:
    """Closes buffers and file descriptors, without saving."""
    try:
      if self._checkpoints is not None:
        self._checkpoints.wait()
    finally:
      self._recorder.close()
      self.inbox.close()
      self._store.close()
