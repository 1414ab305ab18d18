"""A node without a server: trains, and averages with others; waits for nobody.

It steps on its own weights, shows them to whoever asks, and mixes with live
others every few steps. Its files are its own: trace, checkpoints, address.
"""

from collections.abc import Callable, Mapping
import logging
import math
import threading
import time
from typing import Any

from jasgd import gossip
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _mixing
from jasgd.runtime import _node_settings
from jasgd.runtime import _node_weights
from jasgd.runtime import _peers
from jasgd.runtime import _station
from jasgd.runtime import hosting

_log = logging.getLogger(__name__)

# Between two looks of a node that has made its steps, in seconds.
_INTERVAL = 0.05

Find = Callable[[], Mapping[int, _peers.Connect]]


class Peer:
  """A node in this process.

  Args:
    settings: What to do.
    run: The folder of the run; a node that is there goes on from its last
      checkpoint.
    node: Its number.
    find: Gives ways to connect to the others that are known, or to the centre.
    place: Where it listens.
    waits: Whether it stays when all have made their steps, until it is told to
      end: whoever started it may want to look.
    stopped: Set, it ends the node in good order.
  """

  def __init__(
    self,
    settings: _node_settings.NodeSettings,
    run: workdirs.Workdir,
    node: int,
    find: Find,
    place: hosting.Place,
    *,
    waits: bool = True,
    stopped: threading.Event | None = None,
  ) -> None:
    self._settings = settings
    self._node = node
    self._find = find
    self._place = place
    self._waits = waits
    self._stopped = threading.Event() if stopped is None else stopped
    self._is_done = self._is_diverged = False
    self._came_at = time.monotonic()
    self._mixing: _mixing.Mixing
    self._station = _station.Station(
      settings,
      run,
      node,
      take=lambda message: self._mixing.take(message),
      describe=self.describe,
      wires=place.wires,
    )
    self._weights = _node_weights.NodeWeights(
      settings,
      node,
      self._station.layout,
      self._station.book,
      self._station.host,
    )
    # With whom it began, itself among them; []: it has not.
    self._began_with: list[int] = []

  def describe(self) -> dict[str, Any]:
    """How it stands, as JSON can say it."""
    weights = self._weights
    return {
      'node': self._node,
      'step': weights.step,
      'num_steps': self._settings.num_steps,
      'version': weights.version,
      'mass': weights.mass,
      'loss': weights.loss if math.isfinite(weights.loss) else None,
      'num_refused': self._station.host.num_refused,
      'has_begun': bool(self._began_with),
      'began_with': self._began_with,
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
      is_new = self._restore()
      peers = _peers.Peers(
        self._find,
        self._station.fingerprint,
        self._station.layout.size,
        self._settings.deadlines.step,
      )
      try:
        self._mixing = self._make_mixing(peers)
        self._weights.publish()
        self._station.open(self._place)
        self._begin(peers, is_new)
        self._train()
        self._rest(peers)
      finally:
        peers.close()
      self._finish()
    finally:
      self._station.close()
    return self.describe()

  # --- The beginning.

  def _restore(self) -> bool:
    """Goes to the last checkpoint; whether there is none."""
    weights = self._weights
    if isinstance(self._settings.strategy, gossip.PushSum):
      weights.mass = 1.0
    found = self._station.restore(weights.state, weights.position)
    if found is not None:
      weights.restore(*found)
    return found is None

  def _make_mixing(self, peers: _peers.Peers) -> _mixing.Mixing:
    settings, strategy = self._settings, self._settings.strategy
    parts: dict[str, Any] = {
      'weights': self._weights,
      'peers': peers,
      'book': self._station.book,
      'layout': self._station.layout,
      'node': self._node,
    }
    if isinstance(strategy, gossip.Elastic):
      return _mixing.ElasticMixing(
        strategy, settings.deadlines.rejoin, self._stopped, **parts
      )
    if isinstance(strategy, gossip.Pull):
      return _mixing.PullMixing(
        strategy, settings.num_nodes, settings.seed, **parts
      )
    assert isinstance(strategy, gossip.Gossip)
    return _mixing.PushMixing(
      strategy, settings.num_nodes, settings.seed, **parts
    )

  def _begin(self, peers: _peers.Peers, is_new: bool) -> None:
    """Waits for the others, and joins them if they have begun."""
    is_elastic = isinstance(self._settings.strategy, gossip.Elastic)
    expected = 1 if is_elastic else self._settings.num_nodes - 1
    while not self._is_stopping():
      statuses = [peers.ask(peer) for peer in peers.alive]
      begun = [each for each in statuses if each and each['has_begun']]
      if begun:
        # Who began without us is ahead; who began with us waits for nobody.
        is_late = any(
          self._node not in each.get('began_with', ()) for each in begun
        )
        if is_new and is_late:
          self._join(peers)
        break
      if peers.wait_for(expected, _INTERVAL, self._stopped):
        break
      if self._has_waited():
        break
    self._began_with = sorted([self._node, *peers.alive])

  def _has_waited(self) -> bool:
    """Whether all that can come has had its time."""
    waited = time.monotonic() - self._came_at
    if waited < self._settings.deadlines.start:
      return False
    _log.warning('Not all nodes have come within %.0f s.', waited)
    return True

  def _join(self, peers: _peers.Peers) -> None:
    """Takes the weights of somebody who is there."""
    book, weights = self._station.book, self._weights
    for peer in peers.alive:
      start = book.get_time()
      answer = peers.pull(peer)
      if answer is not None and (answer.clock or answer.step):
        weights.mass = 0.0  # Until others send some: none is made.
        book.write(traces.NodeKind.JOIN, [{'version': weights.version}])
        assert answer.payload is not None
        other = _node_weights.Other(
          peer, answer.clock, answer.step, 1.0, answer.payload
        )
        weights.mix([other], 0.0, start)
        return

  # --- Steps and mixes.

  def _train(self) -> None:
    weights, settings = self._weights, self._settings
    period = settings.strategy.period
    while weights.step < settings.num_steps and not self._is_stopping():
      weights.make_step()
      if not math.isfinite(weights.loss):
        self._is_diverged = True
        return
      if weights.step % period == 0:
        self._mixing.mix(weights.step // period - 1)
      self._station.save_if_due(weights.state, weights.position)

  # --- The end.

  def _rest(self, peers: _peers.Peers) -> None:
    """Answers others, until they are done too."""
    self._is_done = True
    while not self._is_stopping():
      self._mixing.rest()
      if not self._waits and not self._is_needed(peers):
        return
      self._stopped.wait(_INTERVAL)

  def _is_needed(self, peers: _peers.Peers) -> bool:
    """Whether anybody still makes steps."""
    statuses = [peers.ask(peer) for peer in peers.alive]
    return any(status and not status['is_done'] for status in statuses)

  def _is_stopping(self) -> bool:
    return self._stopped.is_set() or self._station.host.stopped.is_set()

  def _finish(self) -> None:
    """Saves what there is, and says that this is the end."""
    self._station.hang_up()  # What came is mixed; nothing comes after it.
    self._mixing.rest()
    weights = self._weights
    self._station.finish(weights.state, weights.position)
