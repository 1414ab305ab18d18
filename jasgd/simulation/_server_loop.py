"""The event loop of a server: a protocol, driven through virtual time.

Events at equal times are handled one by one, in the order of learners. A
learner has at most one event under way: its gradient, or its request for
weights, on the way to the server.
"""

import collections
from collections.abc import Iterable, Sequence
import heapq
import itertools
import struct

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _rows
from jasgd.simulation import _times

# Kinds of events, in the order in which they are handled at equal times and
# learners.
_BACK, _GONE, _COMPUTED, _ASKED, _ARRIVED = range(5)

# Time, learner, kind, and life of the learner: the number of its deaths so far.
_Event = tuple[float, int, int, int]

_LAYOUT = _rows.Layout(
  (
    *('kind', 'fate', 'updates', 'worker', 'step', 'read_version', 'version'),
    *('start_time', 'compute_time', 'end_time', 'release_time'),
  )
)

# Looked up once, not for every gradient.
_PUSH = int(traces.Kind.PUSH)
_NOT_KNOWN = float('nan')
_pack = _LAYOUT.pack
# The release time is the last column of a row, which is filled in later.
_set_time = struct.Struct('<d').pack_into
_RELEASE_TIME = _LAYOUT.size - struct.calcsize('<d')


class ServerLoop:
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
    self._durations = _times.Durations(compute, seed, num_learners)
    self._overlap = overlap
    # Whether each push is of one step, on weights of its own.
    self._is_simple = protocol.steps_per_push == protocol.steps_per_fetch == 1
    self._has_fetches = protocol.steps_per_fetch != protocol.steps_per_push
    self._steps_per_push = protocol.steps_per_push
    self._latency = network.latency
    self._push_time = network.link_time(network.bytes_per_push)
    self._pull_time = network.link_time(network.bytes_per_pull)
    self._push_turn = network.server_link_time(network.bytes_per_push)
    self._pull_turn = network.server_link_time(network.bytes_per_pull)
    self._update_times = _network.iterate_update_times(network, seed)
    self._is_free = network.is_free
    self._now = 0.0  # Time of the event that is being handled.
    self._in_free = self._out_free = self._server_free = 0.0
    self._heap: list[_Event] = []
    # Pushes on the server's link. They arrive in the order of their turns, so
    # that no heap is needed to sort them.
    self._line: collections.deque[_Event] = collections.deque()
    # An entry for each learner:
    self._step = [0] * num_learners  # Pushes made.
    self._num_computed = [0] * num_learners  # Steps in all.
    self._since_fetch = [0] * num_learners  # Steps since the last fetch.
    self._since_push = [0] * num_learners  # Steps since the last push.
    self._read_clock = [-1] * num_learners  # Clock of its weights; -1: none.
    self._early_clock = [0] * num_learners  # Clock just before its last push.
    self._start = [0.0] * num_learners  # Start of its gradient.
    self._duration = [0.0] * num_learners  # Time that the gradient takes.
    self._done_at = [np.inf] * num_learners  # Its end; infinity: no push.
    self._life = [0] * num_learners  # Number of its deaths.
    # Place in the rows of its unanswered push; -1: there is none.
    self._pushed = [-1] * num_learners
    # (learner, life) -> step, read clock, start and duration of the gradient
    # that was on its way when the learner died.
    self._orphans: dict[tuple[int, int], tuple[int, int, float, float]] = {}
    self._rows = bytearray()

    protocol.init(num_learners)
    self._release(sorted(protocol.inside), 0.0)
    for time, learner, until in failures:
      heapq.heappush(self._heap, (time, learner, _GONE, 0))
      if until < np.inf:
        heapq.heappush(self._heap, (until, learner, _BACK, 0))

  def run(self, num_gradients: int) -> tuple[np.ndarray, list[list[float]]]:
    """Handles events until `num_gradients` gradients have arrived.

    Args:
      num_gradients: Number of gradients to handle.

    Returns:
      The records, and rows for the header's `in_flight`.
    """
    num_arrived = 0
    heap, line, life_of = self._heap, self._line, self._life
    while num_arrived < num_gradients:
      if line and (not heap or line[0] < heap[0]):
        time, learner, kind, life = line.popleft()
      elif heap:
        time, learner, kind, life = heapq.heappop(heap)
      else:
        break  # All learners are gone for good.
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
      elif life == life_of[learner]:  # Otherwise it has died since.
        if kind == _COMPUTED:
          self._send(learner, time)
        else:
          # The server sends these weights when its update under way is done.
          clock = self._protocol.clock
          self._give_weights(learner, self._serve(time, False), clock)
    records = _LAYOUT.make_records(self._rows)
    records['replica'] = traces.SERVER
    return records, self._list_in_flight()

  # --- The server.

  def _handle(self, learner: int, time: float) -> None:
    """A gradient has arrived: the protocol decides."""
    step, read_clock = self._step[learner], self._read_clock[learner]
    clock = self._protocol.clock
    fate, updates, released = self._protocol.on_push(learner, step, read_clock)
    assert fate is not None  # Every push has a fate.
    # Before `_count_minibatches`, which includes this gradient.
    self._step[learner] = step + 1
    self._early_clock[learner] = clock
    now = time if self._is_free else self._serve(time, updates)
    self._pushed[learner] = len(self._rows)
    self._rows += _pack(
      _PUSH,
      fate,
      updates,
      learner,
      self._count_minibatches(learner),
      read_clock,
      clock + updates,
      self._start[learner],
      self._duration[learner],
      time,
      _NOT_KNOWN,
    )
    self._release(released, now)

  def _serve(self, time: float, updates: bool) -> float:
    """The time at which the server, which may be busy, has done a request."""
    done = max(time, self._server_free)
    if updates:
      done += next(self._update_times)
      self._server_free = done
    return done

  def _release(self, learners: Iterable[int], time: float) -> None:
    """Lets learners go on, with the newest weights or their own replica."""
    protocol, pushed = self._protocol, self._pushed
    for learner in learners:
      self._start[learner] = time
      self._duration[learner] = 0.0
      self._since_push[learner] = 0
      place, clock = pushed[learner], protocol.clock
      if place >= 0:
        _set_time(self._rows, place + _RELEASE_TIME, time)
        pushed[learner] = -1
        if self._overlap:  # It pulled before its own push was applied.
          clock = self._early_clock[learner]
        if self._has_fetches and (
          self._since_fetch[learner] < protocol.steps_per_fetch
        ):
          self._begin(learner, time)
          continue
      self._give_weights(learner, time, clock)

  def _give_weights(self, learner: int, time: float, clock: int) -> None:
    """Sends the weights of a clock; the learner begins when it has them."""
    self._read_clock[learner] = clock
    self._since_fetch[learner] = 0
    if self._has_fetches:
      step = self._num_computed[learner]
      self._note(traces.Kind.FETCH, False, learner, step, clock, time)
    self._begin(learner, time if self._is_free else self._pull(time))

  def _pull(self, time: float) -> float:
    """The time at which weights arrive that the server sends at `time`."""
    start = max(time, self._out_free)
    self._out_free = start + self._pull_turn
    return start + self._pull_time + self._latency

  # --- A learner.

  def _begin(self, learner: int, time: float) -> None:
    """A learner computes until its next push or fetch, whichever is first."""
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
    else:  # Pushes do not wait for each other: the arrival is already known.
      kind, end = _ARRIVED, end + self._latency + self._push_time
    heapq.heappush(self._heap, (end, learner, kind, self._life[learner]))

  def _advance(self, learner: int) -> int:
    """Counts the steps up to the next push or fetch; returns their number."""
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

  # --- Deaths and returns.

  def _lose(self, learner: int, time: float) -> None:
    """A learner dies, and its unfinished gradient is lost."""
    lost_clock = self._read_clock[learner]  # Clock of its current weights.
    if self._pushed[learner] >= 0:
      lost_clock = -1  # It was waiting for the server.
    elif self._done_at[learner] < time:
      # Its gradient is on the way, and will be dropped when it arrives.
      lost_clock = -1
      self._step[learner] += 1
      self._orphans[learner, self._life[learner]] = (
        self._count_minibatches(learner),
        self._read_clock[learner],
        self._start[learner],
        self._duration[learner],
      )
    self._life[learner] += 1
    self._pushed[learner] = self._read_clock[learner] = -1
    self._done_at[learner] = np.inf
    _, updates, released = self._protocol.on_leave(learner)
    step = self._count_minibatches(learner)
    self._note(traces.Kind.LEAVE, updates, learner, step, lost_clock, time)
    self._release(released, self._serve(time, updates))

  def _welcome(self, learner: int, time: float) -> None:
    """A learner comes back."""
    _, updates, released = self._protocol.on_join(learner)
    step = self._count_minibatches(learner)
    self._note(traces.Kind.JOIN, updates, learner, step, 0, time)
    self._release(released, self._serve(time, updates))

  def _drop_orphan(self, learner: int, life: int, time: float) -> None:
    """Drops a gradient that arrives after its learner has died."""
    step, read_clock, start, duration = self._orphans.pop((learner, life))
    self._rows += _pack(
      _PUSH,
      protocols.Fate.DROPPED_GONE,
      False,
      learner,
      step,
      read_clock,
      self._protocol.clock,
      start,
      duration,
      time,
      _NOT_KNOWN,
    )

  # --- Records.

  def _count_minibatches(self, learner: int) -> int:
    """Minibatches of a learner up to its last push, or its last fetch."""
    if self._has_fetches:
      return self._num_computed[learner]
    # Without fetches, a learner that comes back repeats the lost minibatches.
    return self._step[learner] * self._steps_per_push

  def _note(
    self,
    kind: int,
    updates: bool,
    learner: int,
    step: int,
    read_version: int,
    time: float,
  ) -> None:
    """Records an event other than a gradient, answered at `time`."""
    now, version = self._now, self._protocol.clock
    self._rows += _pack(
      *(kind, 0, updates, learner, step, read_version, version),
      *(now, 0.0, now, time),
    )

  def _list_in_flight(self) -> list[list[float]]:
    """[worker, step, read version, start] of gradients not received yet."""
    computing = {
      learner
      for _, learner, kind, life in itertools.chain(self._heap, self._line)
      if kind >= _COMPUTED and life == self._life[learner]
    }
    rows = [
      [
        learner,
        self._num_computed[learner]
        if self._has_fetches
        else (self._step[learner] + 1) * self._steps_per_push,
        self._read_clock[learner],
        self._start[learner],
      ]
      for learner in computing
    ]
    # Gradients on the way of learners that have died since.
    rows += [
      [learner, *orphan[:3]] for (learner, _), orphan in self._orphans.items()
    ]
    return sorted(rows)
