"""What the server does with gradients."""

import collections
import math
from typing import NamedTuple

from jasgd import protocols
from jasgd import traces
from jasgd.runtime import _books
from jasgd.runtime import _core
from jasgd.runtime import _messages
from jasgd.runtime import _snapshots
from jasgd.runtime import _weights

_Fate = protocols.Fate
_State = _books.State

# So many gradients may be applied by one call: each is a compiled program.
GROUP_SIZES = (16, 8, 4, 2)


class Pending(NamedTuple):
  """A gradient on its way through the server."""

  book: _books.Book
  message: _messages.Message
  stale: _snapshots.Snapshot
  decision: protocols.Decision
  clock: int  # When it arrived.
  num_present: int
  arrive_time: float
  start_time: float


class Gradients:
  """Decides on gradients, applies them, writes them down, and answers."""

  def __init__(self, core: _core.Core) -> None:
    self._core = core

  def decide(
    self, book: _books.Book, message: _messages.Message
  ) -> Pending | None:
    """What becomes of a gradient.

    Args:
      book: Whose it is.
      message: An EXCHANGE.

    Returns:
      What `handle` takes; None if it is answered already.

    Raises:
      MessageError: if it is none that this learner can send now.
    """
    core = self._core
    core.reach('received')
    if message.payload is None or (
      message.payload.nbytes != core.weights.layout.size
    ):
      raise _messages.MessageError(
        'size',
        f'An EXCHANGE needs a gradient of {core.weights.layout.size} bytes.',
      )
    if message.step == book.next_step - 1:  # The answer was lost on its way.
      core.repeat_answer(book)
      return None
    check_step(book, message.step)
    check_numbers(message)
    if not math.isfinite(message.loss):
      raise _messages.MessageError(
        'number', f'The loss of an EXCHANGE must be finite, got {message.loss}.'
      )
    stale = find_stale(book, message, core.weights.clock)
    time = core.get_time()
    book.note_seconds(time - book.start_time)
    book.next_step += 1
    book.keeps_weights = bool(message.flags & _messages.Flag.KEEPS_WEIGHTS)
    clock, num_present = core.protocol.clock, len(core.protocol.alive)
    if core.end_reason is not None:
      decision = protocols.Decision(_Fate.AFTER_END, False, ())
    else:
      decision = core.protocol.on_push(
        book.learner, message.step, message.clock
      )
    assert decision.fate is not None  # A push has one.
    book.fate = int(decision.fate)
    book.state = _State.WAITING
    core.num_bad = 0
    return Pending(
      book, message, stale, decision, clock, num_present, time, book.start_time
    )

  def handle(self, pushes: list[Pending]) -> None:
    """Applies gradients, in this order, and answers.

    Args:
      pushes: One; or several, each of which is an update of its own or none.
    """
    core = self._core
    core.spend('decide')
    calls = self._apply(pushes)
    snapshot = None
    if any(push.decision.updates for push in pushes):
      snapshot = core.copy_weights()
    time = core.get_time()
    for push, call in zip(pushes, calls, strict=True):
      digest = 0
      is_update = push.decision.updates
      if (
        snapshot is not None and is_update and push.clock + 1 == snapshot.clock
      ):
        digest = core.weights.layout.digest(snapshot.buffer.array)
      self._record(push, call, digest, time)
    core.recorder.flush()
    core.spend('record')
    core.reach('recorded')
    if snapshot is not None:
      core.publish(snapshot)
    for push in pushes:
      if push.decision.fate == _Fate.AFTER_END:
        core.say_end(push.book)
      core.release(push.decision.released)
    core.reach('replied')
    core.check_budget()

  def _apply(self, pushes: list[Pending]) -> list[int]:
    """Makes the calls; gives the number of that of each gradient."""
    core, weights = self._core, self._core.weights
    rows = collections.deque(
      _weights.Push(
        weights.layout.view(push.message.payload),
        push.stale,
        push.clock - push.message.clock,
        push.decision.updates,
        push.num_present,
      )
      for push in pushes
      if push.decision.fate == _Fate.APPLIED
      and push.message.payload is not None
    )
    numbers: list[int] = []
    while rows:
      size = next((size for size in GROUP_SIZES if size <= len(rows)), 1)
      if size == 1:
        numbers.append(0)
        weights.apply(rows.popleft())
      else:  # Numbered by its first update.
        numbers += [weights.clock + 1] * size
        weights.apply_many([rows.popleft() for _ in range(size)])
    if numbers:
      weights.wait()  # From now on the gradients' memory may be used again.
      core.spend('update')
      core.reach('accumulated')
      if any(push.decision.updates for push in pushes):
        core.reach('updated')
    left = iter(numbers)
    return [
      next(left) if push.decision.fate == _Fate.APPLIED else 0
      for push in pushes
    ]

  def _record(self, push: Pending, call: int, digest: int, time: float) -> None:
    """Writes a gradient down."""
    core, message, fate = self._core, push.message, push.decision.fate
    assert fate is not None
    is_applied = fate == _Fate.APPLIED
    is_released = push.book.learner in push.decision.released
    staleness = push.clock - message.clock
    if is_applied:
      push.book.num_applied += 1
      core.journal.samples += core.settings.samples_per_push
    core.recorder.count(fate, staleness, message.loss)
    core.recorder.record(
      traces.Kind.GRADIENT,
      fate=fate,
      digest=digest,
      learner=push.book.learner,
      call=call,
      step=message.step,
      read_clock=message.clock,
      arrive_clock=push.clock,
      apply_clock=push.clock if is_applied else -1,
      samples=core.journal.samples,
      start_time=push.start_time,
      compute_time=message.seconds,
      arrive_time=push.arrive_time,
      release_time=time if is_released else math.nan,
    )
    count_steps(push.book, core.protocol)

  # --- Weights without a gradient.

  def fetch(self, book: _books.Book, message: _messages.Message) -> None:
    """A learner wants new weights, and has no gradient to give.

    Raises:
      MessageError: if it cannot have computed so many minibatches.
    """
    core = self._core
    # With overlap a gradient is on its way, and its answer will say the end.
    if core.end_reason is not None and core.settings.has_fetches:
      core.say_end(book, book.lost_clock)
      return
    snapshot = core.newest
    if core.settings.has_fetches:
      self._count_fetched(book, message.step)
    core.add_lease(book, snapshot)
    if core.settings.has_fetches:
      core.keep_last_lease(book)
      core.journal.note_fetch(book, snapshot)
    assert book.channel is not None  # It has just spoken.
    book.channel.send(
      _messages.Message(
        _messages.Verb.SNAPSHOT,
        learner=book.learner,
        incarnation=snapshot.incarnation,
        clock=snapshot.clock,
        step=book.next_step,
        rate=snapshot.rate,
      ),
      snapshot.buffer,
    )
    core.spend('send')

  def _count_fetched(self, book: _books.Book, step: int) -> None:
    """Keeps count of the minibatches of a learner that fetches."""
    protocol = self._core.protocol
    least = book.num_computed
    # With as many as make a push, it would have pushed.
    most = least + min(
      protocol.steps_per_fetch, protocol.steps_per_push - book.num_gathered - 1
    )
    if not least <= step <= most:
      raise _messages.MessageError(
        'step',
        f'Learner {book.learner} must have computed from {least} to {most} '
        f'minibatches when it fetches, got {step}.',
      )
    book.num_gathered += step - least
    book.num_computed = step
    book.start_time = self._core.get_time()


def count_steps(book: _books.Book, protocol: protocols.Protocol) -> None:
  """Keeps count of the minibatches of a learner that pushes."""
  book.num_computed += protocol.steps_per_push - book.num_gathered
  book.num_gathered = 0


def check_step(book: _books.Book, step: int) -> None:
  """Raises a MessageError if this is not the step that comes next."""
  if step != book.next_step:
    raise _messages.MessageError(
      'step',
      f'The next step of learner {book.learner} is {book.next_step}, got '
      f'{step}.',
    )


def check_numbers(message: _messages.Message) -> None:
  """Raises a MessageError if times are no times."""
  if not 0 <= message.seconds < math.inf:
    raise _messages.MessageError(
      'number',
      f'seconds must be finite and at least 0, got {message.seconds}.',
    )


def find_stale(
  book: _books.Book, message: _messages.Message, clock: int
) -> _snapshots.Snapshot:
  """The weights that a gradient was computed on.

  Raises:
    MessageError: if the learner does not have such weights.
  """
  version = (message.incarnation, message.clock)
  stale = book.leases.get(version)
  if stale is None:
    raise _messages.MessageError(
      'future' if message.clock > clock else 'clock',
      f'Learner {book.learner} has weights of (incarnation, clock) '
      f'{", ".join(map(str, book.leases)) or "none"}, got a gradient of '
      f'{version}; the clock is {clock}.',
    )
  return stale
