"""All-reduce over jax.distributed: nodes in processes that wait for each other.

The synchronous baseline. Every process has one node, on its first device; their
mean is one compiled program over all of them. Its messages go by gloo on CPUs,
and on accelerators by what jax has there (NCCL, ICI). So a process that is lost
stops all: whoever started them says so, and starts them again from their
checkpoints.
"""

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
from jasgd.runtime import _group_losses
from jasgd.runtime import _group_mesh
from jasgd.runtime import _group_votes
from jasgd.runtime import _messages
from jasgd.runtime import _node_settings
from jasgd.runtime import _station
from jasgd.runtime import hosting
from jasgd.runtime import members

_log = logging.getLogger(__name__)

# Between two looks of a node that has made its steps, in seconds.
_INTERVAL = 0.05
# For which a node stays that ends with another one, so that it can be seen why.
_STOPPED_LINGER = 3.0


class GroupNode:
  """A node of an all-reduce, in this process.

  Args:
    settings: What to do.
    run: The folder of the run.
    node: Its number.
    registry: Says where this node is.
    place: Where it listens, for those who look.
    linger: Seconds for which it stays when all steps are made, unless it is
      told to end: whoever started it may want to look.
    stopped: Set, it asks all to end in good order.
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
    stopped: threading.Event,
  ) -> None:
    self._settings = settings
    self._node = node
    self._registry = registry
    self._place = place
    self._linger = linger
    self._stopped = stopped
    self._station = _station.Station(
      settings,
      run,
      node,
      registry,
      take=_refuse,
      describe=self.describe,
      wires=place.wires,
    )
    mesh = _group_mesh.make_mesh(settings.num_nodes)
    self._average = engine.make_group_average(mesh)
    self._functions = engine.make_node_functions(
      settings.task, settings.optimizer, self._station.layout
    )
    self._state = self._functions.start(settings.make_weights())
    self._step = self._version = 0
    self._loss = math.nan
    self._has_begun = self._is_diverged = self._is_stopped = False
    self._is_done = False
    machine = settings.strategy.make_node(
      node, settings.num_nodes, settings.seed
    )
    assert isinstance(machine, gossip.AllReduceNode)
    self._machine = machine
    self._votes = _group_votes.Votes(_group_mesh.make_tell_all(mesh))
    self._losses = _group_losses.Losses(
      node,
      settings.num_nodes,
      registry,
      self._station.layout.size,
      settings.deadlines.end,
      lambda: self._step,
    )

  def describe(self) -> dict[str, Any]:
    """How it stands, as JSON can say it."""
    return {
      'node': self._node,
      'step': self._step,
      'num_steps': self._settings.num_steps,
      'version': self._version,
      'mass': 0.0,
      'loss': self._loss if math.isfinite(self._loss) else None,
      # One that comes back may find that all steps are made.
      'has_begun': self._has_begun or self._is_done,
      'is_done': self._is_done,
      'is_stopped': self._is_stopped,
      'is_diverged': self._is_diverged,
    }

  def run(self) -> None:
    """Trains until all steps are made, or anybody is told to end.

    Raises:
      GroupError: if another process was lost.
    """
    try:
      self._begin()
      with self._losses.mind():
        self._train()
      self._is_done = self._is_diverged or (
        self._step >= self._settings.num_steps
      )
      self._publish()
      self._station.save(self._state, self._position)
      self._stay()
      self._station.finish(self._state, self._position)
    finally:
      self._station.close()

  def _begin(self) -> None:
    """Finds where all can go on, and lets all know where all are."""
    checkpoints = self._station.find_steps()
    with self._losses.mind():
      number = self._votes.agree_on_number(self._station.book.num_means)
      step = self._votes.agree_on_step(checkpoints)
    self._restore(None if step is None else checkpoints[step])
    self._machine.number = number
    self._publish()
    self._station.open(self._place)
    address, since = self._registry.tell().get(str(self._node), ['', 0.0])
    with self._losses.mind():
      found = self._votes.exchange_addresses(address)
    for node, other in enumerate(found):
      if other and node != self._node:
        self._registry.note(node, other, since)
    self._losses.have_met = True

  def _stay(self) -> None:
    """Lets others look, until it is told to end."""
    linger = self._linger if self._is_done else _STOPPED_LINGER
    done_at = time.monotonic()
    while not self._is_stopping() and time.monotonic() - done_at < linger:
      self._stopped.wait(_INTERVAL)

  # --- Steps.

  def _train(self) -> None:
    vote_at = self._step
    while self._step < self._settings.num_steps:
      # All must save, and stop, at the same step, or could not go on together.
      if self._step == vote_at:
        self._publish()
        num_steps = self._vote()
        if not num_steps:
          return
        vote_at += num_steps
      self._make_step()

  def _vote(self) -> int:
    """Saves if that is due for anybody.

    Returns:
      The number of steps until the next vote; 0 if all are to stop.
    """
    verdict = self._votes.vote(
      is_stopping=self._is_stopping(),
      is_diverged=self._is_diverged,
      is_due=self._station.is_due,
    )
    self._is_diverged = verdict.is_diverged
    if verdict.stopping:
      self._is_stopped = True
      names = ', '.join(map(members.name_member, verdict.stopping))
      _log.info(
        'Stopped at step %d, with all others: %s was told to end. Started '
        'again, they go on from there.',
        self._step,
        names,
      )
    if verdict.stopping or verdict.is_diverged:
      return 0  # There is a checkpoint at the end.
    if verdict.is_due:
      self._station.save(self._state, self._position)
    return verdict.num_steps

  def _make_step(self) -> None:
    """A gradient, or a step, of this node; and a mean of all: they wait."""
    book, settings = self._station.book, self._settings
    begun = (book.get_time(), time.perf_counter())
    rate = settings.find_rate(self._step)
    weights = (self._state.params, self._state.stats)
    where = (settings.task.data, settings.seed, self._node, self._step)
    gradient = None
    if settings.strategy.averages_gradients:
      found = self._functions.gradient(*weights, *where)
      gradient, loss = (found.gradient, found.stats), found.loss
    else:
      self._state, loss = self._functions.step(self._state, *where, rate)
    self._note_step(loss, *begun)
    for action in self._machine.on_step(self._step):
      assert isinstance(action, gossip.JoinMean)
      computed = book.get_time()
      if gradient is not None:
        mean = self._average(gradient)
        self._state = self._functions.update(self._state, mean, rate)
      else:
        params, stats = self._average((self._state.params, self._state.stats))
        self._state = self._state._replace(params=params, stats=stats)
      self._note_mean(action.number, computed)
      self._machine.on_replies([gossip.Reply(traces.ALL, gossip.Outcome.TAKEN)])

  def _note_step(self, loss: jax.Array, start: float, begin: float) -> None:
    """Waits for what was computed since then, and writes it down."""
    self._loss = float(loss)
    self._settings.rest(self._node, begin)
    self._is_diverged |= not math.isfinite(self._loss)
    self._has_begun = True
    self._step += 1
    self._version += 1
    row = {
      'version': self._version,
      'step': self._step,
      'peer_version': self._version - 1,
      'start_time': start,
    }
    self._station.book.write(traces.NodeKind.STEP, [row])

  def _note_mean(self, number: int, start: float) -> None:
    """Waits for the mean of all, and writes it down."""
    jax.block_until_ready(self._state)
    self._version += 1
    share = 1 / self._settings.num_nodes
    row = {
      'version': self._version,
      'step': self._step,
      'peer': traces.ALL,
      'mix': self._station.book.num_mixes,
      'peer_version': number,
      'own_weight': share,
      'peer_weight': share,
      'start_time': start,
    }
    self._station.book.write(traces.NodeKind.MIX, [row])
    self._station.book.num_mixes += 1

  def _publish(self) -> None:
    weights = (self._state.params, self._state.stats)
    self._station.host.publish(weights, self._version, self._step)

  @property
  def _position(self) -> dict[str, Any]:
    return {'clock': self._version, 'step': self._step, 'mass': 0.0}

  def _restore(self, clock: int | None) -> None:
    """Goes on from a checkpoint; or, if there is none, from the start."""
    last_version = self._station.book.last_version
    if clock is not None:
      self._state, position = self._station.load(self._state, clock)
      self._step = position['step']
    elif not last_version:
      return  # It has never been here.
    self._version = last_version + 1
    row = {
      'version': self._version,
      'peer_version': clock or 0,
      'step': self._step,
    }
    self._station.book.write(traces.NodeKind.RESTART, [row])

  def _is_stopping(self) -> bool:
    return self._stopped.is_set() or self._station.host.stopped.is_set()


def _refuse(message: _messages.Message) -> int:
  del message
  raise _messages.MessageError('verb', 'This node takes no weights.')
