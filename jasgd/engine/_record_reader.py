"""Reader of traces of nodes: from records to operations.

It reads one record after another, since the weights that a mix reads depend on
all records before it.
"""

from collections.abc import Iterable, Mapping
import itertools
from typing import Any

import numpy as np

from jasgd import traces
from jasgd.engine import _operations

_Kind = traces.Kind

_Version = tuple[int, int]  # (replica, version)
_Pair = tuple[int, int]  # (value of weights, value of an optimizer's state)


def read_records(
  trace: traces.Trace, until: Mapping[int, int] | None = None
) -> _operations.Operations:
  """Reads a trace of nodes.

  Args:
    trace: Trace, from its first record on.
    until: Replica of a node -> version to end with. Operations that these
      versions do not depend on are left out, even if they cannot be computed.
      None: all operations.

  Returns:
    The operations.

  Raises:
    TraceError: if weights are read that do not exist; or if only some members
      of an all-reduce recorded it, and an operation reads its result.
  """
  reader = _Reader(trace, until or {})
  reader.read()
  if until is None:
    reader.check()
  else:
    reader.keep_needed(until)
  operations, changes = reader.operations, reader.changes
  columns = {
    name: np.array(column)
    for name, column in zip(
      _operations.Operation._fields, zip(*operations, strict=True), strict=False
    )
  }
  columns |= {
    name: _operations.fill_column(value, len(operations))
    for name, value in _operations.SERVER_COLUMNS.items()
  }
  table = np.array(changes, int).reshape(
    -1, len(_operations.ValueChanges._fields)
  )
  return _operations.Operations(
    columns=columns,
    changes=_operations.ValueChanges(*table.T),
    replicas=reader.replicas,
  )


class _Reader:
  """Reads records one after another.

  A value that cannot be computed has an entry in `_errors`: the message of the
  error, which is raised only if a needed operation reads the value.

  Attributes:
    operations: Operations of the records read so far.
    changes: Rows of `ValueChanges`.
    replicas: Numbers of all nodes, and `SERVER` if there is a centre.
  """

  def __init__(self, trace: traces.Trace, goals: Mapping[int, int]) -> None:
    """Prepares the columns; `goals` are the versions to end with, if any."""
    _check_replicas(trace)
    records = trace.records
    self._columns: dict[str, list] = {
      name: records[name].tolist()
      for name in (
        *('kind', 'replica', 'source', 'group', 'step', 'version'),
        *('read_version', 'source_version', 'own_weight', 'weight'),
        'end_time',
      )
    }
    self._replica, self._source = (
      self._columns['replica'],
      self._columns['source'],
    )
    kinds = records['kind']
    is_mix, is_move = kinds == _Kind.MIX, kinds == _Kind.MOVE
    to_server = is_mix & (records['source'] == _operations.SERVER)
    has_centre = bool(np.any(is_move | to_server))
    self.replicas = (
      *range(trace.num_workers),
      *([_operations.SERVER] * has_centre),
    )
    self._averages_gradients = trace.header.get('averages') == 'gradients'
    self._is_all_reduce = bool(np.any(kinds == _Kind.MEAN))
    # Only versions that a record reads are remembered, to save memory.
    replicas = np.where(is_mix, records['source'], records['replica'])
    versions = np.where(
      is_mix, records['source_version'], records['read_version']
    )
    self._is_read = set(
      zip(replicas.tolist(), versions.tolist(), strict=True)
    ) | set(goals.items())
    self.operations: list[_operations.Operation] = []
    self.changes: list[tuple[int, ...]] = []
    # All replicas start with value 0.
    self._values, self._states = itertools.count(1), itertools.count(1)
    self._current: dict[int, _Pair] = dict.fromkeys(self.replicas, (0, 0))
    self._version = dict.fromkeys(self.replicas, 0)
    self._found: dict[_Version, _Pair] = {
      (replica, 0): (0, 0) for replica in self.replicas
    }
    # (node, its version before the exchange) -> value of the difference.
    self._differences: dict[_Version, int] = {}
    # Node -> value of a gradient that waits for its mean.
    self._pending: dict[int, int] = {}
    self._joined: set[int] = set()  # Nodes whose first weights are to come.
    self._errors: dict[int, str] = {}  # Value -> message of the error.
    self._void: set[int] = set()  # Values in `_errors` of a broken all-reduce.

  def read(self) -> None:
    """Reads all records."""
    kinds, index = self._columns['kind'], 0
    while index < len(kinds):
      kind, end = kinds[index], index + 1
      if kind == _Kind.STEP:
        self._step(index)
      elif kind == _Kind.MEAN:
        end = self._average(index)
      elif kind == _Kind.MOVE:
        self._move(index)
      elif kind == _Kind.MIX:
        is_joining = self._replica[index] in self._joined
        if self._source[index] == _operations.SERVER and not is_joining:
          self._pull(index)
        else:
          end = self._mix(index)
      elif kind == _Kind.RESTART:
        self._restart(index)
      elif kind == _Kind.JOIN:
        self._joined.add(self._replica[index])
      index = end

  # --- Kinds of records.

  def _step(self, index: int) -> None:
    replica = self._replica[index]
    own, state_read = self._current[replica]
    source, _ = self._find(index, replica, 'read_version')
    if own in self._void or source in self._void:
      # A node may make steps before it detects a broken all-reduce and goes
      # back to a checkpoint. These steps are left out.
      self._make_void(index)
      return
    fields = {'worker': replica, 'step': self._columns['step'][index] - 1}
    if self._averages_gradients:
      gradient = self._add(
        _operations.GRADIENT, index, source, source, **fields
      )
      self._pending[replica] = gradient
      self._change(index, (own, state_read))
      return
    state = next(self._states)
    fields |= {'state_read': state_read, 'state_write': state}
    self._change(
      index, (self._add(_operations.STEP, index, own, source, **fields), state)
    )

  def _mix(self, index: int) -> int:
    """Adds the operations of one mix, or of the first weights of a joiner.

    Args:
      index: Index of the first record of the mix.

    Returns:
      The index after its last record.
    """
    replica, columns = self._replica[index], self._columns
    end = index + 1
    while (
      end < len(self._replica)
      and columns['kind'][end] == _Kind.MIX
      and self._replica[end] == replica
      and columns['group'][end] == columns['group'][index] > 0
    ):
      end += 1
    value, state = self._current[replica]
    is_joining = replica in self._joined
    if is_joining:
      self._pending.pop(replica, None)
      if self._is_all_reduce:
        # In an all-reduce, all nodes have equal weights and equal optimizer
        # states: the joiner takes both.
        self._change(index, self._find_source(index))
        return end
    own_weight = columns['own_weight'][index]
    for each in range(index, end):
      source, _ = self._find_source(each)
      value = self._add(
        _operations.MIX,
        index,
        value,
        source,
        own_weight=own_weight,
        weight=columns['weight'][each],
        state_read=state,
      )
      own_weight = 1.0
    if is_joining:
      fields = {'state_read': state, 'step': columns['step'][index]}
      state = next(self._states)
      fields['state_write'] = state
      value = self._add(_operations.START, index, value, value, **fields)
    self._change(index, (value, state))
    return end

  def _pull(self, index: int) -> None:
    """Adds the operations that move a node towards the centre."""
    replica = self._replica[index]
    own, state = self._current[replica]
    centre, _ = self._find_source(index)
    rate = self._columns['weight'][index]
    difference = self._add(
      _operations.DIFFERENCE, index, own, centre, weight=rate, state_read=state
    )
    value = self._add(
      _operations.SUBTRACT,
      index,
      own,
      difference,
      weight=-1.0,
      state_read=state,
    )
    self._differences[replica, self._version[replica]] = difference
    self._change(index, (value, state))

  def _move(self, index: int) -> None:
    """Adds the operation that moves the centre by a node's difference."""
    own, state = self._current[_operations.SERVER]
    key = self._source[index], self._columns['source_version'][index]
    difference = self._differences.get(key)
    if difference is None:
      difference = self._make_error(
        f'Record {index} moves the centre by a force of node {key[0]} at its '
        f'version {key[1]}, which did not exist then.'
      )
    self._change(
      index, (self._add(_operations.MOVE, index, own, difference), state)
    )

  def _average(self, index: int) -> int:
    """Adds the operations of a mean of nodes; returns the index after it."""
    columns, end = self._columns, index + 1
    while (
      end < len(self._replica)
      and columns['kind'][end] == _Kind.MEAN
      and columns['group'][end] == columns['group'][index]
    ):
      end += 1
    members = range(index, end)
    if len(members) < round(1 / columns['weight'][index]):
      # Some members were killed before they recorded the mean. The others go
      # back to a checkpoint, so that their result is void.
      for each in members:
        self._make_void(each)
      return end
    pairs = [self._current[self._replica[each]] for each in members]
    if not self._averages_gradients:
      mean = self._add_mean(index, [value for value, _ in pairs])
      for each, (_, state) in zip(members, pairs, strict=True):
        self._change(each, (mean, state))
      return end
    gradients = [self._take_gradient(each) for each in members]
    mean = self._add_mean(index, gradients)
    step = max(columns['step'][index:end]) - 1
    updated: dict[_Pair, _Pair] = {}  # Equal nodes stay equal.
    for each, pair in zip(members, pairs, strict=True):
      if pair not in updated:
        state = next(self._states)
        value = self._add(
          _operations.UPDATE,
          index,
          pair[0],
          mean,
          state_read=pair[1],
          state_write=state,
          step=step,
        )
        updated[pair] = (value, state)
      self._change(each, updated[pair])
    return end

  def _take_gradient(self, index: int) -> int:
    """Removes and returns the gradient of a member of a mean."""
    replica = self._replica[index]
    value, _ = self._current[replica]
    if value in self._errors:
      return value
    if replica in self._pending:
      return self._pending.pop(replica)
    return self._make_error(
      f'Record {index} belongs to a mean of gradients, but node {replica} had '
      'computed none.'
    )

  def _restart(self, index: int) -> None:
    """Sets a node, or the centre, back to an earlier version."""
    replica = self._replica[index]
    self._pending.pop(replica, None)
    self._change(index, self._find(index, replica, 'read_version'))

  # --- Values.

  def _make_error(self, message: str) -> int:
    """Makes a value that cannot be computed: an error if it is needed."""
    value = next(self._values)
    self._errors[value] = message
    return value

  def _make_void(self, index: int) -> None:
    """Makes a version that cannot be computed; the optimizer's state stays."""
    replica, version = self._replica[index], self._columns['version'][index]
    value = self._make_error(
      f'Version {version} of node {replica}, of record {index}, comes from an '
      'all-reduce that not all of its nodes have recorded, and a later version '
      'depends on it.'
    )
    self._void.add(value)
    self._set(index, (value, self._current[replica][1]))

  def _add(
    self, kind: int, index: int, own: int, source: int, **fields: Any
  ) -> int:
    """Adds an operation; returns the value that it makes."""
    value = next(self._values)
    self.operations.append(
      _operations.Operation(
        kind,
        own,
        source,
        value,
        time=self._columns['end_time'][index],
        **fields,
      )
    )
    return value

  def _add_mean(self, index: int, values: list[int]) -> int:
    """Adds the operations of a mean of values; returns its value."""
    mean = values[0]
    if len(set(values)) == 1:
      return mean
    for count, value in enumerate(values[1:], start=2):
      shares = {'own_weight': (count - 1) / count, 'weight': 1 / count}
      mean = self._add(_operations.AVERAGE, index, mean, value, **shares)
    return mean

  # --- Versions.

  def _find_source(self, index: int) -> _Pair:
    """The values of the other replica that a record reads."""
    return self._find(index, self._source[index], 'source_version')

  def _find(self, index: int, replica: int, field: str) -> _Pair:
    """The values of a replica at the version in a field of a record."""
    version = self._columns[field][index]
    if (replica, version) in self._found:
      return self._found[replica, version]
    return self._make_error(
      f'Record {index} reads version {version} of {_describe(replica)}, which '
      'does not exist then.'
    ), 0

  def _change(self, index: int, pair: _Pair) -> None:
    """Sets the values of a record's replica, and adds them to `changes`."""
    self._set(index, pair)
    replica, version = self._replica[index], self._columns['version'][index]
    self.changes.append((len(self.operations), replica, version, *pair))

  def _set(self, index: int, pair: _Pair) -> None:
    """Sets the values and the version of a record's replica."""
    replica, version = self._replica[index], self._columns['version'][index]
    self._current[replica] = pair
    self._version[replica] = version
    self._joined.discard(replica)
    if (replica, version) in self._is_read:
      self._found[replica, version] = pair

  # --- Operations that are needed.

  def check(self) -> None:
    """Raises a TraceError if an operation reads a value with an error."""
    if self._errors:
      for each in self.operations:
        self._require((each.own, each.source))
      self._require(value for *_, value, _ in self.changes)

  def _require(self, values: Iterable[int]) -> None:
    for value in values:
      if value in self._errors:
        raise traces.TraceError(self._errors[value])

  def keep_needed(self, until: Mapping[int, int]) -> None:
    """Keeps the operations that some versions depend on, and ends with these.

    Args:
      until: Replica -> version.

    Raises:
      TraceError: if a version does not exist, or cannot be computed.
    """
    values, states = {0}, {0}
    for replica, version in until.items():
      if (replica, version) not in self._found:
        raise traces.TraceError(
          f'{_describe(replica).capitalize()} never had a version {version}.'
        )
      value, state = self._found[replica, version]
      values.add(value)
      states.add(state)
    kept, num_before = [], [0] * (len(self.operations) + 1)
    for index in reversed(range(len(self.operations))):
      each = self.operations[index]
      # One call makes a difference and subtracts it: both or none.
      is_pair = each.kind == _operations.SUBTRACT and each.source in values
      if each.write in values or each.state_write in states or is_pair:
        self._require((each.own, each.source))
        values.update((each.own, each.source, each.write))
        # Without -1, which means no state.
        states.update({each.state_read, each.state_write} - {-1})
        kept.append(each)
        num_before[index + 1] = 1
    self._require(values)
    self.operations = kept[::-1]
    num_before = np.cumsum(num_before).tolist()
    self.changes = [
      (num_before[after], *rest)
      for after, *rest in self.changes
      if rest[2] in values and rest[3] in states
    ]
    last = {replica: version for _, replica, version, *_ in self.changes}
    for replica, version in until.items():
      if last.get(replica, 0) != version:
        pair = self._found[replica, version]
        self.changes.append((len(kept), replica, version, *pair))


def _check_replicas(trace: traces.Trace) -> None:
  """Raises a TraceError for a replica, source or weight out of range."""
  records = trace.records
  traces.check_records(trace)
  replicas = records['replica']
  members = (_operations.SERVER, *range(trace.num_workers))
  traces.refuse_record(
    'replica', replicas, ~np.isin(replicas, members), 'one of this run'
  )
  has_source = np.isin(records['kind'], (_Kind.MIX, _Kind.MOVE))
  sources = np.where(has_source, records['source'], 0)
  traces.refuse_record(
    'source', sources, ~np.isin(sources, members), 'one of this run'
  )
  # The number of minibatches includes that of the step itself.
  steps, is_step = records['step'], records['kind'] == _Kind.STEP
  traces.refuse_record('step', steps, is_step & (steps < 1), 'at least 1')
  is_mean = records['kind'] == _Kind.MEAN
  weights = np.where(is_mean, records['weight'], 1.0)
  is_share = (weights > 0) & (weights <= 1)
  traces.refuse_record('weight', weights, ~is_share, 'above 0 and at most 1')


def _describe(replica: int) -> str:
  return 'the centre' if replica == _operations.SERVER else f'node {replica}'
