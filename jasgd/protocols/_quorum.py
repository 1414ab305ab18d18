"""Protocols that wait for a quorum of gradients of the current clock."""

from typing import Any

from jasgd.protocols import _base


class Hardsync(_base.Protocol):
  """Synchronous SGD: every learner waits for the gradients of all.

  The staleness is 0 always.

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """

  name = 'hardsync'
  needs_current_clock = True
  # Learners that an update does not wait for.
  num_backups = 0

  def __init__(self) -> None:
    super().__init__()
    self._waiting: set[int] = set()  # Learners that gave one and are here.

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      'hardsync: the server updates once every learner has pushed a gradient '
      'of the current clock; each learner waits for that update.'
    )

  def _push(self, learner: int, read_clock: int) -> _base.Decision:
    if read_clock != self.clock:
      return _base.Decision(_base.Fate.DROPPED_LATE, False, (learner,))
    if learner in self._waiting:
      _base.refuse_held(learner)
    self._waiting.add(learner)
    released = self._use_quorum()
    return _base.Decision(_base.Fate.APPLIED, bool(released), released)

  def _change(self) -> _base.Decision:
    released = self._use_quorum()
    return _base.Decision(None, bool(released), released)

  def _use_quorum(self) -> tuple[int, ...]:
    """Those who wait, if there are enough of them for an update; else ()."""
    # The gradient of a learner that has left since still counts, but nobody
    # waits for a learner that has left: those who are here make the quorum.
    if len(self._waiting) < max(1, len(self.alive) - self.num_backups):
      return ()
    released = tuple(sorted(self._waiting))
    self._waiting.clear()
    return released

  def _leave(self, learner: int) -> None:
    self._waiting.discard(learner)

  def _fresh(self) -> dict[str, Any]:
    return {'waiting': []}

  def _save(self) -> dict[str, Any]:
    return {'waiting': sorted(self._waiting)}

  def _restore(self, state: dict[str, Any]) -> None:
    self._waiting = set(state['waiting'])


class Backup(Hardsync):
  """Synchronous SGD that does without the `num_backups` slowest learners.

  The server takes the first alive - b gradients of the current clock; late ones
  are dropped and counted, and their learners go on with the newest weights at
  once.

  References:
    Chen et al., `Revisiting Distributed Synchronous SGD
    <https://arxiv.org/abs/1604.00981>`_, 2016
  """

  name = 'backup'

  def __init__(self, num_backups: int) -> None:
    """Waits for all learners but `num_backups`."""
    super().__init__()
    self.num_backups = _base.check_count('num_backups', num_backups, 1)

  def _arguments(self) -> dict[str, Any]:
    return {'num_backups': self.num_backups}

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'backup({self.num_backups}): the server updates once all learners but '
      f'{self.num_backups} have pushed a gradient of the current clock; those '
      'wait for that update. Later gradients are dropped, and their learners '
      'go on at once.'
    )

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if this many learners could never make an update."""
    super().check(num_learners)
    if self.num_backups >= num_learners:
      raise ValueError(
        f'num_backups must be below num_learners={num_learners}, got '
        f'{self.num_backups}: no gradient would be waited for.'
      )
