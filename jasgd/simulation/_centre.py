"""The centre of elastic averaging in virtual time."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

from jasgd import gossip
from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _network
from jasgd.simulation import _rows

# Kinds of events, beside those of `_peer_loop`.
AT_CENTRE, MOVED = 8, 9

_TAKEN = gossip.Outcome.TAKEN


class _Request(NamedTuple):
  """A force or a question that waits for its turn at the centre."""

  node: int
  arrived: float
  life: int = 0
  answer_kind: int = 0  # Question: the kind of event that answers it.
  force: 'Force | None' = None


class Force(NamedTuple):
  """A force by which a node has moved.

  Attributes:
    version: Version of the node's weights before it moved.
    step: Steps in its weights.
    rate: Rate of the force.
    read_version: Version of the centre's weights that the node was given.
  """

  version: int
  step: int
  rate: float
  read_version: int


class Centre:
  """Answers questions and adds forces, first come, first served.

  As in a real centre, a protocol decides whether it moves by a force; a force
  that it refuses is recorded as lost.

  All nodes share the centre's link, each direction of it, and its time: adding
  a force takes `server_time`, an answer takes none. The centre never dies, and
  messages to it that are on the way when their sender dies still arrive.

  Args:
    protocol: State machine of the centre, after its start. Its clock is the
      version of the weights.
    network: Durations of messages and moves.
    seed: Seed of the moves' durations.
    schedule: Adds an event: `(time, node, kind, data)`.
    rows: Rows of all records, to be appended to.
  """

  def __init__(
    self,
    protocol: protocols.Protocol,
    network: _network.Network,
    seed: int,
    schedule: Callable[[float, int, int, Any], None],
    rows: bytearray,
  ) -> None:
    self._protocol = protocol
    self._schedule = schedule
    self._rows = rows
    self._latency = network.latency
    self._link_time = network.link_time(network.bytes_per_push)
    self._turn = network.server_link_time(network.bytes_per_push)
    self._update_times = _network.iterate_update_times(network, seed)
    self._in_free = self._out_free = 0.0
    self._queue: collections.deque[_Request] = collections.deque()
    self._is_moving = False

  def ask(self, node: int, time: float, life: int, answer_kind: int) -> None:
    """The question of a node has arrived."""
    self._wait(_Request(node, time, life, answer_kind))

  def send_force(self, node: int, time: float, force: Force) -> None:
    """A node sends the force by which it has moved."""
    start = max(time + self._latency, self._in_free)
    self._in_free = start + self._turn
    arrival = start + self._link_time
    self._schedule(arrival, node, AT_CENTRE, force)

  def receive(self, node: int, time: float, force: Force) -> None:
    """A force has arrived."""
    self._wait(_Request(node, time, force=force))

  def leave(self, node: int) -> None:
    """A node has died: it joins with its next force."""
    if node in self._protocol.alive:
      self._protocol.on_leave(node)

  def finish_move(self, _: int, time: float, request: _Request) -> None:
    """Records that the centre has moved: its steps are its moves."""
    assert request.force is not None
    read_version, step, rate, _ = request.force
    version = self._protocol.clock
    self._rows += _rows.pack(
      *(traces.Kind.MOVE, traces.SERVER, request.node, 0, version, version),
      *(read_version, step, 1.0, rate, 0.0, request.arrived, time),
    )
    self._is_moving = False
    self._serve(time)

  def _wait(self, request: _Request) -> None:
    self._queue.append(request)
    self._serve(request.arrived)

  def _serve(self, time: float) -> None:
    """Handles waiting requests, until the centre is busy with a move."""
    while self._queue and not self._is_moving:
      request = self._queue.popleft()
      if request.force is None:
        self._answer(request, time)
        continue
      if not self._takes(request.node, request.force):
        self._rows += _rows.pack_lost(
          request.node, traces.SERVER, request.force, request.arrived, time
        )
        continue
      self._is_moving = True
      done = time + next(self._update_times)
      # With the number -1 the centre comes first at equal times.
      self._schedule(done, -1, MOVED, request)

  def _takes(self, node: int, force: Force) -> bool:
    """Lets the protocol decide on a force; a node joins with its first one."""
    if node not in self._protocol.alive:
      self._protocol.on_join(node)
    return self._protocol.on_push(node, force.step, force.read_version).updates

  def _answer(self, request: _Request, time: float) -> None:
    """Sends the weights as they are now."""
    start = max(time, self._out_free)
    self._out_free = start + self._turn
    arrival = start + self._link_time + self._latency
    version = self._protocol.clock
    reply = gossip.Reply(gossip.CENTRE, _TAKEN, version, version)
    data = (request.life, [reply])
    self._schedule(arrival, request.node, request.answer_kind, data)
