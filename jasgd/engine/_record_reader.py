"""The reader of traces whose workers step on replicas of their own.

It reads record by record: which weights a mix reads depends on all records
before it.
"""

from collections.abc import Iterable, Mapping
import itertools
from typing import Any

import numpy as np

from jasgd import traces
from jasgd.engine import _operations

_Kind = traces.Kind

_Version = tuple[int, int]  # (replica, version)
_Held = tuple[int, int]  # (value of weights, value of an optimizer's state)


def read_records(
  trace: traces.Trace, until: Mapping[int, int] | None = None
) -> _operations.Operations:
  """Reads a trace of nodes.

  Args:
    trace: The trace, from its first record on.
    until: From replicas of nodes to the versions to come to; operations that
      these do not depend on are left out, whatever is wrong with them. None:
      all.

  Returns:
    The operations.

  Raises:
    TraceError: if weights are read that do not exist; or if an all-reduce was
      recorded by some of its members only and others build on its result.
  """
  reader = _Reader(trace, until or {})
  reader.read()
  if until is None:
    reader.check()
  else:
    reader.keep_needed(until)
  operations, holdings = reader.operations, reader.holdings
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
  table = np.array(holdings, int).reshape(-1, len(_operations.Holdings._fields))
  return _operations.Operations(
    columns=columns,
    holdings=_operations.Holdings(*table.T),
    replicas=reader.replicas,
  )


class _Reader:
  """Reads records one after another.

  A value that cannot be computed has an entry in `_errors`, the sentence that
  is raised if an operation which is asked for reads the value.

  Attributes:
    operations: What was read so far.
    holdings: Rows of `Holdings`.
    replicas: All nodes', and the centre's if there is one.
  """

  def __init__(self, trace: traces.Trace, goals: Mapping[int, int]) -> None:
    """Prepares the columns; `goals` are versions that are asked for."""
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
    # Only versions that something reads are remembered.
    replicas = np.where(is_mix, records['source'], records['replica'])
    versions = np.where(
      is_mix, records['source_version'], records['read_version']
    )
    self._is_read = set(
      zip(replicas.tolist(), versions.tolist(), strict=True)
    ) | set(goals.items())
    self.operations: list[_operations.Operation] = []
    self.holdings: list[tuple[int, ...]] = []
    # 0 is the value that all replicas start with.
    self._values, self._states = itertools.count(1), itertools.count(1)
    self._current: dict[int, _Held] = dict.fromkeys(self.replicas, (0, 0))
    self._version = dict.fromkeys(self.replicas, 0)
    self._found: dict[_Version, _Held] = {
      (replica, 0): (0, 0) for replica in self.replicas
    }
    self._differences: dict[_Version, int] = {}
    self._pending: dict[int, int] = {}  # Gradients that wait for their mean.
    self._joined: set[int] = set()
    self._errors: dict[int, str] = {}
    self._void: set[int] = set()  # Of these, those of a broken all-reduce.

  def read(self) -> None:
    """Goes through all records."""
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
        self._return(index)
      elif kind == _Kind.JOIN:
        self._joined.add(self._replica[index])
      index = end

  # --- Kinds of records.

  def _step(self, index: int) -> None:
    replica = self._replica[index]
    own, state_read = self._current[replica]
    source, _ = self._find(index, replica, 'read_version')
    if own in self._void or source in self._void:
      # A node may make steps before it notices that an all-reduce was broken.
      # It goes back to a checkpoint then; these steps are left out.
      self._make_void(index)
      return
    fields = {'worker': replica, 'step': self._columns['step'][index] - 1}
    if self._averages_gradients:
      gradient = self._add(
        _operations.GRADIENT, index, source, source, **fields
      )
      self._pending[replica] = gradient
      self._hold(index, (own, state_read))
      return
    state = next(self._states)
    fields |= {'state_read': state_read, 'state_write': state}
    self._hold(
      index, (self._add(_operations.STEP, index, own, source, **fields), state)
    )

  def _mix(self, index: int) -> int:
    """Of one mix, or of a joiner's first weights; gives where it ends."""
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
        # All nodes are to be the same, in their optimizers' states too.
        self._hold(index, self._find_source(index))
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
    self._hold(index, (value, state))
    return end

  def _pull(self, index: int) -> None:
    """A node moves towards the centre."""
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
    self._hold(index, (value, state))

  def _move(self, index: int) -> None:
    """The centre moves by the difference that a node has sent."""
    own, state = self._current[_operations.SERVER]
    key = self._source[index], self._columns['source_version'][index]
    difference = self._differences.get(key)
    if difference is None:
      difference = self._make_error(
        f'Record {index} moves the centre by a force of node {key[0]} at its '
        f'version {key[1]}, which did not exist then.'
      )
    self._hold(
      index, (self._add(_operations.MOVE, index, own, difference), state)
    )

  def _average(self, index: int) -> int:
    """The mean of several nodes; gives where its records end."""
    columns, end = self._columns, index + 1
    while (
      end < len(self._replica)
      and columns['kind'][end] == _Kind.MEAN
      and columns['group'][end] == columns['group'][index]
    ):
      end += 1
    members = range(index, end)
    if len(members) < round(1 / columns['weight'][index]):
      # Members that were killed before they wrote a record cannot have gone
      # on. The others go back to a checkpoint.
      for each in members:
        self._make_void(each)
      return end
    helds = [self._current[self._replica[each]] for each in members]
    if not self._averages_gradients:
      mean = self._add_mean(index, [value for value, _ in helds])
      for each, (_, state) in zip(members, helds, strict=True):
        self._hold(each, (mean, state))
      return end
    gradients = [self._take_gradient(each) for each in members]
    mean = self._add_mean(index, gradients)
    step = max(columns['step'][index:end]) - 1
    updated: dict[_Held, _Held] = {}  # Equal nodes stay equal.
    for each, held in zip(members, helds, strict=True):
      if held not in updated:
        state = next(self._states)
        value = self._add(
          _operations.UPDATE,
          index,
          held[0],
          mean,
          state_read=held[1],
          state_write=state,
          step=step,
        )
        updated[held] = (value, state)
      self._hold(each, updated[held])
    return end

  def _take_gradient(self, index: int) -> int:
    """The gradient that a member brings to a mean."""
    replica = self._replica[index]
    value, _ = self._current[replica]
    if value in self._errors:
      return value
    if replica in self._pending:
      return self._pending.pop(replica)
    return self._make_error(
      f'Record {index} is of a mean of gradients, and node {replica} had none.'
    )

  def _return(self, index: int) -> None:
    """A node, or the centre, restarts from an earlier version."""
    replica = self._replica[index]
    self._pending.pop(replica, None)
    self._hold(index, self._find(index, replica, 'read_version'))

  # --- Values.

  def _make_error(self, message: str) -> int:
    """A value that does not exist, which is an error if something reads it."""
    value = next(self._values)
    self._errors[value] = message
    return value

  def _make_void(self, index: int) -> None:
    """A version that cannot be computed; its replica keeps what it had."""
    replica, version = self._replica[index], self._columns['version'][index]
    value = self._make_error(
      f'Version {version} of node {replica}, of record {index}, comes from an '
      'all-reduce that not all of its nodes have recorded, and something was '
      'made of it.'
    )
    self._void.add(value)
    self._set(index, (value, self._current[replica][1]))

  def _add(
    self, kind: int, index: int, own: int, source: int, **fields: Any
  ) -> int:
    """Adds an operation; gives the value that it makes."""
    value = next(self._values)
    self.operations.append(
      _operations.Operation(
        kind,
        own,
        source,
        value,
        time=self._columns['end_time'][index],
        record=index,
        **fields,
      )
    )
    return value

  def _add_mean(self, index: int, values: list[int]) -> int:
    """The mean of some values."""
    mean = values[0]
    if len(set(values)) == 1:
      return mean
    for count, value in enumerate(values[1:], start=2):
      shares = {'own_weight': (count - 1) / count, 'weight': 1 / count}
      mean = self._add(_operations.AVERAGE, index, mean, value, **shares)
    return mean

  # --- Versions.

  def _find_source(self, index: int) -> _Held:
    """The values of the other replica that a record reads."""
    return self._find(index, self._source[index], 'source_version')

  def _find(self, index: int, replica: int, field: str) -> _Held:
    """The values of the version of a replica that a field of a record names."""
    version = self._columns[field][index]
    if (replica, version) in self._found:
      return self._found[replica, version]
    return self._make_error(
      f'Record {index} reads version {version} of {_describe(replica)}, which '
      'does not exist then.'
    ), 0

  def _hold(self, index: int, held: _Held) -> None:
    """The replica of a record has other values now."""
    self._set(index, held)
    replica, version = self._replica[index], self._columns['version'][index]
    self.holdings.append((len(self.operations), replica, version, *held))

  def _set(self, index: int, held: _Held) -> None:
    replica, version = self._replica[index], self._columns['version'][index]
    self._current[replica] = held
    self._version[replica] = version
    self._joined.discard(replica)
    if (replica, version) in self._is_read:
      self._found[replica, version] = held

  # --- Which operations are asked for.

  def check(self) -> None:
    """Raises a TraceError if any operation cannot be made."""
    if self._errors:
      for each in self.operations:
        self._require((each.own, each.source))
      self._require(value for *_, value, _ in self.holdings)

  def _require(self, values: Iterable[int]) -> None:
    for value in values:
      if value in self._errors:
        raise traces.TraceError(self._errors[value])

  def keep_needed(self, until: Mapping[int, int]) -> None:
    """Keeps what some versions depend on, and ends with these versions.

    Args:
      until: From replicas to versions.

    Raises:
      TraceError: if one does not exist.
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
        # -1, of operations without a state, must not get in.
        states.update({each.state_read, each.state_write} - {-1})
        kept.append(each)
        num_before[index + 1] = 1
    self._require(values)
    self.operations = kept[::-1]
    num_before = np.cumsum(num_before).tolist()
    self.holdings = [
      (num_before[after], *rest)
      for after, *rest in self.holdings
      if rest[2] in values and rest[3] in states
    ]
    last = {replica: version for _, replica, version, *_ in self.holdings}
    for replica, version in until.items():
      if last.get(replica, 0) != version:
        held = self._found[replica, version]
        self.holdings.append((len(kept), replica, version, *held))


def _check_replicas(trace: traces.Trace) -> None:
  """Raises a TraceError for a record that no owner of a replica writes."""
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
