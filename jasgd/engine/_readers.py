"""From the records of a trace to operations.

Two readers know what records look like, one for those of a server and one for
those of nodes. Whatever comes after them is the same for both.
"""

from collections.abc import Iterable, Mapping
import itertools
from typing import Any

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.engine import _operations


def _fill(value: Any, size: int) -> np.ndarray:
  """A column of one value, which takes no memory."""
  dtype = np.int32 if type(value) is int else None
  return np.broadcast_to(np.asarray(value, dtype), size)


# --- Records of a server.


def read_server(
  trace: traces.Trace, num_updates: int | None
) -> _operations.Operations:
  """Reads the records of a server.

  Args:
    trace: The trace, from its first update on.
    num_updates: Where to stop; None: at the end.

  Returns:
    The operations.

  Raises:
    TraceError: if updates are missing, or a gradient was computed on weights
      that did not exist yet.
  """
  records, numbers = np.asarray(trace.records), None
  if np.any(trace.is_void):
    numbers = np.flatnonzero(~trace.is_void)
    records = records[numbers]
  _check_server(records, numbers)
  end = trace.end_clock if num_updates is None else num_updates
  applied = _find_applied(records, numbers, end)
  has_locals = bool(np.any(records['kind'] == traces.Kind.FETCH))
  num_locals = 0
  if has_locals:
    columns = _list_segments(records, numbers, applied, trace.header)
    num_locals = traces.statistics.count_learners(trace)
  else:
    columns = _list_pushes(records, applied, trace.header)
  return _operations.Operations(
    columns=columns,
    holdings=None,
    replicas=(_operations.SERVER,),
    num_locals=num_locals,
  )


def _check_server(records: np.ndarray, numbers: np.ndarray | None) -> None:
  """Raises a TraceError for a record that no server writes."""
  kinds, learners = records['kind'], records['learner']
  fates = np.where(kinds == traces.Kind.GRADIENT, records['fate'], 0)
  is_server = np.isin(kinds, (traces.Kind.RESTART, traces.Kind.END))
  last_kind, last_fate = max(traces.Kind), max(protocols.Fate)
  _refuse('kind', kinds, kinds > last_kind, f'0 to {last_kind}', numbers)
  _refuse('fate', fates, fates > last_fate, f'0 to {last_fate}', numbers)
  is_bad = (learners < 0) & ~is_server
  _refuse('learner', learners, is_bad, '0 or more', numbers)


def _refuse(
  name: str,
  values: np.ndarray,
  is_bad: np.ndarray,
  rule: str,
  numbers: np.ndarray | None = None,
) -> None:
  """Raises a TraceError for the first record with a bad field."""
  if np.any(is_bad):
    index = int(np.argmax(is_bad))
    raise traces.TraceError(
      f'Record {_number(numbers, index)} has {name}={values[index]}, which '
      f'must be {rule}.'
    )


def _number(numbers: np.ndarray | None, index: int) -> int:
  """The number of a record among those of the trace, with void ones."""
  return index if numbers is None else int(numbers[index])


def _find_applied(
  records: np.ndarray, numbers: np.ndarray | None, end: int | None
) -> np.ndarray:
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
      f'{_number(numbers, applied[index])} is of the update at clock '
      f'{clocks[index]}.'
    )
  reads = records['read_clock'][applied]
  is_bad = (reads > clocks) | (reads < 0)
  if np.any(is_bad):
    index = np.flatnonzero(is_bad)[0]
    raise traces.TraceError(
      f'Record {_number(numbers, applied[index])} was computed at clock '
      f'{reads[index]} and applied at clock {clocks[index]}: those weights did '
      'not exist yet.'
    )
  return applied


def _list_pushes(
  records: np.ndarray, applied: np.ndarray, header: dict[str, Any]
) -> _operations.Columns:
  """The columns of a trace in which learners have no replicas of their own.

  Vectorised, and with narrow columns: there may be ten million records.
  """
  size = len(applied)
  # If all records are pushes, nothing needs to be picked out.
  chosen = slice(None) if size == len(records) else applied
  clocks = records['apply_clock'][chosen]
  steps_per_push = int(header.get('steps_per_push', 1))
  is_update = np.diff(clocks, append=clocks[-1] + 1) > 0
  # If the next record saw the same clock, the update was not made by then.
  next_clock = np.append(records['arrive_clock'], clocks[-1] + 1)[applied + 1]
  kind = np.where(is_update, _operations.STEP, _operations.ACCUMULATE)
  columns = _list_common(records, chosen, header) | {
    'kind': kind.astype(np.int8),
    'write': np.where(is_update, clocks + 1, -1).astype(np.int32),
    'step': records['step'][chosen] * steps_per_push,
    'num_steps': _fill(steps_per_push, size),
    'is_reset': _fill(False, size),
    'is_separate': is_update & (next_clock == clocks),
  }
  columns['staleness'] = (clocks - columns['source']).astype(np.int32)
  columns['local_version'] = columns['source']
  return columns


def _list_common(
  records: np.ndarray, chosen: slice | np.ndarray, header: dict[str, Any]
) -> _operations.Columns:
  """The columns that are the same whether learners have replicas or not."""
  source = records['read_clock'][chosen].astype(np.int32)
  return {
    'own': _fill(-1, len(source)),
    'source': source,
    'worker': records['learner'][chosen],
    'time': records['arrive_time'][chosen],
    'num_learners': _count_present(records, header)[chosen],
    'call': records['call'][chosen],
    'num_devices': _list_devices(records)[chosen],
  }


def _list_segments(
  records: np.ndarray,
  numbers: np.ndarray | None,
  applied: np.ndarray,
  header: dict[str, Any],
) -> _operations.Columns:
  """The columns of a trace in which learners step on their own replicas.

  Each operation is of the minibatches up to a push or a fetch.
  """
  steps_per_push = int(header['steps_per_push'])
  num_learners = int(records['learner'].max()) + 1
  position = [0] * num_learners  # Minibatches that a learner has computed.
  gathered = [0] * num_learners  # Those of them since its last push.
  is_new = [True] * num_learners
  version = [0] * num_learners  # Of the weights that it steps from.
  is_push = np.zeros(len(records), bool)
  is_push[applied] = True
  end_clock = int(records['apply_clock'][applied[-1]]) + 1
  rows = []
  names = ('kind', 'learner', 'step', 'read_clock')
  for index, (kind, learner, step, read_clock, pushes) in enumerate(
    zip(
      *(records[name].tolist() for name in names), is_push.tolist(), strict=True
    )
  ):
    is_fetch = kind == traces.Kind.FETCH
    if is_fetch and read_clock > end_clock:  # Beyond the last update.
      break
    if kind == traces.Kind.JOIN:
      is_new[learner] = True
    elif is_fetch:
      first, is_reset = position[learner], is_new[learner]
      if is_reset:  # The work of its last life is lost.
        first, gathered[learner], is_new[learner] = step, 0, False
      rows.append((index, first, step - first, is_reset, version[learner]))
      version[learner] = read_clock
      gathered[learner] += step - first
      position[learner] = step
    elif pushes:
      first = position[learner]
      num_steps = steps_per_push - gathered[learner]
      rows.append((index, first, num_steps, False, version[learner]))
      gathered[learner] = 0
      position[learner] = first + num_steps
  index, step, num_steps, is_reset, version = map(
    np.array, zip(*rows, strict=True)
  )
  chosen, is_push = records[index], is_push[index]
  clock = np.cumsum(is_push)  # After the operation: every push is an update.
  is_bad = (chosen['read_clock'] > clock) | (chosen['read_clock'] < 0)
  if np.any(is_bad):  # Of a fetch; pushes have been checked.
    bad = int(index[np.argmax(is_bad)])
    raise traces.TraceError(
      f'Record {_number(numbers, bad)} fetched the weights of clock '
      f'{records["read_clock"][bad]}, which did not exist then.'
    )
  staleness = chosen['apply_clock'] - chosen['read_clock']
  return _list_common(records, index, header) | {
    'kind': np.where(is_push, _operations.STEP, _operations.FETCH),
    'write': np.where(is_push, clock, -1),
    'step': step,
    'num_steps': num_steps,
    'staleness': np.where(is_push, staleness, 0),
    'is_reset': is_reset,
    'is_separate': _fill(False, len(index)),
    'local_version': version,
  }


def _count_present(records: np.ndarray, header: dict[str, Any]) -> np.ndarray:
  """How many learners were present, at each record."""
  first = header.get('num_present', header.get('num_learners'))
  if first is None:
    first = records['learner'].max() + 1
  is_join = records['kind'] == traces.Kind.JOIN
  is_leave = records['kind'] == traces.Kind.LEAVE
  if not np.any(is_join | is_leave):
    return _fill(max(int(first), 1), len(records))
  change = is_join.astype(int) - is_leave
  return np.maximum(int(first) + np.cumsum(change), 1)


def _list_devices(records: np.ndarray) -> np.ndarray:
  """Over how many devices the learner of each record spreads a minibatch."""
  is_join = records['kind'] == traces.Kind.JOIN
  if not np.any(is_join & (records['call'] > 1)):
    return _fill(1, len(records))
  counts = np.ones(len(records), int)
  for index in np.flatnonzero(is_join):
    is_later = records['learner'] == records['learner'][index]
    is_later[:index] = False
    counts[is_later] = max(1, records['call'][index])
  return counts


def count_devices(trace: traces.Trace) -> int:
  """The most devices that a learner spread a minibatch over.

  Args:
    trace: The trace of a real run, or of a simulated one, where that is 1.

  Returns:
    Number of devices that exact replay needs.

  Examples:
    >>> from jasgd import engine, traces
    >>> engine.count_devices(traces.Trace(traces.make_records(kind=1, call=2)))
    2
  """
  records = np.asarray(trace.records)[~trace.is_void]
  joins = records[records['kind'] == traces.Kind.JOIN]
  return int(joins['call'].max(initial=1))


# --- Records of nodes.

_Version = tuple[int, int]  # (replica, version)
_Held = tuple[int, int]  # (value of weights, value of an optimizer's state)


def read_nodes(
  trace: traces.NodeTrace, until: Mapping[int, int] | None = None
) -> _operations.Operations:
  """Reads the records of nodes.

  Args:
    trace: The trace.
    until: From replicas to the versions to come to; operations that these do
      not depend on are left out, whatever is wrong with them. None: all.

  Returns:
    The operations.

  Raises:
    TraceError: if a version is read, or asked for, that does not exist, or an
      all-reduce was recorded by some of its members only and others build on
      its result.
  """
  reader = _NodeReader(trace, until or {})
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
    name: _fill(value, len(operations))
    for name, value in _operations.SERVER_COLUMNS.items()
  }
  table = np.array(holdings, int).reshape(-1, len(_operations.Holdings._fields))
  return _operations.Operations(
    columns=columns,
    holdings=_operations.Holdings(*table.T),
    replicas=reader.replicas,
  )


class _NodeReader:
  """Reads records one after another.

  A value that cannot be computed has an entry in `_errors`, the sentence that
  is raised if an operation which is asked for reads the value.

  Attributes:
    operations: What was read so far.
    holdings: Rows of `Holdings`.
    replicas: All nodes', and the centre's if there is one.
  """

  def __init__(self, trace: traces.NodeTrace, goals: Mapping[int, int]) -> None:
    """Prepares the columns; `goals` are versions that are asked for."""
    _check_nodes(trace)
    records = trace.records
    self._columns: dict[str, list] = {
      name: records[name].tolist()
      for name in (
        *('kind', 'peer', 'mix', 'step', 'version', 'peer_version'),
        *('own_weight', 'peer_weight', 'end_time'),
      )
    }
    node, peer = (
      np.where(column == traces.CENTRE, _operations.SERVER, column)
      for column in (records['node'], records['peer'])
    )
    self._replica, self._peer = node.tolist(), peer.tolist()
    is_mix = records['kind'] == traces.NodeKind.MIX
    is_mean = is_mix & (records['peer'] == traces.ALL)
    is_move = is_mix & (node == _operations.SERVER)
    has_centre = bool(np.any(is_move | (is_mix & (peer == _operations.SERVER))))
    self.replicas = (
      *range(trace.num_nodes),
      *([_operations.SERVER] * has_centre),
    )
    self._averages_gradients = trace.header.get('averages') == 'gradients'
    self._is_all_reduce = bool(np.any(is_mean))
    # Only versions that something reads are remembered.
    sources = np.where(is_mix & ~is_mean, peer, node)
    self._is_read = set(
      zip(sources.tolist(), self._columns['peer_version'], strict=True)
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
    kinds, peers, replicas = self._columns['kind'], self._peer, self._replica
    index = 0
    while index < len(kinds):
      kind, end = kinds[index], index + 1
      if kind == traces.NodeKind.STEP:
        self._step(index)
      elif kind == traces.NodeKind.MIX:
        if peers[index] == traces.ALL:
          end = self._average(index)
        elif replicas[index] == _operations.SERVER:
          self._move(index)
        elif (
          peers[index] == _operations.SERVER
          and replicas[index] not in self._joined
        ):
          self._pull(index)
        else:
          end = self._mix(index)
      elif kind == traces.NodeKind.RESTART:
        self._return(index)
      elif kind == traces.NodeKind.JOIN:
        self._joined.add(replicas[index])
      index = end

  # --- What records say.

  def _step(self, index: int) -> None:
    replica = self._replica[index]
    own, state_read = self._current[replica]
    source, _ = self._find(index, replica)
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
      and columns['kind'][end] == traces.NodeKind.MIX
      and self._replica[end] == replica
      and columns['mix'][end] == columns['mix'][index]
      and self._peer[end] != traces.ALL
    ):
      end += 1
    value, state = self._current[replica]
    if replica in self._joined:
      self._pending.pop(replica, None)
      if self._is_all_reduce:
        # All nodes are to be the same, in their optimizers' states too.
        self._hold(index, self._find(index, self._peer[index]))
        return end
    own_weight = columns['own_weight'][index]
    for each in range(index, end):
      source, _ = self._find(each, self._peer[each])
      value = self._add(
        _operations.MIX,
        index,
        value,
        source,
        own_weight=own_weight,
        weight=columns['peer_weight'][each],
        state_read=state,
      )
      own_weight = 1.0
    self._hold(index, (value, state))
    return end

  def _pull(self, index: int) -> None:
    """A node moves towards the centre."""
    replica = self._replica[index]
    own, state = self._current[replica]
    centre, _ = self._find(index, _operations.SERVER)
    rate = self._columns['peer_weight'][index]
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
    key = self._peer[index], self._columns['peer_version'][index]
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
    number = columns['peer_version'][index]
    while (
      end < len(self._peer)
      and columns['kind'][end] == traces.NodeKind.MIX
      and self._peer[end] == traces.ALL
      and columns['peer_version'][end] == number
    ):
      end += 1
    members = range(index, end)
    if len(members) < round(1 / columns['peer_weight'][index]):
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
    self._hold(index, self._find(index, replica))

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

  def _find(self, index: int, replica: int) -> _Held:
    """The values of the version of a replica that a record reads."""
    version = self._columns['peer_version'][index]
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


def _check_nodes(trace: traces.NodeTrace) -> None:
  """Raises a TraceError for a record that no node writes."""
  kinds, nodes = trace.records['kind'], trace.records['node']
  is_mix = kinds == traces.NodeKind.MIX
  peers = np.where(is_mix, trace.records['peer'], traces.ALL)
  last, members = max(traces.NodeKind), (traces.CENTRE, *range(trace.num_nodes))
  is_peer = np.isin(peers, (traces.ALL, *members))
  _refuse('kind', kinds, kinds > last, f'0 to {last}')
  _refuse('node', nodes, ~np.isin(nodes, members), 'a node of this run')
  _refuse('peer', peers, ~is_peer, 'a node of this run')


def _describe(replica: int) -> str:
  return 'the centre' if replica == _operations.SERVER else f'node {replica}'
