"""The view of a run from outside: status, evaluation, requests to end.

A supervisor looks at a run through one of two views, which have the same
methods. `ServerView` asks the server, which knows its learners and sums up
their losses and stalenesses. `NodesView` asks every node and the centre. Both
evaluate the weights and write the metrics.
"""

from collections.abc import Callable, Collection, Iterable
import json
import sys
import time
from typing import Any, NamedTuple

from jasgd import engine
from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.experiment.running import measuring
from jasgd.experiment.running import recipe as recipes

# Seconds within which a node answers an observer: it answers while it computes.
_NODE_DEADLINE = 5.0
# Seconds between two questions whether nodes have ended, and in total.
_INTERVAL = 0.2
_END_TIMEOUT = 30.0

OnMetrics = Callable[[int, dict[str, Any]], None]


class Observer:
  """A connection to a server, node or centre, reopened after a loss.

  Args:
    layout: Layout of the weights in messages.
    connect: Function from the size of a payload to a connection.
    deadline: Seconds within which an answer comes.
  """

  def __init__(
    self,
    layout: engine.Layout,
    connect: Callable[[int], runtime.Connection],
    deadline: float = 60.0,
  ) -> None:
    self._layout = layout
    self._connect = connect
    self._deadline = deadline
    self._connection: runtime.Connection | None = None

  def ask(self, message: runtime.Message) -> runtime.Message:
    """Sends a request; connects first if there is no connection.

    Raises:
      WireError: if the process cannot be reached now.
    """
    if self._connection is None:
      self._connection = self._connect(self._layout.size)
    try:
      return self._connection.request(message, deadline=self._deadline)
    except runtime.WireError:
      self.close()
      raise

  def get_status(self) -> dict[str, Any]:
    """The status of the process."""
    return json.loads(self.ask(runtime.Message(runtime.Verb.STATUS)).text)

  def pull(
    self, flags: runtime.Flag | None = None
  ) -> tuple[runtime.Message, tuple[Any, Any]]:
    """The answer to a PULL, and its (params, stats)."""
    answer = self.ask(
      runtime.Message(runtime.Verb.PULL, flags=flags or runtime.Flag(0))
    )
    assert answer.payload is not None
    return answer, self._layout.unpack(answer.payload)

  def get_rows(self, clock: int) -> list[dict[str, float]]:
    """Rows of a server's metrics after a clock, the oldest first.

    Args:
      clock: Clock of the last row that was written; the server forgets it.

    Returns:
      Some of the rows; [] if there are none.
    """
    message = runtime.Message(runtime.Verb.METRICS, version=clock)
    return json.loads(self.ask(message).text)

  def report_death(self, *, pid: int = 0, node: int = -1) -> None:
    """Tells a server, or a node, that a process is dead.

    Args:
      pid: Process of a learner.
      node: Number of a node.
    """
    text = str(pid) if pid else ''
    self.ask(runtime.Message(runtime.Verb.LOST, worker=node, text=text))

  def stop(self, reason: str) -> None:
    """Asks the process to end in good order."""
    self.ask(runtime.Message(runtime.Verb.STOP, text=reason))

  def leave(self) -> None:
    """Leaves, so that a server need not wait for this observer."""
    if self._connection is not None:
      try:
        self.ask(runtime.Message(runtime.Verb.LEAVE))
      except runtime.WireError:
        return  # It has ended already.
      self.close()

  def close(self) -> None:
    """Closes the connection. Twice is no error."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None


class ServerView:
  """A server, and its learners as it knows them.

  Args:
    recipe: Recipe of the run.
    folder: Folder of the run, for the metrics.
    connect: Function from the size of a payload to a connection with the
      server.
    on_metrics: Called with the clock and the metrics of each row.
  """

  unit = 'clock'
  workers = 'learners'

  def __init__(
    self,
    recipe: recipes.Recipe,
    folder: workdirs.Workdir,
    connect: Callable[[int], runtime.Connection],
    on_metrics: OnMetrics | None = None,
  ) -> None:
    self._task = recipe.task
    self._folder = folder
    self._observer = Observer(recipe.make_layout(), connect)
    self._on_metrics = on_metrics
    self.statuses: dict[int, dict[str, Any]] = {}
    self._test: dict[str, float] = {}
    self._writer: workdirs.MetricsWriter | None = None
    self._incarnation = -1  # Incarnation of the server in the metrics file.
    self._written_at = -1  # Clock of the last row in the file.
    # Evaluations by clock, whose rows are not written yet.
    self._evaluated: dict[int, dict[str, float]] = {}
    self._reported: set[int] = set()  # Dead learners that the server knows of.
    self._num_alive = 0
    self._has_asked = False  # Whether the server was asked to end the run.

  @property
  def status(self) -> dict[str, Any]:
    """The last status of the server; {} before the first."""
    return self.statuses.get(recipes.SERVER, {})

  @property
  def clock(self) -> int:
    """Updates that the server has made."""
    return self.status.get('clock', 0)

  @property
  def metrics(self) -> dict[str, float]:
    """The last metrics."""
    return {**self.status.get('metrics', {}), **self._test}

  @property
  def is_diverged(self) -> bool:
    """Whether the server has ended the run because the loss diverged."""
    return self.status.get('is_diverged', False)

  @property
  def has_begun(self) -> bool:
    """Whether the server has made an update: learners have compiled."""
    return self.clock > 0 or self.is_over(())

  def is_over(self, lost: Collection[int]) -> bool:
    """Whether the server has ended the run."""
    del lost
    return bool(self.status.get('end_reason'))

  def is_asked(self, member: int) -> bool:
    """Whether it is the server: learners are not asked."""
    return member == recipes.SERVER

  def look_around(self) -> None:
    """Does nothing: the server knows all its learners."""

  def ask(self, member: int) -> dict[str, Any] | None:
    """The status of the server; None if it starts, or has died."""
    try:
      status = self._observer.get_status()
    except runtime.WireError:
      return None
    self.statuses[member] = status
    if status['incarnation'] != self._incarnation:
      self._open_metrics(status['incarnation'], status['start_clock'])
    if not status['end_reason']:  # After the end, learners leave.
      self._num_alive = status['num_alive']
    elif not self._num_alive:  # The run was over before the first look.
      self._num_alive = len(status['learners'])
    return status

  def forget(self, member: int) -> None:
    """Connects again later; the new server is told of all dead learners."""
    del member  # Its last status is kept: it has the clock.
    self._observer.close()
    self._reported.clear()

  def report_deaths(self, dead: dict[int, int | None]) -> None:
    """Tells the server which learners are dead: it may wait for them."""
    for learner, pid in dead.items():
      if learner in self._reported or pid is None or self.is_over(()):
        continue
      try:
        self._observer.report_death(pid=pid)
      except runtime.WireError:
        return  # The server has died: the next one will be told.
      self._reported.add(learner)

  def count_workers(self, lost: Collection[int]) -> int:
    """Number of learners that the server has, from wherever they came."""
    del lost
    return self._num_alive

  def is_evaluation_due(self) -> bool:
    """Whether the server has kept weights to be evaluated."""
    return self.status.get('evaluation_clock', -1) >= 0

  def evaluate(self, lost: Collection[int], *, is_last: bool = False) -> None:
    """Evaluates the weights that the server has kept, and writes metrics."""
    del lost
    last_clock = sys.maxsize
    try:
      if not (is_last and self._has_asked):  # Do not delay an interrupt.
        clock = self._evaluate_kept()
        # Later rows wait for an evaluation at their clock: a row is written
        # once, with all its metrics, and in the order of clocks.
        last_clock = sys.maxsize if is_last else clock
      self._write_rows(last_clock)
    except runtime.WireError:
      return  # The server has died; its successor keeps weights again.

  def _evaluate_kept(self) -> int:
    """Evaluates the weights that the server has kept; returns their clock."""
    answer, weights = self._observer.pull(runtime.Flag.AT_CLOCK)
    if self._task.test_data is not None:
      self._test = measuring.evaluate(self._task, weights)
      self._evaluated[answer.version] = self._test
    return answer.version

  def _write_rows(self, last_clock: int) -> None:
    """Writes the server's rows up to a clock, with their evaluations."""
    assert self._writer is not None  # The server has answered before.
    while rows := self._observer.get_rows(self._written_at):
      for row in rows:
        clock = int(row.pop('clock'))
        if clock > last_clock:
          return
        row |= self._evaluated.pop(clock, {})
        self._writer.write(clock, row)
        self._written_at = clock

  def _open_metrics(self, incarnation: int, start_clock: int) -> None:
    """Opens the metrics where an incarnation of the server goes on.

    Rows after its first clock belong to updates that were lost with the
    previous server, and that are made again.

    Args:
      incarnation: The incarnation.
      start_clock: Its first clock.
    """
    self._close_metrics()
    position = workdirs.find_metrics_position(self._folder, start_clock)
    self._writer = workdirs.MetricsWriter(
      self._folder, resume_at=position, on_metrics=self._on_metrics
    )
    clocks = workdirs.read_metrics(self._folder)['clock']
    self._written_at = int(clocks[-1]) if len(clocks) else -1
    self._incarnation = incarnation
    self._evaluated = {
      clock: metrics
      for clock, metrics in self._evaluated.items()
      if clock <= start_clock
    }

  def _close_metrics(self) -> None:
    if self._writer is not None:
      self._writer.close()

  def interrupt(self) -> bool:
    """Asks the server to end the run; False: watch until it has ended."""
    if not self._has_asked:
      try:
        self._observer.stop('It was interrupted.')
      except runtime.WireError:
        return False
      self._has_asked = True
    return False

  def finish(self, lost: Collection[int], *, is_owner: bool) -> None:
    """Leaves the server, which waits for its observer before it ends."""
    del lost, is_owner
    self._observer.leave()

  def close(self) -> None:
    """Closes the connection and the metrics. Twice is no error."""
    self._observer.close()
    self._close_metrics()


class _Pulled(NamedTuple):
  """The weights of a node."""

  step: int
  mass: float
  weights: tuple[Any, Any]


class NodesView:
  """Nodes, and the centre if there is one.

  Args:
    recipe: Recipe of the run.
    folder: Folder of the run.
    registry: Addresses of the members.
    members: Numbers of the nodes, and `recipes.SERVER`.
    writer: Writer of the metrics.

  Attributes:
    mean: The mean (params, stats) of the last evaluation.
    unwritten_at: Clock of the last metrics, if they are not written yet.
  """

  unit = 'steps'
  workers = 'nodes'

  def __init__(
    self,
    recipe: recipes.Recipe,
    folder: workdirs.Workdir,
    registry: runtime.Registry,
    members: Iterable[int],
    writer: workdirs.MetricsWriter,
  ) -> None:
    self._recipe = recipe
    self._registry = registry
    self._writer = writer
    self._meter = measuring.NodeMeter(folder)
    layout = recipe.make_layout()
    self._observers = {
      member: Observer(layout, registry.connect(member), _NODE_DEADLINE)
      for member in members
    }
    self.statuses: dict[int, dict[str, Any]] = {}
    self.metrics: dict[str, float] = {}
    self.mean: Any = None
    self.unwritten_at: int | None = None
    self._evaluated_at = -1
    # Pairs (member, dead node) of which the member was informed.
    self._reported: set[tuple[int, int]] = set()

  @property
  def clock(self) -> int:
    """Steps of all nodes, lost ones included."""
    return sum(status['step'] for _, status in self._list_nodes())

  @property
  def is_diverged(self) -> bool:
    """Whether the loss of a node was not finite."""
    return any(status['is_diverged'] for status in self.statuses.values())

  @property
  def has_begun(self) -> bool:
    """Whether a node has begun: the first nodes may not wait for all others."""
    return any(status['has_begun'] for _, status in self._list_nodes())

  def is_over(self, lost: Collection[int]) -> bool:
    """Whether all nodes have made their steps, or one has diverged."""
    nodes = [member for member in self._observers if member >= 0]
    statuses = [self.statuses.get(node) for node in nodes if node not in lost]
    are_done = all(status and status['is_done'] for status in statuses)
    return self.is_diverged or (bool(statuses) and are_done)

  def is_asked(self, member: int) -> bool:
    """Every member has a status of its own."""
    del member
    return True

  def look_around(self) -> None:
    """Asks for the numbers of members of which only the address is known."""
    self._registry.contact_addresses()

  def ask(self, member: int) -> dict[str, Any] | None:
    """The status of a node; None if it does not answer."""
    try:
      status = self._observers[member].get_status()
    except runtime.WireError:
      return None
    self._registry.merge(status['members'])
    self.statuses[member] = status
    return status

  def forget(self, member: int) -> None:
    """Forgets the status of a centre that is started again."""
    self.statuses.pop(member, None)

  def report_deaths(self, dead: dict[int, int | None]) -> None:
    """Tells members that wait for all nodes which of them are dead."""
    if self._recipe.is_collective:
      return
    for member, status in self.statuses.items():
      if member in dead or status['has_begun']:
        continue
      for node in dead:
        if node < 0 or (member, node) in self._reported:
          continue
        try:
          self._observers[member].report_death(node=node)
        except (runtime.WireError, runtime.RefusedError):
          continue
        self._reported.add((member, node))

  def count_workers(self, lost: Collection[int]) -> int:
    """Number of nodes that have answered and are not lost."""
    return sum(node not in lost for node, _ in self._list_nodes())

  def is_evaluation_due(self) -> bool:
    """Whether enough steps were made since the last evaluation."""
    every = self._recipe.eval_every
    return self.clock // every > max(0, self._evaluated_at // every)

  def evaluate(self, lost: Collection[int], *, is_last: bool = False) -> None:
    """Evaluates the mean of the nodes, and writes the metrics.

    The last metrics are left to the launcher: it knows more when all nodes
    have ended.
    """
    measured = {}
    if self.clock:  # Before the evaluation, during which nodes go on.
      measured = self._meter.measure(self.statuses, lost)
    found = self._evaluate_mean(
      [member for member in self._observers if member not in lost]
    )
    if found is None:
      return
    steps, mean, metrics = found
    # Steps of the weights that were pulled, and of lost nodes.
    clock = sum(
      steps.get(node, status['step']) for node, status in self._list_nodes()
    )
    if clock <= self._evaluated_at:
      return
    self.mean, self._evaluated_at = mean, clock
    self.metrics = self.describe_clock(clock) | measured | metrics
    if is_last:
      self.unwritten_at = clock
      return
    self._writer.write(clock, self.metrics)
    self._writer.flush()

  def describe_clock(self, clock: int) -> dict[str, float]:
    """The metrics that depend on the clock alone."""
    task = self._recipe.task
    epoch = clock * task.batch / task.num_samples
    get_rate = self._recipe.get_rate
    rate = {} if get_rate is None else {'train/rate': get_rate(epoch)}
    return {'epoch': epoch, **rate}

  def interrupt(self) -> bool:
    """True: `finish` asks the nodes to end, after the last evaluation."""
    return True

  def finish(self, lost: Collection[int], *, is_owner: bool) -> None:
    """Asks all members to end, the centre last.

    A node may have moved towards the centre without having sent the force yet.
    A launcher ends its own centre after its nodes have ended; an observer of
    other launchers' nodes must ask the nodes until none answers.
    """
    members = [member for member in self._observers if member not in lost]
    nodes = [member for member in members if member >= 0]
    for node in nodes:
      self._stop(node)
    if is_owner or recipes.SERVER not in members:
      return
    deadline = time.monotonic() + _END_TIMEOUT
    while (
      any(self.ask(node) is not None for node in nodes)
      and time.monotonic() < deadline
    ):
      time.sleep(_INTERVAL)
    self._stop(recipes.SERVER)

  def close(self) -> None:
    """Closes all connections. Twice is no error."""
    for observer in self._observers.values():
      observer.close()

  def _list_nodes(self) -> list[tuple[int, dict[str, Any]]]:
    return [each for each in self.statuses.items() if each[0] >= 0]

  def _stop(self, member: int) -> None:
    try:
      self._observers[member].stop('It was stopped.')
    except runtime.WireError:
      return  # It has ended already.

  def _evaluate_mean(
    self, members: list[int]
  ) -> tuple[dict[int, int], Any, dict[str, float]] | None:
    """Steps by node, mean and metrics; None if no node answers."""
    pulled = {
      member: found
      for member in members
      if (found := self._pull(member)) is not None
    }
    centre = pulled.pop(recipes.SERVER, None)
    if not pulled:
      return None
    has_mass = self._recipe.strategy.has_mass
    mean, metrics = measuring.describe_nodes(
      self._recipe.task,
      [found.weights for found in pulled.values()],
      [found.mass for found in pulled.values()] if has_mass else [],
      None if centre is None else centre.weights,
    )
    steps = {member: found.step for member, found in pulled.items()}
    return steps, mean, metrics

  def _pull(self, member: int) -> _Pulled | None:
    """The weights of a member; None if it does not answer."""
    try:
      answer, weights = self._observers[member].pull()
    except (runtime.WireError, runtime.RefusedError):
      return None
    return _Pulled(answer.step, answer.mass, weights)


View = ServerView | NodesView
