"""Elastic averaging: a centre that is asked, and told of forces."""

import collections
from typing import NamedTuple

from jasgd import gossip
from jasgd import traces
from jasgd.simulation import _network
from jasgd.simulation import _node_loop
from jasgd.simulation import _node_records


class _Request(NamedTuple):
  """What waits for its turn at the centre: a force, or else a question."""

  node: int
  arrived: float
  life: int
  purpose: int  # Of a question: the event that the answer is.
  force: _node_records.Snapshot | None


class ElasticLoop(_node_loop.NodeLoop):
  """A node asks the centre, moves, and sends the force by which it has moved.

  It waits for the answer, and for nothing else: the centre adds a force when it
  arrives, and may have moved in between. So the sum of all copies is changed by
  gradients alone, and by what is on the way.

  All share the centre's link, one way and the other, and its time: first come,
  first served. Only to add a force takes `server_time`. The centre never dies,
  and what is on the way to it when a node dies still arrives. A joiner gets the
  weights of the centre, which does not move for that.
  """

  def __init__(self, setup: _node_loop.Setup) -> None:
    """Starts all nodes at time 0."""
    super().__init__(setup)
    assert isinstance(setup.strategy, gossip.Elastic)
    network = setup.network
    self._rate = setup.strategy.rate
    # Whether the next gradient is still of the weights before the mix.
    self._is_stale = setup.strategy.order == 'easgd'
    self._link_time = network.link_time(network.bytes_per_push)
    self._turn = network.server_link_time(network.bytes_per_push)
    self._update_times = _network.iterate_update_times(network, setup.seed)
    self._in_free = self._out_free = 0.0
    self._queue: collections.deque[_Request] = collections.deque()
    self._is_moving = False
    self._centre_version = 0
    self._handlers |= {
      _node_loop.READ: self._ask,
      _node_loop.MIXED: self._finish_mix,
      _node_loop.ARRIVED: self._receive,
      _node_loop.MOVED: self._finish_move,
    }

  # --- The node.

  def _begin_mix(self, node: int, time: float) -> None:
    arrival, life = time + self._latency, self._life[node]
    self._schedule(arrival, node, _node_loop.READ, life)

  def _finish_mix(
    self, node: int, time: float, data: tuple[int, _node_records.Snapshot]
  ) -> None:
    """The answer is there: the node moves, and goes on."""
    life, answer = data
    if life != self._life[node]:
      self._note_lost(answer, node, time)
      return
    before = self._version[node]
    force = _node_records.Snapshot(node, before, self._step[node], self._rate)
    self._mix(node, time, self._begun[node], [answer], 1 - self._rate)
    start = max(time + self._latency, self._in_free)
    self._in_free = start + self._turn
    arrival = start + self._link_time
    self._schedule(arrival, node, _node_loop.ARRIVED, force)
    self._begin_step(node, time)
    if self._is_stale:
      self._read_version[node] = before

  # --- The centre.

  def _ask(self, node: int, time: float, life: int) -> None:
    """The question of a node is there."""
    self._wait(_Request(node, time, life, _node_loop.MIXED, None))

  def _fetch(self, node: int, time: float, life: int) -> None:
    """That of a joiner is."""
    self._wait(_Request(node, time, life, _node_loop.FETCHED, None))

  def _receive(
    self, node: int, time: float, force: _node_records.Snapshot
  ) -> None:
    """A force is there."""
    self._wait(_Request(node, time, 0, 0, force))

  def _wait(self, request: _Request) -> None:
    self._queue.append(request)
    self._serve(request.arrived)

  def _serve(self, time: float) -> None:
    """Takes up what waits, until the centre has something to do."""
    while self._queue and not self._is_moving:
      request = self._queue.popleft()
      if request.force is None:
        self._answer(request, time)
        continue
      self._is_moving = True
      done = time + next(self._update_times)
      # Of no node's: at equal times, the centre comes first.
      self._schedule(done, -1, _node_loop.MOVED, request)

  def _answer(self, request: _Request, time: float) -> None:
    """The centre sends what it is now."""
    start = max(time, self._out_free)
    self._out_free = start + self._turn
    arrival = start + self._link_time + self._latency
    version, is_mix = self._centre_version, request.purpose == _node_loop.MIXED
    weight = self._rate if is_mix else 1.0
    answer = _node_records.Snapshot(traces.CENTRE, version, version, weight)
    # A joiner gets no mass.
    data = (request.life, answer) if is_mix else (request.life, answer, 0.0)
    self._schedule(arrival, request.node, request.purpose, data)

  def _finish_move(self, _: int, time: float, request: _Request) -> None:
    """Writes down that the centre has moved: its steps are its moves."""
    assert request.force is not None
    node, read_version, step, rate = request.force
    mix = self._centre_version
    version = self._centre_version = mix + 1
    self._rows.append(
      (
        *(1, traces.CENTRE, node, mix, version, version, read_version, step),
        *(1.0, rate, 0.0, request.arrived, time),
      )
    )
    self._is_moving = False
    self._serve(time)
