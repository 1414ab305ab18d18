"""The weights of a node: each change is recorded, made, and shown."""

from collections.abc import Callable
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jasgd import engine
from jasgd import gossip
from jasgd import traces
from jasgd.runtime import _buffers
from jasgd.runtime import _host
from jasgd.runtime import _node_books
from jasgd.runtime import _node_settings

_Kind = traces.NodeKind


class Other(NamedTuple):
  """Weights of somebody else that are mixed in."""

  peer: int
  version: int
  step: int
  weight: float
  payload: np.ndarray


class NodeWeights:
  """What a node has, and all that can happen to it.

  Args:
    settings: What the node was told.
    node: Its number.
    layout: Of the weights, as they travel.
    book: Where each change is written down before anybody can see it.
    host: Shows the weights to others.
    machine: State machine of the node, which has its mass.

  Attributes:
    state: The engine's node.
    version: How often the weights have changed.
    step: How many steps are in them.
    loss: Of the last step.
  """

  def __init__(
    self,
    settings: _node_settings.NodeSettings,
    node: int,
    layout: engine.Layout,
    book: _node_books.NodeBook,
    host: _host.Host,
    machine: gossip.PeerNode,
  ) -> None:
    self._machine = machine
    self._settings = settings
    self._node = node
    self._layout = layout
    self._book = book
    self._host = host
    self._functions = engine.make_node_functions(
      settings.task, settings.optimizer, layout
    )
    self.state = self._functions.start(settings.make_weights())
    self.version = 0
    self.step = 0
    self.loss = float('nan')
    # Where the next gradient is to be taken, if not at the own weights: their
    # version and a copy.
    self._stale: tuple[int, np.ndarray] | None = None
    weights = (self.state.params, self.state.stats)
    self._whole = engine.make_layout(weights)
    self._kept = _buffers.make_aligned(self._whole.size)

  def warm_up(self) -> None:
    """Compiles, so that the first step and mix take no longer than others."""
    state = self._functions.start(self._settings.make_weights())
    parts = self._layout.view(_buffers.make_aligned(self._layout.size))
    rate = self._settings.find_rate(0)
    where = (*self._locate(0), rate)
    state, _ = self._functions.step(state, *where)
    if self._settings.strategy.has_centre:
      state, _ = self._functions.pull_centre(state, parts, 0.0)
      whole = self._whole.view(self._kept)
      state, _ = self._functions.step_at(state, whole, *where)
    state = self._functions.mix(state, parts, 1.0, 0.0)
    jax.block_until_ready(state)

  def restore(self, state: engine.NodeState, position: dict[str, Any]) -> None:
    """Goes on from a checkpoint, whose weights get a new version."""
    self.state = state
    self.step = position['step']
    self._machine.restore(position['machine'])
    self._machine.on_restart(self.step, self._book.last_mass)
    self.version = self._book.last_version + 1
    self._book.write(
      _Kind.RESTART,
      [
        {
          'version': self.version,
          'peer_version': position['clock'],
          'step': self.step,
          'mass': self._machine.mass,
        }
      ],
    )

  @property
  def num_steps(self) -> int:
    """Steps that the node is to make."""
    return self._settings.num_steps

  @property
  def position(self) -> dict[str, Any]:
    """What a checkpoint says besides the state."""
    return {
      'clock': self.version,
      'step': self.step,
      'mass': self._machine.mass,
      'machine': self._machine.save(),
    }

  def publish(self) -> None:
    """Shows the weights as they are now."""
    weights = (self.state.params, self.state.stats)
    self._host.publish(weights, self.version, self.step, self._machine.mass)

  # --- Changes.

  def make_step(
    self, on_step: Callable[[int], gossip.Actions]
  ) -> gossip.Actions:
    """A gradient, and what the optimizer makes of it.

    Args:
      on_step: Called with the number of steps before the step is recorded:
        mass that is to be sent is in no record, so that it is never there twice
        after a restart.

    Returns:
      What `on_step` returned.
    """
    start, begin = self._book.get_time(), time.perf_counter()
    rate = self._settings.find_rate(self.step)
    read_version = self.version
    where = (*self._locate(self.step), rate)
    if self._stale is None:
      self.state, loss = self._functions.step(self.state, *where)
    else:
      read_version, buffer = self._stale
      parts = self._whole.view(buffer)
      self.state, loss = self._functions.step_at(self.state, parts, *where)
      self._stale = None
    self.loss = float(loss)  # Waits for it.
    self._settings.rest(self._node, begin)
    self.version += 1
    self.step += 1
    actions = on_step(self.step)
    self._book.write(
      _Kind.STEP,
      [
        {
          'version': self.version,
          'peer_version': read_version,
          'step': self.step,
          'mass': self._machine.mass,
          'start_time': start,
        }
      ],
    )
    self.publish()
    return actions

  def mix(self, others: list[Other], own_weight: float, start: float) -> None:
    """A weighted mean with others' weights."""
    weight = own_weight
    for other in others:
      parts = self._layout.view(other.payload)
      self.state = self._functions.mix(self.state, parts, weight, other.weight)
      weight = 1.0
    jax.block_until_ready(self.state)  # Payloads may go after this.
    self._note_mix(others, own_weight, start)
    self.publish()

  def pull_centre(self, centre: Other, start: float, *, is_before: bool) -> Any:
    """Moves towards the centre.

    Args:
      centre: Its weights; its weight is the rate.
      start: When the centre was asked.
      is_before: Whether the next gradient is to be taken where the weights are
        before the move.

    Returns:
      The force, like (params, stats), that the centre is to move by.
    """
    if is_before:
      self._whole.pack((self.state.params, self.state.stats), self._kept)
      self._stale = (self.version, self._kept)
    parts = self._layout.view(centre.payload)
    self.state, force = self._functions.pull_centre(
      self.state, parts, centre.weight
    )
    jax.block_until_ready(self.state)
    self._note_mix([centre], 1 - centre.weight, start)
    self.publish()
    return force

  def pack(self, buffer: np.ndarray) -> None:
    """Writes the weights into a message."""
    self._layout.pack((self.state.params, self.state.stats), buffer)

  def _note_mix(
    self, others: list[Other], own_weight: float, start: float
  ) -> None:
    self.version += 1
    self._book.write(
      _Kind.MIX,
      [
        {
          'version': self.version,
          'peer': other.peer,
          'mix': self._book.num_mixes,
          'peer_version': other.version,
          'peer_step': other.step,
          'step': self.step,
          'own_weight': own_weight,
          'peer_weight': other.weight,
          'mass': self._machine.mass,
          'start_time': start,
        }
        for other in others
      ],
    )
    self._book.num_mixes += 1

  def _locate(self, step: int) -> tuple[Any, int, int, int]:
    """(data, seed, node, step) of a minibatch."""
    return self._settings.task.data, self._settings.seed, self._node, step
