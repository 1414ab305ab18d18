"""Weights of a node or centre: each change is recorded, then published."""

from collections.abc import Callable
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jasgd import engine
from jasgd import gossip
from jasgd import traces
from jasgd.runtime import _recorder
from jasgd.runtime import _settings
from jasgd.runtime.nodes import _snapshot_server
from jasgd.runtime.wires import _buffers

_Kind = traces.Kind


class Replica:
  """Weights with their version.

  Args:
    state: State of the engine.
    recorder: Recorder of the trace.
    snapshots: Snapshot server.
    save_machine: Function that gives the state of the owner's state machine,
      which is part of its checkpoints.

  Attributes:
    state: State of the engine.
    version: Version of the weights.
    step: Steps that are in them.
  """

  def __init__(
    self,
    state: engine.NodeState,
    recorder: _recorder.Recorder,
    snapshots: _snapshot_server.SnapshotServer,
    save_machine: Callable[[], dict[str, Any]],
  ) -> None:
    self.state = state
    self.version = 0
    self.step = 0
    self._recorder = recorder
    self._snapshots = snapshots
    self._save_machine = save_machine

  @property
  def mass(self) -> float:
    """Mass of the weights, in push-sum; else 0."""
    return 0.0

  @property
  def weights(self) -> tuple[Any, Any]:
    """(params, stats)."""
    return self.state.params, self.state.stats

  @property
  def position(self) -> dict[str, Any]:
    """Position of a checkpoint."""
    return {
      'clock': self.version,
      'step': self.step,
      'mass': self.mass,
      'machine': self._save_machine(),
    }

  def commit(
    self,
    kind: _Kind,
    rows: list[dict[str, Any]],
    *,
    is_published: bool = True,
  ) -> None:
    """Makes a change of `state` known.

    This is a node's contract. The order of its parts must not change. The
    caller has waited for the new state, and answers after this returns.

    Args:
      kind: Kind of the records.
      rows: Fields of the records; version, step and mass are added.
      is_published: Whether to publish the weights.
    """
    # 1. The version advances: (replica, version) names these weights for ever.
    self.version += 1
    own = {'version': self.version, 'step': self.step, 'mass': self.mass}
    # 2. The records are written and flushed *before* any peer can see the new
    #    weights: a peer's trace may refer to this version from then on, even if
    #    this process is killed now.
    self._recorder.write(kind, *({**own, **row} for row in rows))
    # 3. The snapshot is published *before* the node that caused the change is
    #    answered: that node must be able to pull its own change.
    if is_published:
      self.publish()

  def commit_mix(
    self,
    sources: list['Source'],
    own_weight: float,
    start: float,
    *,
    is_published: bool = True,
  ) -> None:
    """Commits a weighted mean of own weights with those of others."""
    self._recorder.num_mixes += 1
    self.commit(
      _Kind.MIX,
      [
        {
          'source': source.replica,
          'group': self._recorder.num_mixes,
          'source_version': source.version,
          'source_step': source.step,
          'own_weight': own_weight,
          'weight': source.weight,
          'start_time': start,
        }
        for source in sources
      ],
      is_published=is_published,
    )

  def commit_restart(self, version: int) -> None:
    """Commits the state of a checkpoint, as a new version and incarnation.

    Versions after the checkpoint stay valid: peers may have mixed them.

    Args:
      version: Version of the checkpoint.
    """
    self.version = self._recorder.last_version
    self._recorder.incarnation += 1
    self.commit(_Kind.RESTART, [{'read_version': version}], is_published=False)

  def publish(self) -> None:
    """Publishes the weights, whose record has been flushed."""
    self._snapshots.publish(self.weights, self.version, self.step, self.mass)


class Source(NamedTuple):
  """Weights of another replica that are mixed in."""

  replica: int
  version: int
  step: int
  weight: float
  payload: np.ndarray | None = None


class NodeReplica(Replica):
  """Weights and optimizer state of a node.

  Args:
    state: State of the engine.
    recorder: Recorder of the node's trace.
    snapshots: Snapshot server of the node.
    machine: State machine of the node, which knows its mass.
  """

  def __init__(
    self,
    state: engine.NodeState,
    recorder: _recorder.Recorder,
    snapshots: _snapshot_server.SnapshotServer,
    machine: gossip.PeerNode,
  ) -> None:
    super().__init__(state, recorder, snapshots, machine.save)
    self._machine = machine

  @property
  def mass(self) -> float:
    """Mass of the weights, in push-sum; else 0."""
    return self._machine.mass

  def restore(self, state: engine.NodeState, position: dict[str, Any]) -> None:
    """Goes on from a checkpoint, whose weights get a new version."""
    self.state = state
    self.step = position['step']
    self._machine.restore(position['machine'])
    self._machine.on_restart(self.step, self._recorder.last_mass)
    self.commit_restart(position['clock'])


class NodeWeights(NodeReplica):
  """Weights and optimizer state of a node that mixes with peers.

  Args:
    settings: Settings of the run.
    node: Number of the node.
    layout: Layout of the weights in messages.
    recorder: Recorder of the node's trace.
    snapshots: Snapshot server of the node.
    machine: State machine of the node, which knows its mass.

  Attributes:
    loss: Loss of the last step.
  """

  def __init__(
    self,
    settings: _settings.NodeSettings,
    node: int,
    layout: engine.Layout,
    recorder: _recorder.Recorder,
    snapshots: _snapshot_server.SnapshotServer,
    machine: gossip.PeerNode,
  ) -> None:
    self._functions = engine.make_node_functions(
      settings.task, settings.optimizer, layout
    )
    super().__init__(
      self._functions.start(settings.make_weights()),
      recorder,
      snapshots,
      machine,
    )
    self._settings = settings
    self._node = node
    self._layout = layout
    self.loss = float('nan')
    # Version and copy of the weights at which the next gradient is taken, if
    # not at the current ones.
    self._stale: tuple[int, np.ndarray] | None = None
    self._full_layout = engine.make_layout(self.weights)
    self._kept = _buffers.make_aligned(self._full_layout.size)

  def warm_up(self) -> None:
    """Compiles, so that the first step and mix take no longer than others."""
    state = self._functions.start(self._settings.make_weights())
    parts = self._layout.view(_buffers.make_aligned(self._layout.size))
    rate = self._settings.find_rate(0)
    arguments = (*self._locate(0), rate)
    state, _ = self._functions.step(state, *arguments)
    if self._settings.strategy.has_centre:
      state, _ = self._functions.pull_centre(state, parts, 0.0)
      full = self._full_layout.view(self._kept)
      state, _ = self._functions.step_at(state, full, *arguments)
    state = self._functions.mix(state, parts, 1.0, 0.0)
    jax.block_until_ready(state)

  @property
  def num_steps(self) -> int:
    """Steps that the node is to make."""
    return self._settings.num_steps

  def make_step(
    self, on_step: Callable[[int], gossip.Actions]
  ) -> gossip.Actions:
    """Computes a gradient, and updates with it.

    Args:
      on_step: Function called with the number of steps, before the step is
        recorded: the record leaves out mass that is about to be sent, so that
        this mass never exists twice after a restart.

    Returns:
      Result of `on_step`.
    """
    start, begin = self._recorder.get_time(), time.perf_counter()
    rate = self._settings.find_rate(self.step)
    read_version = self.version
    arguments = (*self._locate(self.step), rate)
    if self._stale is None:
      self.state, loss = self._functions.step(self.state, *arguments)
    else:
      read_version, buffer = self._stale
      parts = self._full_layout.view(buffer)
      self.state, loss = self._functions.step_at(self.state, parts, *arguments)
      self._stale = None
    self.loss = float(loss)  # Waits for the step.
    self._settings.sleep_until_min_seconds(self._node, begin)
    self.step += 1
    actions = on_step(self.step)
    self.commit(
      _Kind.STEP, [{'read_version': read_version, 'start_time': start}]
    )
    return actions

  def start_optimizer(self) -> None:
    """Starts a new optimizer state after a join; it counts from `step`."""
    self.state = self._functions.join(self.state, self.step)

  def mix(self, sources: list[Source], own_weight: float, start: float) -> None:
    """Takes a weighted mean with the weights of `sources`, in this order."""
    weight = own_weight
    for source in sources:
      assert source.payload is not None
      parts = self._layout.view(source.payload)
      self.state = self._functions.mix(self.state, parts, weight, source.weight)
      weight = 1.0  # The next source is added to this sum.
    jax.block_until_ready(self.state)  # Payloads may be overwritten after this.
    self.commit_mix(sources, own_weight, start)

  def pull_centre(
    self, centre: Source, start: float, *, keeps_gradient: bool
  ) -> Any:
    """Moves towards the centre.

    Args:
      centre: Weights of the centre; their weight is the elastic rate.
      start: Time when the centre was asked.
      keeps_gradient: Whether the next gradient is taken at the weights before
        the move.

    Returns:
      The elastic force, like (params, stats), which the centre moves by.
    """
    if keeps_gradient:
      self._full_layout.pack(self.weights, self._kept)
      self._stale = (self.version, self._kept)
    assert centre.payload is not None
    parts = self._layout.view(centre.payload)
    self.state, force = self._functions.pull_centre(
      self.state, parts, centre.weight
    )
    jax.block_until_ready(self.state)
    self.commit_mix([centre], 1 - centre.weight, start)
    return force

  def pack(self, buffer: np.ndarray) -> None:
    """Writes the weights into a message."""
    self._layout.pack(self.weights, buffer)

  def _locate(self, step: int) -> tuple[Any, int, int, int]:
    """(data, seed, node, step) of a minibatch."""
    return self._settings.task.data, self._settings.seed, self._node, step
