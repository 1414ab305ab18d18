"""Which learners the server waits for, and for how long."""

from collections.abc import Iterator
import logging

from jasgd.runtime import _settings
from jasgd.runtime.server import _sessions
from jasgd.runtime.wires import _messages

_log = logging.getLogger(__name__)
_State = _sessions.State

# WAITs that a waiting learner gets within the deadline for a sign of life.
_NUM_WAITS = 4


class Attendance:
  """Knows which learners have come, and which are late.

  It only finds learners that are late; the server removes them.

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
    """Learners that others have waited for too long, with their deadlines.

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
    """Tells waiting learners that the server lives, and whom it waits for."""
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
    """Logs now and then that there is no learner."""
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
