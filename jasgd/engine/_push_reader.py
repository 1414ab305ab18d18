"""Reader of traces of learners with a server: from records to operations.

It works on whole columns, since there may be ten million records. Only traces
of learners with their own replicas are read one record after another.
"""

from typing import Any

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.engine import _operations

_Kind = traces.Kind


def read_pushes(
  trace: traces.Trace, num_updates: int | None = None
) -> _operations.Operations:
  """Reads a trace of learners that push to a server.

  Args:
    trace: Trace, from its first update on.
    num_updates: Number of updates of the server to read. None: all.

  Returns:
    The operations.

  Raises:
    TraceError: if updates are missing, or a record reads weights that did not
      exist.
  """
  traces.check_records(trace)
  records, numbers = np.asarray(trace.records), None
  if np.any(trace.is_void):
    numbers = np.flatnonzero(~trace.is_void)
    records = records[numbers]
  applied = _find_applied(records, numbers, num_updates)
  has_locals = bool(np.any(records['kind'] == _Kind.FETCH))
  num_locals = 0
  if has_locals:
    columns = _list_segments(records, numbers, applied, trace.header)
    num_locals = trace.num_workers
  else:
    columns = _list_pushes(records, applied, trace.header)
  return _operations.Operations(
    columns=columns,
    changes=None,
    replicas=(_operations.SERVER,),
    num_locals=num_locals,
  )


def _find_applied(
  records: np.ndarray, numbers: np.ndarray | None, num_updates: int | None
) -> np.ndarray:
  """Finds and checks the indices of the gradients of the first updates."""
  is_taken = (records['kind'] == _Kind.PUSH) & (
    records['fate'] == protocols.Fate.APPLIED
  )
  replicas = [_operations.SERVER]
  if np.any(records['replica'] != _operations.SERVER):
    replicas = np.unique(records['replica'][is_taken]).tolist()
  applied = [
    _find_applied_to(replica, is_taken, records, numbers, num_updates)
    for replica in replicas
  ]
  found = np.sort(np.concatenate(applied)) if len(applied) > 1 else applied[0]
  if not len(found):
    raise traces.TraceError('A trace without any update cannot be replayed.')
  return found


def _find_applied_to(
  replica: int,
  is_taken: np.ndarray,
  records: np.ndarray,
  numbers: np.ndarray | None,
  num_updates: int | None,
) -> np.ndarray:
  """Finds the indices of the gradients applied to one replica of a server."""
  is_own = records['replica'] == replica
  if not np.any(is_own):
    return np.arange(0)
  all_clocks = records['version'] - records['updates']
  # Gradients of an update that was not made before the trace ends are left out.
  end = int(records['version'][np.flatnonzero(is_own)[-1]])
  if num_updates is not None:
    end = min(end, num_updates)
  applied = np.flatnonzero(is_taken & is_own & (all_clocks < end))
  clocks = all_clocks[applied]
  jumps = np.diff(clocks, prepend=-1)
  # The first gradient is at clock 0. Each further one is of the same update as
  # the gradient before it, or of the next.
  is_bad = (jumps < 0) | (jumps > 1)
  is_bad[:1] = clocks[:1] != 0
  if np.any(is_bad):
    index = np.flatnonzero(is_bad)[0]
    number = _operations.get_number(numbers, applied[index])
    raise traces.TraceError(
      'A trace is replayed from clock 0, in order and without gaps; record '
      f'{number} is of the update at clock {clocks[index]}.'
    )
  reads = records['read_version'][applied]
  is_bad = (reads > clocks) | (reads < 0)
  if np.any(is_bad):
    index = np.flatnonzero(is_bad)[0]
    number = _operations.get_number(numbers, applied[index])
    raise traces.TraceError(
      f'Record {number} was computed at clock {reads[index]} and applied at '
      f'clock {clocks[index]}: those weights did not exist yet.'
    )
  return applied


def _list_pushes(
  records: np.ndarray, applied: np.ndarray, header: dict[str, Any]
) -> _operations.Columns:
  """Makes the columns of a trace of learners without their own replicas.

  It is vectorised, and columns have narrow dtypes: there may be ten million
  records.
  """
  size = len(applied)
  # If all records are applied pushes, a slice avoids copies of all columns.
  chosen = slice(None) if size == len(records) else applied
  updates = records['updates'][chosen]
  clocks = records['version'][chosen] - updates
  num_steps = int(header.get('steps_per_push', 1))
  is_update = np.diff(clocks, append=clocks[-1] + 1) > 0
  kind = np.where(is_update, _operations.STEP, _operations.ACCUMULATE)
  columns = _list_common(records, chosen, header) | {
    'kind': kind.astype(np.int8),
    'write': np.where(is_update, clocks + 1, -1).astype(np.int32),
    'step': records['step'][chosen] - num_steps,
    'num_steps': _operations.fill_column(num_steps, size),
    'is_reset': _operations.fill_column(False, size),
    # A JOIN or LEAVE made the update later, by a separate call.
    'is_separate': is_update & (updates == 0),
  }
  columns['staleness'] = (clocks - columns['source']).astype(np.int32)
  columns['local_version'] = columns['source']
  return columns


def _list_common(
  records: np.ndarray, chosen: slice | np.ndarray, header: dict[str, Any]
) -> _operations.Columns:
  """Makes the columns that do not depend on learners' own replicas."""
  source = records['read_version'][chosen].astype(np.int32)
  return {
    'own': _operations.fill_column(-1, len(source)),
    'replica': _operations.fill_column(_operations.SERVER, len(source)),
    'source': source,
    'worker': records['worker'][chosen],
    'time': records['end_time'][chosen],
    'num_learners': _count_present(records, header)[chosen],
    'call': records['group'][chosen],
    'num_devices': _list_devices(records)[chosen],
  }


def _list_segments(
  records: np.ndarray,
  numbers: np.ndarray | None,
  applied: np.ndarray,
  header: dict[str, Any],
) -> _operations.Columns:
  """Makes the columns of a trace of learners with their own replicas.

  An operation has the minibatches up to a push or a fetch. A value has the
  number of the update that made it; value 0 is the initial weights.
  """
  num_workers = int(records['worker'].max()) + 1
  # For each learner:
  position = [0] * num_workers  # Number of minibatches it has computed.
  is_new = [True] * num_workers  # Whether it has not fetched since it joined.
  fetched = [0] * num_workers  # Value of the weights that it fetched last.
  is_push = np.zeros(len(records), bool)
  is_push[applied] = True
  last = applied[-1]
  made: dict[tuple[int, int], int] = {}  # (replica, version) -> value
  num_made, rows = 0, []
  names = ('kind', 'updates', 'replica', 'worker', 'step', 'version')
  names += ('read_version',)
  for index, (
    (kind, updates, replica, worker, step, version, read_version),
    pushes,
  ) in enumerate(
    zip(
      zip(*(records[name].tolist() for name in names), strict=True),
      is_push.tolist(),
      strict=True,
    )
  ):
    if kind == _Kind.JOIN:
      is_new[worker] = True
      continue
    is_fetch = kind == _Kind.FETCH
    if not (is_fetch or pushes):
      continue
    source = made.get((replica, read_version), 0 if read_version == 0 else -1)
    if source < 0:
      if index > last:  # The weights are of an update that is left out.
        break
      number = _operations.get_number(numbers, index)
      raise traces.TraceError(
        f'Record {number} read the weights of clock {read_version}, which did '
        'not exist then.'
      )
    is_reset = is_fetch and is_new[worker]
    if is_reset:  # The minibatches before the learner joined are lost.
      position[worker], is_new[worker] = step, False
    first = position[worker]
    if step < first:
      number = _operations.get_number(numbers, index)
      raise traces.TraceError(
        f'Record {number} has step={step}, which must be at least {first}, as '
        f'worker {worker} has computed as many minibatches.'
      )
    write = -1
    if pushes and updates:
      num_made += 1
      write = made[replica, version] = num_made
    row = (index, first, step - first, is_reset, fetched[worker], source, write)
    rows.append(row)
    position[worker] = step
    if is_fetch:
      fetched[worker] = source
  index, step, num_steps, is_reset, local_version, source, write = map(
    np.array, zip(*rows, strict=True)
  )
  chosen, is_push = records[index], is_push[index]
  kinds = np.where(write >= 0, _operations.STEP, _operations.ACCUMULATE)
  staleness = chosen['version'] - chosen['updates'] - chosen['read_version']
  return _list_common(records, index, header) | {
    'kind': np.where(is_push, kinds, _operations.FETCH),
    'replica': chosen['replica'],
    'source': source,
    'write': write,
    'step': step,
    'num_steps': num_steps,
    'staleness': np.where(is_push, staleness, 0),
    'is_reset': is_reset,
    'is_separate': _operations.fill_column(False, len(index)),
    'local_version': local_version,
  }


def _count_present(records: np.ndarray, header: dict[str, Any]) -> np.ndarray:
  """Number of learners that were present at each record."""
  first = header.get('num_present', header.get('num_workers'))
  if first is None:
    first = records['worker'].max() + 1
  is_join = records['kind'] == _Kind.JOIN
  is_leave = records['kind'] == _Kind.LEAVE
  if not np.any(is_join | is_leave):
    return _operations.fill_column(max(int(first), 1), len(records))
  change = is_join.astype(int) - is_leave
  return np.maximum(int(first) + np.cumsum(change), 1)


def _list_devices(records: np.ndarray) -> np.ndarray:
  """Number of devices of the learner of each record."""
  is_join = records['kind'] == _Kind.JOIN
  if not np.any(is_join & (records['num_devices'] > 1)):
    return _operations.fill_column(1, len(records))
  counts = np.ones(len(records), int)
  for index in np.flatnonzero(is_join):
    is_later = records['worker'] == records['worker'][index]
    is_later[:index] = False
    counts[is_later] = max(1, records['num_devices'][index])
  return counts


def count_devices(trace: traces.Trace) -> int:
  """Number of devices that exact replay of a trace needs.

  Args:
    trace: Trace of a real or simulated run.

  Returns:
    The largest number of devices that a learner spread a minibatch over; 1 for
    a simulated run.

  Examples:
    >>> from jasgd import engine, traces
    >>> records = traces.make_records(kind=traces.Kind.JOIN, num_devices=2)
    >>> engine.count_devices(traces.Trace(records))
    2
  """
  joins = trace.of_kind(_Kind.JOIN)
  return int(joins['num_devices'].max(initial=1))
