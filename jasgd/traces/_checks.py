"""Checks of records: an error names the number of the first bad record.

A header has a checksum and a record has none, so any field may be damaged.
"""

import numpy as np

from jasgd import protocols
from jasgd.traces import _schema
from jasgd.traces import _trace

_Kind = _schema.Kind

# Above the number of groups in any run. The number after it must fit, too.
_MAX_GROUP = 1 << 30
_HUGE = np.finfo(np.float64).max
_NODE_CHANGES = (
  *(_Kind.STEP, _Kind.MIX, _Kind.MOVE, _Kind.MEAN),
  _Kind.RESTART,
)
_NODE_KINDS = (*_NODE_CHANGES, _Kind.LOST, _Kind.JOIN, _Kind.LEAVE, _Kind.END)
_SERVER_KINDS = (
  *(_Kind.PUSH, _Kind.FETCH, _Kind.JOIN, _Kind.LEAVE),
  *(_Kind.RESTART, _Kind.END),
)
# The kinds of records that read a version of the owner's weights.
_READERS = (_Kind.PUSH, _Kind.STEP, _Kind.FETCH, _Kind.RESTART)


def refuse_record(
  name: str,
  values: np.ndarray,
  is_bad: np.ndarray,
  rule: str,
  numbers: np.ndarray | None = None,
) -> None:
  """Raises a TraceError for the first record with a bad field, if there is one.

  Args:
    name: Name of the field.
    values: Value of the field in each record.
    is_bad: Whether each value is bad.
    rule: Rule for the field, in words.
    numbers: Number of each record in its trace; None: 0, 1, and so on.

  Raises:
    TraceError: with the number of the record, the value and the rule.

  Examples:
    >>> import numpy as np
    >>> from jasgd import traces
    >>> steps = np.array([1, -5])
    >>> traces.refuse_record('step', steps, steps < 0, '0 or more')
    Traceback (most recent call last):
    jasgd.traces._schema.TraceError: Record 1 has step=-5, which must be 0 or \
more: the records are damaged.
  """
  if np.any(is_bad):
    index = int(np.argmax(is_bad))
    number = index if numbers is None else int(numbers[index])
    raise _schema.TraceError(
      f'Record {number} has {name}={values[index]}, which must be {rule}: the '
      'records are damaged.'
    )


def check_records(trace: _trace.Trace) -> None:
  """Checks fields that any code uses: kinds, fates, and numbers of replicas.

  Records that a restart made void are not looked at.

  Args:
    trace: A trace, or a part of one.

  Raises:
    TraceError: if a record is bad; it is named by its number.

  Examples:
    >>> from jasgd import traces
    >>> traces.check_records(traces.Trace(traces.make_records(kind=[0, 1])))
  """
  _check_fields(trace, *_take_valid(trace))


def check_history(
  trace: _trace.Trace, replica: int, *, is_server: bool = False
) -> None:
  """Checks the file of one owner, before the owner continues it.

  Its records must follow each other: versions grow by 1 at each change, and
  only versions that exist are read.

  Args:
    trace: Trace of the file, from its first record on.
    replica: Number of the node, or `SERVER` for a server or a centre.
    is_server: Whether learners push to the owner.

  Raises:
    TraceError: if a record is bad; it is named by its number.

  Examples:
    >>> from jasgd import traces
    >>> step = traces.Kind.STEP
    >>> records = traces.make_records(
    ...   kind=step, worker=1, step=[1, 2], version=[1, 2], read_version=[0, 1]
    ... )
    >>> trace = traces.Trace(records, {'num_workers': 2})
    >>> traces.check_history(trace, 1)
  """
  records, numbers = _take_valid(trace)
  _check_fields(trace, records, numbers)
  kinds = records['kind']
  if is_server:
    written = _SERVER_KINDS
    # The protocol decides whether these change the weights.
    is_free = np.isin(kinds, (_Kind.JOIN, _Kind.LEAVE))
    is_free |= (kinds == _Kind.PUSH) & (records['fate'] == 0)
    changes = np.where(is_free, records['updates'], 0)
    last_worker = max(trace.num_workers, 1) - 1  # Learners may come late.
  else:
    written = _NODE_KINDS
    changes = np.isin(kinds, _NODE_CHANGES).astype(int)
    last_worker = trace.header.get('num_workers', trace.num_workers) - 1
  has_worker = ~np.isin(kinds, (_Kind.RESTART, _Kind.END))
  # Void restarts count, too: each of them began an incarnation.
  restarts = np.cumsum(trace.records['kind'] == _Kind.RESTART)
  restarts = restarts if numbers is None else restarts[numbers]
  is_bad = ~np.isin(kinds, written)
  refuse_record('kind', kinds, is_bad, 'one that its owner writes', numbers)
  for name, is_used, first, last, rule in (
    ('replica', True, replica, replica, f'{replica}'),
    ('worker', has_worker, -1, last_worker, f'at most {last_worker}'),
    ('source', True, -1, last_worker, f'from -1 to {last_worker}'),
    ('updates', True, changes, changes, 'that of its kind'),
    ('step', kinds == _Kind.STEP, 1, _HUGE, 'at least 1'),
    ('incarnation', True, 0, restarts, 'at most the number of restarts'),
    ('group', True, 0, _MAX_GROUP, f'from 0 to {_MAX_GROUP}'),
    ('source_version', True, 0, _HUGE, 'at least 0'),
    ('mass', True, 0.0, _HUGE, 'finite and at least 0'),
    ('own_weight', True, -_HUGE, _HUGE, 'finite'),
    ('weight', True, -_HUGE, _HUGE, 'finite'),
  ):
    values = records[name]
    is_bad = is_used & ~((values >= first) & (values <= last))  # NaN is bad.
    refuse_record(name, values, is_bad, rule, numbers)
  _check_versions(records, numbers, changes, is_server=is_server)


def _take_valid(
  trace: _trace.Trace,
) -> tuple[np.ndarray, np.ndarray | None]:
  """Records that are not void, and their numbers (None: no record is void)."""
  records = np.asarray(trace.records)
  if not np.any(trace.is_void):
    return records, None
  numbers = np.flatnonzero(~trace.is_void)
  return records[numbers], numbers


def _check_fields(
  trace: _trace.Trace, records: np.ndarray, numbers: np.ndarray | None
) -> None:
  """Checks numbers of workers and replicas, which are used as indices later."""
  kinds = records['kind']
  is_nodes = np.isin(kinds, (_Kind.STEP, _Kind.MIX, _Kind.MEAN))
  last_worker = max(trace.num_workers, 1) - 1
  for name, is_used, first, last in (
    ('kind', True, 0, len(_Kind) - 1),
    ('fate', np.isin(kinds, _schema.GRADIENTS), 0, len(protocols.Fate) - 1),
    ('updates', True, 0, 1),
    ('step', True, 0, np.iinfo(np.int64).max),
    ('replica', is_nodes, 0, last_worker),
    ('replica', kinds == _Kind.PUSH, -_schema.MAX_WORKERS, -1),
    # The fragments of a server have numbers below 0, also as a source.
    ('replica', True, -_schema.MAX_WORKERS, last_worker),
    ('source', True, -_schema.MAX_WORKERS, last_worker),
  ):
    values = np.where(is_used, records[name], min(max(0, first), last))
    is_bad = (values < first) | (values > last)
    refuse_record(name, values, is_bad, f'from {first} to {last}', numbers)


def _check_versions(
  records: np.ndarray,
  numbers: np.ndarray | None,
  changes: np.ndarray,
  *,
  is_server: bool,
) -> None:
  """Checks that versions follow each other, and exist when they are read.

  Args:
    records: Records of one replica.
    numbers: Their numbers in the trace, or None.
    changes: Number of versions that each of them makes.
    is_server: Whether learners push to the owner.
  """
  # A LOST has no version of its own.
  is_own = records['kind'] != _Kind.LOST
  records, changes = records[is_own], changes[is_own]
  numbers = np.flatnonzero(is_own) if numbers is None else numbers[is_own]
  kinds, groups = records['kind'], records['group']
  versions, reads = records['version'], records['read_version']
  # All sources of a mix together make one version.
  is_further = np.zeros(len(records), bool)
  is_further[1:] = (groups[1:] > 0) & (np.diff(groups) == 0)
  is_further[1:] &= (kinds[1:] == _Kind.MIX) & (kinds[:-1] == _Kind.MIX)
  last = np.append(0, versions)[:-1]
  is_bad = versions != last + np.where(is_further, 0, changes)
  if not is_server:  # A restart may skip numbers of records that were lost.
    is_bad = np.where(kinds == _Kind.RESTART, versions <= last, is_bad)
  rule = 'that of the record before it, or the next one if it makes one'
  refuse_record('version', versions, is_bad, rule, numbers)
  is_used = np.isin(kinds, _READERS)
  # A gradient that is not applied may be of a version that was lost.
  is_used &= (kinds != _Kind.PUSH) | (records['fate'] == 0)
  is_bad = is_used & ((reads < 0) | (reads > versions - changes))
  rule = 'a version that existed then'
  refuse_record('read_version', reads, is_bad, rule, numbers)
