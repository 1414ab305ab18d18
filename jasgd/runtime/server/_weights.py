"""The server's weights, optimizer state and clock."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import engine
from jasgd.runtime import _settings
from jasgd.runtime import _snapshots

# Numbers of gradients that one call may apply: each is a compiled program.
_GROUP_SIZES = (16, 8, 4, 2)


class Gradient(NamedTuple):
  """A gradient that is to be applied.

  Attributes:
    parts: The gradient, as the compiled functions take it.
    stale: Weights that it was computed on.
    staleness: Staleness of the gradient.
    updates: Whether the weights are updated after it.
    num_present: Number of learners.
  """

  parts: engine.BufferViews
  stale: _snapshots.Snapshot
  staleness: int
  updates: bool
  num_present: int


class ServerWeights:
  """Weights, optimizer state and the clock; belongs to the owner's thread.

  Attributes:
    layout: Layout of (params, stats) in messages.
    clock: Number of updates made.
    samples: Samples of all applied gradients.
    group_size: Number of gradients accumulated for the next update.
    num_present: Number of learners at the last gradient.
    state: State of the engine. Each call donates it.
  """

  def __init__(self, settings: _settings.ServerSettings) -> None:
    """Begins with the first weights, at clock 0."""
    self._settings = settings
    init = settings.init
    if init is None:
      key = jax.random.key(settings.seed, impl='threefry2x32')
      init = settings.task.init(key)
    # Copied, as a donated array must have one owner.
    params, stats = jax.tree.map(jnp.array, init)
    self.layout = engine.make_layout((params, stats), settings.wire_dtype)
    self._functions = engine.make_server(settings.update, self.layout)
    self.state = self._functions.init(params, stats)
    self.clock = 0
    self.samples = 0
    self.group_size = 0
    self.num_present = 1
    self._samples_at_update = 0

  def restore(self, state: Any, position: dict[str, Any]) -> None:
    """Inverse of `save`, with the state of a checkpoint."""
    self.state = state
    self.clock = position['clock']
    self.samples = position['samples']
    self.group_size = position['group_size']
    self.num_present = position['num_present']
    self._samples_at_update = position['samples_at_update']

  def save(self) -> dict[str, Any]:
    """Counts for a checkpoint."""
    return {
      'clock': self.clock,
      'samples': self.samples,
      'group_size': self.group_size,
      'num_present': self.num_present,
      'samples_at_update': self._samples_at_update,
    }

  @property
  def epoch(self) -> float:
    """Passes over the training set, by samples of applied gradients."""
    return self.samples / self._settings.task.num_samples

  @property
  def rate(self) -> float | None:
    """Factor of the next update; None if there is no schedule."""
    if self._settings.get_rate is None:
      return None
    epoch = self._samples_at_update / self._settings.task.num_samples
    return float(self._settings.get_rate(epoch))

  def count_affordable(self) -> int:
    """Gradients that may be decided on before the next update is made.

    One call must be able to apply them, and the budget of the run must allow
    them even if each gradient makes an update.
    """
    settings = self._settings
    left = settings.max_samples - self.samples
    room = min(
      settings.max_group,
      max(1, int(min(left, 1e9)) // settings.samples_per_push),
    )
    if settings.num_updates:
      room = min(room, settings.num_updates - self.clock)
    return room

  def find_end(self) -> str | None:
    """Why the run ends now: it has made its updates or epochs."""
    settings = self._settings
    if self.group_size:
      return None
    if settings.num_updates and self.clock >= settings.num_updates:
      return f'All {settings.num_updates} updates were made.'
    if self.samples >= settings.max_samples:
      return f'All {settings.num_epochs:g} epochs were made.'
    return None

  def apply_all(self, gradients: Sequence[Gradient]) -> list[int]:
    """Applies gradients, several in one call where that is possible.

    When it returns, learners may write into the gradients' memory again.

    Args:
      gradients: Gradients. If there are several, each makes an update.

    Returns:
      For each gradient the number of the call that it shares with others, which
      is that of the first update in it; 0: it shares none.
    """
    calls: list[int] = []
    while len(calls) < len(gradients):
      rest = gradients[len(calls) :]
      size = next((size for size in _GROUP_SIZES if size <= len(rest)), 1)
      if size == 1:
        calls.append(0)
        self.apply(rest[0])
      else:
        calls += [self.clock + 1] * size
        self.apply_many(list(rest[:size]))
    if calls:
      self.wait()
    return calls

  def apply(self, gradient: Gradient) -> None:
    """Applies a gradient, and updates if the protocol says so."""
    self.samples += self._settings.samples_per_push
    self.num_present = gradient.num_present
    arguments = (gradient.parts, gradient.staleness, gradient.stale.parts)
    if not gradient.updates:
      self.group_size += 1
      self.state = self._functions.accumulate(self.state, *arguments)
      return
    self.state = self._functions.apply(
      self.state,
      *arguments,
      self.rate,
      gradient.num_present,
      is_single=self.group_size == 0,
    )
    self._tick()

  def apply_many(self, gradients: list[Gradient]) -> None:
    """Updates with each of several gradients, in one call."""
    rows = []
    for gradient in gradients:
      self.samples += self._settings.samples_per_push
      self.num_present = gradient.num_present
      rows.append(
        (
          gradient.parts,
          gradient.staleness,
          gradient.stale.parts,
          self.rate,
          gradient.num_present,
        )
      )
      self._tick()
    self.state = self._functions.apply_many(self.state, tuple(rows))

  def update_alone(self) -> None:
    """Updates with the gradients so far: a missing learner has left."""
    self.state = self._functions.update(self.state, self.rate, self.num_present)
    self._tick()

  def _tick(self) -> None:
    self.clock += 1
    self.group_size = 0
    self._samples_at_update = self.samples

  def wait(self) -> None:
    """Waits until the last call has read its gradient."""
    # All results of a call are ready at once.
    self.state.aggregation.server_clock.block_until_ready()

  def warm_up(self) -> None:
    """Compiles all calls; the state does not change."""
    message = np.zeros(self.layout.size, np.uint8)
    parts = self.layout.view(message)

    def copy() -> engine.ServerState:  # Each call donates its state.
      return jax.tree.map(jnp.copy, self.state)

    rate = self.rate
    calls = self._functions
    calls.apply(copy(), parts, 0, parts, rate, 1, is_single=True)
    if not self._settings.protocol.updates_each:
      calls.apply(copy(), parts, 0, parts, rate, 1, is_single=False)
      calls.update(calls.accumulate(copy(), parts, 0, parts), rate, 1)
    for size in _GROUP_SIZES:
      if size <= self._settings.max_group:
        calls.apply_many(copy(), ((parts, 0, parts, rate, 1),) * size)
