"""Learner sessions: the server's state of each learner, and leases."""

from collections.abc import Iterator
import dataclasses
import enum
import math
from typing import Any

from jasgd.runtime import _settings
from jasgd.runtime import _snapshots
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

# Least seconds of an adaptive deadline for a gradient.
_MIN_DEADLINE = 5.0
# Largest number of learners that a text names, so that it fits into a message.
_MAX_NAMES = 8


class State(enum.StrEnum):
  """State of a learner, as far as the server knows."""

  COMPUTING = 'computing'
  WAITING = 'waiting'  # It pushed or joined, and its answer is withheld.
  ABSENT = 'absent'  # It was connected before the server's restart.
  GONE = 'gone'


@dataclasses.dataclass(slots=True, eq=False)
class LearnerSession:
  """State of one learner.

  Attributes:
    learner: Number of the learner.
    instance: Random text that identifies its process.
    pid: Process id, as the learner says; 0: not given.
    num_devices: Devices over which it spreads a minibatch.
    channel: Channel for answers; None if it is not connected.
    state: State of the learner.
    was_waiting: Whether an absent learner was waiting before the restart.
    next_push: Number of its next push.
    num_computed: Number of minibatches that it has computed. Only counted if
      learners fetch apart from pushes.
    num_gathered: Number of these since its last push.
    welcome: Text that goes with its next answer.
    fate: Fate of its last push.
    keeps_weights: Whether the answer to its last push carries no weights.
    start_time: Time when it was answered, or began to wait.
    leases: Snapshots that it may use, by key, oldest first.
    num_applied: Number of its gradients that were applied.
    num_not_finite: Number of its gradients that were not finite.
    is_warm: Whether it has sent a gradient: the first one includes compiling.
    longest: Longest recent computing time, in seconds; 0: there was none.
  """

  learner: int
  instance: str = ''
  pid: int = 0
  num_devices: int = 1
  channel: _wire.Channel | None = None
  state: State = State.GONE
  was_waiting: bool = False
  next_push: int = 0
  num_computed: int = 0
  num_gathered: int = 0
  welcome: str = ''
  fate: int = 0
  keeps_weights: bool = False
  start_time: float = 0.0
  leases: dict[tuple[int, int], _snapshots.Snapshot] = dataclasses.field(
    default_factory=dict
  )
  num_applied: int = 0
  num_not_finite: int = 0
  is_warm: bool = False
  longest: float = 0.0

  @property
  def lost_version(self) -> int:
    """Version that it computes on, with no gradient yet; -1: none."""
    if self.state == State.WAITING or self.was_waiting or not self.leases:
      return -1
    _, version = next(iter(self.leases))
    return version

  def belongs_to(self, instance: str) -> bool:
    """Whether this is the session of a process."""
    return bool(instance) and self.instance == instance

  def has_answered(self, message: _messages.Message) -> bool:
    """Whether a push repeats the last one, which was answered."""
    return 0 <= message.push == self.next_push - 1

  def check_push(
    self, message: _messages.Message, version: int
  ) -> _snapshots.Snapshot:
    """Checks that this learner can have sent an EXCHANGE or a NOTICE now.

    Args:
      message: The message.
      version: Version of the server's weights.

    Returns:
      The snapshot that the gradient was computed on.

    Raises:
      MessageError: if push, version or computing time are impossible.
    """
    if message.push != self.next_push:
      raise _messages.MessageError(
        'push',
        f'The next push of learner {self.learner} is {self.next_push}, got '
        f'{message.push}.',
      )
    if not 0 <= message.seconds < math.inf:
      raise _messages.MessageError(
        'number',
        f'seconds must be finite and at least 0, got {message.seconds}.',
      )
    key = (message.incarnation, message.version)
    stale = self.leases.get(key)
    if stale is None:
      raise _messages.MessageError(
        'future' if message.version > version else 'clock',
        f'Learner {self.learner} has weights of (incarnation, version) '
        f'{", ".join(map(str, self.leases)) or "none"}, got a gradient of '
        f'{key}; the clock is {version}.',
      )
    return stale

  def count_push(self, time: float) -> None:
    """Counts a valid push, and the time that it took."""
    seconds = time - self.start_time
    if self.is_warm:
      self.longest = _settings.update_longest(self.longest, seconds)
    self.is_warm = True
    self.next_push += 1

  def count_pushed_steps(self, steps_per_push: int) -> None:
    """Counts the minibatches of a push."""
    self.num_computed += steps_per_push - self.num_gathered
    self.num_gathered = 0

  def count_fetched_steps(
    self, step: int, steps_per_push: int, steps_per_fetch: int
  ) -> None:
    """Counts the minibatches that were computed before a fetch.

    Raises:
      MessageError: if the learner cannot have computed as many.
    """
    least = self.num_computed
    # With as many minibatches as a push has, it would have pushed instead.
    most = least + min(steps_per_fetch, steps_per_push - self.num_gathered - 1)
    if not least <= step <= most:
      raise _messages.MessageError(
        'step',
        f'Learner {self.learner} must have computed from {least} to {most} '
        f'minibatches when it fetches, got {step}.',
      )
    self.num_gathered += step - least
    self.num_computed = step

  def send_answer(self) -> None:
    """Sends the last answer, for the first time or again."""
    text, self.welcome = self.welcome, ''
    if self.channel is None:
      return
    where: dict[str, Any] = {'worker': self.learner, 'push': self.next_push}
    if self.keeps_weights:
      self.channel.send(
        _messages.Message(_messages.Verb.ANSWER, self.fate, **where, text=text)
      )
      return
    snapshot = next(iter(self.leases.values()))
    message = snapshot.make_message(**where, fate=self.fate, text=text)
    self.channel.send(message, snapshot.buffer)

  def ask_to_resend(self) -> None:
    """Asks a learner that came back for the gradient that it had computed."""
    assert self.channel is not None  # It has just connected.
    text, self.welcome = self.welcome, ''
    self.channel.send(
      _messages.Message(
        _messages.Verb.ANSWER,
        flags=_messages.Flag.RESEND,
        worker=self.learner,
        push=self.next_push,
        text=text,
      )
    )

  def describe(self) -> dict[str, Any]:
    """Entry of the server's status."""
    return {
      'state': str(self.state),
      'next_push': self.next_push,
      'num_applied': self.num_applied,
      'num_not_finite': self.num_not_finite,
    }

  def save(self, keys: list[tuple[int, int]]) -> dict[str, Any]:
    """State for a checkpoint; leases as their indices in `keys`."""
    is_waiting = self.state == State.WAITING or self.was_waiting
    return {
      'learner': self.learner,
      'instance': self.instance,
      'pid': self.pid,
      'num_devices': self.num_devices,
      'is_here': self.state != State.GONE,
      'is_waiting': is_waiting,
      'next_push': self.next_push,
      'num_computed': self.num_computed,
      'num_gathered': self.num_gathered,
      'fate': int(self.fate),
      'keeps_weights': self.keeps_weights,
      'leases': [keys.index(key) for key in self.leases],
      'num_applied': self.num_applied,
      'num_not_finite': self.num_not_finite,
      'longest': self.longest,
    }


class Sessions:
  """All learner sessions, by number and by channel, with their leases.

  Args:
    store: Snapshots that learners lease.
  """

  def __init__(self, store: _snapshots.SnapshotStore) -> None:
    self._store = store
    self._sessions: dict[int, LearnerSession] = {}
    self._by_channel: dict[_wire.Channel, LearnerSession] = {}

  def __iter__(self) -> Iterator[LearnerSession]:
    return iter(self._sessions.values())

  def __getitem__(self, learner: int) -> LearnerSession:
    return self._sessions[learner]

  def list_in(self, *states: State) -> list[LearnerSession]:
    """Sessions that are in one of `states`, by number."""
    return [each for each in self._sessions.values() if each.state in states]

  def count_connected(self) -> int:
    """How many learners are connected."""
    return len(self.list_in(State.COMPUTING, State.WAITING))

  def find(self, channel: _wire.Channel) -> LearnerSession | None:
    """The session of a channel, if there is one."""
    return self._by_channel.get(channel)

  def find_instance(self, instance: str) -> LearnerSession | None:
    """The session of a process, if there is one.

    The process may not know its number: the first answer may have been lost.
    """
    for session in self._sessions.values():
      if session.belongs_to(instance):
        return session
    return None

  def get_sender(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> LearnerSession:
    """The session of a learner that may send a message now.

    Raises:
      MessageError: if there is none, the message names another learner, or the
        learner has to wait for an answer.
    """
    session = self._by_channel.get(channel)
    if session is None:
      raise _messages.MessageError(
        'stranger', f'Say HELLO before {message.verb.name}.'
      )
    if message.worker != session.learner:
      raise _messages.MessageError(
        'worker',
        f'The worker on this channel must be {session.learner}, got '
        f'{message.worker}.',
      )
    if session.state != State.COMPUTING:
      raise _messages.MessageError(
        'held',
        f'Learner {session.learner} must wait for its answer.',
      )
    return session

  def check_free(
    self,
    channel: _wire.Channel,
    *,
    worker: int,
    instance: str,
    num_devices: int,
  ) -> None:
    """Checks that a learner may come on a channel.

    Args:
      channel: Channel of its HELLO.
      worker: Number that it had before; -1: none.
      instance: Random text that identifies its process.
      num_devices: Number of its devices.

    Raises:
      MessageError: if another learner has the channel or the number, or it has
        come back with another number of devices.
    """
    if channel in self._by_channel:
      raise _messages.MessageError(
        'twice', 'This channel has a learner already.'
      )
    wanted = self._sessions.get(worker)
    if (
      wanted is not None
      and wanted.channel is not None
      and not wanted.belongs_to(instance)
    ):
      raise _messages.MessageError(
        'taken', f'Learner {worker} is connected already.'
      )
    own = self.find_instance(instance)
    if (
      own is not None
      and own.state == State.ABSENT
      and own.num_devices != num_devices
    ):
      raise _messages.MessageError(
        'hello',
        f'Learner {own.learner} had {own.num_devices} devices, got '
        f'{num_devices}.',
      )

  def choose(self, instance: str) -> LearnerSession:
    """The session for a process: its own, the first that is free, or new."""
    session = self.find_instance(instance)
    if session is not None:
      return session
    for session in self._sessions.values():
      if session.state == State.GONE:
        return session
    session = LearnerSession(len(self._sessions))
    self._sessions[session.learner] = session
    return session

  def attach(
    self, session: LearnerSession, channel: _wire.Channel, instance: str
  ) -> None:
    """Binds a session to a channel and a process."""
    self._detach(session)
    if not session.belongs_to(instance):  # The new process has to compile.
      session.is_warm, session.longest = False, 0.0
    session.channel, session.instance = channel, instance
    self._by_channel[channel] = session

  def _detach(self, session: LearnerSession) -> None:
    if session.channel is not None:
      del self._by_channel[session.channel]
      session.channel = None

  def remove(self, session: LearnerSession) -> None:
    """Marks a learner as gone, and ends its leases."""
    self._detach(session)
    session.state, session.was_waiting = State.GONE, False
    while session.leases:
      self._store.end_lease(session.leases.popitem()[1])

  # --- Leases.

  def add_lease(
    self, session: LearnerSession, snapshot: _snapshots.Snapshot
  ) -> None:
    """Lets a learner use a snapshot, besides the one that it computes on."""
    if snapshot.key in session.leases:
      return
    while len(session.leases) > 1:  # The last lease was never used.
      self._store.end_lease(session.leases.popitem()[1])
    session.leases[snapshot.key] = self._store.lease(snapshot)

  def keep_last_lease(self, session: LearnerSession) -> None:
    """Ends all leases of a learner but the last one."""
    while len(session.leases) > 1:
      key = next(iter(session.leases))
      self._store.end_lease(session.leases.pop(key))

  # --- Deadlines.

  def find_step_deadline(self, deadlines: _settings.Deadlines) -> float:
    """Seconds that a gradient may take while other learners wait for it."""
    longest = max((each.longest for each in self), default=0.0)
    minimum = _MIN_DEADLINE if longest else deadlines.first_step
    return deadlines.find_step(longest, minimum)

  def describe_waits(self, time: float) -> str:
    """Which learners wait for which, in words; '' if none waits."""
    waiting = self.name_waiting()
    if not waiting:
      return ''
    late = self.list_in(State.COMPUTING, State.ABSENT)
    late.sort(key=lambda session: session.start_time)
    names = _join_names(
      [
        f'{each.learner} ({each.state} for {time - each.start_time:.1f} s)'
        for each in late
      ]
    )
    return f'Learners {waiting} wait for {names or "no learner"}'

  def name_waiting(self) -> str:
    """Numbers of the learners that wait; '' if none does."""
    return _join_names(
      [str(each.learner) for each in self.list_in(State.WAITING)]
    )

  # --- Checkpoints.

  def list_leased(self) -> list[_snapshots.Snapshot]:
    """Snapshots that learners may use."""
    return [lease for each in self for lease in each.leases.values()]

  def save(self, keys: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """State for a checkpoint; leases as their indices in `keys`."""
    return [session.save(keys) for session in self]

  def restore(
    self, saved: list[dict[str, Any]], snapshots: list[_snapshots.Snapshot]
  ) -> None:
    """Inverse of `save`: learners that were connected are absent now."""
    for each in saved:
      leases = [snapshots[index] for index in each['leases']]
      self._sessions[each['learner']] = LearnerSession(
        learner=each['learner'],
        instance=each['instance'],
        pid=each['pid'],
        num_devices=each['num_devices'],
        state=State.ABSENT if each['is_here'] else State.GONE,
        was_waiting=each['is_waiting'],
        next_push=each['next_push'],
        num_computed=each['num_computed'],
        num_gathered=each['num_gathered'],
        fate=each['fate'],
        keeps_weights=each['keeps_weights'],
        leases={
          snapshot.key: self._store.lease(snapshot) for snapshot in leases
        },
        num_applied=each['num_applied'],
        num_not_finite=each['num_not_finite'],
        is_warm=each['longest'] > 0,
        longest=each['longest'],
      )


def _join_names(names: list[str]) -> str:
  """The first names, and how many more there are."""
  text = ', '.join(names[:_MAX_NAMES])
  if len(names) > _MAX_NAMES:
    text += f' and {len(names) - _MAX_NAMES} more'
  return text
