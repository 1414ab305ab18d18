"""A node without a server: trains, and averages with others; waits for nobody.

It steps on its own weights, shows them to whoever asks, and mixes with live
others every few steps. Its files are its own: trace, checkpoints, address.
"""

import logging
import math
import threading
import time
from typing import Any

from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _exchange
from jasgd.runtime import _messages
from jasgd.runtime import _node_settings
from jasgd.runtime import _node_weights
from jasgd.runtime import _peers
from jasgd.runtime import _station
from jasgd.runtime import hosting
from jasgd.runtime import members

_log = logging.getLogger(__name__)

# Between two looks of a node that has made its steps, in seconds.
_INTERVAL = 0.05
# For those to be reached who have come, in seconds.
_GRACE = 1.0
# Between two words on how it stands, in seconds.
_LOG_INTERVAL = 10.0


class Peer:
  """A node in this process.

  Args:
    settings: What to do.
    run: The folder of the run; a node that is there goes on from its last
      checkpoint.
    node: Its number.
    registry: Where the others are.
    place: Where it listens.
    linger: Seconds for which it stays when all have made their steps, unless it
      is told to end: whoever started it may want to look.
    stopped: Set, it ends the node in good order.
  """

  def __init__(
    self,
    settings: _node_settings.NodeSettings,
    run: workdirs.Workdir,
    node: int,
    registry: members.Registry,
    place: hosting.Place,
    *,
    linger: float = math.inf,
    stopped: threading.Event | None = None,
  ) -> None:
    self._settings = settings
    self._node = node
    self._registry = registry
    self._place = place
    self._linger = linger
    self._stopped = threading.Event() if stopped is None else stopped
    self._is_resumed = self._is_done = self._is_diverged = False
    self._exchanger: _exchange.Exchanger | None = None
    self._peers: _peers.Peers | None = None
    self._machine = settings.strategy.make_node(
      node, settings.num_nodes, settings.seed
    )
    self._station = _station.Station(
      settings,
      run,
      node,
      registry,
      take=self._take,
      describe=self.describe,
      wires=place.wires,
    )
    self._weights = _node_weights.NodeWeights(
      settings,
      node,
      self._station.layout,
      self._station.book,
      self._station.host,
      self._machine,
    )
    # With whom it began, itself among them; []: it has not.
    self._began_with: list[int] = []

  def describe(self) -> dict[str, Any]:
    """How it stands, as JSON can say it."""
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
    """Trains until all steps are made, and everybody is done or it is told.

    Returns:
      What `describe` says at the end.
    """
    try:
      self._weights.warm_up()
      self._restore()
      self._registry.ask_strangers()
      self._registry.check_free(self._node)
      peers = _peers.Peers(
        self._registry,
        self._is_wanted,
        self._station.greet,
        self._station.layout.size,
        self._settings.deadlines.step,
        self._settings.deadlines.silence,
      )
      self._peers = peers
      try:
        exchanger = self._exchanger = self._make_exchanger(peers)
        self._weights.publish()
        self._station.open(self._place)
        peers.start()
        self._begin(peers, exchanger)
        self._train(exchanger)
        self._rest(exchanger, peers)
      finally:
        peers.close()
      self._finish(exchanger)
    finally:
      self._station.close()
    return self.describe()

  def _take(self, message: _messages.Message) -> int:
    """Takes in what somebody sent, in the host's thread."""
    assert self._exchanger is not None  # Before that, nobody can reach it.
    return self._exchanger.take(message)

  # --- The beginning.

  def _is_wanted(self, member: int) -> bool:
    """Whether it mixes with somebody: the centre if there is one, or nodes."""
    if self._settings.strategy.has_centre:
      return member == traces.CENTRE
    return member != self._node and 0 <= member < self._settings.num_nodes

  def _restore(self) -> None:
    """Goes to the last checkpoint; or, if there is none, to the start."""
    weights = self._weights
    found = self._station.restore(weights.state, weights.position)
    if found is not None:
      weights.restore(*found)
    folder = self._station.folder
    self._is_resumed = bool(workdirs.list_checkpoints(folder))

  def _make_exchanger(self, peers: _peers.Peers) -> _exchange.Exchanger:
    return _exchange.Exchanger(
      self._machine,
      self._weights,
      peers,
      self._station.book,
      self._station.layout,
      patience=self._settings.deadlines.rejoin,
      is_stopping=self._is_stopping,
    )

  def _begin(self, peers: _peers.Peers, exchanger: _exchange.Exchanger) -> None:
    """Waits for the others, and joins them if they have begun."""
    # Who has a centre sees nobody else: that says when all are there.
    has_centre = self._settings.strategy.has_centre
    has_steps = self._weights.step < self._settings.num_steps
    num_others = self._settings.num_nodes - 1
    company: set[int] = set()
    seen: set[int] = set()
    came_at = time.monotonic()  # What it took to compile was not waiting.
    _log.info(
      'Waits for all %d nodes, %g s at most.',
      self._settings.num_nodes,
      self._settings.deadlines.start,
    )
    complete_at = came_at
    while has_steps and not self._is_stopping():
      alive = peers.alive
      statuses = [each for each in map(peers.ask, alive) if each]
      # Who came first may not have heard of the others: so times agree.
      book = self._station.book
      book.origin = min([book.origin, *(each['origin'] for each in statuses)])
      if not self._is_resumed and any(map(self._is_ahead, statuses)):
        exchanger.join()
        company = {self._node}  # It was not there: others know who was.
        break
      begun = [each for each in statuses if each['has_begun']]
      if begun:  # They wait for nobody.
        company = company.union(*(each['began_with'] for each in begun))
        break
      seen.update(alive)
      if not has_centre and len(seen) >= num_others:
        break
      # Who came to us, and was gone before we could reach it, has come too.
      if len(seen | self._station.met) < num_others:
        complete_at = time.monotonic()
      is_complete = time.monotonic() - complete_at > _GRACE
      if (is_complete and not has_centre) or self._has_waited(came_at):
        break
      peers.wait_for(len(alive) + 1, _INTERVAL, self._is_stopping)
    # Those whom we have not met yet, but others have, are not late either; and
    # who is not known to them is late.
    there = company or self._station.met.union(peers.alive)
    self._began_with = sorted({self._node, *there})
    self._station.returned.clear()  # They were there in time.

  def _is_ahead(self, status: dict[str, Any]) -> bool:
    """Whether somebody has steps that were made without this node."""
    is_late = status['has_begun'] and self._node not in status['began_with']
    return is_late or status.get('is_resumed', False)

  def _has_waited(self, since: float) -> bool:
    """Whether all that can come has had its time."""
    patience = self._settings.deadlines.start
    if time.monotonic() - since < patience:
      return False
    _log.warning(
      'Not all of %d nodes have come within %g s: it begins without them.',
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
      self._station.save_if_due(weights.state, weights.position)
      if time.monotonic() - said_at > _LOG_INTERVAL:
        said_at = time.monotonic()
        _log.info(
          'Step %d/%d, loss %.4g.',
          weights.step,
          settings.num_steps,
          weights.loss,
        )

  # --- The end.

  def _rest(self, exchanger: _exchange.Exchanger, peers: _peers.Peers) -> None:
    """Answers others, until they are done too and nobody wants to look."""
    has_steps = self._weights.step < self._settings.num_steps
    self._is_done = self._is_diverged or not has_steps
    needed_at = time.monotonic()
    while not self._is_stopping():
      exchanger.rest()
      if self._is_needed(peers):
        needed_at = time.monotonic()
      elif time.monotonic() - needed_at > self._linger:
        return
      self._stopped.wait(_INTERVAL)

  def _is_needed(self, peers: _peers.Peers) -> bool:
    """Whether anybody still makes steps."""
    statuses = [peers.ask(peer) for peer in peers.alive]
    return any(status and not status['is_done'] for status in statuses)

  def _is_stopping(self) -> bool:
    """Whether it is to end; raises what has ended one of its threads."""
    self._station.host.check()
    if self._peers is not None:
      self._peers.check()
    return self._stopped.is_set() or self._station.host.stopped.is_set()

  def _finish(self, exchanger: _exchange.Exchanger) -> None:
    """Saves what there is, and says that this is the end.

    Others are answered meanwhile: who is told that nothing is taken any more
    keeps what it sent.
    """
    exchanger.end()
    weights = self._weights
    self._station.finish(weights.state, weights.position)
