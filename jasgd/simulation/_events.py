"""The event loop: a protocol, driven through virtual time.

Events at equal times are handled one by one, by learner. A learner has at most
one event under way: its gradient, on the way to the server.
"""

from collections.abc import Iterator, Sequence
import heapq
import itertools
from typing import Any

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _times

# What an event is about; at equal times and learner they come in this order.
_BACK, _GONE, _COMPUTED, _ARRIVED = range(4)

# What is written down of an event; the release time is kept apart, because it
# is known later.
_COLUMNS = (
  'kind',
  'fate',
  'learner',
  'step',
  'read_clock',
  'arrive_clock',
  'apply_clock',
  'start_time',
  'compute_time',
  'arrive_time',
)


def _iterate_update_times(
  network: _network.Network, seed: int
) -> Iterator[float]:
  """The durations of the server's updates, one after another."""
  time = network.server_time
  if not isinstance(time, _times.ComputeTime):
    return itertools.repeat(time / network.num_shards)
  blocks = (
    time.table(seed, 1000 * i, 1000, 1, stream=_times.SERVER)
    for i in itertools.count()
  )
  return (
    duration / network.num_shards
    for block in blocks
    for duration in block[:, 0].tolist()
  )


class EventLoop:
  """A simulation under way."""

  def __init__(
    self,
    protocol: protocols.Protocol,
    num_learners: int,
    compute: _times.ComputeTime,
    network: _network.Network,
    failures: Sequence[_failures.Failure],
    seed: int,
    overlap: bool,
  ) -> None:
    """Starts all learners at time 0."""
    self._protocol = protocol
    self._num_learners = num_learners
    self._compute = compute
    self._seed = seed
    self._overlap = overlap
    self._rows: list[list[float]] = []  # Of the table of durations, as needed.
    self._latency = network.latency
    self._push_time = network.link_time(network.bytes_per_push)
    self._pull_time = network.link_time(network.bytes_per_pull)
    self._push_turn = network.server_link_time(network.bytes_per_push)
    self._pull_turn = network.server_link_time(network.bytes_per_pull)
    self._update_times = _iterate_update_times(network, seed)
    self._is_free = network.is_free
    self._next_kind = _ARRIVED if network.is_free else _COMPUTED
    self._in_free = self._out_free = self._server_free = 0.0
    self._heap: list[tuple[float, int, int, int]] = []
    # Per learner: pushes made, durations used, steps since the last fetch, the
    # clock and the time of its weights, how long it computes, which life it is
    # in, and the record of the push that it waits for an answer to.
    self._step = [0] * num_learners
    self._num_used = [0] * num_learners
    self._since_fetch = [0] * num_learners
    self._read_clock = [0] * num_learners
    self._start = [0.0] * num_learners
    self._duration = [0.0] * num_learners
    self._life = [0] * num_learners
    self._pushed: dict[int, int] = {}
    self._records: list[tuple[Any, ...]] = []
    self._release_times: list[float] = []

    protocol.init(num_learners)
    inside = getattr(protocol, 'protocol', protocol).alive
    self._release(sorted(inside), 0.0)
    for time, learner, until in failures:
      heapq.heappush(self._heap, (time, learner, _GONE, 0))
      if until < np.inf:
        heapq.heappush(self._heap, (until, learner, _BACK, 0))

  def run(self, num_gradients: int) -> tuple[np.ndarray, list[list[float]]]:
    """Handles events until `num_gradients` gradients have arrived.

    Args:
      num_gradients: When to stop.

    Returns:
      The records, and [learner, step, read clock, start] of what is in flight.
    """
    num_arrived = 0
    heap, life_of = self._heap, self._life
    while heap and num_arrived < num_gradients:
      time, learner, kind, life = heapq.heappop(heap)
      if kind == _ARRIVED:
        if life == life_of[learner]:  # Or it died on the way.
          self._handle(learner, time)
          num_arrived += 1
      elif kind == _COMPUTED:
        if life == life_of[learner]:
          self._send(learner, time)
      elif kind == _GONE:
        self._lose(learner, time)
      else:
        self._welcome(learner, time)
    return self._finish()

  def _handle(self, learner: int, time: float) -> None:
    """A gradient has arrived: the protocol decides."""
    step, read_clock = self._step[learner], self._read_clock[learner]
    clock = self._protocol.clock
    fate, updates, released = self._protocol.on_push(learner, step, read_clock)
    self._step[learner] = step + 1
    now = time if self._is_free else self._serve(time, updates)
    self._pushed[learner] = len(self._records)
    self._records.append(
      (
        0,  # Kind.GRADIENT
        fate,
        learner,
        step,
        read_clock,
        clock,
        clock if fate == 0 else -1,  # Fate.APPLIED
        self._start[learner],
        self._duration[learner],
        time,
      )
    )
    self._release_times.append(np.nan)
    self._release(released, now)
    if self._overlap and learner in released and not self._since_fetch[learner]:
      # It has pulled before its own push was applied.
      self._read_clock[learner] = clock

  def _release(self, learners: Sequence[int], time: float) -> None:
    """Lets learners go on, with the newest weights or on their own copy."""
    protocol = self._protocol
    for learner in learners:
      index = self._pushed.pop(learner, None)
      if index is not None:
        self._release_times[index] = time
        since_fetch = self._since_fetch[learner] + protocol.steps_per_push
        self._since_fetch[learner] = since_fetch
        if since_fetch < protocol.steps_per_fetch:
          self._start[learner] = time
          self._begin(learner, time)
          continue
      self._since_fetch[learner] = 0
      self._read_clock[learner] = protocol.clock
      self._start[learner] = time
      self._begin(learner, time if self._is_free else self._pull(time))

  def _pull(self, time: float) -> float:
    """When the weights have arrived that are asked for at `time`."""
    start = max(time, self._out_free)
    self._out_free = start + self._pull_turn
    return start + self._pull_time + self._latency

  def _begin(self, learner: int, time: float) -> None:
    """A learner computes as many gradients as it will push at once."""
    first = self._num_used[learner]
    end = self._num_used[learner] = first + self._protocol.steps_per_push
    while end > len(self._rows):
      self._draw_rows()
    duration = self._rows[first][learner]
    for row in range(first + 1, end):
      duration += self._rows[row][learner]
    self._duration[learner] = duration
    heapq.heappush(
      self._heap,
      (time + duration, learner, self._next_kind, self._life[learner]),
    )

  def _draw_rows(self) -> None:
    """Draws some more rows of the table of durations."""
    num_rows = max(1, (1 << 16) // self._num_learners)
    table = self._compute.table(
      self._seed, len(self._rows), num_rows, self._num_learners
    )
    self._rows.extend(table.tolist())

  def _send(self, learner: int, time: float) -> None:
    """A gradient waits for its turn on the server's link, and is sent."""
    start = max(time + self._latency, self._in_free)
    self._in_free = start + self._push_turn
    event = (start + self._push_time, learner, _ARRIVED, self._life[learner])
    heapq.heappush(self._heap, event)

  def _serve(self, time: float, updates: bool) -> float:
    """When the server is done with what came at `time`: one at a time."""
    done = max(time, self._server_free)
    if updates:
      done += next(self._update_times)
      self._server_free = done
    return done

  def _lose(self, learner: int, time: float) -> None:
    """A learner dies, and what it was computing with it."""
    self._life[learner] += 1
    self._pushed.pop(learner, None)
    self._note(traces.Kind.LEAVE, learner, time)
    _, updates, released = self._protocol.on_leave(learner)
    self._release(released, self._serve(time, updates))

  def _welcome(self, learner: int, time: float) -> None:
    """A learner comes back."""
    self._note(traces.Kind.JOIN, learner, time)
    _, updates, released = self._protocol.on_join(learner)
    self._release(released, self._serve(time, updates))

  def _note(self, kind: traces.Kind, learner: int, time: float) -> None:
    """Writes down that a learner came or went."""
    clock, step = self._protocol.clock, self._step[learner]
    self._records.append(
      (kind, 0, learner, step, clock, clock, -1, time, 0.0, time)
    )
    self._release_times.append(time)

  def _finish(self) -> tuple[np.ndarray, list[list[float]]]:
    """The records as an array, and what is in flight."""
    records = np.zeros(len(self._records), traces.RECORD)
    columns = zip(*self._records, strict=True)
    for name, column in zip(_COLUMNS, columns, strict=False):
      records[name] = column
    records['release_time'] = self._release_times
    # Those on their way to the server, in this life.
    computing = {
      learner
      for _, learner, kind, life in self._heap
      if kind in (_COMPUTED, _ARRIVED) and life == self._life[learner]
    }
    in_flight = [
      [
        learner,
        self._step[learner],
        self._read_clock[learner],
        self._start[learner],
      ]
      for learner in sorted(computing)
    ]
    return records, in_flight
