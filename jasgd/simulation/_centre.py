"""The centre of elastic averaging in virtual time."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

from jasgd import gossip
from jasgd import traces
from jasgd.simulation import _network
from jasgd.simulation import _rows

# Kinds of events, among those of `_peer_loop`.
AT_CENTRE, MOVED = 8, 9

_TAKEN = gossip.Outcome.TAKEN


class _Request(NamedTuple):
  """A force, or else a question, that waits for its turn at the centre."""

  node: int
  arrived: float
  life: int = 0
  answer_kind: int = 0  # Of a question: the kind of event that answers it.
  force: tuple[int, int, float] | None = None  # Version, step and rate.


class Centre:
  """Answers questions and adds forces, first come, first served.

  All nodes share the centre's link, each direction of it, and its time: adding
  a force takes `server_time`, an answer takes none. The centre never dies, and
  messages to it that are on the way when their sender dies still arrive.

  Args:
    network: Durations of messages and moves.
    seed: Seed of the moves' durations.
    schedule: Adds an event: `(time, node, kind, data)`.
    rows: Rows of all records, to be appended to.
  """

  def __init__(
    self,
    network: _network.Network,
    seed: int,
    schedule: Callable[[float, int, int, Any], None],
    rows: bytearray,
  ) -> None:
    self._schedule = schedule
    self._rows = rows
    self._latency = network.latency
    self._link_time = network.link_time(network.bytes_per_push)
    self._turn = network.server_link_time(network.bytes_per_push)
    self._update_times = _network.iterate_update_times(network, seed)
    self._in_free = self._out_free = 0.0
    self._queue: collections.deque[_Request] = collections.deque()
    self._is_moving = False
    self._version = 0

  def ask(self, node: int, time: float, life: int, answer_kind: int) -> None:
    """The question of a node has arrived."""
    self._wait(_Request(node, time, life, answer_kind))

  def send_force(
    self, node: int, time: float, version: int, step: int, rate: float
  ) -> None:
    """A node sends the force by which it has moved.

    Args:
      node: Number of the node.
      time: Time at which it sends.
      version: Version of its weights before it moved.
      step: Steps in its weights.
      rate: Rate of the force.
    """
    start = max(time + self._latency, self._in_free)
    self._in_free = start + self._turn
    arrival = start + self._link_time
    self._schedule(arrival, node, AT_CENTRE, (version, step, rate))

  def receive(
    self, node: int, time: float, force: tuple[int, int, float]
  ) -> None:
    """A force has arrived."""
    self._wait(_Request(node, time, force=force))

  def finish_move(self, _: int, time: float, request: _Request) -> None:
    """Records that the centre has moved: its steps are its moves."""
    assert request.force is not None
    read_version, step, rate = request.force
    version = self._version = self._version + 1
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
      self._is_moving = True
      done = time + next(self._update_times)
      # As node -1: at equal times, the centre comes first.
      self._schedule(done, -1, MOVED, request)

  def _answer(self, request: _Request, time: float) -> None:
    """Sends the weights as they are now."""
    start = max(time, self._out_free)
    self._out_free = start + self._turn
    arrival = start + self._link_time + self._latency
    version = self._version
    reply = gossip.Reply(gossip.CENTRE, _TAKEN, version, version)
    data = (request.life, [reply])
    self._schedule(arrival, request.node, request.answer_kind, data)
