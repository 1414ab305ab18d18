"""Admission of learners: which join or come back, and which are late.

`check_hello` and `choose_entry` decide how a learner that says HELLO goes on.
`Attendance` knows which learners the server waits for, and for how long. Both
only decide: the server lets learners join, and removes them.
"""

from collections.abc import Iterator
import enum
import logging
import math
from typing import Any, NamedTuple

from jasgd.runtime import _settings
from jasgd.runtime.server import _sessions
from jasgd.runtime.wires import _messages

_log = logging.getLogger(__name__)
_State = _sessions.State

# Number of WAITs to a waiting learner within the deadline `silence`.
_NUM_WAITS = 4
_MAX_INSTANCE = 64  # Characters.
_MAX_COUNT = 2**31 - 1  # Steps, versions, incarnations and pids.


class Hello(NamedTuple):
  """A valid HELLO of a learner.

  Attributes:
    worker: Number that the learner had before; -1: none.
    instance: Random text that identifies the learner's process.
    num_devices: Devices over which it spreads a minibatch.
    pid: Process id that the learner reports; 0: not given.
  """

  worker: int
  instance: str
  num_devices: int
  pid: int


def check_hello(
  message: _messages.Message, said: dict[str, Any], batch: int
) -> Hello:
  """Checks the fields of a learner's HELLO.

  Args:
    message: The message.
    said: JSON object of its text; the fingerprint has been checked.
    batch: Samples in a minibatch.

  Returns:
    The fields.

  Raises:
    MessageError: if no learner of this run can have sent this.
  """
  instance = said.get('instance', '')
  if not isinstance(instance, str) or not (
    instance.isascii() and len(instance) <= _MAX_INSTANCE
  ):
    raise _messages.MessageError(
      'hello',
      f'An instance has at most {_MAX_INSTANCE} ASCII characters, got '
      f'{instance!r:.80}.',
    )
  num_devices = said.get('num_devices', 1)
  if (
    type(num_devices) is not int
    or not 0 <= num_devices <= batch
    or (batch % max(num_devices, 1))
  ):
    raise _messages.MessageError(
      'hello',
      f'num_devices must divide the batch of {batch}, got {num_devices!r:.40}.',
    )
  pid = said.get('pid', 0)
  if type(pid) is not int or not 0 <= pid <= _MAX_COUNT:
    raise _messages.MessageError(
      'hello', f'A pid must be from 0 to {_MAX_COUNT}, got {pid!r:.40}.'
    )
  # A learner that comes back names its gradient that was not answered.
  counts = (message.push, message.version, message.incarnation)
  if message.push < -1 or max(counts) > _MAX_COUNT:
    raise _messages.MessageError(
      'hello',
      'Push, version and incarnation of a HELLO must be at most '
      f'{_MAX_COUNT}, and push at least -1, got {counts}.',
    )
  if message.push >= 0 and not (
    min(counts) >= 0 and 0 <= message.seconds < math.inf
  ):
    raise _messages.MessageError(
      'hello',
      'Version, incarnation and seconds of a gradient must be finite and at '
      f'least 0, got {message.version}, {message.incarnation} and '
      f'{message.seconds}.',
    )
  return Hello(message.worker, instance, max(num_devices, 1), pid)


class Entry(enum.Enum):
  """How a learner that has said HELLO goes on."""

  JOIN = enum.auto()  # As a new learner, with the newest weights.
  # The other entries are for a learner that was connected before the server's
  # restart.
  REJOIN = enum.auto()  # It leaves and joins: its own replica was lost.
  RESEND = enum.auto()  # It sends the gradient again that was not answered.
  RECEIVE = enum.auto()  # It gets weights: its gradient cannot be used.
  WAIT = enum.auto()  # Its gradient was counted; the answer is withheld.


def choose_entry(
  session: _sessions.LearnerSession,
  message: _messages.Message,
  *,
  has_fetches: bool,
) -> Entry:
  """Decides how a learner goes on.

  Args:
    session: Session of the learner.
    message: HELLO, which tells of the gradient that was not answered.
    has_fetches: Whether learners fetch apart from pushes, into replicas of
      their own.

  Returns:
    The decision.
  """
  if session.state != _State.ABSENT:
    return Entry.JOIN
  if has_fetches:  # No checkpoint has the learner's own replica.
    return Entry.REJOIN
  if session.was_waiting:
    return Entry.WAIT
  key = (message.incarnation, message.version)
  if message.push == session.next_push and key in session.leases:
    return Entry.RESEND
  return Entry.RECEIVE


class Attendance:
  """Knows which learners have come, and which are late.

  Args:
    settings: Settings of the run.
    sessions: Sessions of the learners.

  Attributes:
    has_begun: Whether learners compute. At first they wait until all have
      joined.
  """

  def __init__(
    self, settings: _settings.ServerSettings, sessions: _sessions.Sessions
  ) -> None:
    self.has_begun = False
    self._expected = settings.num_learners
    self._deadlines = settings.deadlines
    self._protocol = settings.protocol
    self._sessions = sessions
    self._num_joins = 0
    self._joined_pids: set[int] = set()
    self._dead_pids: set[int] = set()  # Processes that died before they joined.
    self._opened_at = self._waits_sent_at = self._warned_at = 0.0

  def open(self, time: float) -> None:
    """Starts all deadlines."""
    self._opened_at = self._waits_sent_at = self._warned_at = time

  def add_pid(self, pid: int) -> None:
    """Notes the process of a learner that has said HELLO."""
    self._joined_pids.add(pid)

  def add_join(self) -> None:
    """Counts a learner that joined."""
    self._num_joins += 1

  def add_death(self, pid: int) -> None:
    """Notes a dead process: if it had not joined, it is not waited for."""
    self._dead_pids.add(pid)

  def save(self) -> bool:
    """State for a checkpoint: whether learners compute."""
    return self.has_begun

  def restore(self, has_begun: bool) -> None:
    """Inverse of `save`."""
    self.has_begun = has_begun

  @property
  def can_begin(self) -> bool:
    """Whether all expected learners have joined, or are dead."""
    num_known = self._num_joins + len(self._dead_pids - self._joined_pids)
    return (
      not self.has_begun
      and num_known >= self._expected
      and self._sessions.count_connected() > 0
    )

  def must_begin(self, time: float) -> bool:
    """Whether the deadline for the first learners has passed."""
    is_late = time - self._opened_at > self._deadlines.start
    if self.has_begun or not is_late or not self._sessions.count_connected():
      return False
    _log.warning('Not all learners joined: %s.', self.describe_waits(time))
    return True

  def list_not_returned(self, time: float) -> list[_sessions.LearnerSession]:
    """Learners that did not come back in time after the server's restart."""
    if time - self._opened_at <= self._deadlines.rejoin:
      return []
    return self._sessions.list_in(_State.ABSENT)

  def iterate_late(
    self, time: float
  ) -> Iterator[tuple[_sessions.LearnerSession, float]]:
    """Learners for which others have waited too long, with their deadlines.

    The caller removes each before it takes the next: a removal may release
    those that waited, and then no other learner is late.

    Args:
      time: Time now.

    Yields:
      Session, and the deadline in seconds that it has missed.
    """
    if not self.has_begun or not self._protocol.holds_learners:
      return
    deadline = self._sessions.find_step_deadline(self._deadlines)
    for session in self._sessions.list_in(_State.COMPUTING):
      if not self._sessions.list_in(_State.WAITING):
        return
      late = time - session.start_time
      limit = deadline
      if not session.is_warm:  # It may be compiling.
        limit = max(deadline, self._deadlines.first_step)
      if late > limit:
        yield session, limit
      elif late > limit / 2 and time - self._warned_at > limit / 2:
        self._warned_at = time
        _log.warning('%s.', self.describe_waits(time))

  def send_waits_if_due(self, time: float) -> None:
    """Sends signs of life to waiting learners, with the names of the late."""
    if time - self._waits_sent_at <= self._deadlines.silence / _NUM_WAITS:
      return
    self._waits_sent_at = time
    reason = ''
    for session in self._sessions.list_in(_State.WAITING):
      if session.channel is not None:
        reason = reason or self.describe_waits(time)
        session.channel.send(
          _messages.Message(_messages.Verb.WAIT, text=reason)
        )

  def warn_if_alone(self, time: float, clock: int) -> None:
    """Warns that no learner is connected, at most once per `start` seconds."""
    is_alone = not self._sessions.count_connected()
    if is_alone and time - self._warned_at > self._deadlines.start:
      self._warned_at = time
      _log.warning('There is no learner; the server waits at clock %d.', clock)

  def describe_waits(self, time: float) -> str:
    """Which learners wait for which, in words; '' if none waits."""
    if self.has_begun:
      return self._sessions.describe_waits(time)
    missing = self._expected - self._sessions.count_connected()
    return (
      f'Learners {self._sessions.name_waiting() or "-"} wait for {missing} '
      f'more of {self._expected} learners to join'
    )
