"""The centre of elastic averaging: weights that move by the nodes' forces."""

import logging
import math
import threading
import time
from typing import Any

import jax

from jasgd import engine
from jasgd import gossip
from jasgd import protocols
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _settings
from jasgd.runtime.nodes import _member
from jasgd.runtime.nodes import _registry
from jasgd.runtime.nodes import _weights
from jasgd.runtime.wires import _addresses
from jasgd.runtime.wires import _buffers
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

_log = logging.getLogger(__name__)

# Seconds between two checks for a due checkpoint or a request to end.
_INTERVAL = 0.05
# Seconds between two requests for the status of the nodes.
_LOOK_INTERVAL = 1.0


class Centre(_member.Member):
  """The centre of elastic averaging. The arguments are those of `Member`."""

  def __init__(
    self,
    settings: _settings.NodeSettings,
    run: workdirs.Workdir,
    registry: _registry.Registry,
    bind: _addresses.BindAddress,
    *,
    linger: float = math.inf,
    stopped: threading.Event | None = None,
  ) -> None:
    super().__init__(
      settings,
      run,
      registry,
      bind,
      node=traces.SERVER,
      linger=linger,
      stopped=stopped,
    )
    self._functions = engine.make_node_functions(
      settings.task, settings.optimizer, self._files.layout
    )
    start = self._functions.start(settings.make_weights())
    self._protocol: protocols.Protocol = settings.strategy.make_centre()
    self._protocol.start(settings.num_nodes)
    self._replica = _weights.Replica(
      start._replace(opt_state=()),
      self._files.recorder,
      self._files.snapshots,
      self._protocol.save,
    )
    self._began_with: list[int] = []
    # Guards the replica, the protocol and `_began_with`.
    self._lock = threading.Lock()
    # Whether no node makes steps any more. Nodes that are done contact only the
    # centre: its status says whether other nodes still make steps.
    self._is_done = False

  def describe(self) -> dict[str, Any]:
    """Status, as a JSON-serialisable dict."""
    began_with = self._find_beginners()
    return {
      'version': self._replica.version,
      'step': self._replica.step,
      'has_begun': bool(began_with),
      'began_with': began_with,
      'is_done': self._is_done,
      'is_diverged': False,
    }

  def _find_beginners(self) -> list[int]:
    """Members that were present when the run began; []: it has not begun."""
    met = self._files.met
    has_begun = self._replica.version > 0 or (
      len(met) >= self._settings.num_nodes
    )
    if has_begun and not self._began_with:
      self._began_with = sorted({traces.SERVER, *met})
    return self._began_with

  def run(self) -> None:
    """Serves until it is stopped, or no node needs it."""
    files, replica = self._files, self._replica
    try:
      self._warm_up()
      found = files.restore(replica.state, replica.position)
      if found is not None:
        replica.state, position = found
        replica.step = files.recorder.last_version + 1
        replica.commit_restart(position['clock'])
        # Its clock is the centre's version, which a restart makes larger.
        self._protocol.restore(
          {**position['machine'], 'clock': replica.version}
        )
        # The run has begun: a node without a checkpoint is late.
        self._find_beginners()
      replica.publish()
      files.open(self._bind)
      self._serve()
      files.close_snapshots()  # No force may arrive after the last checkpoint.
      files.finish(replica.state, replica.position)
    finally:
      files.close()

  def _receive(self, message: _messages.Message) -> int:
    """Moves by the force of a node, in the snapshot server's thread.

    The protocol decides whether it moves. Otherwise the force is refused.
    """
    num_nodes = self._settings.num_nodes
    if not 0 <= message.worker < num_nodes or message.version < 0:
      raise _messages.MessageError(
        'worker',
        f'A force must be from a node below {num_nodes}, at a version of at '
        f'least 0, got {message.worker} and {message.version}.',
      )
    if message.share != 1 or not 0 <= message.elastic_rate <= 1:
      raise _messages.MessageError(
        'share',
        'A force must have the share 1 and an elastic rate from 0 to 1, got '
        f'{message.share} and {message.elastic_rate}.',
      )
    if not 0 <= message.read_version <= self._replica.version:
      raise _messages.MessageError(
        'version',
        'A force must be computed with a version of the centre from 0 to '
        f'{self._replica.version}, got {message.read_version}.',
      )
    start, replica = self._files.recorder.get_time(), self._replica
    assert message.payload is not None  # The snapshot server checks this.
    parts = self._files.layout.view(message.payload)
    with self._lock:
      if not self._takes_force(message):
        return gossip.Outcome.REFUSED
      params, stats = self._functions.move_centre(replica.weights, parts, 1.0)
      # The node may overwrite the payload once it is answered.
      jax.block_until_ready(params)
      replica.state = replica.state._replace(params=params, stats=stats)
      replica.step = replica.version + 1
      # Recorded and published before the node is answered.
      row = {
        'worker': message.worker,
        'source': message.worker,
        'source_version': message.version,
        'source_step': message.step,
        'own_weight': 1.0,
        'weight': message.elastic_rate,
        'start_time': start,
      }
      replica.commit(traces.Kind.MOVE, [row])
      self._find_beginners()  # Nodes that come after this are late.
    return gossip.Outcome.TAKEN

  def _takes_force(self, message: _messages.Message) -> bool:
    """Lets the protocol decide on a force; a node joins with its first one."""
    node = message.worker
    if node not in self._protocol.alive:
      self._protocol.on_join(node)
    return self._protocol.on_push(
      node, message.step, message.read_version
    ).updates

  def _note_gone(self, node: int) -> None:
    """Removes a node whose process has ended; its next force joins again."""
    with self._lock:
      if node in self._protocol.alive:
        self._protocol.on_leave(node)

  def _serve(self) -> None:
    """Saves when that is due, until it is stopped or no node needs it."""
    needed_at = looked_at = time.monotonic()
    while not (self._stopped.wait(_INTERVAL) or self._is_stopping()):
      with self._lock:
        self._files.save_if_due(self._replica.state, self._replica.position)
      now = time.monotonic()
      if math.isinf(self._linger) or now - looked_at < _LOOK_INTERVAL:
        continue
      looked_at = now
      self._is_done = not self._is_needed()
      if not self._is_done:
        needed_at = now
      elif now - needed_at > self._get_patience():
        return

  def _is_needed(self) -> bool:
    """Whether a node has not made all its steps."""
    if not self._find_beginners():
      return True  # The nodes are still to come.
    try:
      self._registry.contact_addresses()
      statuses = [
        self._registry.get_status(member, self._files.layout.size)
        for member in self._registry.list_members()
        if member != traces.SERVER
      ]
    except _wire.RefusedError as error:  # A node has another token.
      _log.warning('%s', error)
      return True
    return any(each and not each['is_done'] for each in statuses)

  def _get_patience(self) -> float:
    """Seconds for which it stays when no node needs it."""
    if len(self._files.met) >= self._settings.num_nodes:
      return self._linger
    # Nodes that have not come yet may be compiling.
    return max(self._linger, self._settings.deadlines.first_step)

  def _warm_up(self) -> None:
    layout = self._files.layout
    parts = layout.view(_buffers.make_aligned(layout.size))
    weights = self._functions.start(self._settings.make_weights())
    jax.block_until_ready(
      self._functions.move_centre((weights.params, weights.stats), parts, 0.0)
    )
