"""Stale synchronous parallel: fast learners wait, but only for the slowest."""

import collections
import heapq
from typing import Any

from jasgd.protocols import _base


class Ssp(_base.Protocol):
  """A learner may be at most s steps ahead of the slowest when it starts one.

  With p completed steps it starts the next one only if p - min(p) <= s. Every
  gradient is an update of its own. s = 0 makes all learners step in rounds.

  References:
    Ho et al., `More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server <https://papers.nips.cc/paper/4894>`_, 2013
  """

  name = 'ssp'
  updates_each = True

  def __init__(self, s: int) -> None:
    """Lets learners lead by `s` steps."""
    super().__init__()
    self.s = _base.check_count('s', s, 0)
    self._completed: dict[int, int] = {}  # Learner -> its completed steps.
    self._num_with: collections.Counter[int] = collections.Counter()
    self._slowest = 0  # The least number of completed steps.
    self._held: dict[int, int] = {}  # Learner that waits -> completed steps.
    # A heap of (completed, learner), which those who left are still in.
    self._queue: list[tuple[int, int]] = []

  def _arguments(self) -> dict[str, Any]:
    return {'s': self.s}

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'ssp({self.s}): the server updates with every gradient that comes; a '
      f'learner that has completed over {self.s} steps more than the slowest '
      'waits for it.'
    )

  def _push(self, learner: int, read_clock: int) -> _base.Decision:
    del read_clock
    if learner in self._held:
      _base.refuse_held(learner)
    num_with, slowest = self._num_with, self._slowest
    completed = self._completed[learner] + 1
    self._completed[learner] = completed
    num_with[completed - 1] -= 1
    num_with[completed] += 1
    if num_with[slowest] and completed <= slowest + self.s:
      # As usual: the slowest is no faster now, and this one is not too fast.
      return _base.Decision(_base.Fate.APPLIED, True, (learner,))
    self._held[learner] = completed
    heapq.heappush(self._queue, (completed, learner))
    return _base.Decision(_base.Fate.APPLIED, True, self._release())

  def _change(self) -> _base.Decision:
    return _base.Decision(None, False, self._release())

  def _release(self) -> tuple[int, ...]:
    """Those who may start a step now, by number."""
    if not self.alive:
      return ()
    while not self._num_with[self._slowest]:
      del self._num_with[self._slowest]
      self._slowest += 1
    released = []
    while self._queue and self._queue[0][0] <= self._slowest + self.s:
      completed, learner = heapq.heappop(self._queue)
      if self._held.get(learner) == completed:
        del self._held[learner]
        released.append(learner)
    return tuple(sorted(released))

  def _join(self, learner: int) -> None:
    # It neither leads nor holds the others back.
    self._completed[learner] = self._slowest
    self._num_with[self._slowest] += 1

  def _leave(self, learner: int) -> None:
    self._num_with[self._completed.pop(learner)] -= 1
    self._held.pop(learner, None)

  def _fresh(self) -> dict[str, Any]:
    return {'completed': [], 'slowest': 0, 'held': []}

  def _save(self) -> dict[str, Any]:
    return {
      'completed': sorted(self._completed.items()),
      'slowest': self._slowest,
      'held': sorted(self._held),
    }

  def _restore(self, state: dict[str, Any]) -> None:
    self._completed = dict(map(tuple, state['completed']))
    self._num_with = collections.Counter(self._completed.values())
    self._slowest = state['slowest']
    self._held = {
      learner: self._completed[learner] for learner in state['held']
    }
    self._queue = sorted(
      (count, learner) for learner, count in self._held.items()
    )
