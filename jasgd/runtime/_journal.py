"""The records that a server writes: one method for each thing that happens."""

from collections.abc import Callable
import math

from jasgd import protocols
from jasgd import traces
from jasgd.runtime import _books
from jasgd.runtime import _messages
from jasgd.runtime import _recorder
from jasgd.runtime import _snapshots
from jasgd.runtime import _weights

_Kind = traces.Kind


class Journal:
  """Writes down what happens, in the order in which it does.

  Args:
    recorder: Where to.
    weights: The clock.
    get_time: The time.

  Attributes:
    samples: Of the applied gradients that were written down.
  """

  def __init__(
    self,
    recorder: _recorder.Recorder,
    weights: _weights.Weights,
    get_time: Callable[[], float],
  ) -> None:
    self.samples = weights.samples
    self._recorder = recorder
    self._weights = weights
    self._get_time = get_time

  def note_member(self, kind: int, book: _books.Book, clock: int) -> None:
    """Somebody came (JOIN) or went (LEAVE); `clock` is the record's."""
    time = self._get_time()
    self._recorder.record(
      kind,
      learner=book.learner,
      call=book.num_devices if kind == _Kind.JOIN else 0,
      step=book.next_step,
      read_clock=clock,
      arrive_clock=self._weights.clock,
      samples=self.samples,
      start_time=time,
      arrive_time=time,
      release_time=time,
    )
    self._recorder.flush()

  def note_fetch(
    self, book: _books.Book, snapshot: _snapshots.Snapshot
  ) -> None:
    """A learner got weights apart from a push."""
    time = self._get_time()
    self._recorder.record(
      _Kind.FETCH,
      learner=book.learner,
      step=book.num_computed,
      read_clock=snapshot.clock,
      arrive_clock=self._weights.clock,
      samples=self.samples,
      start_time=time,
      arrive_time=time,
      release_time=time,
    )
    self._recorder.flush()

  def note_unused(
    self,
    book: _books.Book,
    message: _messages.Message,
    fate: protocols.Fate,
    *,
    start_time: float = math.nan,
    is_released: bool = False,
  ) -> None:
    """A gradient that was never sent: it is lost, or was not finite."""
    time = self._get_time()
    self._recorder.count(fate, 0, message.loss)
    self._recorder.record(
      _Kind.GRADIENT,
      fate=fate,
      learner=book.learner,
      step=message.step,
      read_clock=message.clock,
      arrive_clock=self._weights.clock,
      samples=self.samples,
      start_time=start_time,
      compute_time=message.seconds,
      arrive_time=time,
      release_time=time if is_released else math.nan,
    )
    self._recorder.flush()

  def note_server(self, kind: int, step: int = 0) -> None:
    """The server came back (RESTART), or the run is over (END)."""
    self._recorder.record(
      kind,
      step=step,
      read_clock=self._weights.clock,
      arrive_clock=self._weights.clock,
      samples=self.samples,
      arrive_time=self._get_time(),
    )
    self._recorder.flush()
