"""Introducing learners one by one, before a protocol takes over."""

import collections
from typing import Any

from jasgd.protocols import _base


class RampUp(_base.Protocol):
  """Any protocol, with its learners introduced over a number of updates.

  The i-th of N learners to join is let in at clock i * num_updates / N, the
  first at once. Until then it waits. Few learners make little staleness, which
  is what training wants at its start.

  References:
    Chen et al., `Revisiting Distributed Synchronous SGD
    <https://arxiv.org/abs/1604.00981>`_, 2016 (staleness raised over the first
    epochs); Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012 (warm start)
  """

  def __init__(self, protocol: _base.Protocol, num_updates: int) -> None:
    """Introduces the learners of `protocol` over `num_updates` updates."""
    super().__init__()
    self.protocol = protocol
    self.num_updates = _base.check_count('num_updates', num_updates, 1)
    self.steps_per_push = protocol.steps_per_push
    self.steps_per_fetch = protocol.steps_per_fetch
    self._num_expected = 1
    self._num_joined = 0
    # (clock to enter at, learner), in that order; who left is still in it.
    self._queue: collections.deque[tuple[int, int]] = collections.deque()
    self._outside: set[int] = set()

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'{self.protocol.describe()} Learners are let in one by one over the '
      f'first {self.num_updates} updates.'
    )

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if this many learners could never make an update."""
    self.protocol.check(num_learners)

  def init(self, num_learners: int) -> None:
    """Starts anew, with the learners 0 to num_learners - 1."""
    self.check(num_learners)
    self._num_expected = num_learners
    super().init(num_learners)

  def on_join(self, learner: int) -> _base.Decision:
    """A learner came; it is released when its turn to enter comes."""
    super().on_join(learner)
    # Whoever comes back after the ramp is let in at once.
    turn = min(self._num_joined, self._num_expected)
    enter_at = turn * self.num_updates // self._num_expected
    self._num_joined += 1
    self._outside.add(learner)
    self._queue.append((enter_at, learner))
    return self._follow(_base.Decision(None, False, ()))

  def _push(self, learner: int, read_clock: int) -> _base.Decision:
    return self._follow(self.protocol.on_push(learner, -1, read_clock))

  def on_leave(self, learner: int) -> _base.Decision:
    """A learner finished or was lost, inside or outside."""
    is_inside = learner in self.protocol.alive
    self._outside.discard(learner)
    super().on_leave(learner)
    decision = _base.Decision(None, False, ())
    if is_inside:
      decision = self.protocol.on_leave(learner)
      self.clock = self.protocol.clock
    return self._follow(decision)

  def _follow(self, decision: _base.Decision) -> _base.Decision:
    """Lets in whose turn it is, or anyone if nobody is inside."""
    released = decision.released
    while self._queue and (
      self._queue[0][0] <= self.protocol.clock or not self.protocol.alive
    ):
      _, learner = self._queue.popleft()
      if learner in self._outside:
        self._outside.remove(learner)
        released += self.protocol.on_join(learner).released
    return decision._replace(released=released)

  def _fresh(self) -> dict[str, Any]:
    self.protocol.restore({'clock': 0, 'alive': [], **self.protocol._fresh()})
    return {
      'num_expected': self._num_expected,
      'num_joined': 0,
      'queue': [],
      'outside': [],
      'protocol': self.protocol.save(),
    }

  def _save(self) -> dict[str, Any]:
    return {
      'num_expected': self._num_expected,
      'num_joined': self._num_joined,
      'queue': list(self._queue),
      'outside': sorted(self._outside),
      'protocol': self.protocol.save(),
    }

  def _restore(self, state: dict[str, Any]) -> None:
    self._num_expected = state['num_expected']
    self._num_joined = state['num_joined']
    self._queue = collections.deque(map(tuple, state['queue']))
    self._outside = set(state['outside'])
    self.protocol.restore(state['protocol'])
