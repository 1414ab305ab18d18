"""Hardsync: synchronous SGD, an update per gradient of every learner."""

from typing import Any

from jasgd.protocols import _base


class Hardsync(_base.Protocol):
  r"""Synchronous SGD: every learner waits for the gradients of all learners.

  .. math:: x \leftarrow x - \frac{\alpha}{N} \sum_{i=1}^{N} g_i(x)

  All N gradients are of the current clock: the staleness is always 0.

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """

  name = 'hardsync'
  needs_current_clock = True
  # Number of learners whose gradients an update does not wait for.
  num_backups = 0

  def __init__(self) -> None:
    super().__init__()
    # Learners whose gradient is taken and whose update is not made yet.
    self._waiting: set[int] = set()

  def describe(self) -> str:
    """The rule in words."""
    return (
      'hardsync: the server updates once every learner has pushed a gradient '
      'of the current clock; each learner waits for that update.'
    )

  def handle_push(self, learner: int, read_clock: int) -> _base.Decision:
    """Takes a gradient of the current clock, and holds its learner."""
    if read_clock != self.clock:
      return _base.Decision(_base.Fate.DROPPED_LATE, False, (learner,))
    if learner in self._waiting:
      _base.refuse_held(learner)
    self._waiting.add(learner)
    released = self._use_quorum()
    return _base.Decision(_base.Fate.APPLIED, bool(released), released)

  def handle_leave(self, learner: int) -> _base.Decision:
    """Updates if the quorum of the remaining learners is met."""
    self._waiting.discard(learner)
    released = self._use_quorum()
    return _base.Decision(None, bool(released), released)

  def _use_quorum(self) -> tuple[int, ...]:
    """The learners to release if an update is due; otherwise ()."""
    # The gradient of a learner that left meanwhile stays in the sum, but only
    # learners that are still alive count for the quorum.
    if len(self._waiting) < max(1, len(self.alive) - self.num_backups):
      return ()
    released = tuple(sorted(self._waiting))
    self._waiting.clear()
    return released

  def initial_state(self) -> dict[str, Any]:
    """The state before the first event."""
    return {'waiting': []}

  def save_state(self) -> dict[str, Any]:
    """The learners that wait."""
    return {'waiting': sorted(self._waiting)}

  def restore_state(self, state: dict[str, Any]) -> None:
    """Sets the learners that wait."""
    self._waiting = set(state['waiting'])
