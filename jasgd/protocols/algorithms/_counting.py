"""Base class of protocols in which no learner waits: gradients are counted."""

from typing import Any

from jasgd.protocols import _base


class Counting(_base.Protocol):
  """Base class of protocols that update after a number of gradients."""

  holds_learners = False

  def __init__(self) -> None:
    super().__init__()
    self._size = 0  # Gradients taken since the last update.

  def _quorum(self) -> int:
    """Number of gradients that an update takes now."""
    return 1

  def _find_refusal(self, read_clock: int) -> _base.Fate | None:
    """Fate of a dropped gradient of this clock; None if it is taken."""
    del read_clock
    return None

  def handle_push(self, learner: int, read_clock: int) -> _base.Decision:
    """Takes the gradient unless it is too stale; releases the learner."""
    fate = self._find_refusal(read_clock)
    if fate is not None:
      return _base.Decision(fate, False, (learner,))
    self._size += 1
    return _base.Decision(_base.Fate.APPLIED, self._use_quorum(), (learner,))

  def count_per_update(self) -> int | None:
    """The quorum; None if a subclass has a rule of its own for a push."""
    rules = ('on_push', 'handle_push', '_find_refusal')
    if any(getattr(type(self), n) is not getattr(Counting, n) for n in rules):
      return None
    return self._quorum()

  def handle_leave(self, learner: int) -> _base.Decision:
    """Updates if the quorum of the remaining learners is met."""
    del learner
    return _base.Decision(None, self._size > 0 and self._use_quorum(), ())

  def _use_quorum(self) -> bool:
    """Whether an update is due; if so, its gradients count as used."""
    if self._size < self._quorum():
      return False
    self._size = 0
    return True

  def initial_state(self) -> dict[str, Any]:
    """The state before the first event."""
    return {'size': 0}

  def save_state(self) -> dict[str, Any]:
    """The number of gradients since the last update."""
    return {'size': self._size}

  def restore_state(self, state: dict[str, Any]) -> None:
    """Sets the number of gradients since the last update."""
    self._size = state['size']
