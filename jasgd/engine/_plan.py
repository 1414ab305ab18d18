"""From the records of a trace to what is computed, one event at a time."""

from collections.abc import Callable
import dataclasses
from typing import Any

import numpy as np

from jasgd import protocols
from jasgd import traces

# The read clock of an event that reads no weights of the server.
NOTHING = -1


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
    read_clock: Of the weights that are read, or NOTHING.
    read_slot: Where those are.
    write_slot: Where those go that the update makes.
    time: When the server handled it.
    samples: Of all applied gradients so far, with this one.
    rate: Of the update, as a factor.
    ends: [updates + 1]: the events of update u are `ends[u]` to `ends[u + 1]`.
    num_slots: With the last.
    num_copies: Learners that have a copy of their own.
    has_rates: Whether there is a schedule; else all rates are 1.
    is_single: Whether every update is of one gradient.
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
  ends: np.ndarray
  num_slots: int
  num_copies: int
  has_rates: bool
  is_single: bool

  @property
  def num_updates(self) -> int:
    """How many updates there are."""
    return len(self.ends) - 1

  @property
  def has_copies(self) -> bool:
    """Whether learners step on copies of their own."""
    return self.num_copies > 0


def make_plan(
  trace: traces.Trace,
  *,
  num_samples: int,
  batch: int,
  get_rate: Callable[[float], float] | None = None,
) -> Plan:
  """Reads a trace.

  Args:
    trace: From its first update on.
    num_samples: An epoch.
    batch: Samples per minibatch, whatever the trace was simulated with.
    get_rate: From the epochs before an update to the factor of its rate.

  Returns:
    The plan.

  Raises:
    TraceError: if updates are missing, or a gradient was computed on weights
      that did not exist yet.
  """
  records = np.asarray(trace.records)[~trace.is_void]
  applied = _find_applied(records)
  has_copies = bool(np.any(records['kind'] == traces.Kind.FETCH))
  list_events = _list_segments if has_copies else _list_gradients
  columns = list_events(records, applied, trace.header)
  steps_per_push = int(trace.header.get('steps_per_push', 1))
  columns['samples'] = np.cumsum(columns['is_push']) * batch * steps_per_push
  ends = np.append(0, np.flatnonzero(columns['is_update']) + 1)
  read_slot, write_slot, num_slots = _allocate_slots(
    columns['read_clock'], ends
  )
  return Plan(
    **columns,
    read_slot=read_slot,
    write_slot=write_slot,
    rate=_get_rates(columns['samples'], ends, num_samples, get_rate),
    ends=ends,
    num_slots=num_slots,
    num_copies=traces.statistics.count_learners(trace) if has_copies else 0,
    has_rates=get_rate is not None,
    is_single=len(ends) - 1 == len(applied),
  )


def _find_applied(records: np.ndarray) -> np.ndarray:
  """The indices of the gradients that were applied, checked."""
  is_applied = (records['kind'] == traces.Kind.GRADIENT) & (
    records['fate'] == protocols.Fate.APPLIED
  )
  applied = np.flatnonzero(is_applied)
  if not len(applied):
    raise traces.TraceError('A trace without any update cannot be replayed.')
  clocks = records['apply_clock'][applied]
  jumps = np.diff(clocks, prepend=-1)
  # The first is at clock 0; after that an update goes on, or the next begins.
  is_bad = (jumps < 0) | (jumps > 1)
  is_bad[0] = clocks[0] != 0
  if np.any(is_bad):
    index = np.flatnonzero(is_bad)[0]
    raise traces.TraceError(
      'A trace is replayed from clock 0, in order and without gaps; record '
      f'{applied[index]} is of the update at clock {clocks[index]}.'
    )
  reads = records['read_clock'][applied]
  is_bad = (reads > clocks) | (reads < 0)
  if np.any(is_bad):
    index = np.flatnonzero(is_bad)[0]
    raise traces.TraceError(
      f'Record {applied[index]} was computed at clock {reads[index]} and '
      f'applied at clock {clocks[index]}: those weights did not exist yet.'
    )
  return applied


def _count_present(records: np.ndarray, header: dict[str, Any]) -> np.ndarray:
  """How many learners were there, at each record."""
  change = (records['kind'] == traces.Kind.JOIN).astype(int)
  change -= records['kind'] == traces.Kind.LEAVE
  first = int(header.get('num_learners') or records['learner'].max() + 1)
  return np.maximum(first + np.cumsum(change), 1)


def _list_gradients(
  records: np.ndarray, applied: np.ndarray, header: dict[str, Any]
) -> dict[str, np.ndarray]:
  """The events of a trace in which every gradient has weights of its own."""
  gradients = records[applied]
  clocks = gradients['apply_clock']
  steps_per_push = int(header.get('steps_per_push', 1))
  is_update = np.diff(clocks, append=clocks[-1] + 1) > 0
  # If what comes next saw the same clock, the update was not made by then.
  next_clock = np.append(records['arrive_clock'], clocks[-1] + 1)[applied + 1]
  size = len(applied)
  return {
    'learner': gradients['learner'],
    'step': gradients['step'] * steps_per_push,
    'num_steps': np.full(size, steps_per_push),
    'staleness': clocks - gradients['read_clock'],
    'is_push': np.ones(size, bool),
    'is_update': is_update,
    'is_alone': is_update & (next_clock == clocks),
    'is_reset': np.zeros(size, bool),
    'num_learners': _count_present(records, header)[applied],
    'read_clock': gradients['read_clock'],
    'time': gradients['arrive_time'],
  }


def _list_segments(
  records: np.ndarray, applied: np.ndarray, header: dict[str, Any]
) -> dict[str, np.ndarray]:
  """The events of a trace in which learners step on copies of the weights."""
  steps_per_push = int(header['steps_per_push'])
  num_learners = int(records['learner'].max()) + 1
  position = [0] * num_learners  # Minibatches that a learner has computed.
  gathered = [0] * num_learners  # Those of them since its last push.
  is_new = [True] * num_learners
  pushes = set(applied.tolist())
  rows = []
  for index, record in enumerate(records):
    learner = int(record['learner'])
    if record['kind'] == traces.Kind.JOIN:
      is_new[learner] = True
    elif record['kind'] == traces.Kind.FETCH:
      end = int(record['step'])
      first, is_reset = position[learner], is_new[learner]
      if is_reset:  # What it did in its last life is lost.
        first, gathered[learner], is_new[learner] = end, 0, False
      rows.append((index, first, end - first, False, is_reset))
      gathered[learner] += end - first
      position[learner] = end
    elif index in pushes:
      first = position[learner]
      num_steps = steps_per_push - gathered[learner]
      rows.append((index, first, num_steps, True, False))
      gathered[learner] = 0
      position[learner] = first + num_steps
  index, step, num_steps, is_push, is_reset = (
    np.array(column) for column in zip(*rows, strict=True)
  )
  chosen = records[index]
  return {
    'learner': chosen['learner'],
    'step': step,
    'num_steps': num_steps,
    'staleness': np.where(
      is_push, chosen['apply_clock'] - chosen['read_clock'], 0
    ),
    'is_push': is_push,
    'is_update': is_push,
    'is_alone': np.zeros(len(index), bool),
    'is_reset': is_reset,
    'num_learners': _count_present(records, header)[index],
    'read_clock': np.where(is_push, NOTHING, chosen['read_clock']),
    'time': chosen['arrive_time'],
  }


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
  """The factor of each event's update, by the samples applied before it."""
  if get_rate is None:
    return np.ones(len(samples))
  before = np.append(0, samples[ends[1:] - 1])[:-1]
  rates = np.array([get_rate(float(count) / num_samples) for count in before])
  sizes = np.diff(ends)
  rest = len(samples) - int(ends[-1])  # Fetches after the last update.
  return np.append(np.repeat(rates, sizes), np.ones(rest))
