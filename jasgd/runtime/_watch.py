"""Looks at the time: who is late, who waits, and for whom."""

import logging

from jasgd.runtime import _books
from jasgd.runtime import _core
from jasgd.runtime import _members
from jasgd.runtime import _messages

_log = logging.getLogger(__name__)
_State = _books.State

# A deadline is so many times the longest time seen, and no less than that.
_PATIENCE, _LEAST_DEADLINE = 10.0, 5.0
# WAITs within the deadline for a sign of life.
_NUM_WAITS = 4
# More names than that are not read by anybody, nor fit into a message.
_MAX_NAMES = 8


class Watch:
  """Gives up on the late, and tells those who wait that it is alive."""

  def __init__(self, core: _core.Core, members: _members.Members) -> None:
    self._core = core
    self._members = members
    self._opened_at = core.get_time()
    self._said_wait_at = core.get_time()
    self._warned_at = core.get_time()

  def look(self) -> None:
    """Does what is due at this time."""
    core = self._core
    if core.end_reason is not None:
      return
    time, deadlines = core.get_time(), core.settings.deadlines
    since_open = time - self._opened_at
    is_late = not core.has_begun and since_open > deadlines.start
    if is_late and core.count_alive():
      _log.warning('Not all learners came: %s.', self.describe_waits())
      self._members.begin()
    if since_open > deadlines.rejoin:
      for book in core.register.list(_State.ABSENT):
        self._members.lose(book, 'it did not come back after the restart')
    if core.has_begun and core.protocol.holds_learners:
      self._lose_late(time)
    if time - self._said_wait_at > deadlines.silence / _NUM_WAITS:
      self._said_wait_at = time
      self._say_wait()
    self._warn_if_alone(time)

  def _lose_late(self, time: float) -> None:
    """Gives up on those whom others have waited for too long."""
    core = self._core
    deadline = self.get_step_deadline()
    for book in core.register.list(_State.COMPUTING):
      if not core.register.list(_State.WAITING):
        return  # Nobody waits, or not any more.
      late = time - book.start_time
      limit = deadline
      if not book.is_warm:  # It may be compiling.
        limit = max(deadline, core.settings.deadlines.first_step)
      if late > limit:
        self._members.lose(book, f'no gradient came within {limit:.3g} s')
      elif late > limit / 2 and time - self._warned_at > limit / 2:
        self._warned_at = time
        _log.warning('%s.', self.describe_waits())

  def get_step_deadline(self) -> float:
    """How long a gradient may take if others wait for it."""
    deadlines = self._core.settings.deadlines
    if deadlines.step:
      return deadlines.step
    longest = max((book.longest for book in self._core.register), default=0.0)
    if not longest:
      return deadlines.first_step
    return max(_PATIENCE * longest, _LEAST_DEADLINE)

  def _say_wait(self) -> None:
    """Tells those who wait that the server is alive, and for whom they wait."""
    reason = ''
    for book in self._core.register.list(_State.WAITING):
      if book.channel is not None:
        reason = reason or self.describe_waits()
        book.channel.send(_messages.Message(_messages.Verb.WAIT, text=reason))

  def _warn_if_alone(self, time: float) -> None:
    """Says, now and then, that there is nobody to learn."""
    core = self._core
    pause = core.settings.deadlines.start
    if not core.count_alive() and time - self._warned_at > pause:
      self._warned_at = time
      _log.warning(
        'There is no learner; the server waits at clock %d.', core.weights.clock
      )

  def describe_waits(self) -> str:
    """Who waits for whom, in words; '' if nobody waits."""
    core = self._core
    time = core.get_time()
    waiting = _name([str(each.learner) for each in self._list_waiting()])
    if not core.has_begun:
      expected = core.settings.num_learners
      missing = expected - core.count_alive()
      return (
        f'Learners {waiting or "-"} wait for {missing} more of {expected} '
        'learners to come'
      )
    if not waiting:
      return ''
    late = core.register.list(_State.COMPUTING, _State.ABSENT)
    late.sort(key=lambda book: book.start_time)
    names = _name(
      [
        f'{book.learner} ({book.state} for {time - book.start_time:.1f} s)'
        for book in late
      ]
    )
    return f'Learners {waiting} wait for {names or "nobody"}'

  def _list_waiting(self) -> list[_books.Book]:
    return self._core.register.list(_State.WAITING)


def _name(names: list[str]) -> str:
  """Some names, and how many more."""
  text = ', '.join(names[:_MAX_NAMES])
  if len(names) > _MAX_NAMES:
    text += f' and {len(names) - _MAX_NAMES} more'
  return text
