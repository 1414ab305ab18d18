"""Who is there: learners come, go, and come back."""

import json
import logging
from typing import Any

from jasgd import protocols
from jasgd import traces
from jasgd.runtime import _books
from jasgd.runtime import _core
from jasgd.runtime import _hello
from jasgd.runtime import _messages
from jasgd.runtime import _wire

_log = logging.getLogger(__name__)
_Fate = protocols.Fate
_State = _books.State


class Members:
  """Keeps the register: who comes and who goes."""

  def __init__(self, core: _core.Core, fingerprint: str) -> None:
    self._core = core
    self._fingerprint = fingerprint
    self._num_joins = 0
    self._joined_pids: set[int] = set()
    self._dead_pids: set[int] = set()  # Those that died before they joined.

  # --- Coming.

  def welcome(self, channel: _wire.Channel, message: _messages.Message) -> None:
    """Somebody says HELLO: a learner that is new, or that comes back.

    Raises:
      MessageError: if it learns something else, or its number is taken.
    """
    core = self._core
    hello = _hello.read_hello(
      message, self._fingerprint, core.settings.task.batch
    )
    self._check_free(channel, hello)
    if core.end_reason is None:
      self._let_in(channel, message, hello)
    if core.end_reason is not None and core.register.find(channel) is None:
      core.say_end_on(channel)
      book = core.register.find_instance(hello.instance)
      if book is not None and book.state == _State.ABSENT:
        core.remove(book, book.lost_clock)  # It came back for that.

  def _let_in(
    self,
    channel: _wire.Channel,
    message: _messages.Message,
    hello: _hello.Hello,
  ) -> None:
    """Finds the learner's number, and lets it join or go on."""
    core = self._core
    book = core.register.choose(hello.instance)
    is_known = book.is_of(hello.instance)
    if book.channel is not None:
      # Its old channel is dead, and nobody has noticed yet.
      self.lose(book, 'it came back on another channel')
      if core.end_reason is not None:
        return
    channel.pid = channel.pid or hello.pid
    self._joined_pids.add(hello.pid)
    core.last_pid = channel.pid
    core.register.attach(book, channel, hello.instance)
    book.welcome = json.dumps(self._describe(book))
    is_resent = self._is_wanted(book, message)
    # What was received before is not lost.
    if not is_resent and message.step >= (book.next_step if is_known else 0):
      is_old = message.incarnation < core.incarnation
      fate = _Fate.LOST_HISTORY if is_old else _Fate.DROPPED_GONE
      core.journal.note_unused(book, message, fate)
    if book.state == _State.ABSENT:
      self._take_back(book, is_resent)
    else:
      book.num_devices = hello.num_devices
      if not is_known:
        book.is_warm, book.longest = False, 0.0
      self._join(book)
    if core.end_reason is None:
      self._begin_if_all()
      self._forget_absent()

  def _check_free(self, channel: _wire.Channel, hello: _hello.Hello) -> None:
    """Raises a MessageError if somebody else is there."""
    register = self._core.register
    if register.find(channel) is not None:
      raise _messages.MessageError(
        'twice', 'This channel has a learner already.'
      )
    wanted = register.books.get(hello.wanted)
    if (
      wanted is not None
      and wanted.channel is not None
      and not wanted.is_of(hello.instance)
    ):
      raise _messages.MessageError(
        'taken', f'Learner {hello.wanted} is here already.'
      )
    own = register.find_instance(hello.instance)
    if (
      own is not None
      and own.state == _State.ABSENT
      and own.num_devices != hello.num_devices
    ):
      raise _messages.MessageError(
        'hello',
        f'Learner {own.learner} had {own.num_devices} devices, got '
        f'{hello.num_devices}.',
      )

  def _describe(self, book: _books.Book) -> dict[str, Any]:
    """What a learner is told when it comes."""
    settings = self._core.settings
    return {
      'learner': book.learner,
      'seed': settings.seed,
      'steps_per_push': settings.protocol.steps_per_push,
      'steps_per_fetch': settings.protocol.steps_per_fetch,
      'num_computed': book.num_computed,
      'local_rate': settings.local_rate,
      'overlap': settings.overlap,
      'silence': settings.deadlines.silence,
    }

  def _join(self, book: _books.Book) -> None:
    """A learner comes, or comes again: it starts from the newest weights."""
    core = self._core
    core.journal.note_member(traces.Kind.JOIN, book, core.weights.clock)
    self._num_joins += 1
    book.state = _State.WAITING
    book.keeps_weights = False
    book.num_gathered = 0
    book.start_time = core.get_time()
    _log.info('Learner %d came.', book.learner)
    core.settle(core.protocol.on_join(book.learner))

  def _is_wanted(self, book: _books.Book, message: _messages.Message) -> bool:
    """Whether a learner that comes back has a gradient that can be used."""
    if book.state != _State.ABSENT or book.was_waiting:
      return False
    if self._core.settings.has_fetches:  # It is of a copy that is lost.
      return False
    version = (message.incarnation, message.clock)
    return message.step == book.next_step and version in book.leases

  def _take_back(self, book: _books.Book, is_resent: bool) -> None:
    """A learner comes back to a server that was away."""
    core = self._core
    was_waiting, book.was_waiting = book.was_waiting, False
    _log.info('Learner %d came back.', book.learner)
    book.start_time = core.get_time()
    book.state = _State.WAITING if was_waiting else _State.COMPUTING
    if core.settings.has_fetches:  # Its copy is its own affair: a new life.
      self.restart(book)
    elif is_resent:
      assert book.channel is not None  # It has just come by one.
      book.channel.send(
        _messages.Message(
          _messages.Verb.ANSWER,
          flags=_messages.Flag.RESEND,
          learner=book.learner,
          step=book.next_step,
          text=book.welcome,
        )
      )
      book.welcome = ''
    else:
      book.keeps_weights = False  # It needs some to go on.
      if not was_waiting:
        core.answer(book)

  def _begin_if_all(self) -> None:
    """Lets everybody start once all have come that are expected."""
    core = self._core
    # Learners that have come and gone again, or died before they came, are not
    # waited for.
    num_settled = self._num_joins + len(self._dead_pids - self._joined_pids)
    have_come = num_settled >= core.settings.num_learners
    if have_come and core.count_alive() and not core.has_begun:
      self.begin()

  def note_death(self, message: _messages.Message) -> None:
    """A launcher says that the process of a learner is dead.

    If it had not come yet, the others need not wait for it.

    Raises:
      MessageError: if the text is not the number of a process.
    """
    if not (message.text.isascii() and message.text.isdecimal()):
      raise _messages.MessageError(
        'pid', f'The text of a LOST must be a pid, got {message.text[:20]!r}.'
      )
    self._dead_pids.add(int(message.text))
    if self._core.end_reason is None:
      self._begin_if_all()

  def _forget_absent(self) -> None:
    """Waits no longer for those who were there before a restart."""
    core = self._core
    if core.count_alive() >= core.settings.num_learners:
      for book in core.register.list(_State.ABSENT):
        self.lose(book, 'others have come', is_failure=False)

  def begin(self) -> None:
    """Lets those who are there start."""
    core = self._core
    core.has_begun = True
    core.release(sorted(core.protocol.inside))

  # --- Going.

  def hang_up(self, channel: _wire.Channel) -> None:
    """A channel is gone; if a learner was at its end, so is that."""
    book = self._core.register.find(channel)
    if book is not None:
      self.lose(book, 'its connection is gone')

  def leave(self, channel: _wire.Channel) -> None:
    """A learner says that it goes."""
    book = self._core.register.find(channel)
    if book is not None:
      self.lose(book, 'it said so', is_failure=False)

  def lose(
    self, book: _books.Book, why: str, *, is_failure: bool = True
  ) -> None:
    """A learner is gone; the others must not wait for it."""
    core = self._core
    channel = book.channel
    was_over = core.end_reason is not None
    core.remove(book, book.lost_clock)
    if channel is not None:
      channel.close()
    if was_over:
      return
    _log.log(
      logging.WARNING if is_failure else logging.INFO,
      'Learner %d left at clock %d: %s. %d are there.',
      book.learner,
      core.weights.clock,
      why,
      core.count_alive(),
    )
    if core.end_reason is None:
      self._begin_if_all()
    is_fatal = is_failure and core.settings.on_learner_lost == 'fail'
    if is_fatal and core.end_reason is None:
      core.is_failed = True
      core.interrupt(f'Learner {book.learner} was lost: {why}.')

  def restart(self, book: _books.Book) -> None:
    """A learner begins a new life; what it had gathered is lost."""
    core = self._core
    core.journal.note_member(traces.Kind.LEAVE, book, -1)
    core.settle(core.protocol.on_leave(book.learner))
    self._join(book)
