"""From the records of a trace to what is computed, one event at a time."""

from collections.abc import Callable
import dataclasses

import numpy as np

from jasgd import traces
from jasgd.engine import _events


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
  """What replay computes: arrays with an entry for each event.

  An event is a gradient that was applied. If learners fetch apart from their
  pushes (`has_copies`) they step on copies of the weights, and an event is the
  steps up to a push or to a fetch.

  A version of the weights is kept in a slot from the update that made it to the
  last event that reads it, so that there are as few slots as can be: never more
  than learners and one, nor than the largest staleness and one. Versions that
  nobody reads go to one more slot, the last.

  Attributes:
    learner: Who.
    step: The first minibatch.
    num_steps: How many minibatches.
    staleness: Of the push.
    is_push: Whether it ends with a push; otherwise with a fetch.
    is_update: Whether that push is the last of an update.
    is_alone: Whether that update came by itself later, as somebody left.
    is_reset: Whether the learner begins a new life: what it gathered is lost.
    num_learners: How many were there.
    read_clock: Of the weights that are read: by a push, those that the learner
      last got.
    read_slot: Where those are.
    write_slot: Where those go that the update makes.
    time: When the server handled it.
    samples: Of all applied gradients so far, with this one.
    rate: Of the update, as a factor.
    local_rate: Of the learner's own steps, as a factor: that of the update
      which was next when the weights were read that it steps from.
    ends: [updates + 1]: the events of update u are `ends[u]` to `ends[u + 1]`.
    num_slots: With the last.
    num_copies: Learners that have a copy of their own.
    has_rates: Whether there is a schedule; else all rates are 1.
    is_single: Whether every update is of one gradient.
    is_first: Whether the push is the first of its update.
    call: Updates with equal numbers above 0 were made by one call.
    num_devices: Over how many devices the learner spread a minibatch.
    wire_dtype: What float32 was rounded to in messages.
  """

  learner: np.ndarray
  step: np.ndarray
  num_steps: np.ndarray
  staleness: np.ndarray
  is_push: np.ndarray
  is_update: np.ndarray
  is_alone: np.ndarray
  is_reset: np.ndarray
  num_learners: np.ndarray
  read_clock: np.ndarray
  read_slot: np.ndarray
  write_slot: np.ndarray
  time: np.ndarray
  samples: np.ndarray
  rate: np.ndarray
  local_rate: np.ndarray
  is_first: np.ndarray
  call: np.ndarray
  num_devices: np.ndarray
  ends: np.ndarray
  num_slots: int
  num_copies: int
  has_rates: bool
  is_single: bool
  wire_dtype: str

  @property
  def num_updates(self) -> int:
    """How many updates there are."""
    return len(self.ends) - 1

  @property
  def has_copies(self) -> bool:
    """Whether learners step on copies of their own."""
    return self.num_copies > 0

  def find_call_end(self, clock: int) -> int:
    """The next clock, from this one on, that is not within a call."""
    calls = self.call[self.ends[1:] - 1]
    while 0 < clock < len(calls) and calls[clock - 1] == calls[clock] > 0:
      clock += 1
    return clock


def make_plan(
  trace: traces.Trace,
  *,
  num_samples: int,
  batch: int,
  get_rate: Callable[[float], float] | None = None,
  num_updates: int | None = None,
) -> Plan:
  """Reads a trace.

  Args:
    trace: From its first update on.
    num_samples: An epoch.
    batch: Samples per minibatch, whatever the trace was simulated with.
    get_rate: From the epochs before an update to the factor of its rate.
    num_updates: Where to stop; None: with the last update that was made.

  Returns:
    The plan.

  Raises:
    TraceError: if updates are missing, or a gradient was computed on weights
      that did not exist yet.
  """
  records = np.asarray(trace.records)[~trace.is_void]
  end = trace.end_clock if num_updates is None else num_updates
  applied = _events.find_applied(records, end)
  has_copies = bool(np.any(records['kind'] == traces.Kind.FETCH))
  list_columns = _events.list_segments if has_copies else _events.list_gradients
  columns = list_columns(records, applied, trace.header)
  steps_per_push = int(trace.header.get('steps_per_push', 1))
  columns['samples'] = np.cumsum(columns['is_push']) * batch * steps_per_push
  ends = np.append(0, np.flatnonzero(columns['is_update']) + 1)
  read_slot, write_slot, num_slots = _allocate_slots(
    columns['read_clock'], ends
  )
  rates = _get_rates(columns['samples'], ends, num_samples, get_rate)
  clock = np.cumsum(columns['is_update']) - columns['is_update']
  is_push = columns['is_push']
  # A push is the first of its update if no push came between.
  num_pushes = np.cumsum(is_push) - is_push
  is_first = num_pushes == num_pushes[ends[np.minimum(clock, len(ends) - 2)]]
  copy_clock = columns.pop('copy_clock')
  return Plan(
    **columns,
    read_slot=read_slot,
    write_slot=write_slot,
    rate=rates[clock],
    local_rate=rates[copy_clock],
    is_first=is_push & is_first,
    ends=ends,
    num_slots=num_slots,
    num_copies=traces.statistics.count_learners(trace) if has_copies else 0,
    has_rates=get_rate is not None,
    is_single=len(ends) - 1 == len(applied),
    wire_dtype=str(trace.header.get('wire_dtype', 'float32')),
  )


def _allocate_slots(
  read_clock: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
  """Gives every version that is read a slot for as long as it is needed."""
  num_events = len(read_clock)
  num_versions = max(len(ends), int(read_clock.max()) + 1)
  last_read = np.full(num_versions, -1)
  reads = np.flatnonzero(read_clock >= 0)
  last_read[read_clock[reads]] = reads
  is_last = np.zeros(num_events, bool)
  is_last[last_read[last_read >= 0]] = True
  slot_of = np.full(num_versions, -1)
  slot_of[0] = 0
  free: list[int] = []
  num_slots = 1
  start = 0
  for version, end in enumerate(ends[1:].tolist(), start=1):
    done = read_clock[start:end][is_last[start:end]]
    free.extend(slot_of[done].tolist())
    if last_read[version] >= 0:
      if not free:
        free.append(num_slots)
        num_slots += 1
      slot_of[version] = free.pop()
    start = end
  write_slot = np.full(num_events, -1)
  write_slot[ends[1:] - 1] = slot_of[1 : len(ends)]
  read_slot = np.where(read_clock >= 0, slot_of[read_clock], -1)
  # Nobody reads the last slot.
  return (
    np.where(read_slot < 0, num_slots, read_slot),
    np.where(write_slot < 0, num_slots, write_slot),
    num_slots + 1,
  )


def _get_rates(
  samples: np.ndarray,
  ends: np.ndarray,
  num_samples: int,
  get_rate: Callable[[float], float] | None,
) -> np.ndarray:
  """The factor at each clock, by the samples applied before; and at the end."""
  if get_rate is None:
    return np.ones(len(ends))
  before = np.append(0, samples[ends[1:] - 1])
  return np.array([get_rate(float(count) / num_samples) for count in before])
