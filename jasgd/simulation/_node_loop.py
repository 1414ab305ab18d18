"""What all nodes do, however they mix: they step, die and come back."""

from collections.abc import Callable, Sequence
import heapq
from typing import Any, NamedTuple

import numpy as np

from jasgd import gossip
from jasgd import traces
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _node_records
from jasgd.simulation import _times

# What an event is about; at equal times and node they come in this order.
(
  BACK,  # A node is there again, without weights yet.
  GONE,  # A node dies.
  FETCH,  # Its question for weights has arrived.
  FETCHED,  # It has them.
  DELIVERED,  # A message is in its inbox.
  STEPPED,  # Its gradient is computed.
  READ,  # Its question has arrived, at peers or at the centre.
  MIXED,  # The answers are there.
  ARRIVED,  # Its force is at the centre.
  MOVED,  # The centre has moved by it.
) = range(10)


class Setup(NamedTuple):
  """The arguments of `simulate_nodes`, checked."""

  strategy: gossip.Strategy
  num_nodes: int
  num_steps: int
  compute: _times.ComputeTime
  network: _network.Network
  failures: Sequence[_failures.Failure]
  seed: int


class NodeLoop:
  """A simulation under way; subclasses say how nodes mix.

  An event is (time, node, kind, data). Data begins with the life that the node
  was in, where the event is void once that life is over.
  """

  # What a node has at the start; only push-sum has masses.
  _initial_mass = 0.0

  def __init__(self, setup: Setup) -> None:
    """Starts all nodes at time 0."""
    num_nodes, network = setup.num_nodes, setup.network
    self._setup = setup
    self._num_steps = setup.num_steps
    self._period = setup.strategy.period
    self._latency = network.latency
    # Peers are joined by links of their own: the server's is of no matter.
    self._transfer = network.bytes_per_push / network.bandwidth
    self._durations = setup.compute.table(
      setup.seed, 0, setup.num_steps, num_nodes
    ).tolist()
    self._step = [0] * num_nodes
    self._version = [0] * num_nodes
    self._read_version = [0] * num_nodes
    self._num_mixes = [0] * num_nodes
    self._mass = [self._initial_mass] * num_nodes
    self._begun = [0.0] * num_nodes  # When a node began what it is at.
    self._life = [0] * num_nodes
    self._is_in = [True] * num_nodes  # Whether it is up, and has weights.
    self._until = [0.0] * num_nodes  # When it comes back, if it is down.
    self._records = _node_records.Records()
    self._rows = self._records.rows
    self._heap: list[tuple[float, int, int, Any]] = [
      (time, node, GONE, until) for time, node, until in setup.failures
    ]
    heapq.heapify(self._heap)
    self._handlers: dict[int, Callable[..., None]] = {
      BACK: self._return,
      GONE: self._die,
      FETCH: self._fetch,
      FETCHED: self._finish_fetch,
      STEPPED: self._finish_step,
    }

  def run(self) -> np.ndarray:
    """Handles events until every node that can has made its steps."""
    for node in range(self._setup.num_nodes):
      self._begin_step(node, 0.0)
    heap, pop, handlers = self._heap, heapq.heappop, self._handlers
    records, rows = self._records, self._rows
    while heap:
      time, node, kind, data = pop(heap)
      if kind <= GONE and self._is_over():
        break
      handlers[kind](node, time, data)
      if len(rows) >= records.MAX_ROWS:
        records.pack()
    return records.finish()

  # --- What a subclass says.

  def _begin_mix(self, node: int, time: float) -> None:
    """A node has stepped often enough to mix."""
    raise NotImplementedError

  def _rest(self, node: int, time: float) -> None:
    """A node has made all its steps."""

  def _leave(self, node: int, time: float) -> None:
    """A node that others counted on has died."""

  # --- Steps.

  def _begin_step(self, node: int, time: float) -> None:
    step = self._step[node]
    if step == self._num_steps:
      self._rest(node, time)
      return
    self._read_version[node] = self._version[node]
    self._begun[node] = time
    end = time + self._durations[step][node]
    heapq.heappush(self._heap, (end, node, STEPPED, self._life[node]))

  def _finish_step(self, node: int, time: float, life: int) -> None:
    if life != self._life[node]:
      return  # What it was computing is lost; it will do the step again.
    self._step[node] += 1
    self._version[node] += 1
    self._rows.append(
      (
        0,  # NodeKind.STEP, as the plain number that is packed faster.
        node,
        -1,
        -1,
        self._step[node],
        self._version[node],
        self._read_version[node],
        -1,
        1.0,
        0.0,
        self._mass[node],
        self._begun[node],
        time,
      )
    )
    if self._step[node] % self._period:
      self._begin_step(node, time)
    else:
      self._begun[node] = time
      self._begin_mix(node, time)

  # --- Deaths and returns.

  def _die(self, node: int, time: float, until: float) -> None:
    """A node dies, and its weights and its mass with it."""
    self._life[node] += 1
    self._until[node] = until
    if until < np.inf:
      self._schedule(until, node, BACK, 0)
    if not self._is_in[node]:
      return  # It had not got its weights yet: nobody knew that it was back.
    self._is_in[node] = False
    self._note(traces.NodeKind.LEAVE, node, self._mass[node], time, time)
    self._mass[node] = 0.0
    self._leave(node, time)

  def _return(self, node: int, time: float, _: int) -> None:
    """A node is up again, and needs weights."""
    self._until[node] = 0.0
    self._begun[node] = time
    self._schedule(time + self._latency, node, FETCH, self._life[node])

  def _fetch(self, node: int, time: float, life: int) -> None:
    """A joiner's question has arrived: the next node that is in answers."""
    if life != self._life[node]:
      return
    num_nodes = self._setup.num_nodes
    others = ((node + i) % num_nodes for i in range(1, num_nodes))
    peer = next((other for other in others if self._is_in[other]), None)
    if peer is None:  # It goes on with the weights that it had.
      self._enter(node, time, self._initial_mass)
      self._begin_step(node, time)
      return
    # With push-sum, the two share the mass: nothing is lost or gained.
    self._mass[peer] /= 2
    snapshot = _node_records.Snapshot(
      peer, self._version[peer], self._step[peer], 1.0
    )
    arrival = time + self._latency + self._transfer
    data = (life, snapshot, self._mass[peer])
    self._schedule(arrival, node, FETCHED, data)

  def _finish_fetch(
    self,
    node: int,
    time: float,
    data: tuple[int, _node_records.Snapshot, float],
  ) -> None:
    """A joiner has weights, if it still lives."""
    life, snapshot, mass = data
    if life != self._life[node]:
      self._note_lost(snapshot, node, time, mass)
      return
    self._enter(node, time, 0.0)
    self._mass[node] = mass
    self._mix(node, time, self._begun[node], [snapshot], 0.0)
    self._begin_step(node, time)

  def _enter(self, node: int, time: float, new_mass: float) -> None:
    """From now on others count on a node."""
    self._is_in[node] = True
    self._mass[node] = new_mass
    start = self._begun[node]
    self._note(traces.NodeKind.JOIN, node, new_mass, start, time)

  def _is_over(self) -> bool:
    """Whether nothing is left but failures, and nobody comes back to work."""
    return all(
      step == self._num_steps or until == np.inf
      for step, until in zip(self._step, self._until, strict=True)
    ) and all(kind <= GONE for _, _, kind, _ in self._heap)

  # --- Records.

  def _mix(
    self,
    node: int,
    time: float,
    start: float,
    others: list[_node_records.Snapshot],
    own_weight: float,
  ) -> None:
    """Changes a node's weights."""
    self._version[node] += 1
    mix = self._num_mixes[node]
    self._num_mixes[node] += 1
    for peer, version, step, weight in others:
      self._rows.append(
        (
          1,  # NodeKind.MIX
          node,
          peer,
          mix,
          self._step[node],
          self._version[node],
          version,
          step,
          own_weight,
          weight,
          self._mass[node],
          start,
          time,
        )
      )

  def _note(
    self,
    kind: traces.NodeKind,
    node: int,
    mass: float,
    start: float,
    end: float,
  ) -> None:
    """Writes down that a node came or went."""
    step, version = self._step[node], self._version[node]
    self._rows.append(
      (kind, node, -1, -1, step, version, -1, -1, 1.0, 0.0, mass, start, end)
    )

  def _note_lost(
    self,
    snapshot: _node_records.Snapshot,
    receiver: int,
    time: float,
    mass: float = 0.0,
    start: float | None = None,
  ) -> None:
    """Writes down a message that a dead node did not get."""
    sender, version, step, _ = snapshot
    start = time if start is None else start
    kind = traces.NodeKind.LOST
    self._rows.append(
      (
        *(kind, sender, receiver, -1, step, version, -1, -1),
        *(1.0, 0.0, mass, start, time),
      )
    )

  def _schedule(self, time: float, node: int, kind: int, data: Any) -> None:
    heapq.heappush(self._heap, (time, node, kind, data))
