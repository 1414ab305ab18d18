"""The learners of a run: they join, are answered, leave, and are lost."""

from collections.abc import Callable, Iterable
import json
import logging
from typing import Protocol

from jasgd import protocols
from jasgd import traces
from jasgd.runtime import _front_desk
from jasgd.runtime import _settings
from jasgd.runtime import _snapshots
from jasgd.runtime.server import _admission
from jasgd.runtime.server import _ending
from jasgd.runtime.server import _metrics
from jasgd.runtime.server import _records
from jasgd.runtime.server import _sessions
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

_log = logging.getLogger(__name__)
_Channel = _wire.Channel
_Entry = _admission.Entry
_Fate = protocols.Fate
_Kind = traces.Kind
_Message = _messages.Message
_MessageError = _messages.MessageError
_Session = _sessions.LearnerSession
_State = _sessions.State
_Verb = _messages.Verb


class Apply(Protocol):
  """Function of the server that applies a decision on a join or a leave."""

  def __call__(
    self,
    decision: protocols.Decision,
    session: _Session,
    kind: traces.Kind,
    **fields: int,
  ) -> None:
    """Updates if the protocol says so; then commits: see `Server._commit`."""


class Membership:
  """Lets learners in, answers them, and removes them.

  The sessions and the protocol always agree on the members. Each join and each
  leave is decided by the protocol and passed to `apply`. Learners that go on
  for another reason are passed to `commit`. Both end in `Server._commit`, which
  calls `record_fetches` and then `release`: answers go out after the records.

  Args:
    settings: Settings of the run.
    fingerprint: Fingerprint of the run, which learners must have.
    sessions: Sessions of the learners.
    records: Records of learners.
    store: Snapshots that learners are answered with.
    end: End of the run: no learner joins after it.
    watch: Stopwatch of the run.
    apply: Function that applies a decision of the protocol.
    commit: Function that answers learners: `Server._commit`.
    on_failure: Function called with the reason if a lost learner must end the
      run.

  Attributes:
    attendance: Learners that are expected, or late.
    last_pid: Process of the learner whose message was handled last.
  """

  def __init__(
    self,
    settings: _settings.ServerSettings,
    fingerprint: str,
    sessions: _sessions.Sessions,
    records: _records.LearnerRecords,
    store: _snapshots.SnapshotStore,
    end: _ending.RunEnd,
    watch: _metrics.Stopwatch,
    *,
    apply: Apply,
    commit: Callable[..., None],
    on_failure: Callable[[str], None],
  ) -> None:
    self.attendance = _admission.Attendance(settings, sessions)
    self.last_pid = 0
    self._settings = settings
    self._protocol = settings.protocol
    self._fingerprint = fingerprint
    self._sessions = sessions
    self._records = records
    self._store = store
    self._end = end
    self._watch = watch
    self._apply = apply
    self._commit = commit
    self._on_failure = on_failure

  # --- Learners join and come back.

  def hello(self, channel: _Channel, message: _Message) -> None:
    """Handles the HELLO of a learner that is new, or comes back."""
    said = _front_desk.read_hello(message.text, self._fingerprint)
    hello = _admission.check_hello(message, said, self._settings.task.batch)
    self._sessions.check_free(
      channel,
      worker=hello.worker,
      instance=hello.instance,
      num_devices=hello.num_devices,
    )
    known = self._sessions.find_instance(hello.instance)
    if known and known.channel is not None and not self._end.has_come:
      # Its old channel is dead, but the wire has not noticed yet.
      self._lose(known, 'it came back on another channel')
    if not self._end.has_come:
      self._admit(channel, message, hello)
      return
    self._send_end_on(channel)
    if known and known.state == _State.ABSENT:
      self._remove(known, known.lost_version)  # It knows of the end now.

  def _admit(
    self, channel: _Channel, message: _Message, hello: _admission.Hello
  ) -> None:
    """Finds the learner's session, and lets it join or go on."""
    session = self._sessions.choose(hello.instance)
    is_known = session.belongs_to(hello.instance)
    entry = _admission.choose_entry(
      session, message, has_fetches=self._settings.has_fetches
    )
    channel.pid = channel.pid or hello.pid
    self.attendance.add_pid(hello.pid)
    self.last_pid = channel.pid
    self._sessions.attach(session, channel, hello.instance)
    session.pid, session.num_devices = hello.pid, hello.num_devices
    session.welcome = json.dumps(
      self._settings.describe_run(session.learner, session.num_computed)
    )
    # The HELLO may name a gradient for an earlier connection or incarnation.
    # Unless it was counted or will be sent again, it is recorded as unused.
    first_unused = session.next_push if is_known else 0
    if entry != _Entry.RESEND and message.push >= first_unused:
      is_old = message.incarnation < self._store.newest.incarnation
      fate = _Fate.LOST_HISTORY if is_old else _Fate.DROPPED_GONE
      self._records.record_unused(
        session, message, fate, self._store.newest.version
      )
    if entry == _Entry.JOIN:
      self._join(session)
    else:
      self._take_back(session, entry)
    if not self._end.has_come:
      self._begin_if_complete()
      if self._sessions.count_connected() >= self._settings.num_learners:
        for absent in self._sessions.list_in(_State.ABSENT):
          self._lose(absent, 'others have joined', is_failure=False)

  def _take_back(self, session: _Session, entry: _Entry) -> None:
    """Lets a learner go on that was connected before the server's restart."""
    was_waiting, session.was_waiting = session.was_waiting, False
    _log.info('Learner %d came back.', session.learner)
    session.start_time = self._watch.get_time()
    session.state = _State.WAITING if was_waiting else _State.COMPUTING
    if entry == _Entry.REJOIN:
      self.rejoin(session)
    elif entry == _Entry.RESEND:
      session.ask_to_resend()
    else:
      session.keeps_weights = False  # It needs weights to go on.
      if entry == _Entry.RECEIVE:
        self.answer(session)

  def _join(self, session: _Session) -> None:
    """Lets a learner join: it starts from the newest weights."""
    self.attendance.add_join()
    session.state = _State.WAITING
    session.keeps_weights = False
    session.num_gathered = 0
    session.start_time = self._watch.get_time()
    _log.info('Learner %d joined.', session.learner)
    self._apply(
      self._protocol.on_join(session.learner),
      session,
      _Kind.JOIN,
      num_devices=session.num_devices,
    )

  def rejoin(self, session: _Session) -> None:
    """Lets a learner leave and join again; its sum of gradients is lost."""
    self._leave(session, -1)
    self._join(session)

  def _leave(self, session: _Session, lost_version: int) -> None:
    """Lets a learner leave: the protocol may update or release others."""
    self._apply(
      self._protocol.on_leave(session.learner),
      session,
      _Kind.LEAVE,
      read_version=lost_version,
    )

  def _begin_if_complete(self) -> None:
    """Begins once all expected learners have joined, or are dead."""
    if self.attendance.can_begin:
      self._begin()

  def _begin(self) -> None:
    """Answers all learners that have joined."""
    self.attendance.has_begun = True
    self._commit(released=sorted(self._protocol.inside))

  # --- Learners leave, or are lost.

  def note_death(self, channel: _Channel, message: _Message) -> None:
    """Handles a LOST: a launcher says that the process of a learner is dead.

    The others stop waiting for it, if it had not joined yet or was connected to
    an earlier incarnation of this server. The death of a learner that is
    connected now is noticed by its channel.
    """
    if not (message.text.isascii() and message.text.isdecimal()):
      raise _MessageError(
        'pid', f'The text of a LOST must be a pid, got {message.text[:20]!r}.'
      )
    pid = int(message.text)
    self.attendance.add_death(pid)
    for session in self._sessions.list_in(_State.ABSENT):
      if session.pid == pid != 0:
        self._lose(session, 'its process is dead')
    if not self._end.has_come:
      self._begin_if_complete()
    channel.send(_Message(_Verb.ANSWER))

  def lose_channel(self, channel: _Channel, has_said_so: bool) -> None:
    """Handles the end of a channel: removes the learner at its other end."""
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
    was_over = self._end.has_come
    self._remove(session, session.lost_version)
    if channel is not None:
      channel.close()
    if was_over:
      return
    _log.log(
      logging.WARNING if is_failure else logging.INFO,
      'Learner %d left at clock %d: %s. %d are connected.',
      session.learner,
      self._store.newest.version,
      why,
      self._sessions.count_connected(),
    )
    if not self._end.has_come:
      self._begin_if_complete()
    is_fatal = is_failure and self._settings.on_learner_lost == 'fail'
    if is_fatal and not self._end.has_come:
      self._on_failure(f'Learner {session.learner} was lost: {why}.')

  def _remove(self, session: _Session, lost_version: int) -> None:
    """Removes a learner; the protocol may update or release others."""
    self._sessions.remove(session)
    # A run that was interrupted may be resumed, so the protocol must know.
    if not self._end.has_come or self._end.is_interrupted:
      self._leave(session, lost_version)
    else:
      self._records.record_presence(
        session,
        _Kind.LEAVE,
        self._store.newest.version,
        read_version=lost_version,
      )

  def check_deadlines(self, time: float) -> None:
    """Gives up on learners that are late, and sends WAITs to the others."""
    if self._end.has_come:
      return
    attendance = self.attendance
    if attendance.must_begin(time):
      self._begin()
    for session in attendance.list_not_returned(time):
      self._lose(session, 'it did not come back after the restart')
    for session, limit in attendance.iterate_late(time):
      self._lose(session, f'no gradient came within {limit:.3g} s')
    attendance.send_waits_if_due(time)
    attendance.warn_if_alone(time, self._store.newest.version)

  # --- Answers.

  def get_sender(self, channel: _Channel, message: _Message) -> _Session:
    """The session of a learner that may send a message now.

    Raises:
      MessageError: as `Sessions.get_sender`.
    """
    session = self._sessions.get_sender(channel, message)
    self.last_pid = channel.pid
    return session

  def record_fetches(self, learners: Iterable[int], clock: int) -> None:
    """Records the fetches of learners, which `release` will answer.

    Only learners that step on replicas of their own have such records: for
    others, each push and each join is a fetch as well.

    Args:
      learners: Learners that the protocol lets go on.
      clock: Clock of the weights that they will get.
    """
    if (
      not self._settings.has_fetches
      or not self.attendance.has_begun
      or self._end.has_come
    ):
      return
    for learner in dict.fromkeys(learners):  # Without repetitions.
      session = self._sessions[learner]
      if session.state == _State.WAITING and not session.keeps_weights:
        self._records.record_fetch(session, clock)

  def release(self, learners: Iterable[int]) -> None:
    """Answers learners that the protocol lets go on, once the run has begun."""
    if not self.attendance.has_begun:
      return
    for learner in learners:
      session = self._sessions[learner]
      if session.state == _State.ABSENT:  # Answered when it comes back.
        session.was_waiting = False
      elif session.state == _State.WAITING and not self._end.has_come:
        self.answer(session)
      elif session.state == _State.WAITING:
        self.send_end(session)

  def answer(self, session: _Session) -> None:
    """Answers a learner, which computes from now on."""
    session.state = _State.COMPUTING
    session.start_time = self._watch.get_time()
    if not session.keeps_weights:
      self._sessions.add_lease(session, self._store.newest)
    # The last lease is of the weights in this answer, or, if the learner keeps
    # its weights, of those that it fetched last.
    self._sessions.keep_last_lease(session)
    self.repeat_answer(session)

  def repeat_answer(self, session: _Session) -> None:
    """Sends a learner's last answer, for the first time or again."""
    session.send_answer()
    self._watch.add('send')

  def fetch(self, channel: _Channel, message: _Message) -> None:
    """Handles a FETCH: a learner wants weights, and has no gradient to give."""
    session = self.get_sender(channel, message)
    if not self._settings.has_fetches:
      self._lend(session, channel)
    elif self._end.has_come:
      self.send_end(session, session.lost_version)
    else:
      session.count_fetched_steps(
        message.step,
        self._protocol.steps_per_push,
        self._protocol.steps_per_fetch,
      )
      session.state, session.keeps_weights = _State.WAITING, False
      self._commit(released=[session.learner])

  def _lend(self, session: _Session, channel: _Channel) -> None:
    """Sends weights to a learner that computes, for its next gradient.

    This makes no record: the next push names the weights that it used. It sends
    no END: a gradient will follow, whose answer can be the END.
    """
    snapshot = self._store.newest
    self._sessions.add_lease(session, snapshot)
    channel.send(
      snapshot.make_message(worker=session.learner, push=session.next_push),
      snapshot.buffer,
    )
    self._watch.add('send')

  def send_end(self, session: _Session, lost_version: int = -1) -> None:
    """Tells a learner that the run is over, and removes it."""
    channel = session.channel
    self._remove(session, lost_version)
    if channel is not None:
      self._send_end_on(channel)

  def _send_end_on(self, channel: _Channel) -> None:
    channel.send(_Message(_Verb.END, text=self._end.reason or ''))
