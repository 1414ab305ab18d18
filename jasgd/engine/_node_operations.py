"""From changes of weights to operations on values, each of which is made once.

A value is never changed: an operation reads some and makes a new one. Versions
of nodes are names of values, and may share one: all nodes at the start, those
who have just averaged, a node that went back to what it was. So nothing is
computed or copied twice.
"""

from typing import Any, NamedTuple

from jasgd import traces
from jasgd.engine import _node_events

# The operations. The first two are steps: a gradient that is applied, or only
# computed, because it is averaged first. A force is computed, then subtracted,
# by one call of a real node. The mean of many is made one by one.
STEP, GRADIENT, MIX, FORCE, SUBTRACT, MOVE, AVERAGE, UPDATE = range(8)
# The own weight of the first AVERAGE of a mean; those that follow have more.
FIRST_SHARE = 0.5


class Operation(NamedTuple):
  """Reads values and makes one of weights, and one of what optimizers keep.

  Attributes:
    kind: What is done.
    own: The weights that change. (A gradient changes none.)
    source: The other weights: where a gradient is computed, or what is mixed
      in: of a MOVE or SUBTRACT a force, of an UPDATE a gradient.
    write: What comes about.
    own_weight: What `own` is multiplied with.
    weight: What `source` is; of a FORCE, their difference.
    state_read: What the optimizer kept; -1: it does not matter.
    state_write: What it keeps then.
    node: Of a step.
    step: Of a step: which minibatch. Of an UPDATE, which one it is of.
    time: When it ended.
  """

  kind: int
  own: int
  source: int
  write: int
  own_weight: float = 1.0
  weight: float = 1.0
  state_read: int = -1
  state_write: int = -1
  node: int = 0
  step: int = 0
  time: float = 0.0


class Name(NamedTuple):
  """From then on, a row has these values."""

  after: int  # So many operations.
  row: int
  version: int
  value: int
  state: int


# What a row has at some version: a value of weights, and one of what its
# optimizer keeps.
_Held = tuple[int, int]


class OperationList:
  """The operations that some events are.

  Attributes:
    operations: In order.
    names: What rows have, and when.
    num_values: Of weights; 0 is what all rows start with.
    num_states: Of what optimizers keep; likewise.
  """

  def __init__(
    self,
    events: list[_node_events.Event],
    num_rows: int,
    averages_gradients: bool,
  ) -> None:
    """Goes through the events."""
    self.operations: list[Operation] = []
    self.names: list[Name] = []
    self.num_values = self.num_states = 1
    self._averages_gradients = averages_gradients
    self._is_all_reduce = any(
      event.kind == _node_events.MEAN for event in events
    )
    self._current: list[_Held] = [(0, 0)] * num_rows
    self._pending: dict[int, int] = {}  # Gradients that wait for their mean.
    self._is_read = {key for event in events for key in event.reads}
    self._found: dict[_node_events.Version, _Held] = {
      (row, 0): (0, 0) for row in range(num_rows)
    }
    handlers = {
      _node_events.STEP: self._step,
      _node_events.MIX: self._mix,
      _node_events.PULL: self._pull,
      _node_events.MOVE: self._move,
      _node_events.MEAN: self._average,
      _node_events.RETURN: self._return,
    }
    for event in events:
      handlers[event.kind](event)

  # --- Events.

  def _step(self, event: _node_events.Event) -> None:
    (row,) = event.rows
    own, state_read = self._current[row]
    source, _ = self._find(event.reads[0])
    fields = {'node': row, 'step': event.step, 'time': event.time}
    if self._averages_gradients:
      self._pending[row] = self._add(GRADIENT, source, source, **fields)
      self._name(event, (own, state_read))
      return
    state = self._make_state()
    fields |= {'state_read': state_read, 'state_write': state}
    self._name(event, (self._add(STEP, own, source, **fields), state))

  def _mix(self, event: _node_events.Event) -> None:
    value, state = self._current[event.rows[0]]
    if event.is_join:
      self._pending.pop(event.rows[0], None)
    if event.is_join and self._is_all_reduce:
      # All of them are to be the same, in what the optimizer keeps too.
      self._name(event, self._find(event.reads[0]))
      return
    own_weight = event.own_weight
    for key, weight in zip(event.reads, event.weights, strict=True):
      source, _ = self._find(key)
      value = self._add(
        MIX,
        value,
        source,
        own_weight=own_weight,
        weight=weight,
        state_read=state,
        time=event.time,
      )
      own_weight = 1.0
    self._name(event, (value, state))

  def _pull(self, event: _node_events.Event) -> None:
    own, state = self._current[event.rows[0]]
    (rate,) = event.weights
    centre, _ = self._find(event.reads[0])
    fields = {'state_read': state, 'time': event.time}
    force = self._add(FORCE, own, centre, weight=rate, **fields)
    value = self._add(SUBTRACT, own, force, weight=-1.0, **fields)
    self._keep((-1 - event.rows[0], event.befores[0]), (force, 0))
    self._name(event, (value, state))

  def _move(self, event: _node_events.Event) -> None:
    own, state = self._current[event.rows[0]]
    force, _ = self._find(event.reads[0])
    value = self._add(MOVE, own, force, time=event.time)
    self._name(event, (value, state))

  def _average(self, event: _node_events.Event) -> None:
    if not self._averages_gradients:
      helds = [self._current[row] for row in event.rows]
      mean = self._add_mean([value for value, _ in helds], event.time)
      for index, (_, state) in enumerate(helds):
        self._name(event, (mean, state), index)
      return
    missing = [row for row in event.rows if row not in self._pending]
    if missing:
      raise traces.TraceError(
        f'Node {missing[0]} took part in the mean of gradients at '
        f'{event.time:g} s, and had none.'
      )
    gradients = [self._pending.pop(row) for row in event.rows]
    mean = self._add_mean(gradients, event.time)
    updated: dict[_Held, _Held] = {}  # Those who are the same stay the same.
    for index, row in enumerate(event.rows):
      held = self._current[row]
      if held not in updated:
        state = self._make_state()
        value = self._add(
          UPDATE,
          held[0],
          mean,
          state_read=held[1],
          state_write=state,
          step=event.step,
          time=event.time,
        )
        updated[held] = (value, state)
      self._name(event, updated[held], index)

  def _return(self, event: _node_events.Event) -> None:
    self._pending.pop(event.rows[0], None)
    self._name(event, self._find(event.reads[0]))

  # --- Values.

  def _add(self, kind: int, own: int, source: int, **fields: Any) -> int:
    """An operation, which makes a value."""
    value = self.num_values
    self.num_values += 1
    self.operations.append(Operation(kind, own, source, value, **fields))
    return value

  def _add_mean(self, values: list[int], time: float) -> int:
    """The mean of some values."""
    mean = values[0]
    if len(set(values)) == 1:
      return mean
    for count, value in enumerate(values[1:], start=2):
      fields = {'own_weight': (count - 1) / count, 'weight': 1 / count}
      mean = self._add(AVERAGE, mean, value, time=time, **fields)
    return mean

  def _make_state(self) -> int:
    state = self.num_states
    self.num_states += 1
    return state

  # --- Versions.

  def _find(self, key: _node_events.Version) -> _Held:
    """What a version of a row is; or the force that it came about with."""
    if key in self._found:
      return self._found[key]
    row, version = key
    if row < 0:
      raise traces.TraceError(
        f'The centre moves by a force of node {-1 - row} at its version '
        f'{version}, which there was not.'
      )
    raise traces.TraceError(
      f'Version {version} of node {row} is read, but it does not exist then.'
    )

  def _name(
    self, event: _node_events.Event, held: _Held, index: int = 0
  ) -> None:
    """A row has another version now."""
    row, version = event.rows[index], event.versions[index]
    self._current[row] = held
    self._keep((row, version), held)
    self.names.append(Name(len(self.operations), row, version, *held))

  def _keep(self, key: _node_events.Version, held: _Held) -> None:
    if key in self._is_read:
      self._found[key] = held
