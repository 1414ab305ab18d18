"""The events of a plan, from the records of a trace."""

from typing import Any

import numpy as np

from jasgd import protocols
from jasgd import traces


def find_applied(records: np.ndarray, end: int | None) -> np.ndarray:
  """The indices of the gradients of updates before `end`, checked."""
  is_applied = (records['kind'] == traces.Kind.GRADIENT) & (
    records['fate'] == protocols.Fate.APPLIED
  )
  if end is not None:
    is_applied &= records['apply_clock'] < end
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
  first = header.get('num_present', header.get('num_learners'))
  if first is None:
    first = records['learner'].max() + 1
  return np.maximum(int(first) + np.cumsum(change), 1)


def _count_devices(records: np.ndarray) -> np.ndarray:
  """Over how many devices the learner of each record spreads a minibatch."""
  counts = np.ones(len(records), int)
  is_join = records['kind'] == traces.Kind.JOIN
  if np.any(is_join & (records['call'] > 1)):
    for index in np.flatnonzero(is_join):
      is_later = records['learner'] == records['learner'][index]
      is_later[:index] = False
      counts[is_later] = max(1, records['call'][index])
  return counts


def list_gradients(
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
    'copy_clock': gradients['read_clock'],
    'call': gradients['call'],
    'num_devices': _count_devices(records)[applied],
    'time': gradients['arrive_time'],
  }


def list_segments(
  records: np.ndarray, applied: np.ndarray, header: dict[str, Any]
) -> dict[str, np.ndarray]:
  """The events of a trace in which learners step on copies of the weights."""
  steps_per_push = int(header['steps_per_push'])
  num_learners = int(records['learner'].max()) + 1
  position = [0] * num_learners  # Minibatches that a learner has computed.
  gathered = [0] * num_learners  # Those of them since its last push.
  is_new = [True] * num_learners
  copy_clock = [0] * num_learners  # Of the weights that it steps from.
  pushes = set(applied.tolist())
  end_clock = int(records['apply_clock'][applied[-1]]) + 1
  rows = []
  for index, record in enumerate(records):
    learner = int(record['learner'])
    is_fetch = record['kind'] == traces.Kind.FETCH
    if is_fetch and record['read_clock'] > end_clock:  # Not asked for.
      break
    if record['kind'] == traces.Kind.JOIN:
      is_new[learner] = True
    elif is_fetch:
      end = int(record['step'])
      first, is_reset = position[learner], is_new[learner]
      if is_reset:  # What it did in its last life is lost.
        first, gathered[learner], is_new[learner] = end, 0, False
      clock = copy_clock[learner]
      rows.append((index, first, end - first, False, is_reset, clock))
      copy_clock[learner] = int(record['read_clock'])
      gathered[learner] += end - first
      position[learner] = end
    elif index in pushes:
      first = position[learner]
      num_steps = steps_per_push - gathered[learner]
      clock = copy_clock[learner]
      rows.append((index, first, num_steps, True, False, clock))
      gathered[learner] = 0
      position[learner] = first + num_steps
  index, step, num_steps, is_push, is_reset, clock = (
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
    'read_clock': chosen['read_clock'],
    'copy_clock': clock,
    'call': chosen['call'],
    'num_devices': _count_devices(records)[index],
    'time': chosen['arrive_time'],
  }


def count_devices(trace: traces.Trace) -> int:
  """The most devices that a learner spread a minibatch over.

  Args:
    trace: Of a real run, or of a simulated one, where that is 1.

  Returns:
    How many devices exact replay needs.

  Examples:
    >>> from jasgd import engine, traces
    >>> engine.count_devices(traces.Trace(traces.make_records(kind=1, call=2)))
    2
  """
  records = np.asarray(trace.records)[~trace.is_void]
  joins = records[records['kind'] == traces.Kind.JOIN]
  return int(joins['call'].max(initial=1))


def read_digests(trace: traces.Trace) -> dict[int, int]:
  """The digests of weights that a server wrote into its trace.

  Args:
    trace: Of a real run.

  Returns:
    From a clock to what `Replay.get_digest` must say there.

  Examples:
    >>> from jasgd import engine, traces
    >>> records = traces.make_records(apply_clock=[0, 1], digest=[0, 77])
    >>> engine.read_digests(traces.Trace(records))
    {2: 77}
  """
  records = np.asarray(trace.records)[~trace.is_void]
  is_known = (
    (records['kind'] == traces.Kind.GRADIENT)
    & (records['fate'] == protocols.Fate.APPLIED)
    & (records['digest'] != 0)
  )
  clocks = (records['apply_clock'][is_known] + 1).tolist()
  return dict(zip(clocks, records['digest'][is_known].tolist(), strict=True))
