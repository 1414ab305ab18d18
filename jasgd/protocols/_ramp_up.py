"""Introducing learners one by one, before a protocol takes over."""

import heapq
from typing import Any

from jasgd.protocols import _base


class RampUp(_base.Protocol):
  """Any protocol, with its learners introduced over a number of updates.

  The i-th of N learners to join is let in at clock i * num_updates / N, the
  first at once. Until then it waits; one that goes and comes back keeps its
  turn. Few learners make little staleness, which is what training wants at its
  start.

  References:
    Chen et al., `Revisiting Distributed Synchronous SGD
    <https://arxiv.org/abs/1604.00981>`_, 2016 (staleness raised over the first
    epochs); Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012 (warm start)
  """

  name = 'ramp_up'

  def __init__(self, protocol: _base.Protocol, num_updates: int) -> None:
    """Introduces the learners of `protocol` over `num_updates` updates."""
    super().__init__()
    if not isinstance(protocol, _base.Protocol) or isinstance(protocol, RampUp):
      raise ValueError(
        'ramp_up takes a protocol that is none itself, as in '
        f'ramp_up(asynchronous(), 100), got {protocol!r}.'
      )
    self.protocol = protocol
    self.num_updates = _base.check_count('num_updates', num_updates, 1)
    self.steps_per_push = protocol.steps_per_push
    self.steps_per_fetch = protocol.steps_per_fetch
    self.updates_each = protocol.updates_each
    self.needs_current_clock = protocol.needs_current_clock
    self.needs_equal_times = protocol.needs_equal_times
    self._num_expected = 1
    self._turns: dict[int, int] = {}  # Learner -> the how manieth it came as.
    self._outside: set[int] = set()
    # A heap of (clock to enter at, learner); who left is still in it.
    self._queue: list[tuple[int, int]] = []

  def _arguments(self) -> dict[str, Any]:
    return {'protocol': self.protocol, 'num_updates': self.num_updates}

  @property
  def inside(self) -> set[int]:
    """Those who have been let in."""
    return self.protocol.alive

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'{self.protocol.describe()} Learners are let in one by one over the '
      f'first {self.num_updates} updates.'
    )

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if this many learners could never make an update."""
    self.protocol.check(num_learners)

  def start(self, num_learners: int) -> None:
    """Starts anew; so many learners are expected, and nobody has joined."""
    self.check(num_learners)
    self._num_expected = num_learners
    super().start(num_learners)

  def on_join(self, learner: int) -> _base.Decision:
    """A learner came; it is released when its turn to enter comes."""
    super().on_join(learner)
    self._turns.setdefault(learner, len(self._turns))
    self._outside.add(learner)
    heapq.heappush(self._queue, self._make_entry(learner))
    return self._follow(_base.Decision(None, False, ()))

  def _make_entry(self, learner: int) -> tuple[int, int]:
    """When a learner may enter, and who it is."""
    # More than were expected are let in once the ramp is over.
    turn = min(self._turns[learner], self._num_expected)
    return turn * self.num_updates // self._num_expected, learner

  def _push(self, learner: int, read_clock: int) -> _base.Decision:
    if learner in self._outside:
      _base.refuse_held(learner)
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
      _, learner = heapq.heappop(self._queue)
      if learner in self._outside:
        self._outside.remove(learner)
        released += self.protocol.on_join(learner).released
    return decision._replace(released=released)

  def _fresh(self) -> dict[str, Any]:
    return {
      'num_expected': self._num_expected,
      'turns': [],
      'outside': [],
      'inside': self.protocol._start(),
    }

  def _save(self) -> dict[str, Any]:
    return {
      'num_expected': self._num_expected,
      'turns': sorted(self._turns.items()),
      'outside': sorted(self._outside),
      'inside': self.protocol.save(),
    }

  def _restore(self, state: dict[str, Any]) -> None:
    self._num_expected = state['num_expected']
    self._turns = dict(map(tuple, state['turns']))
    self._outside = set(state['outside'])
    self._queue = sorted(map(self._make_entry, self._outside))
    self.protocol.restore(state['inside'])
