"""Protocols in which no learner waits: the server counts gradients."""

from typing import Any

from jasgd.protocols import _base
from jasgd.protocols import _checks


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


class Softsync(Counting):
  """n-softsync: an update per floor(alive / n) gradients, from any learners.

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """

  name = 'softsync'

  def __init__(self, n: int) -> None:
    """Builds the protocol.

    Args:
      n: Divisor of the number of learners: an update takes as many gradients
        as 1/n of the learners.
    """
    super().__init__()
    self.n = _checks.check_count('n', n, 1)

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'n': self.n}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'softsync({self.n}): the server updates once it has as many gradients '
      f'as 1/{self.n} of the learners, from any of them; no learner waits. A '
      'learner that pushes before the update is due computes its next gradient '
      'on the same weights.'
    )

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if there are fewer than n learners."""
    super().check(num_learners)
    if self.n > num_learners:
      raise ValueError(
        f'n must be at most num_learners={num_learners}, got {self.n}: an '
        'update takes at least one gradient.'
      )

  def _quorum(self) -> int:
    return max(1, len(self.alive) // self.n)


class Asynchronous(Counting):
  """Every gradient makes its own update on arrival: Downpour's server.

  References:
    Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012
  """

  name = 'asynchronous'
  updates_each = True

  def describe(self) -> str:
    """The rule in words."""
    return (
      'asynchronous: the server updates with every gradient on arrival; no '
      'learner waits.'
    )


class ConstantDelay(Asynchronous):
  """d + 1 learners of equal speed in rotation: each gradient d updates late.

  References:
    Jain et al., `An Analysis of the Delayed Gradients Problem in Asynchronous
    SGD <https://openreview.net/forum?id=BJLSGcywG>`_, 2018
  """

  name = 'constant_delay'
  needs_equal_times = True

  def __init__(self, delay: int) -> None:
    """Builds the protocol.

    Args:
      delay: Staleness of every gradient, in updates.
    """
    super().__init__()
    self.delay = _checks.check_count('delay', delay, 0)
    self.num_learners = self.delay + 1  # No other number gives this delay.

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'delay': self.delay}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'constant_delay({self.delay}): {self.delay + 1} learners of equal speed '
      'push in rotation, and the server updates with every gradient; no '
      'learner waits.'
    )

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if this number of learners gives another delay."""
    super().check(num_learners)
    if num_learners != self.num_learners:
      raise ValueError(
        f'A constant delay of {self.delay} needs exactly {self.delay + 1} '
        f'learners, got num_learners={num_learners}.'
      )


class Downpour(Asynchronous):
  """Learners push every n_push steps and fetch every n_fetch steps.

  Between fetches a learner takes local steps on its own copy of the weights. A
  push carries the sum of the gradients since the last push; its read clock is
  that of the last fetch.

  References:
    Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012
  """

  name = 'downpour'

  def __init__(self, n_push: int = 1, n_fetch: int = 1) -> None:
    """Builds the protocol.

    Args:
      n_push: Steps between two pushes of a learner.
      n_fetch: Steps between two fetches of a learner.
    """
    super().__init__()
    self.steps_per_push = _checks.check_count('n_push', n_push, 1)
    self.steps_per_fetch = _checks.check_count('n_fetch', n_fetch, 1)

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'n_push': self.steps_per_push, 'n_fetch': self.steps_per_fetch}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'downpour({self.steps_per_push}, {self.steps_per_fetch}): a learner '
      f'pushes the sum of {self.steps_per_push} gradients, and fetches new '
      f'weights every {self.steps_per_fetch} steps; in between it steps on its '
      'own copy. The server updates with every push; no learner waits.'
    )


class Rennala(Counting):
  """An update takes s gradients, all of the current clock; others are dropped.

  References:
    Tyurin and Richtarik, `Optimal Time Complexities of Parallel Stochastic
    Optimization Methods <https://arxiv.org/abs/2305.12387>`_, 2023
  """

  name = 'rennala'
  needs_current_clock = True

  def __init__(self, s: int) -> None:
    """Builds the protocol.

    Args:
      s: Gradients per update, all of the current clock.
    """
    super().__init__()
    self.s = _checks.check_count('s', s, 1)

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'s': self.s}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'rennala({self.s}): the server updates once it has {self.s} gradients '
      'of the current clock, from any learners; stale gradients are dropped; '
      'no learner waits.'
    )

  def _quorum(self) -> int:
    return self.s

  def _find_refusal(self, read_clock: int) -> _base.Fate | None:
    return _base.Fate.DROPPED_STALE if read_clock != self.clock else None


class Ringmaster(Counting):
  """Asynchronous, but gradients of staleness above r are dropped: no update.

  References:
    Maranjyan et al., `Ringmaster ASGD
    <https://arxiv.org/abs/2501.16168>`_, 2025
  """

  name = 'ringmaster'
  updates_each = True

  def __init__(self, r: int) -> None:
    """Builds the protocol.

    Args:
      r: Largest staleness of a gradient that makes an update.
    """
    super().__init__()
    self.r = _checks.check_count('r', r, 0)

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'r': self.r}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'ringmaster({self.r}): the server updates with every gradient of '
      f'staleness {self.r} or less, and drops the others; no learner waits.'
    )

  def _find_refusal(self, read_clock: int) -> _base.Fate | None:
    is_stale = self.clock - read_clock > self.r
    return _base.Fate.DROPPED_STALE if is_stale else None
