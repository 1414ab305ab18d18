"""A node that trains without a server, and mixes weights with its peers.

It steps on its own weights, publishes them, and mixes with live peers every few
steps. It never waits for a peer's step. It has its own files: trace,
checkpoints, address.
"""

import logging
import math
import threading
import time
from typing import Any

from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _settings
from jasgd.runtime.nodes import _connections
from jasgd.runtime.nodes import _exchange
from jasgd.runtime.nodes import _member
from jasgd.runtime.nodes import _registry
from jasgd.runtime.nodes import _weights
from jasgd.runtime.wires import _addresses
from jasgd.runtime.wires import _messages

_log = logging.getLogger(__name__)

# Seconds between two checks of the peers, while the node makes no steps.
_INTERVAL = 0.05
# Seconds to reach all nodes that have contacted this one, before it begins.
_GRACE = 1.0
# Seconds between two lines of the log.
_LOG_INTERVAL = 10.0


class Peer(_member.Member):
  """A node that mixes with its peers. The arguments are those of `Member`."""

  def __init__(
    self,
    settings: _settings.NodeSettings,
    run: workdirs.Workdir,
    registry: _registry.Registry,
    bind: _addresses.BindAddress,
    *,
    node: int,
    linger: float = math.inf,
    stopped: threading.Event | None = None,
  ) -> None:
    super().__init__(
      settings,
      run,
      registry,
      bind,
      node=node,
      linger=linger,
      stopped=stopped,
    )
    self._is_resumed = self._is_done = self._is_diverged = False
    self._exchanger: _exchange.Exchanger | None = None
    self._peers: _connections.PeerConnections | None = None
    self._machine = settings.strategy.make_node(
      self._node, settings.num_nodes, settings.seed
    )
    self._weights = _weights.NodeWeights(
      settings,
      self._node,
      self._files.layout,
      self._files.recorder,
      self._files.snapshots,
      self._machine,
    )
    # Nodes with which it began, including itself; []: it has not begun.
    self._began_with: list[int] = []

  def describe(self) -> dict[str, Any]:
    """Status, as a JSON-serialisable dict."""
    weights, exchanger = self._weights, self._exchanger
    return {
      'node': self._node,
      'step': weights.step,
      'num_steps': self._settings.num_steps,
      'version': weights.version,
      'mass': self._machine.mass,
      'loss': weights.loss if math.isfinite(weights.loss) else None,
      'num_full': exchanger.num_full if exchanger else 0,
      'num_done': exchanger.num_done if exchanger else 0,
      'has_begun': bool(self._began_with),
      'began_with': self._began_with,
      'is_resumed': self._is_resumed,
      'is_done': self._is_done,
      'is_diverged': self._is_diverged,
    }

  def run(self) -> dict[str, Any]:
    """Trains until all nodes have made their steps, or it is stopped.

    Returns:
      The final status.
    """
    try:
      self._weights.warm_up()
      self._restore()
      self._registry.contact_addresses()
      self._registry.check_free(self._node)
      peers = _connections.PeerConnections(
        self._registry,
        self._is_wanted,
        self._files.make_hello,
        self._files.layout.size,
        self._settings.deadlines,
      )
      self._peers = peers
      try:
        exchanger = self._exchanger = self._make_exchanger(peers)
        self._weights.publish()
        self._files.open(self._bind)
        peers.start()
        self._begin(peers, exchanger)
        self._train(exchanger)
        self._wait_for_others(exchanger, peers)
      finally:
        peers.close()
      self._finish(exchanger)
    finally:
      self._files.close()
    return self.describe()

  def _receive(self, message: _messages.Message) -> int:
    """Takes in weights of a peer, in the snapshot server's thread."""
    assert self._exchanger is not None  # The wires are opened after it is made.
    return self._exchanger.receive(message)

  # --- The beginning.

  def _is_wanted(self, member: int) -> bool:
    """Whether it exchanges weights with a member: the centre, or a node."""
    if self._settings.strategy.has_centre:
      return member == traces.SERVER
    return member != self._node and 0 <= member < self._settings.num_nodes

  def _restore(self) -> None:
    """Resumes, from the last checkpoint or from the start, if it has files."""
    weights = self._weights
    found = self._files.restore(weights.state, weights.position)
    if found is not None:
      weights.restore(*found)
    folder = self._files.folder
    self._is_resumed = bool(workdirs.list_checkpoints(folder))

  def _make_exchanger(
    self, peers: _connections.PeerConnections
  ) -> _exchange.Exchanger:
    return _exchange.Exchanger(
      self._machine,
      self._weights,
      peers,
      self._files.recorder,
      self._files.layout,
      patience=self._settings.deadlines.rejoin,
      is_stopping=self._is_stopping,
    )

  def _begin(
    self, peers: _connections.PeerConnections, exchanger: _exchange.Exchanger
  ) -> None:
    """Waits for the other nodes, and joins them if they have begun."""
    # With a centre, a node contacts only the centre, which lists the nodes.
    has_centre = self._settings.strategy.has_centre
    has_steps = self._weights.step < self._settings.num_steps
    num_others = self._settings.num_nodes - 1
    company: set[int] = set()
    seen: set[int] = set()
    came_at = time.monotonic()  # Compiling does not count as waiting.
    _log.info(
      'Waiting for all %d nodes, for at most %g s.',
      self._settings.num_nodes,
      self._settings.deadlines.start,
    )
    complete_at = came_at
    while has_steps and not self._is_stopping():
      alive = peers.alive
      statuses = [each for each in map(peers.get_status, alive) if each]
      # The earliest origin that any node knows, so that times agree.
      self._files.origin = min(
        [self._files.origin, *(each['origin'] for each in statuses)]
      )
      if not self._is_resumed and any(map(self._is_ahead, statuses)):
        exchanger.join()
        company = {self._node}  # The others know their own first members.
        break
      begun = [each for each in statuses if each['has_begun']]
      if begun:  # The others have begun, and wait for no more nodes.
        company = company.union(*(each['began_with'] for each in begun))
        break
      seen.update(alive)
      if not has_centre and len(seen) >= num_others:
        break
      # A node that contacted this one and then died counts as arrived.
      if len(seen | self._files.met) < num_others:
        complete_at = time.monotonic()
      is_complete = time.monotonic() - complete_at > _GRACE
      if (is_complete and not has_centre) or self._has_waited(came_at):
        break
      peers.wait_for(len(alive) + 1, _INTERVAL, self._is_stopping)
    # A node that finds itself in no such list is late, and has to join.
    present = company or self._files.met.union(peers.alive)
    self._began_with = sorted({self._node, *present})
    self._files.returned.clear()  # They came back before the beginning.

  def _is_ahead(self, status: dict[str, Any]) -> bool:
    """Whether a peer has made steps without this node."""
    is_late = status['has_begun'] and self._node not in status['began_with']
    return is_late or status.get('is_resumed', False)

  def _has_waited(self, since: float) -> bool:
    """Whether the deadline for the other nodes has passed."""
    patience = self._settings.deadlines.start
    if time.monotonic() - since < patience:
      return False
    _log.warning(
      'Not all of %d nodes came within %g s: the others begin without them.',
      self._settings.num_nodes,
      patience,
    )
    return True

  # --- Steps and mixes.

  def _train(self, exchanger: _exchange.Exchanger) -> None:
    weights, settings = self._weights, self._settings
    said_at = time.monotonic()
    while weights.step < settings.num_steps and not self._is_stopping():
      exchanger.make_step()
      if not math.isfinite(weights.loss):
        self._is_diverged = True
        return
      self._files.save_if_due(weights.state, weights.position)
      if time.monotonic() - said_at > _LOG_INTERVAL:
        said_at = time.monotonic()
        _log.info(
          'Step %d/%d, loss %.4g.',
          weights.step,
          settings.num_steps,
          weights.loss,
        )

  # --- The end.

  def _wait_for_others(
    self,
    exchanger: _exchange.Exchanger,
    peers: _connections.PeerConnections,
  ) -> None:
    """Mixes and answers until all peers are done, and `linger` has passed."""
    has_steps = self._weights.step < self._settings.num_steps
    self._is_done = self._is_diverged or not has_steps
    needed_at = time.monotonic()
    while not self._is_stopping():
      exchanger.mix_waiting()
      if self._is_needed(peers):
        needed_at = time.monotonic()
      elif time.monotonic() - needed_at > self._linger:
        return
      self._stopped.wait(_INTERVAL)

  def _is_needed(self, peers: _connections.PeerConnections) -> bool:
    """Whether a peer still makes steps."""
    statuses = [peers.get_status(peer) for peer in peers.alive]
    return any(status and not status['is_done'] for status in statuses)

  def _is_stopping(self) -> bool:
    """Whether it must end; raises errors of its other threads."""
    if self._peers is not None:
      self._peers.check()
    return super()._is_stopping()

  def _finish(self, exchanger: _exchange.Exchanger) -> None:
    """Saves, and records the end.

    Peers are answered meanwhile: a peer that hears that this node takes no more
    messages keeps the mass that it sent.
    """
    exchanger.finish()
    weights = self._weights
    self._files.finish(weights.state, weights.position)
