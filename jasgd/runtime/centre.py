"""The centre of elastic averaging: moves by what nodes send."""

import logging
import threading
from typing import Any

import jax

from jasgd import engine
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _buffers
from jasgd.runtime import _host
from jasgd.runtime import _messages
from jasgd.runtime import _node_settings
from jasgd.runtime import _station
from jasgd.runtime import hosting

_log = logging.getLogger(__name__)

# Between two looks at the time, in seconds.
_INTERVAL = 0.05


class Centre:
  """The centre, in this process. Whatever comes is added when it comes.

  Args:
    settings: What to do; as the nodes'.
    run: The folder of the run; a centre that is there goes on from its last
      checkpoint.
    place: Where it listens.
    stopped: Set, it ends in good order.
  """

  def __init__(
    self,
    settings: _node_settings.NodeSettings,
    run: workdirs.Workdir,
    place: hosting.Place,
    *,
    stopped: threading.Event,
  ) -> None:
    self._settings = settings
    self._place = place
    self._stopped = stopped
    self._station = _station.Station(
      settings,
      run,
      traces.CENTRE,
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
    self._lock = threading.Lock()  # Of the two above, and of the trace.

  def describe(self) -> dict[str, Any]:
    """How it stands, as JSON can say it."""
    return {
      'version': self._version,
      'step': self._version,
      'num_refused': self._station.host.num_refused,
      'has_begun': self._version > 0,
      'is_done': True,
      'is_diverged': False,
    }

  def run(self) -> None:
    """Serves until it is stopped."""
    try:
      self._warm_up()
      found = self._station.restore(self._state, self._position)
      if found is not None:
        self._restore(*found)
      self._publish()
      self._station.open(self._place)
      host = self._station.host
      while not self._stopped.is_set() and not host.stopped.is_set():
        with self._lock:
          self._station.save_if_due(self._state, self._position)
        self._stopped.wait(_INTERVAL)
      self._station.hang_up()  # Nothing may come after this.
      self._station.finish(self._state, self._position)
    finally:
      self._station.close()

  def _warm_up(self) -> None:
    layout = self._station.layout
    parts = layout.view(_buffers.make_aligned(layout.size))
    weights = self._functions.start(self._settings.make_weights())
    jax.block_until_ready(
      self._functions.move_centre((weights.params, weights.stats), parts, 0.0)
    )

  def _restore(self, state: engine.Node, position: dict[str, Any]) -> None:
    """Goes on from a checkpoint, whose weights get a new version."""
    book = self._station.book
    self._state = state
    self._version = book.last_version + 1
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
    if min(message.learner, message.clock) < 0:
      raise _messages.MessageError(
        'learner',
        'A force is of a node and of a version from 0 on, got '
        f'{message.learner} and {message.clock}.',
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
    self._publish()
    return _host.TAKEN

  @property
  def _position(self) -> dict[str, Any]:
    """What a checkpoint says besides the state."""
    return {'clock': self._version, 'step': self._version, 'mass': 0.0}
