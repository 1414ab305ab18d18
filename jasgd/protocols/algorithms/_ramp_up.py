"""Ramp-up: a protocol whose learners enter one by one."""

import heapq
from typing import Any

from jasgd.protocols import _base
from jasgd.protocols import _checks


class RampUp(_base.Protocol):
  r"""Any protocol, with its learners admitted over a number of updates.

  .. math:: t_i = \lfloor i \, k / N \rfloor, \quad i = 0, \dots, N - 1

  The i-th of N learners to join, counted from 0, is admitted at clock t_i,
  where k is `num_updates`. Until then it waits. A learner that leaves and joins
  again keeps its turn. Few learners cause little staleness, which helps at the
  start of training.

  References:
    Chen et al., `Revisiting Distributed Synchronous SGD
    <https://arxiv.org/abs/1604.00981>`_, 2016 (staleness raised over the first
    epochs); Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012 (warm start)
  """

  name = 'ramp_up'

  def __init__(self, protocol: _base.Protocol, num_updates: int) -> None:
    """Builds the protocol.

    Args:
      protocol: Protocol of the learners that have been admitted.
      num_updates: Number of updates after which all learners are admitted.
    """
    super().__init__()
    if not isinstance(protocol, _base.Protocol) or isinstance(protocol, RampUp):
      raise ValueError(
        'ramp_up takes a protocol other than a ramp_up, as in '
        f'ramp_up(asynchronous(), 100), got {protocol!r}.'
      )
    self.protocol = protocol
    self.num_updates = _checks.check_count('num_updates', num_updates, 1)
    self.steps_per_push = protocol.steps_per_push
    self.steps_per_fetch = protocol.steps_per_fetch
    self.updates_each = protocol.updates_each
    self.needs_current_clock = protocol.needs_current_clock
    self.needs_equal_times = protocol.needs_equal_times
    self.num_learners = protocol.num_learners
    self._num_expected = 1
    # Learner -> number of learners that joined before it.
    self._turns: dict[int, int] = {}
    self._outside: set[int] = set()  # Learners that are not admitted yet.
    # A heap of (clock to enter at, learner). A learner that left stays in it
    # until it is popped, and is ignored then.
    self._queue: list[tuple[int, int]] = []

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'protocol': self.protocol, 'num_updates': self.num_updates}

  @property
  def inside(self) -> set[int]:
    """Learners that have been admitted."""
    return self.protocol.alive

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'{self.protocol.describe()} Learners are admitted one by one over the '
      f'first {self.num_updates} updates.'
    )

  def without_equal_times(self) -> _base.Protocol:
    """The ramp-up of the inner protocol for learners of unequal speeds."""
    return RampUp(self.protocol.without_equal_times(), self.num_updates)

  def without_ramp_up(self) -> _base.Protocol:
    """The inner protocol."""
    return self.protocol

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if the inner protocol refuses the number."""
    self.protocol.check(num_learners)

  def start(self, num_learners: int) -> None:
    """Starts a run that expects `num_learners`; none of them has joined yet."""
    self.check(num_learners)
    # Before the base class asks for the initial state, which holds it.
    self._num_expected = num_learners
    super().start(num_learners)

  def on_join(self, learner: int) -> _base.Decision:
    """Handles a learner that joins; it is released when it is admitted."""
    super().on_join(learner)
    self._turns.setdefault(learner, len(self._turns))
    self._outside.add(learner)
    heapq.heappush(self._queue, self._make_entry(learner))
    return self._admit(_base.Decision(None, False, ()))

  def _make_entry(self, learner: int) -> tuple[int, int]:
    """The clock at which a learner is admitted, and the learner."""
    # Learners beyond the expected number are admitted at the end of the ramp.
    turn = min(self._turns[learner], self._num_expected)
    return turn * self.num_updates // self._num_expected, learner

  def handle_push(self, learner: int, read_clock: int) -> _base.Decision:
    """Passes the gradient to the inner protocol, then admits learners."""
    if learner in self._outside:
      _base.refuse_held(learner)
    # The inner protocol uses the step for error messages only; -1: not known.
    return self._admit(self.protocol.on_push(learner, -1, read_clock))

  def on_leave(self, learner: int) -> _base.Decision:
    """Handles a learner that finished or was lost, admitted or not."""
    is_inside = learner in self.protocol.alive
    self._outside.discard(learner)
    super().on_leave(learner)
    decision = _base.Decision(None, False, ())
    if is_inside:
      decision = self.protocol.on_leave(learner)
      self.clock = self.protocol.clock
    return self._admit(decision)

  def _admit(self, decision: _base.Decision) -> _base.Decision:
    """Adds to those released the learners that are admitted now."""
    released = decision.released
    # If no learner is admitted, the clock cannot advance, so the next learner
    # is admitted before its turn.
    while self._queue and (
      self._queue[0][0] <= self.protocol.clock or not self.protocol.alive
    ):
      _, learner = heapq.heappop(self._queue)
      if learner in self._outside:
        self._outside.remove(learner)
        released += self.protocol.on_join(learner).released
    return decision._replace(released=released)

  def initial_state(self) -> dict[str, Any]:
    """The state before the first event, and that of the inner protocol."""
    return {
      'num_expected': self._num_expected,
      'turns': [],
      'outside': [],
      'inside': self.protocol._make_initial(),
    }

  def save_state(self) -> dict[str, Any]:
    """Turns, learners not admitted yet, and the inner protocol's state."""
    return {
      'num_expected': self._num_expected,
      'turns': sorted(self._turns.items()),
      'outside': sorted(self._outside),
      'inside': self.protocol.save(),
    }

  def restore_state(self, state: dict[str, Any]) -> None:
    """Sets the state, and that of the inner protocol."""
    self._num_expected = state['num_expected']
    # JSON holds a dict with int keys as a list of pairs.
    self._turns = dict(map(tuple, state['turns']))
    self._outside = set(state['outside'])
    # After `_turns` and `_num_expected`, which the entries depend on. A sorted
    # list is a heap.
    self._queue = sorted(map(self._make_entry, self._outside))
    self.protocol.restore(state['inside'])
