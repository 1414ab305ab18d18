"""What the server does when a gradient was not finite."""

import logging

from jasgd import protocols
from jasgd.runtime import _books
from jasgd.runtime import _core
from jasgd.runtime import _gradients
from jasgd.runtime import _members
from jasgd.runtime import _messages

_log = logging.getLogger(__name__)
_Fate = protocols.Fate


class Notices:
  """Counts gradients that were not finite, and ends a run that diverges."""

  def __init__(self, core: _core.Core, members: _members.Members) -> None:
    self._core = core
    self._members = members

  def take(self, book: _books.Book, message: _messages.Message) -> None:
    """A gradient was not finite; its learner goes on with the newest weights.

    Raises:
      MessageError: if it is none that this learner can send now.
    """
    core = self._core
    if message.step == book.next_step - 1:  # The answer was lost on its way.
      core.repeat_answer(book)
      return
    _gradients.check_step(book, message.step)
    _gradients.check_numbers(message)
    _gradients.find_stale(book, message, core.weights.clock)
    book.note_seconds(core.get_time() - book.start_time)
    book.next_step += 1
    book.num_not_finite += 1
    book.fate = int(_Fate.NOT_FINITE)
    book.keeps_weights = False
    core.num_bad += 1
    core.journal.note_unused(
      book,
      message,
      _Fate.NOT_FINITE,
      start_time=book.start_time,
      is_released=True,
    )
    _log.warning(
      'Learner %d: the gradient of step %d, at clock %d, was not finite.',
      book.learner,
      message.step,
      message.clock,
    )
    _gradients.count_steps(book, core.protocol)
    self._go_on(book)

  def _go_on(self, book: _books.Book) -> None:
    """Answers, unless all is lost."""
    core = self._core
    if core.end_reason is None and core.num_bad >= self._get_patience():
      core.is_diverged = True
      core.end(self._explain())
    if core.end_reason is not None:
      core.say_end(book)
    elif core.settings.has_fetches:  # Its copy is spoilt: a new life.
      self._members.restart(book)
    else:
      core.answer(book)

  def _get_patience(self) -> int:
    """How many gradients in a row must be bad for all to be lost."""
    return max(3, 2 * len(self._core.protocol.alive))

  def _explain(self) -> str:
    """What to say of a run whose loss is not finite."""
    core = self._core
    summary = core.recorder.summarize()
    staleness = summary.get('server/staleness_mean', 0.0)
    rate = core.weights.rate
    rate_text = 'that of the optimizer' if rate is None else f'{rate:g}'
    bad = [book for book in core.register if book.num_not_finite]
    worst = sorted(bad, key=lambda book: -book.num_not_finite)[:4]
    names = ', '.join(
      f'{book.num_not_finite} of learner {book.learner}' for book in worst
    )
    return (
      f'The loss diverged: the last {core.num_bad} gradients were not finite '
      f'(in all, {names}). '
      f'At clock {core.weights.clock} the mean staleness was {staleness:.1f} '
      f'(at most {summary.get("server/staleness_max", 0):.0f}) and the rate '
      f'{rate_text}. A rule of thumb: a rate that is stable without delay is '
      'to be divided by the staleness, which the policy inverse does.'
    )
