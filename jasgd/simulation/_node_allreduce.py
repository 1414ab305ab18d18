"""All-reduce: nodes wait for each other, and for nobody who is gone."""

import heapq

from jasgd import traces
from jasgd.simulation import _node_loop
from jasgd.simulation import _node_records


class AllReduceLoop(_node_loop.NodeLoop):
  """All nodes that are in and have steps left average at once.

  If one dies while they do, the others begin again without it.
  """

  def __init__(self, setup: _node_loop.Setup) -> None:
    """Starts all nodes at time 0."""
    super().__init__(setup)
    self._expected = set(range(setup.num_nodes))
    self._at_barrier: set[int] = set()
    self._group: list[int] = []  # Those who are averaging now.
    self._num_begun = 0
    self._num_done = 0
    self._handlers[_node_loop.MIXED] = self._finish_mix

  def _begin_mix(self, node: int, time: float) -> None:
    self._at_barrier.add(node)
    self._begin_if_all_are_there(time)

  def _rest(self, node: int, time: float) -> None:
    self._expected.discard(node)
    self._begin_if_all_are_there(time)

  def _leave(self, node: int, time: float) -> None:
    self._expected.discard(node)
    self._at_barrier.discard(node)
    if node in self._group:
      self._group.remove(node)
      self._begin(time)
    self._begin_if_all_are_there(time)

  def _enter(self, node: int, time: float, new_mass: float) -> None:
    super()._enter(node, time, new_mass)
    self._expected.add(node)

  def _begin_if_all_are_there(self, time: float) -> None:
    if self._at_barrier and len(self._at_barrier) == len(self._expected):
      self._group, self._at_barrier = sorted(self._at_barrier), set()
      self._begin(time)

  def _begin(self, time: float) -> None:
    """Begins to average; what was under way is void."""
    self._num_begun += 1
    if self._group:
      end = time + self._measure_time(len(self._group))
      event = (end, self._group[0], _node_loop.MIXED, self._num_begun)
      heapq.heappush(self._heap, event)

  def _finish_mix(self, _: int, time: float, number: int) -> None:
    if number != self._num_begun:
      return
    group, self._group = self._group, []
    share = 1 / len(group)
    mean = _node_records.Snapshot(traces.ALL, self._num_done, -1, share)
    self._num_done += 1
    for node in group:
      self._mix(node, time, self._begun[node], [mean], share)
    for node in group:
      self._begin_step(node, time)

  def _measure_time(self, n: int) -> float:
    """The ring formula: 2 (n - 1) messages of 1/n of the weights each."""
    return 2 * (n - 1) * (self._latency + self._transfer / n)
