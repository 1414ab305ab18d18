"""Elastic averaging: a centre that serves one node after another."""

from jasgd import gossip
from jasgd import traces
from jasgd.simulation import _network
from jasgd.simulation import _node_loop
from jasgd.simulation import _node_records


class ElasticLoop(_node_loop.NodeLoop):
  """A node sends its weights to the centre, which moves, and answers.

  All share the centre's link, one way and the other, and its time: first come,
  first served. The centre never dies, and what is on the way to it when a node
  dies still arrives. A joiner gets the weights of the centre, which then does
  not move.
  """

  def __init__(self, setup: _node_loop.Setup) -> None:
    """Starts all nodes at time 0."""
    super().__init__(setup)
    assert isinstance(setup.strategy, gossip.Elastic)
    network = setup.network
    self._rate = setup.strategy.rate
    self._link_time = network.link_time(network.bytes_per_push)
    self._turn = network.server_link_time(network.bytes_per_push)
    self._update_times = _network.iterate_update_times(network, setup.seed)
    self._in_free = self._out_free = self._centre_free = 0.0
    self._centre_version = 0
    self._handlers |= {
      _node_loop.READ: self._arrive,
      _node_loop.SERVED: self._serve,
      _node_loop.MIXED: self._finish_mix,
    }

  def _begin_mix(self, node: int, time: float) -> None:
    start = max(time + self._latency, self._in_free)
    self._in_free = start + self._turn
    sent = _node_records.Snapshot(
      node, self._version[node], self._step[node], self._rate
    )
    arrival = start + self._link_time
    data = (self._life[node], sent)
    self._schedule(arrival, node, _node_loop.READ, data)

  def _arrive(
    self, node: int, time: float, data: tuple[int, _node_records.Snapshot]
  ) -> None:
    """The weights of a node are at the centre, and wait for their turn."""
    done = max(time, self._centre_free) + next(self._update_times)
    self._centre_free = done
    self._schedule(done, node, _node_loop.SERVED, (*data, time))

  def _fetch(self, node: int, time: float, life: int) -> None:
    """A joiner's question waits too, but nothing is to be computed for it."""
    done = max(time, self._centre_free)
    self._schedule(done, node, _node_loop.SERVED, (life, None, time))

  def _serve(
    self,
    node: int,
    time: float,
    data: tuple[int, _node_records.Snapshot | None, float],
  ) -> None:
    """The centre has moved towards a node, and sends what it was before."""
    life, sent, arrived = data
    version = self._centre_version
    start = max(time, self._out_free)
    self._out_free = start + self._turn
    arrival = start + self._link_time + self._latency
    weight = 1.0 if sent is None else self._rate
    answer = _node_records.Snapshot(traces.CENTRE, version, version, weight)
    if sent is None:
      fetched = (life, answer, 0.0)  # Without any mass.
      self._schedule(arrival, node, _node_loop.FETCHED, fetched)
    else:
      self._note_move(sent, arrived, time)
      self._schedule(arrival, node, _node_loop.MIXED, (life, answer))

  def _finish_mix(
    self, node: int, time: float, data: tuple[int, _node_records.Snapshot]
  ) -> None:
    """The answer is there."""
    life, answer = data
    if life != self._life[node]:
      self._note_lost(answer, node, time)
      return
    self._mix(node, time, self._begun[node], [answer], 1 - self._rate)
    self._begin_step(node, time)

  def _note_move(
    self, sent: _node_records.Snapshot, start: float, end: float
  ) -> None:
    """Writes down that the centre has mixed: its steps are its moves."""
    mix = self._centre_version
    version = self._centre_version = mix + 1
    node, read_version, step, rate = sent
    self._rows.append(
      (
        *(1, traces.CENTRE, node, mix, version, version, read_version, step),
        *(1 - rate, rate, 0.0, start, end),
      )
    )
