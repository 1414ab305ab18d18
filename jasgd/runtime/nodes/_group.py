"""All-reduce over jax.distributed: nodes in processes that wait for each other.

The synchronous baseline. Every process has one node, on its first device. The
mean of all nodes is one compiled program over all processes; its messages go by
gloo on CPUs, and by NCCL or ICI on accelerators. A process that is lost stops
all others: they log the loss and end, and their launcher starts all of them
again from their checkpoints.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import logging
import math
import os
import re
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jasgd import engine
from jasgd import gossip
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _settings
from jasgd.runtime.nodes import _member
from jasgd.runtime.nodes import _registry
from jasgd.runtime.nodes import _weights
from jasgd.runtime.wires import _addresses
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

_log = logging.getLogger(__name__)

# Exit code of a process that ended because another one was lost.
GROUP_LOST = 75
# Words in the errors of a collective in which a process was lost.
_LOST_WORDS = re.compile(
  'gloo|nccl|coordination|connection|peer', re.IGNORECASE
)
# Seconds between two checks of the others, or for a request to stop.
_INTERVAL = 0.05
# Seconds for which a node still answers after a vote to stop, so that its
# launcher can read the reason.
_STOPPED_LINGER = 3.0
# Seconds for which node 0 outlives others whose addresses are not known yet.
_BLIND_PATIENCE = 2.0
# Seconds between two votes, and largest number of steps between them.
_VOTE_SECONDS = 0.5
_MAX_STEPS = 100
# Largest number of bytes of an address.
_MAX_ADDRESS = 128
# Largest number of checkpoints that nodes compare; a node keeps fewer.
_MAX_CHECKPOINTS = 8
# Largest number that processes can exchange.
_MAX_NUMBER = 2**31 - 1


class GroupNode(_member.Member):
  """A node of an all-reduce. The arguments are those of `Member`."""

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
    mesh = make_mesh(settings.num_nodes)
    self._average = engine.make_group_average(mesh)
    self._functions = engine.make_node_functions(
      settings.task, settings.optimizer, self._files.layout
    )
    self._machine = settings.strategy.make_node(
      self._node, settings.num_nodes, settings.seed
    )
    self._replica = _weights.NodeReplica(
      self._functions.start(settings.make_weights()),
      self._files.recorder,
      self._files.snapshots,
      self._machine,
    )
    self._loss = math.nan
    self._has_begun = self._is_diverged = self._is_stopped = False
    self._is_done = False
    self._votes = Votes(make_all_gather(mesh))
    self._lost = LostProcesses(
      self._node,
      settings.num_nodes,
      self._registry,
      self._files.layout.size,
      settings.deadlines.end,
      lambda: self._replica.step,
    )

  def describe(self) -> dict[str, Any]:
    """Status, as a JSON-serialisable dict."""
    return {
      'node': self._node,
      'step': self._replica.step,
      'num_steps': self._settings.num_steps,
      'version': self._replica.version,
      'mass': 0.0,
      'loss': self._loss if math.isfinite(self._loss) else None,
      # A node that is resumed may find that all steps are made.
      'has_begun': self._has_begun or self._is_done,
      'is_done': self._is_done,
      'is_stopped': self._is_stopped,
      'is_diverged': self._is_diverged,
    }

  def run(self) -> None:
    """Trains until all steps are made, or any node is told to end.

    Raises:
      GroupError: if another process was lost.
    """
    replica = self._replica
    try:
      self._begin()
      with self._lost.detect_lost_peers():
        self._train()
      self._is_done = self._is_diverged or (
        replica.step >= self._settings.num_steps
      )
      if self._is_done:
        self._carry_out(self._machine.on_done(), None)
      replica.publish()
      self._files.save(replica.state, replica.position)
      self._linger_on()
      self._carry_out(self._machine.on_end(), None)
      self._files.finish(replica.state, replica.position)
    finally:
      self._files.close()

  def _begin(self) -> None:
    """Resumes from the last common checkpoint, and exchanges addresses."""
    checkpoints = self._files.find_steps()
    with self._lost.detect_lost_peers():
      number = self._votes.agree_on_number(self._files.recorder.num_means)
      step = self._votes.agree_on_step(checkpoints)
    self._restore(None if step is None else checkpoints[step])
    self._machine.on_regroup(number)
    self._replica.publish()
    self._files.open(self._bind)
    own = self._registry.list_addresses().get(str(self._node), ['', 0.0])
    address, since = own
    with self._lost.detect_lost_peers():
      found = self._votes.exchange_addresses(address)
    for node, other in enumerate(found):
      if other and node != self._node:
        self._registry.add(node, other, since)
    self._lost.all_came = True

  def _restore(self, version: int | None) -> None:
    """Resumes from a checkpoint; None: from the start."""
    replica = self._replica
    if version is not None:
      replica.restore(*self._files.load(replica.state, version))
    elif self._files.recorder.last_version:  # Otherwise the node is new.
      replica.restore(replica.state, replica.position)

  def _linger_on(self) -> None:
    """Answers its launcher until it must stop, or `linger` has passed."""
    linger = self._linger if self._is_done else _STOPPED_LINGER
    done_at = time.monotonic()
    while not self._is_stopping() and time.monotonic() - done_at < linger:
      self._stopped.wait(_INTERVAL)

  def _train(self) -> None:
    replica = self._replica
    vote_at = replica.step
    while replica.step < self._settings.num_steps:
      # All nodes save and stop at the same step, to resume from it together.
      if replica.step == vote_at:
        replica.publish()
        num_steps = self._vote()
        if not num_steps:
          return
        vote_at += num_steps
      self._make_step()

  def _vote(self) -> int:
    """Saves if that is due for any node.

    Returns:
      The number of steps until the next vote; 0 if all are to stop.
    """
    verdict = self._votes.vote(
      is_stopping=self._is_stopping(),
      is_diverged=self._is_diverged,
      is_due=self._files.is_due,
    )
    self._is_diverged = verdict.is_diverged
    if verdict.stopping:
      self._is_stopped = True
      names = ', '.join(map(_registry.name_member, verdict.stopping))
      _log.info(
        'Stopped at step %d, with all others: %s was told to end. If they are '
        'started again, they go on from there.',
        self._replica.step,
        names,
      )
    if verdict.stopping or verdict.is_diverged:
      return 0  # `run` saves a checkpoint.
    if verdict.is_due:
      self._files.save(self._replica.state, self._replica.position)
    return verdict.num_steps

  def _make_step(self) -> None:
    """Makes a gradient or a step of this node, then a mean with all others."""
    settings, replica = self._settings, self._replica
    start, begin = self._files.recorder.get_time(), time.perf_counter()
    rate = settings.find_rate(replica.step)
    where = (settings.task.data, settings.seed, self._node, replica.step)
    gradient = None
    if settings.strategy.averages_gradients:
      found = self._functions.gradient(*replica.weights, *where)
      gradient, loss = (found.gradient, found.stats), found.loss
    else:
      replica.state, loss = self._functions.step(replica.state, *where, rate)
    self._loss = float(loss)  # Waits for the step.
    settings.sleep_until_min_seconds(self._node, begin)
    self._is_diverged |= not math.isfinite(self._loss)
    self._has_begun = True
    replica.step += 1
    # Published at the votes only: no peer pulls weights in an all-reduce.
    replica.commit(
      traces.Kind.STEP,
      [{'read_version': replica.version, 'start_time': start}],
      is_published=False,
    )
    self._carry_out(self._machine.on_step(replica.step), gradient, rate)

  def _carry_out(
    self, actions: gossip.Actions, gradient: Any, rate: float | None = None
  ) -> None:
    """Carries out actions.

    Args:
      actions: Actions of the machine.
      gradient: Gradient and statistics to average; None: the weights are
        averaged.
      rate: Factor of the schedule for the update; None: there is none.
    """
    replica = self._replica
    for action in actions:
      if isinstance(action, gossip.JoinMean):
        self._join_mean(action, gradient, rate)
        reply = gossip.Reply(
          self._node, gossip.Outcome.TAKEN, replica.version, replica.step
        )
        self._machine.on_replies([reply])
      elif isinstance(action, gossip.MixWaiting):
        # No node sends weights in an all-reduce.
        assert self._machine.mix_waiting() is None
      else:
        raise ValueError(
          f'Nodes of an all-reduce cannot carry out {action!r}: they only take '
          'part in means.'
        )

  def _join_mean(
    self, action: gossip.JoinMean, gradient: Any, rate: float | None
  ) -> None:
    """Takes part in a mean with all others, and records it."""
    replica, computed = self._replica, self._files.recorder.get_time()
    if gradient is not None:
      mean = self._average(gradient)
      replica.state = self._functions.update(replica.state, mean, rate)
    else:
      params, stats = self._average(replica.weights)
      replica.state = replica.state._replace(params=params, stats=stats)
    jax.block_until_ready(replica.state)
    share = 1 / self._settings.num_nodes
    row = {
      'group': action.number + 1,
      'own_weight': share,
      'weight': share,
      'start_time': computed,
    }
    replica.commit(traces.Kind.MEAN, [row], is_published=False)

  def _receive(self, message: _messages.Message) -> int:
    """Refuses messages of other nodes: they meet in collectives only."""
    del message
    raise _messages.MessageError('verb', 'This node takes no weights.')


class GroupError(RuntimeError):
  """A process of a group was lost, and the others cannot go on without it."""


class LostProcesses:
  """Detects that another process of the group was lost.

  Args:
    node: Number of this node.
    num_nodes: Number of nodes.
    registry: Addresses of the others.
    payload_size: Bytes of their payloads.
    patience: Seconds for which node 0 waits for the end of the others.
    get_step: Function that gives the number of steps of this node.

  Attributes:
    all_came: Whether all nodes have joined: after that, a node that does not
      answer is lost.
  """

  def __init__(
    self,
    node: int,
    num_nodes: int,
    registry: _registry.Registry,
    payload_size: int,
    patience: float,
    get_step: Callable[[], int],
  ) -> None:
    self.all_came = False
    self._node = node
    self._num_nodes = num_nodes
    self._registry = registry
    self._payload_size = payload_size
    self._patience = patience
    self._get_step = get_step

  @contextlib.contextmanager
  def detect_lost_peers(self) -> Iterator[None]:
    """Context of a collective, which all processes call together.

    Raises:
      GroupError: if another process is lost meanwhile.
    """
    try:
      yield
    except (
      jax.errors.JaxRuntimeError,
      ValueError,
    ) as error:  # jax raises both.
      if not _LOST_WORDS.search(str(error)):
        raise
      lost = self._find_lost()
      if self._node == 0:
        self._outlive_others()
      raise GroupError(
        f'At step {self._get_step()} {_join_names(lost)} was lost, and an '
        'all-reduce cannot go on without it. If all nodes are started again, '
        'they go on from the last checkpoint that they have in common. '
        f'({error})'
      ) from None

  def _find_lost(self) -> list[int]:
    """Other nodes that do not answer any more."""
    if not self.all_came:
      return []
    return [
      node
      for node in self._registry.list_members()
      if node != self._node and self._is_gone(node)
    ]

  def _is_gone(self, node: int) -> bool:
    """Whether a node does not answer."""
    try:
      return self._registry.get_status(node, self._payload_size) is None
    except _wire.RefusedError:  # It has another token, so it is alive.
      return False

  def _outlive_others(self) -> None:
    """Waits until the others have reported the loss.

    Node 0 is the coordinator of jax: when it ends, jax aborts the others.
    """
    patience = self._patience if self.all_came else _BLIND_PATIENCE
    deadline = time.monotonic() + patience
    while (
      len(self._find_lost()) < self._num_nodes - 1
      and time.monotonic() < deadline
    ):
      time.sleep(_INTERVAL)


def _join_names(lost: list[int]) -> str:
  """Names of the lost nodes. Only one was lost first; the others followed."""
  names = list(map(_registry.name_member, lost)) or ['another process']
  if len(names) == 1:
    return names[0]
  return f'one of {", ".join(names)} (the others ended because of it)'


def join_group(
  coordinator: str,
  num_nodes: int,
  node: int,
  deadlines: _settings.Deadlines,
  stopped: threading.Event | None = None,
) -> None:
  """Makes this process a member of a jax.distributed group.

  Call it before anything is computed.

  Args:
    coordinator: Address at which the first process listens: 'HOST:PORT'.
    num_nodes: Number of processes.
    node: Number of this process.
    deadlines: Deadlines; all processes must join within `start`. A process that
      is silent for twice `silence` ends the group, unless its launcher has
      done so before.
    stopped: Event that ends the process at once while it waits for the others:
      there is nothing to save yet.
  """
  has_joined = threading.Event()

  def give_up(stopped: threading.Event) -> None:
    stopped.wait()
    if not has_joined.is_set():
      os._exit(0)  # jax cannot be interrupted.

  if stopped is not None:
    threading.Thread(target=give_up, args=(stopped,), daemon=True).start()
  # The CPU's default collectives do not reach other processes.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  # This service would swallow SIGTERM.
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(
    coordinator,
    num_nodes,
    node,
    initialization_timeout=math.ceil(deadlines.start),
    heartbeat_timeout_seconds=math.ceil(2 * deadlines.silence),
  )
  has_joined.set()


def make_mesh(num_nodes: int) -> jax.sharding.Mesh:
  """Makes a mesh of the first device of each process.

  Args:
    num_nodes: Number of processes.

  Returns:
    A mesh with one axis, `nodes`.
  """
  first: dict[int, Any] = {}
  for device in jax.devices():
    first.setdefault(device.process_index, device)
  return jax.sharding.Mesh(
    np.array([first[process] for process in range(num_nodes)]),
    ('nodes',),
    axis_types=(jax.sharding.AxisType.Auto,),
  )


def make_all_gather(
  mesh: jax.sharding.Mesh,
) -> Callable[[list[int]], np.ndarray]:
  """Makes a function by which processes exchange small numbers.

  Args:
    mesh: Mesh with one device of each process.

  Returns:
    A function of this process's numbers that gives a row of each process. All
    must call it together, with equally many numbers.
  """
  sharding = jax.sharding.NamedSharding(mesh, jax.P('nodes'))
  gather = jax.jit(
    lambda rows: rows,
    out_shardings=jax.sharding.NamedSharding(mesh, jax.P()),
  )

  def all_gather(numbers: list[int]) -> np.ndarray:
    own = np.asarray([numbers], np.int32)
    rows = jax.make_array_from_callback(
      (mesh.size, len(numbers)), sharding, lambda _: own
    )
    return np.asarray(gather(rows))

  return all_gather


class Verdict(NamedTuple):
  """Result of a vote, which is equal in all processes."""

  stopping: list[int]  # Nodes that were told to end: all end with them.
  is_diverged: bool  # Whether the loss of any node is not finite.
  is_due: bool  # Whether to save.
  num_steps: int  # Steps until the next vote.


class Votes:
  """Agreements of a group. All processes call the same methods together.

  All exchange the same numbers, and decide from them alike.

  Args:
    all_gather: Function that gives the numbers of all processes, from
      `make_all_gather`.
    get_time: Function that gives the time in seconds.
  """

  def __init__(
    self,
    all_gather: Callable[[list[int]], np.ndarray],
    get_time: Callable[[], float] = time.monotonic,
  ) -> None:
    self._all_gather = all_gather
    self._get_time = get_time
    self._num_steps = 0  # Steps since the last vote, at `_voted_at`.
    self._voted_at = 0.0

  def agree_on_number(self, own: int) -> int:
    """Agrees on the number of the next mean.

    Args:
      own: A number that is above all that this process has recorded.

    Returns:
      A number that no process has recorded: a mean during which a process was
      lost is in the traces of some only.
    """
    return int(self._all_gather([own]).max())

  def agree_on_step(self, own: Iterable[int]) -> int | None:
    """Finds the last step that all processes have saved.

    Args:
      own: Steps of this process's checkpoints.

    Returns:
      The step; None if there is none.
    """
    steps = sorted(own)[-_MAX_CHECKPOINTS:]
    padded = steps + [-1] * (_MAX_CHECKPOINTS - len(steps))
    rows = self._all_gather(padded).tolist()
    return max(set(steps).intersection(*rows), default=None)

  def exchange_addresses(self, own: str) -> list[str]:
    """Exchanges addresses.

    Args:
      own: Address of this process; '': it has none.

    Returns:
      Addresses of all processes.
    """
    text = own.encode()[:_MAX_ADDRESS].ljust(_MAX_ADDRESS, b'\0')
    rows = self._all_gather(list(text)).tolist()
    return [bytes(row).rstrip(b'\0').decode() for row in rows]

  def vote(
    self, *, is_stopping: bool, is_diverged: bool, is_due: bool
  ) -> Verdict:
    """Agrees whether to save or to stop at this step, and when to vote again.

    Votes are about half a second apart, so that a stop is seen soon and short
    steps are not slowed down. The slowest process's time per step counts. As
    the first steps are longer, the number of steps between votes begins with 1
    and at most doubles.

    Args:
      is_stopping: Whether this process was told to end.
      is_diverged: Whether its loss is not finite.
      is_due: Whether its checkpoint is due.

    Returns:
      The result for all.
    """
    now = self._get_time()
    seconds = (now - self._voted_at) / max(1, self._num_steps)
    microseconds = min(int(1e6 * seconds), _MAX_NUMBER)
    own = [is_stopping, is_diverged, is_due, microseconds]
    votes = self._all_gather([int(each) for each in own])
    slowest = max(1, int(votes[:, 3].max())) / 1e6
    most = min(2 * self._num_steps, _MAX_STEPS)
    self._num_steps = max(1, min(int(_VOTE_SECONDS / slowest), most))
    self._voted_at = now
    return Verdict(
      stopping=np.flatnonzero(votes[:, 0]).tolist(),
      is_diverged=bool(votes[:, 1].any()),
      is_due=bool(votes[:, 2].any()),
      num_steps=self._num_steps,
    )
