"""Protocols in which no learner ever waits: the server counts gradients."""

from typing import Any

from jasgd.protocols import _base


class Counting(_base.Protocol):
  """Updates after a number of gradients, from any learners."""

  holds_learners = False

  def __init__(self) -> None:
    super().__init__()
    self._size = 0  # Gradients since the last update.

  def _quorum(self) -> int:
    """Gradients per update, now."""
    return 1

  def _refuse(self, read_clock: int) -> _base.Fate | None:
    """Why a gradient of this clock does not count, or None if it does."""
    del read_clock
    return None

  def _push(self, learner: int, read_clock: int) -> _base.Decision:
    fate = self._refuse(read_clock)
    if fate is not None:
      return _base.Decision(fate, False, (learner,))
    self._size += 1
    return _base.Decision(_base.Fate.APPLIED, self._is_due(), (learner,))

  def _change(self) -> _base.Decision:
    return _base.Decision(None, self._size > 0 and self._is_due(), ())

  def _is_due(self) -> bool:
    """Whether there are enough gradients for an update; if so, uses them."""
    if self._size < self._quorum():
      return False
    self._size = 0
    return True

  def _fresh(self) -> dict[str, Any]:
    return {'size': 0}

  def _save(self) -> dict[str, Any]:
    return {'size': self._size}

  def _restore(self, state: dict[str, Any]) -> None:
    self._size = state['size']


class Softsync(Counting):
  """n-softsync: an update per floor(alive / n) gradients, from any learners.

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """

  name = 'softsync'

  def __init__(self, n: int) -> None:
    """An update takes as many gradients as 1/n of the learners."""
    super().__init__()
    self.n = _base.check_count('n', n, 1)

  def _arguments(self) -> dict[str, Any]:
    return {'n': self.n}

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'softsync({self.n}): the server updates once it has as many gradients '
      f'as 1/{self.n} of the learners, from any of them; nobody waits. A '
      'learner that pushes before the update is due computes its next gradient '
      'on the same weights.'
    )

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if this many learners could never make an update."""
    super().check(num_learners)
    if self.n > num_learners:
      raise ValueError(
        f'n must be at most num_learners={num_learners}, got {self.n}: an '
        'update takes at least one gradient.'
      )

  def _quorum(self) -> int:
    return max(1, len(self.alive) // self.n)


class Asynchronous(Counting):
  """Every gradient is an update of its own, at once: Downpour's server.

  References:
    Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012
  """

  name = 'asynchronous'
  updates_each = True

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      'asynchronous: the server updates with every gradient that comes; nobody '
      'waits.'
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
    """Delays every gradient by `delay` updates."""
    super().__init__()
    self.delay = _base.check_count('delay', delay, 0)
    self.num_learners = self.delay + 1  # No other number makes this delay.

  def _arguments(self) -> dict[str, Any]:
    return {'delay': self.delay}

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'constant_delay({self.delay}): {self.delay + 1} learners of equal speed '
      'push in rotation, and the server updates with every gradient; nobody '
      'waits.'
    )

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if this many learners make another delay."""
    super().check(num_learners)
    if num_learners != self.num_learners:
      raise ValueError(
        f'A constant delay of {self.delay} is made by {self.delay + 1} '
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
    """Pushes every `n_push` and fetches every `n_fetch` steps."""
    super().__init__()
    self.steps_per_push = _base.check_count('n_push', n_push, 1)
    self.steps_per_fetch = _base.check_count('n_fetch', n_fetch, 1)

  def _arguments(self) -> dict[str, Any]:
    return {'n_push': self.steps_per_push, 'n_fetch': self.steps_per_fetch}

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'downpour({self.steps_per_push}, {self.steps_per_fetch}): a learner '
      f'pushes the sum of {self.steps_per_push} gradients, and fetches new '
      f'weights every {self.steps_per_fetch} steps; in between it steps on its '
      'own copy. The server updates with every push; nobody waits.'
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
    """Takes `s` gradients of the current clock per update."""
    super().__init__()
    self.s = _base.check_count('s', s, 1)

  def _arguments(self) -> dict[str, Any]:
    return {'s': self.s}

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'rennala({self.s}): the server updates once it has {self.s} gradients '
      'of the current clock, from any learners; stale ones are dropped; nobody '
      'waits.'
    )

  def _quorum(self) -> int:
    return self.s

  def _refuse(self, read_clock: int) -> _base.Fate | None:
    return _base.Fate.DROPPED_STALE if read_clock != self.clock else None


class Ringmaster(Counting):
  """Asynchronous, but a gradient of staleness above r is ignored: no step.

  References:
    Maranjyan et al., `Ringmaster ASGD
    <https://arxiv.org/abs/2501.16168>`_, 2025
  """

  name = 'ringmaster'
  updates_each = True

  def __init__(self, r: int) -> None:
    """Ignores gradients with a staleness above `r`."""
    super().__init__()
    self.r = _base.check_count('r', r, 0)

  def _arguments(self) -> dict[str, Any]:
    return {'r': self.r}

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'ringmaster({self.r}): the server updates with every gradient of '
      f'staleness {self.r} or less, and ignores the others; nobody waits.'
    )

  def _refuse(self, read_clock: int) -> _base.Fate | None:
    is_stale = self.clock - read_clock > self.r
    return _base.Fate.DROPPED_STALE if is_stale else None
