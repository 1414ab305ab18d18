"""The event loop: a protocol, driven through virtual time.

Events at equal times are handled one by one, by learner. A learner has at most
one event under way: its gradient, or its wish for weights, on the way to the
server.
"""

import collections
from collections.abc import Iterable, Sequence
import heapq
import itertools

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _columns
from jasgd.simulation import _durations
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _times

# What an event is about; at equal times and learner they come in this order.
_BACK, _GONE, _COMPUTED, _ASKED, _ARRIVED = range(5)

_Event = tuple[float, int, int, int]  # Time, learner, what, which life.

# At hand without a look into a module: they are needed for every gradient.
_GRADIENT = int(traces.Kind.GRADIENT)
_NOT_KNOWN = float('nan')


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
    self._durations = _durations.Durations(compute, seed, num_learners)
    self._overlap = overlap
    # Whether each push is of one step, on weights of its own.
    self._is_simple = protocol.steps_per_push == protocol.steps_per_fetch == 1
    self._has_fetches = protocol.steps_per_fetch != protocol.steps_per_push
    self._latency = network.latency
    self._push_time = network.link_time(network.bytes_per_push)
    self._pull_time = network.link_time(network.bytes_per_pull)
    self._push_turn = network.server_link_time(network.bytes_per_push)
    self._pull_turn = network.server_link_time(network.bytes_per_pull)
    self._update_times = _network.iterate_update_times(network, seed)
    self._is_free = network.is_free
    self._now = 0.0  # When the event was that is being handled.
    self._in_free = self._out_free = self._server_free = 0.0
    self._heap: list[_Event] = []
    # Pushes on the server's link. They arrive in the order in which they got
    # their turns, so that no heap is needed to sort them.
    self._line: collections.deque[_Event] = collections.deque()
    # Per learner: pushes made; steps in all, since the last fetch, and since
    # the last push; the clock of its weights (-1: it has none), and that before
    # its last push;
    # when it began its gradient, for how long it computes on it, and when that
    # is done (never, if it does not); which life it is in; and the record of
    # the push that it waits for an answer to.
    self._step = [0] * num_learners
    self._num_computed = [0] * num_learners
    self._since_fetch = [0] * num_learners
    self._since_push = [0] * num_learners
    self._read_clock = [-1] * num_learners
    self._early_clock = [0] * num_learners
    self._start = [0.0] * num_learners
    self._duration = [0.0] * num_learners
    self._done_at = [np.inf] * num_learners
    self._life = [0] * num_learners
    self._pushed = [-1] * num_learners
    # (learner, life) -> step, read clock, start and duration of the gradient
    # that was on its way when the learner died.
    self._orphans: dict[tuple[int, int], tuple[int, int, float, float]] = {}
    self._columns = _columns.Columns()

    protocol.init(num_learners)
    self._release(sorted(protocol.inside), 0.0)
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
    heap, line, life_of = self._heap, self._line, self._life
    while num_arrived < num_gradients:
      if line and (not heap or line[0] < heap[0]):
        time, learner, kind, life = line.popleft()
      elif heap:
        time, learner, kind, life = heapq.heappop(heap)
      else:
        break  # Everybody is gone for good.
      self._now = time
      if kind == _ARRIVED:
        if life == life_of[learner]:
          self._handle(learner, time)
          num_arrived += 1
        elif (learner, life) in self._orphans:
          self._drop_orphan(learner, life, time)
          num_arrived += 1
      elif kind == _GONE:
        self._lose(learner, time)
      elif kind == _BACK:
        self._welcome(learner, time)
      elif life == life_of[learner]:  # Or it has died since.
        if kind == _COMPUTED:
          self._send(learner, time)
        else:
          # The weights of this clock are there once the server is done.
          clock = self._protocol.clock
          self._give_weights(learner, self._serve(time, False), clock)
    return self._columns.finish(), self._list_in_flight()

  # --- What the server does.

  def _handle(self, learner: int, time: float) -> None:
    """A gradient has arrived: the protocol decides."""
    step, read_clock = self._step[learner], self._read_clock[learner]
    clock = self._protocol.clock
    fate, updates, released = self._protocol.on_push(learner, step, read_clock)
    assert fate is not None  # A push has one.
    self._step[learner] = step + 1
    self._early_clock[learner] = clock
    now = time if self._is_free else self._serve(time, updates)
    columns = self._columns
    self._pushed[learner] = len(columns.release_time)
    columns.append(
      _GRADIENT,
      fate,
      learner,
      step,
      read_clock,
      clock,
      self._start[learner],
      self._duration[learner],
      time,
      _NOT_KNOWN,
    )
    self._release(released, now)

  def _serve(self, time: float, updates: bool) -> float:
    """When the server is done with what came at `time`: one at a time."""
    done = max(time, self._server_free)
    if updates:
      done += next(self._update_times)
      self._server_free = done
    return done

  def _release(self, learners: Iterable[int], time: float) -> None:
    """Lets learners go on, with the newest weights or on their own copy."""
    protocol, pushed = self._protocol, self._pushed
    for learner in learners:
      self._start[learner] = time
      self._duration[learner] = 0.0
      self._since_push[learner] = 0
      index, clock = pushed[learner], protocol.clock
      if index >= 0:
        self._columns.release_time[index] = time
        pushed[learner] = -1
        if self._overlap:  # It has pulled before its own push was applied.
          clock = self._early_clock[learner]
        if self._has_fetches and (
          self._since_fetch[learner] < protocol.steps_per_fetch
        ):
          self._begin(learner, time)
          continue
      self._give_weights(learner, time, clock)

  def _give_weights(self, learner: int, time: float, clock: int) -> None:
    """A learner gets the weights of a clock, and begins once it has them."""
    self._read_clock[learner] = clock
    self._since_fetch[learner] = 0
    if self._has_fetches:
      step = self._num_computed[learner]
      self._note(traces.Kind.FETCH, learner, step, clock, time)
    self._begin(learner, time if self._is_free else self._pull(time))

  def _pull(self, time: float) -> float:
    """When the weights have arrived that the server sends off at `time`."""
    start = max(time, self._out_free)
    self._out_free = start + self._pull_turn
    return start + self._pull_time + self._latency

  # --- What a learner does.

  def _begin(self, learner: int, time: float) -> None:
    """A learner computes until it pushes, or wants new weights before that."""
    duration = self._durations.take(learner)
    is_push = True
    if not self._is_simple:
      for _ in range(self._advance(learner) - 1):
        duration += self._durations.take(learner)
      is_push = self._since_push[learner] == self._protocol.steps_per_push
    self._duration[learner] += duration
    end = time + duration
    self._done_at[learner] = end if is_push else np.inf
    if not is_push:
      kind, end = _ASKED, end + self._latency
    elif self._push_turn:
      kind = _COMPUTED
    else:  # No push waits for another: it is known when this one arrives.
      kind, end = _ARRIVED, end + self._latency + self._push_time
    heapq.heappush(self._heap, (end, learner, kind, self._life[learner]))

  def _advance(self, learner: int) -> int:
    """Counts the steps up to the next push or fetch, and gives their number."""
    num_steps = min(
      self._protocol.steps_per_push - self._since_push[learner],
      self._protocol.steps_per_fetch - self._since_fetch[learner],
    )
    self._since_push[learner] += num_steps
    self._since_fetch[learner] += num_steps
    self._num_computed[learner] += num_steps
    return num_steps

  def _send(self, learner: int, time: float) -> None:
    """A gradient waits for its turn on the server's link, and is sent."""
    start = max(time + self._latency, self._in_free)
    self._in_free = start + self._push_turn
    self._line.append(
      (start + self._push_time, learner, _ARRIVED, self._life[learner])
    )

  # --- Who comes and goes.

  def _lose(self, learner: int, time: float) -> None:
    """A learner dies, and what it was computing with it."""
    lost_clock = self._read_clock[learner]  # Of the weights it computed on.
    if self._pushed[learner] >= 0:
      lost_clock = -1  # It was waiting.
    elif self._done_at[learner] < time:
      # Its gradient is under way, and will find it gone.
      lost_clock = -1
      self._orphans[learner, self._life[learner]] = (
        self._step[learner],
        self._read_clock[learner],
        self._start[learner],
        self._duration[learner],
      )
      self._step[learner] += 1
    self._life[learner] += 1
    self._pushed[learner] = self._read_clock[learner] = -1
    self._done_at[learner] = np.inf
    self._note(
      traces.Kind.LEAVE, learner, self._step[learner], lost_clock, time
    )
    _, updates, released = self._protocol.on_leave(learner)
    self._release(released, self._serve(time, updates))

  def _welcome(self, learner: int, time: float) -> None:
    """A learner comes back."""
    step, clock = self._step[learner], self._protocol.clock
    self._note(traces.Kind.JOIN, learner, step, clock, time)
    _, updates, released = self._protocol.on_join(learner)
    self._release(released, self._serve(time, updates))

  def _drop_orphan(self, learner: int, life: int, time: float) -> None:
    """A gradient arrives whose learner is gone."""
    step, read_clock, start, duration = self._orphans.pop((learner, life))
    self._columns.append(
      _GRADIENT,
      protocols.Fate.DROPPED_GONE,
      learner,
      step,
      read_clock,
      self._protocol.clock,
      start,
      duration,
      time,
      _NOT_KNOWN,
    )

  # --- What is written down.

  def _note(
    self, kind: int, learner: int, step: int, read_clock: int, time: float
  ) -> None:
    """Writes down what is no gradient, and took the server until `time`."""
    now, clock = self._now, self._protocol.clock
    self._columns.append(
      kind, 0, learner, step, read_clock, clock, now, 0.0, now, time
    )

  def _list_in_flight(self) -> list[list[float]]:
    """[learner, step, read clock, start] of what the server has not got yet."""
    computing = {
      learner
      for _, learner, kind, life in itertools.chain(self._heap, self._line)
      if kind >= _COMPUTED and life == self._life[learner]
    }
    books = (self._step, self._read_clock, self._start)
    rows = [
      [learner, *(book[learner] for book in books)] for learner in computing
    ]
    # What is under way of learners that are dead, or in another life.
    rows += [
      [learner, *orphan[:3]] for (learner, _), orphan in self._orphans.items()
    ]
    return sorted(rows)
