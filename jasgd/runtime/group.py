"""All-reduce over jax.distributed: nodes in processes that wait for each other.

The synchronous baseline. Every process has one node; a step is one compiled
program over all of them, so a process that is lost stops all: whoever started
them says so, and starts them again from their checkpoints.
"""

import logging
import math
import threading
import time
from typing import Any

import jax
import numpy as np

from jasgd import engine
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _messages
from jasgd.runtime import _node_settings
from jasgd.runtime import _station
from jasgd.runtime import hosting

_log = logging.getLogger(__name__)

# Steps between two votes on whether to stop.
_VOTE_EVERY = 10
# Between two looks of a node that has made its steps, in seconds.
_INTERVAL = 0.05


def join_group(coordinator: str, num_nodes: int, node: int) -> None:
  """Makes this process one of a group; before anything is computed.

  Args:
    coordinator: 'HOST:PORT', where the first process listens.
    num_nodes: How many processes there are.
    node: Which one this is.
  """
  # A CPU's own collectives reach no other process.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  # It would take SIGTERM for itself, and never give it back.
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(coordinator, num_nodes, node)


class GroupNode:
  """A node of an all-reduce, in this process.

  Args:
    settings: What to do.
    run: The folder of the run.
    node: Its number.
    place: Where it listens, for those who look.
    resume_at: The checkpoint to go on from; None: from the start.
    first_number: Of the next all-reduce.
    save_every: Steps between checkpoints, which all nodes make at once.
    stopped: Set, it asks all to end in good order.
  """

  def __init__(
    self,
    settings: _node_settings.NodeSettings,
    run: workdirs.Workdir,
    node: int,
    place: hosting.Place,
    *,
    resume_at: int | None,
    first_number: int,
    save_every: int,
    stopped: threading.Event,
  ) -> None:
    self._settings = settings
    self._node = node
    self._place = place
    self._number = first_number
    self._save_every = save_every
    self._stopped = stopped
    self._station = _station.Station(
      settings,
      run,
      node,
      take=_refuse,
      describe=self.describe,
      wires=place.wires,
    )
    self._program = engine.make_device_program(
      settings.task,
      settings.optimizer,
      settings.strategy,
      num_nodes=settings.num_nodes,
      runner='shard_map',
      seed=settings.seed,
      get_rate=settings.get_rate,
      init=settings.init,
    )
    self._state = self._program.init()
    self._step = self._version = 0
    self._loss = math.nan
    self._has_begun = self._is_done = self._is_diverged = False
    if resume_at is not None:
      self._restore(resume_at)

  def describe(self) -> dict[str, Any]:
    """How it stands, as JSON can say it."""
    return {
      'node': self._node,
      'step': self._step,
      'num_steps': self._settings.num_steps,
      'version': self._version,
      'mass': 0.0,
      'loss': self._loss if math.isfinite(self._loss) else None,
      'num_refused': self._station.host.num_refused,
      'has_begun': self._has_begun,
      'is_done': self._is_done,
      'is_diverged': self._is_diverged,
    }

  def run(self) -> None:
    """Trains until all steps are made, and it is told to end."""
    try:
      self._publish()
      self._station.open(self._place)
      self._train()
      self._is_done = True
      self._publish()
      while not self._is_stopping():
        self._stopped.wait(_INTERVAL)
      self._station.finish(self._get_node(), self._position)
    finally:
      self._station.close()

  def _train(self) -> None:
    vote = make_vote(self._settings.num_nodes)
    while self._step < self._settings.num_steps and not self._is_diverged:
      # All must stop at the same step, or some would wait for ever.
      if self._step % _VOTE_EVERY == 0 and vote(self._is_stopping()):
        return
      self._make_step()
      if self._step % self._save_every == 0:
        self._publish()
        self._station.save(self._get_node(), self._position)

  def _make_step(self) -> None:
    """A step of all nodes: a program that ends for all at once."""
    book, settings = self._station.book, self._settings
    start, begin = book.get_time(), time.perf_counter()
    settings.rest(self._node, begin)
    computed = book.get_time()
    self._state, losses = self._program.step(self._state)
    self._loss = float(losses.addressable_shards[0].data[0])  # Waits for it.
    self._is_diverged = not math.isfinite(self._loss)
    self._has_begun = True
    self._step += 1
    self._version += 1
    row = {'version': self._version, 'step': self._step}
    book.write(
      traces.NodeKind.STEP,
      [
        {
          **row,
          'peer_version': self._version - 1,
          'start_time': start,
          'end_time': computed,
        }
      ],
    )
    if self._step % settings.strategy.period == 0:
      self._note_mean(computed)

  def _note_mean(self, start: float) -> None:
    """Writes down that all were averaged."""
    self._version += 1
    share = 1 / self._settings.num_nodes
    row = {
      'version': self._version,
      'step': self._step,
      'peer': traces.ALL,
      'mix': self._station.book.num_mixes,
      'peer_version': self._number,
      'own_weight': share,
      'peer_weight': share,
      'start_time': start,
    }
    self._station.book.write(traces.NodeKind.MIX, [row])
    self._station.book.num_mixes += 1
    self._number += 1

  def _publish(self) -> None:
    node = self._get_node()
    weights = (node.params, node.stats)
    self._station.host.publish(weights, self._version, self._step)

  def _get_node(self) -> engine.Node:
    """What this process has, on the host."""
    arrays = self._program.fetch(self._state)
    return jax.tree.map(lambda leaf: leaf[0], arrays.node)

  @property
  def _position(self) -> dict[str, Any]:
    return {'clock': self._version, 'step': self._step, 'mass': 0.0}

  def _restore(self, clock: int) -> None:
    node, position = self._station.load(self._get_node(), clock)
    self._step = position['step']
    self._version = self._station.book.last_version + 1
    rows = jax.tree.map(lambda leaf: np.asarray(leaf)[None], node)
    arrays = self._program.fetch(self._state)._replace(node=rows)
    self._state = self._program.place(arrays, self._step)
    row = {
      'version': self._version,
      'peer_version': clock,
      'step': self._step,
    }
    self._station.book.write(traces.NodeKind.RESTART, [row])

  def _is_stopping(self) -> bool:
    return self._stopped.is_set() or self._station.host.stopped.is_set()


def make_vote(num_nodes: int) -> Any:
  """A function by which all processes find out whether any wants something.

  Args:
    num_nodes: How many there are.

  Returns:
    A function of what this one wants; all must call it together.
  """
  mesh = jax.make_mesh(
    (num_nodes,), ('nodes',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  sharding = jax.sharding.NamedSharding(mesh, jax.P('nodes'))
  count = jax.jit(
    lambda flags: flags.sum(),
    out_shardings=jax.sharding.NamedSharding(mesh, jax.P()),
  )

  def vote(wants: bool) -> bool:
    flags = jax.make_array_from_callback(
      (num_nodes,), sharding, lambda _: np.full(1, wants, np.int32)
    )
    return bool(count(flags))

  return vote


def _refuse(message: _messages.Message) -> int:
  del message
  raise _messages.MessageError('verb', 'This node takes no weights.')
