"""Stale synchronous parallel: fast learners wait for the slowest one."""

import collections
import heapq
from typing import Any

from jasgd.protocols import _base
from jasgd.protocols import _checks


class Ssp(_base.Protocol):
  r"""A learner starts a step at most s steps ahead of the slowest learner.

  .. math:: p_i - \min_j p_j \le s

  p_i is the number of steps that learner i has completed; it starts its next
  step only if the inequality holds. Every gradient makes its own update on
  arrival. s = 0 makes all learners step in rounds.

  References:
    Ho et al., `More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server <https://papers.nips.cc/paper/4894>`_, 2013
  """

  name = 'ssp'
  updates_each = True

  def __init__(self, s: int) -> None:
    """Builds the protocol.

    Args:
      s: Largest lead over the slowest learner, in steps.
    """
    super().__init__()
    self.s = _checks.check_count('s', s, 0)
    self._completed: dict[int, int] = {}  # Learner -> its completed steps.
    # Number of completed steps -> number of learners that have completed them.
    self._num_with: collections.Counter[int] = collections.Counter()
    self._slowest = 0  # Completed steps of the slowest learner.
    self._held: dict[int, int] = {}  # Waiting learner -> its completed steps.
    # A heap of (completed steps, waiting learner). A learner that left stays
    # in it until it is popped, and is ignored then.
    self._queue: list[tuple[int, int]] = []

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'s': self.s}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'ssp({self.s}): the server updates with every gradient on arrival; a '
      f'learner that has completed over {self.s} steps more than the slowest '
      'learner waits for it.'
    )

  def handle_push(self, learner: int, read_clock: int) -> _base.Decision:
    """Takes the gradient; holds the learner if it is too far ahead."""
    del read_clock
    if learner in self._held:
      _base.refuse_held(learner)
    num_with, slowest = self._num_with, self._slowest
    completed = self._completed[learner] + 1
    self._completed[learner] = completed
    num_with[completed - 1] -= 1
    num_with[completed] += 1
    if num_with[slowest] and completed <= slowest + self.s:
      # The usual case, without the heap: the slowest learner is still as slow,
      # so no waiting learner is released, and this one is not too far ahead.
      return _base.Decision(_base.Fate.APPLIED, True, (learner,))
    # Held first, then released with the others if its lead allows it.
    self._held[learner] = completed
    heapq.heappush(self._queue, (completed, learner))
    return _base.Decision(_base.Fate.APPLIED, True, self._release())

  def _release(self) -> tuple[int, ...]:
    """Releases the held learners whose lead is small enough now, sorted."""
    if not self.alive:
      return ()
    while not self._num_with[self._slowest]:
      del self._num_with[self._slowest]
      self._slowest += 1
    released = []
    while self._queue and self._queue[0][0] <= self._slowest + self.s:
      completed, learner = heapq.heappop(self._queue)
      # An entry of a learner that left, or left and joined again, is outdated.
      if self._held.get(learner) == completed:
        del self._held[learner]
        released.append(learner)
    return tuple(sorted(released))

  def handle_join(self, learner: int) -> None:
    """Gives the learner the slowest one's count: no lead, and no lag."""
    self._completed[learner] = self._slowest
    self._num_with[self._slowest] += 1

  def handle_leave(self, learner: int) -> _base.Decision:
    """Releases the learners that waited for this one."""
    self._num_with[self._completed.pop(learner)] -= 1
    self._held.pop(learner, None)
    return _base.Decision(None, False, self._release())

  def initial_state(self) -> dict[str, Any]:
    """The state before the first event."""
    return {'completed': [], 'slowest': 0, 'held': []}

  def save_state(self) -> dict[str, Any]:
    """Completed steps per learner, and the learners that wait."""
    return {
      'completed': sorted(self._completed.items()),
      'slowest': self._slowest,
      'held': sorted(self._held),
    }

  def restore_state(self, state: dict[str, Any]) -> None:
    """Sets the state; counters and heap are derived from it."""
    # JSON holds a dict with int keys as a list of pairs.
    self._completed = dict(map(tuple, state['completed']))
    self._num_with = collections.Counter(self._completed.values())
    self._slowest = state['slowest']
    self._held = {
      learner: self._completed[learner] for learner in state['held']
    }
    # A sorted list is a heap.
    self._queue = sorted(
      (count, learner) for learner, count in self._held.items()
    )
