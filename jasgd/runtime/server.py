"""The parameter server: one thread that owns the weights.

It takes requests out of an inbox, one at a time, asks the protocol, updates,
writes the trace, publishes, and answers through the channel that a request came
by. It knows nothing of wires, and never evaluates.
"""

import collections
from collections.abc import Callable
import logging
import time
from typing import Any

from jasgd import engine
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _books
from jasgd.runtime import _checkpoints
from jasgd.runtime import _core
from jasgd.runtime import _crash
from jasgd.runtime import _gradients
from jasgd.runtime import _inbox
from jasgd.runtime import _members
from jasgd.runtime import _messages
from jasgd.runtime import _notices
from jasgd.runtime import _resuming
from jasgd.runtime import _saver
from jasgd.runtime import _settings
from jasgd.runtime import _status
from jasgd.runtime import _visitors
from jasgd.runtime import _watch
from jasgd.runtime import _wire

_log = logging.getLogger(__name__)
_Verb = _messages.Verb
_State = _books.State

# How often the time is looked at, in seconds.
_TICK = 0.1


class Server:
  """A parameter server, without its wires.

  Its loop is over `step`, which handles one request and belongs to one thread,
  the owner; wires put events into the inbox from wherever they like.

  Args:
    settings: What to do.
    workdir: Where trace, metrics and checkpoints go; None: nowhere. A run that
      is there goes on from its last checkpoint that can be read, as a new
      incarnation.
    is_shared: Whether snapshots can be mapped by other processes.
    now: Gives the time in seconds.
    crash: Where to be killed, in tests.

  Attributes:
    inbox: Where requests come in.
    fingerprint: What learners must say.
  """

  def __init__(
    self,
    settings: _settings.ServerSettings,
    workdir: workdirs.Workdir | None = None,
    *,
    is_shared: bool = False,
    now: Callable[[], float] = time.monotonic,
    crash: _crash.CrashPoints | None = None,
  ) -> None:
    crash = _crash.CrashPoints() if crash is None else crash
    self._core = core = _core.Core(
      settings, is_shared=is_shared, now=now, crash=crash
    )
    self.inbox = _inbox.Inbox()
    self.fingerprint = _settings.make_fingerprint(
      settings.task, self.layout, settings.seed
    )
    self._backlog: collections.deque[_wire.Event] = collections.deque()
    self._checkpoints: _checkpoints.Checkpoints | None = None
    self._watched_at = 0.0
    found = None
    if workdir is not None:
      if workdir.trace.exists():  # A test kills once, before a checkpoint too.
        crash.disarm()
      workdirs.set_aside_broken(workdir)
      found = _saver.restore(workdir, core.weights.state, self.layout.size)
    position = found[2] if found else {}
    core.open_recorder(workdir, self._make_header(), position.get('metrics', 0))
    if workdir is not None:
      self._checkpoints = _checkpoints.Checkpoints(core, workdir, crash)
      core.save_end = self._checkpoints.finish
    if found is None:
      core.protocol.start(settings.num_learners)
    else:
      _resuming.resume(core, *found)
    core.weights.warm_up(
      tuple(
        size for size in _gradients.GROUP_SIZES if size <= settings.max_group
      )
    )
    self._members = _members.Members(core, self.fingerprint)
    self._gradients = _gradients.Gradients(core)
    self._notices = _notices.Notices(core, self._members)
    self._visitors = _visitors.Visitors(core)
    self._watch = _watch.Watch(core, self._members)
    core.publish(core.copy_weights())
    if found is None and self._checkpoints is not None:
      self._checkpoints.finish()  # So that there is always one to go back to.
    elif found is not None and position['end_reason'] is not None:
      core.is_failed = position['is_failed']
      core.is_diverged = position['is_diverged']
      core.end(position['end_reason'])
    else:
      core.check_budget()

  def _make_header(self) -> dict[str, Any]:
    """What replay and reports need to know."""
    settings = self._core.settings
    protocol = settings.protocol
    return {
      **settings.header,
      'protocol': protocol.describe(),
      'strategy': protocol.to_config(),
      'num_learners': settings.num_learners,
      'num_present': 0,  # When it begins: all of them join.
      'overlap': settings.overlap,
      'batch': settings.task.batch,
      'steps_per_push': protocol.steps_per_push,
      'steps_per_fetch': protocol.steps_per_fetch,
      'bytes_per_push': self.layout.size,
      'bytes_per_pull': self.layout.size,
      'wire_dtype': settings.wire_dtype,
    }

  # --- How it stands.

  @property
  def layout(self) -> engine.Layout:
    """How weights and gradients lie in a message."""
    return self._core.weights.layout

  @property
  def clock(self) -> int:
    """Updates made."""
    return self._core.weights.clock

  @property
  def incarnation(self) -> int:
    """How often the run was resumed."""
    return self._core.incarnation

  @property
  def state(self) -> engine.ServerState:
    """The engine's state; the next update donates it."""
    return self._core.weights.state

  @property
  def end_reason(self) -> str | None:
    """Why the run is over, in words; None while it is not."""
    return self._core.end_reason

  @property
  def is_over(self) -> bool:
    """Whether the run has ended and everybody has been told, or is late."""
    core = self._core
    if core.end_reason is None:
      return False
    if core.get_time() > core.ended_at + core.settings.deadlines.end:
      return True
    # Those who were there before a restart will ask, too.
    here = core.register.list(_State.COMPUTING, _State.WAITING, _State.ABSENT)
    return not here and not len(self._visitors)

  def get_trace(self) -> traces.Trace:
    """The trace so far."""
    return self._core.recorder.get_trace()

  def describe(self) -> dict[str, Any]:
    """How the run stands, as JSON can say it."""
    saved = -1 if self._checkpoints is None else self._checkpoints.last_clock
    return _status.describe(self._core, self._watch, saved)

  # --- The loop.

  def step(self, timeout: float) -> bool:
    """Handles one request, or the lack of one.

    Args:
      timeout: How long to wait for one, in seconds.

    Returns:
      Whether there was one.
    """
    core = self._core
    event = self._take_event(timeout)
    core.spend('wait')
    if event is not None:
      self._handle(event)
    now = core.get_time()
    if event is None or now - self._watched_at > _TICK:
      self._watched_at = now
      self._watch.look()
      if self._checkpoints is not None:
        self._checkpoints.save_if_due()
        core.spend('save')
    return event is not None

  def _take_event(self, timeout: float) -> _wire.Event | None:
    if self._backlog:
      return self._backlog.popleft()
    return self.inbox.get(timeout)

  def _handle(self, event: _wire.Event) -> None:
    """Handles an event; whatever is wrong with it is said to its sender."""
    channel, message, error = event
    if error is not None:  # The wire has refused it already.
      self._count_refusal(channel, error)
      return
    if message is None:
      self._visitors.forget(channel)
      self._members.hang_up(channel)
      return
    try:
      if message.verb == _Verb.EXCHANGE:
        self._exchange(channel, message)
      else:
        self._dispatch(channel, message)
      self._core.counts['accepted'] += 1
    except _messages.MessageError as refusal:
      self._refuse(channel, refusal)

  def _refuse(
    self, channel: _wire.Channel, refusal: _messages.MessageError
  ) -> None:
    self._count_refusal(channel, refusal)
    channel.send(_messages.Message(_Verb.REFUSED, text=str(refusal)))

  def _count_refusal(
    self, channel: _wire.Channel, refusal: _messages.MessageError
  ) -> None:
    """Counts it; the first of each kind is worth a line."""
    counts = self._core.counts
    if not counts[refusal.reason]:
      _log.warning(
        'Refused (%s), from %s: %s', refusal.reason, channel.name, refusal
      )
    counts[refusal.reason] += 1

  def _dispatch(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> None:
    """Everything that is no gradient."""
    verb = message.verb
    if verb == _Verb.NOTICE:
      self._notices.take(self._get_book(channel, message), message)
    elif verb == _Verb.FETCH:
      self._gradients.fetch(self._get_book(channel, message), message)
    elif verb == _Verb.HELLO:
      self._members.welcome(channel, message)
    elif verb == _Verb.PULL:
      self._visitors.pull(channel, message)
    elif verb == _Verb.REPORT:
      self._visitors.report(channel, message)
    elif verb == _Verb.STATUS:
      self._visitors.say(channel, self.describe())
    elif verb == _Verb.LEAVE:
      self._visitors.forget(channel)
      channel.send(_messages.Message(_Verb.ANSWER))
      self._members.leave(channel)
    elif verb == _Verb.LOST:
      self._members.note_death(message)
      channel.send(_messages.Message(_Verb.ANSWER))
    elif verb == _Verb.STOP:
      channel.send(_messages.Message(_Verb.ANSWER))
      self.stop(message.text or 'It was stopped.')
    else:
      raise _messages.MessageError(
        'verb', f'A server does not take {verb.name}.'
      )

  def _get_book(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> _books.Book:
    """Whose message it is, checked."""
    book = self._core.register.find(channel)
    if book is None:
      raise _messages.MessageError(
        'stranger', f'Say HELLO before {message.verb.name}.'
      )
    if message.learner != book.learner:
      raise _messages.MessageError(
        'learner',
        f'This is learner {book.learner}, got {message.learner}.',
      )
    if book.state != _State.COMPUTING:
      raise _messages.MessageError(
        'held', f'Learner {book.learner} is {book.state}: it must wait.'
      )
    self._core.last_pid = channel.pid
    return book

  def _exchange(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> None:
    """A gradient, and those behind it that may be applied by the same call."""
    self._core.times['copy'] += message.copy_seconds
    first = self._gradients.decide(self._get_book(channel, message), message)
    pushes = [] if first is None else [first]
    settings = self._core.settings
    if settings.max_group > 1 and settings.protocol.updates_each:
      self._gather(pushes)
    if pushes:
      self._gradients.handle(pushes)

  def _gather(self, pushes: list[_gradients.Pending]) -> None:
    """Takes in gradients that are there already."""
    settings, weights = self._core.settings, self._core.weights
    left = settings.max_samples - weights.samples
    room = min(
      settings.max_group,
      max(1, int(min(left, 1e9)) // settings.samples_per_push),
    )
    if settings.num_updates:
      room = min(room, settings.num_updates - weights.clock)
    while len(pushes) < room:
      event = self._take_event(0)
      if event is None:
        return
      message = event.message
      if message is None or message.verb != _Verb.EXCHANGE:
        self._backlog.appendleft(event)
        return
      try:
        book = self._get_book(event.channel, message)
        push = self._gradients.decide(book, message)
        self._core.counts['accepted'] += 1
        if push is not None:
          pushes.append(push)
      except _messages.MessageError as refusal:
        self._refuse(event.channel, refusal)

  # --- Saving, and the end.

  def stop(self, reason: str) -> None:
    """Ends the run early, in good order; call it in the owner's thread."""
    if self._core.end_reason is None:
      self._core.interrupt(reason)

  def finish(self) -> None:
    """Saves what was not saved yet, and closes the files."""
    if self._checkpoints is not None:
      self._checkpoints.finish()
    if self._core.is_interrupted:  # Behind the checkpoint: void if it goes on.
      self._core.journal.note_server(traces.Kind.END)
    self._core.recorder.close()

  def close(self) -> None:
    """Gives buffers and file descriptors back, without saving."""
    try:
      if self._checkpoints is not None:
        self._checkpoints.wait()
    finally:
      self._core.recorder.close()
      self.inbox.close()
      self._core.store.close()
