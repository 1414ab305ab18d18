"""Records of learners in the trace, and their counts in the metrics."""

from collections.abc import Callable
import math
from typing import NamedTuple

from jasgd import protocols
from jasgd import traces
from jasgd.runtime import _recorder
from jasgd.runtime import _settings
from jasgd.runtime import _snapshots
from jasgd.runtime.server import _metrics
from jasgd.runtime.server import _sessions
from jasgd.runtime.wires import _messages

_Kind = traces.Kind


class Push(NamedTuple):
  """A gradient that the protocol has decided on."""

  session: _sessions.LearnerSession
  message: _messages.Message
  stale: _snapshots.Snapshot  # The weights that it was computed on.
  decision: protocols.Decision
  clock: int  # Just before the update that consumes it.
  num_present: int
  arrive_time: float
  start_time: float

  @property
  def fate(self) -> protocols.Fate:
    """Fate of the gradient."""
    assert self.decision.fate is not None  # Each push has one.
    return self.decision.fate

  @property
  def answered(self) -> tuple[int, ...]:
    """Learners that are answered after it.

    The protocol does not decide on a gradient after the end of the run: its
    learner is answered in any case.
    """
    if self.fate == protocols.Fate.AFTER_END:
      return (self.session.learner,)
    return self.decision.released


class LearnerRecords:
  """Writes the records of learners. All but pushes are flushed immediately.

  Args:
    settings: Settings of the run.
    recorder: Recorder of the trace.
    metrics: Metrics, which count the gradients.
    get_time: Function that gives the seconds since the run began.
  """

  def __init__(
    self,
    settings: _settings.ServerSettings,
    recorder: _recorder.Recorder,
    metrics: _metrics.ServerMetrics,
    get_time: Callable[[], float],
  ) -> None:
    self._settings = settings
    self._recorder = recorder
    self._metrics = metrics
    self._get_time = get_time

  def record_push(
    self, push: Push, *, call: int, digest: int, time: float
  ) -> None:
    """Records a gradient; the caller flushes.

    Args:
      push: The gradient.
      call: Number of the compiled call that it shares with others; 0: alone.
      digest: Digest of the weights after the update; 0: unknown.
      time: Time at which the learner is answered, if it is released.
    """
    session, message = push.session, push.message
    is_released = session.learner in push.decision.released
    self._metrics.count(push.fate, push.clock - message.version, message.loss)
    self._recorder.append(
      _Kind.PUSH,
      worker=session.learner,
      step=self._count_minibatches(session, message.push + 1),
      fate=push.fate,
      updates=push.decision.updates,
      read_version=message.version,
      version=push.clock + push.decision.updates,
      samples=self._settings.samples_per_push,
      group=call,
      digest=digest,
      start_time=push.start_time,
      compute_time=message.seconds,
      end_time=push.arrive_time,
      release_time=time if is_released else math.nan,
    )

  def record_unused(
    self,
    session: _sessions.LearnerSession,
    message: _messages.Message,
    fate: protocols.Fate,
    clock: int,
    *,
    start_time: float = math.nan,
    is_released: bool = False,
  ) -> None:
    """Records a gradient that was lost or not finite.

    Args:
      session: Session of the learner.
      message: Message that tells of the gradient.
      fate: Fate of the gradient.
      clock: Clock of the server.
      start_time: Time when the learner was given the weights.
      is_released: Whether the learner is answered now.
    """
    time = self._get_time()
    self._metrics.count(fate, 0, message.loss)
    row = {
      'worker': session.learner,
      'step': self._count_minibatches(session, message.push + 1),
      'fate': fate,
      'version': clock,
      'read_version': message.version,
      'start_time': start_time,
      'compute_time': message.seconds,
      'end_time': time,
      'release_time': time if is_released else math.nan,
    }
    self._recorder.write(_Kind.PUSH, row)

  def record_fetch(self, session: _sessions.LearnerSession, clock: int) -> None:
    """Records that a learner got the newest weights, apart from a push."""
    self._write(
      _Kind.FETCH,
      worker=session.learner,
      step=session.num_computed,
      version=clock,
      read_version=clock,
    )

  def record_presence(
    self,
    session: _sessions.LearnerSession,
    kind: traces.Kind,
    clock: int,
    **fields: int,
  ) -> None:
    """Records that a learner joined or left.

    Args:
      session: Session of the learner.
      kind: JOIN or LEAVE.
      clock: Clock of the server, after the update that this caused, if any.
      **fields: Other fields of the record.
    """
    self._write(
      kind,
      worker=session.learner,
      step=self._count_minibatches(session, session.next_push),
      version=clock,
      **fields,
    )

  def _write(self, kind: traces.Kind, **fields: int) -> None:
    """Writes and flushes the record of an event without duration."""
    time = self._get_time()
    times = {'start_time': time, 'end_time': time, 'release_time': time}
    self._recorder.write(kind, {**fields, **times})

  def _count_minibatches(
    self, session: _sessions.LearnerSession, num_pushes: int
  ) -> int:
    """Minibatches that a learner has computed."""
    if self._settings.has_fetches:
      return session.num_computed
    return num_pushes * self._settings.protocol.steps_per_push
