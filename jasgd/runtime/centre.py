"""The centre of elastic averaging: moves by what nodes send."""

import logging
import math
import threading
import time
from typing import Any

import jax

from jasgd import engine
from jasgd import gossip
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _buffers
from jasgd.runtime import _messages
from jasgd.runtime import _node_settings
from jasgd.runtime import _station
from jasgd.runtime import _wire
from jasgd.runtime import hosting
from jasgd.runtime import members

_log = logging.getLogger(__name__)

# Between two looks at the time, in seconds.
_INTERVAL = 0.05
# Between two looks at the nodes, in seconds.
_LOOK_INTERVAL = 1.0


class Centre:
  """The centre, in this process. Whatever comes is added when it comes.

  Args:
    settings: What to do; as the nodes'.
    run: The folder of the run; a centre that is there goes on from its last
      checkpoint.
    registry: Where the nodes are.
    place: Where it listens.
    linger: Seconds for which it stays when all nodes have made their steps,
      unless it is told to end.
    stopped: Set, it ends in good order.
  """

  def __init__(
    self,
    settings: _node_settings.NodeSettings,
    run: workdirs.Workdir,
    registry: members.Registry,
    place: hosting.Place,
    *,
    linger: float = math.inf,
    stopped: threading.Event,
  ) -> None:
    self._settings = settings
    self._registry = registry
    self._place = place
    self._linger = linger
    self._stopped = stopped
    self._station = _station.Station(
      settings,
      run,
      traces.CENTRE,
      registry,
      take=self._take,
      describe=self.describe,
      wires=place.wires,
    )
    self._functions = engine.make_node_functions(
      settings.task, settings.optimizer, self._station.layout
    )
    start = self._functions.start(settings.make_weights())
    self._state = start._replace(opt_state=())
    self._version = 0
    self._began_with: list[int] = []
    self._lock = threading.Lock()  # Of the two above, and of the trace.
    # Whether it has found that nobody makes steps: nodes that have made theirs
    # see nobody else, and ask it whether they are still needed.
    self._is_done = False

  def describe(self) -> dict[str, Any]:
    """How it stands, as JSON can say it."""
    return {
      'version': self._version,
      'step': self._version,
      'has_begun': bool(self._find_beginners()),
      'began_with': self._find_beginners(),
      'is_done': self._is_done,
      'is_diverged': False,
    }

  def _find_beginners(self) -> list[int]:
    """The nodes that were there when the run began; []: it has not."""
    has_begun = self._version > 0 or len(self._station.met) >= (
      self._settings.num_nodes
    )
    if has_begun and not self._began_with:
      self._began_with = sorted({traces.CENTRE, *self._station.met})
    return self._began_with

  def run(self) -> None:
    """Serves until it is stopped."""
    try:
      self._warm_up()
      found = self._station.restore(self._state, self._position)
      if found is not None:
        self._restore(*found)
      self._publish()
      self._station.open(self._place)
      self._serve()
      self._station.hang_up()  # Nothing may come after this.
      self._station.finish(self._state, self._position)
    finally:
      self._station.close()

  def _serve(self) -> None:
    """Saves now and then, until nobody needs it any more."""
    host = self._station.host
    needed_at = looked_at = time.monotonic()
    while not self._stopped.wait(_INTERVAL) and not host.stopped.is_set():
      host.check()
      with self._lock:
        self._station.save_if_due(self._state, self._position)
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
    """Whether there are nodes that have not made all their steps."""
    if not self._find_beginners():
      return True  # They are still to come.
    try:
      self._registry.ask_strangers()
      statuses = [
        self._registry.ask(member, self._station.layout.size)
        for member in self._registry.list_members()
        if member != traces.CENTRE
      ]
    except _wire.RefusedError as error:  # Somebody has another token.
      _log.warning('%s', error)
      return True
    return any(each and not each['is_done'] for each in statuses)

  def _get_patience(self) -> float:
    """How long it stays when nobody needs it, in seconds."""
    if len(self._station.met) >= self._settings.num_nodes:
      return self._linger
    # Those who have not come yet may be compiling.
    return max(self._linger, self._settings.deadlines.first_step)

  def _warm_up(self) -> None:
    layout = self._station.layout
    parts = layout.view(_buffers.make_aligned(layout.size))
    weights = self._functions.start(self._settings.make_weights())
    jax.block_until_ready(
      self._functions.move_centre((weights.params, weights.stats), parts, 0.0)
    )

  def _restore(self, state: engine.NodeState, position: dict[str, Any]) -> None:
    """Goes on from a checkpoint, whose weights get a new version."""
    book = self._station.book
    self._state = state
    self._version = book.last_version + 1
    self._find_beginners()  # Nobody: all but those with checkpoints are late.
    book.write(
      traces.NodeKind.RESTART,
      [
        {
          'version': self._version,
          'peer_version': position['clock'],
          'step': self._version,
        }
      ],
    )

  def _publish(self) -> None:
    weights = (self._state.params, self._state.stats)
    self._station.host.publish(weights, self._version, self._version)

  def _take(self, message: _messages.Message) -> int:
    """Moves by the force that a node has sent; in the host's thread."""
    num_nodes = self._settings.num_nodes
    if not 0 <= message.learner < num_nodes or message.clock < 0:
      raise _messages.MessageError(
        'learner',
        f'A force is of a node below {num_nodes} and of a version from 0 on, '
        f'got {message.learner} and {message.clock}.',
      )
    if not 0 <= message.rate <= 1:
      raise _messages.MessageError(
        'weight', f'A rate must be from 0 to 1, got {message.rate}.'
      )
    book, layout = self._station.book, self._station.layout
    start = book.get_time()
    assert message.payload is not None  # The host sees to that.
    parts = layout.view(message.payload)
    with self._lock:
      weights = (self._state.params, self._state.stats)
      params, stats = self._functions.move_centre(weights, parts, 1.0)
      jax.block_until_ready(params)
      self._state = self._state._replace(params=params, stats=stats)
      self._version += 1
      row = {
        'version': self._version,
        'step': self._version,
        'peer': message.learner,
        'mix': book.num_mixes,
        'peer_version': message.clock,
        'peer_step': message.step,
        'peer_weight': message.rate,
        'start_time': start,
      }
      book.write(traces.NodeKind.MIX, [row])
      book.num_mixes += 1
      self._find_beginners()  # Who comes after this is late.
    self._publish()
    return gossip.Outcome.TAKEN

  @property
  def _position(self) -> dict[str, Any]:
    """What a checkpoint says besides the state."""
    return {'clock': self._version, 'step': self._version, 'mass': 0.0}
