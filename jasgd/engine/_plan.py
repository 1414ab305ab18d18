"""From a trace to a plan: the operations, with their slots and rates."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import gc
from typing import Any, NamedTuple

import numpy as np

from jasgd import traces
from jasgd.engine import _operations
from jasgd.engine import _push_reader
from jasgd.engine import _record_reader
from jasgd.engine import _slots

SERVER = _operations.SERVER
FETCH = _operations.FETCH
STEP = _operations.STEP


class Steps(NamedTuple):
  """Columns with an entry for each operation on minibatches.

  `own`, `source`, `write`, `state_read` and `state_write` are slots. All others
  are described at `Operation` and at `SERVER_COLUMNS`.
  """

  kind: np.ndarray
  worker: np.ndarray
  step: np.ndarray
  own: np.ndarray
  source: np.ndarray
  write: np.ndarray
  state_read: np.ndarray
  state_write: np.ndarray
  rate: np.ndarray  # Factor on the optimizer's updates.
  replica: np.ndarray
  num_steps: np.ndarray
  staleness: np.ndarray
  num_learners: np.ndarray
  is_reset: np.ndarray
  is_separate: np.ndarray
  call: np.ndarray
  num_devices: np.ndarray
  local_rate: np.ndarray  # Factor on a learner's own steps.


class Mixes(NamedTuple):
  """Columns with an entry for each operation without a minibatch."""

  kind: np.ndarray
  own: np.ndarray
  source: np.ndarray
  write: np.ndarray
  own_weight: np.ndarray
  weight: np.ndarray
  state_read: np.ndarray
  state_write: np.ndarray
  rate: np.ndarray  # Factor on the optimizer's updates, for UPDATE.
  step: np.ndarray  # Number of the next minibatch, for START.


class Located(NamedTuple):
  """Places of the replicas of a plan: arrays with an entry for each."""

  slot: np.ndarray  # Slot of its weights.
  state: np.ndarray  # Slot of its optimizer's state.
  version: np.ndarray


class _Moves(NamedTuple):
  """Columns with an entry for each change of the place of a replica."""

  clock: np.ndarray
  row: np.ndarray  # Index of the replica in `Plan.replicas`.
  slot: np.ndarray
  state: np.ndarray
  version: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
  """Operations of a replay, and the slots of their results.

  The clock of a replay counts updates. With a server, an update consists of one
  or several steps. With nodes, every step counts as an update, together with
  the mixes up to the next step.

  Attributes:
    steps: Operations on minibatches.
    mixes: All other operations.
    step_ends: int [updates + 1]; the steps of update u are those from
      `step_ends[u]` up to `step_ends[u + 1]`.
    mix_ends: int [steps + 1]; `mix_ends[s]` is the number of mixes made before
      step s.
    time: float [updates + 1]: time of the last step at each clock.
    samples: int [updates + 1]: samples of all gradients applied at each clock.
    replicas: Numbers of all replicas with records; `SERVER` is the server or
      the centre.
    num_slots: Number of slots for weights; the first slot holds the initial
      weights. With a server, the last slot is written but never read.
    num_states: Number of slots for the states of nodes' optimizers.
    num_locals: Number of learners with their own replica.
    has_server: Whether learners push to a server; otherwise nodes step and mix.
    has_rates: Whether there is a schedule; otherwise all rates are 1.
    is_single: Whether every update has one gradient.
    averages_gradients: Whether nodes average gradients instead of weights.
    wire_dtype: Dtype that float32 was rounded to in messages.
    fragments: Replica of the server -> numbers of its leaves (None for all), if
      learners have their own optimizers and push differences of weights. None
      if learners push gradients.
    masses: (node, version) -> mass of push-sum; {} for other strategies.
    digests: Clock -> digest of a real server's weights.
    moves: Changes of the slots of nodes' replicas; None with a server.
  """

  steps: Steps
  mixes: Mixes
  step_ends: np.ndarray
  mix_ends: np.ndarray
  time: np.ndarray
  samples: np.ndarray
  replicas: tuple[int, ...]
  num_slots: int
  num_states: int
  num_locals: int
  has_server: bool
  has_rates: bool
  is_single: bool
  averages_gradients: bool
  wire_dtype: str
  fragments: dict[int, list[int] | None] | None
  masses: dict[tuple[int, int], float]
  digests: dict[int, int]
  moves: _Moves | None

  @property
  def num_updates(self) -> int:
    """Number of updates: the clock at the end."""
    return len(self.step_ends) - 1

  @property
  def nodes(self) -> tuple[int, ...]:
    """Numbers of the nodes: `replicas` without the centre."""
    return tuple(each for each in self.replicas if each != SERVER)

  @property
  def has_local_steps(self) -> bool:
    """Whether learners step on replicas of their own."""
    return self.num_locals > 0 or bool(np.any(self.steps.num_steps > 1))

  def find_call_end(self, clock: int) -> int:
    """The first clock, from `clock` on, at the end of a call.

    Between the updates of one call the weights do not exist.
    """
    calls, ends = self.steps.call, self.step_ends

    def get_call(clock: int) -> int:
      return int(calls[ends[clock] - 1])

    while (
      0 < clock < self.num_updates
      and get_call(clock) == get_call(clock + 1) > 0
    ):
      clock += 1
    return clock

  def locate(self, clock: int) -> Located:
    """Finds the slots of all replicas at a clock.

    Args:
      clock: Clock of the replay.

    Returns:
      Slots and versions in the order of `replicas`. With a server the slots are
      0 and have no meaning: its weights are in its state.
    """
    located = Located(*np.zeros((3, len(self.replicas)), int))
    if self.moves is None:
      located.version[:] = clock
      return located
    end = np.searchsorted(self.moves.clock, clock, 'right')
    rows = self.moves.row[:end]
    # Of several moves of one replica, numpy keeps the last one.
    for name in Located._fields:
      getattr(located, name)[rows] = getattr(self.moves, name)[:end]
    return located

  def find_versions(self, clock: int) -> dict[int, int]:
    """Counts the changes of the weights of each replica up to a clock.

    Args:
      clock: Clock of the replay.

    Returns:
      Replica -> version, for `replicas`, all fragments, and learners with their
      own replicas. A learner's weights change with each of its steps and with
      each fetch.
    """
    if not self.has_server:
      versions = self.locate(clock).version.tolist()
      return dict(zip(self.replicas, versions, strict=True))
    end = self.step_ends[clock]
    steps = Steps(*(column[:end] for column in self.steps))
    made = steps.replica[steps.kind == STEP]
    found = {
      replica: int(np.count_nonzero(made == replica))
      for replica in self.fragments or (SERVER,)
    }
    changes = np.bincount(
      steps.worker,
      steps.num_steps + (steps.kind == FETCH),
      minlength=self.num_locals,
    )
    return found | dict(
      enumerate(changes[: self.num_locals].astype(int).tolist())
    )

  def find_shares(self, clock: int) -> np.ndarray | None:
    """Shares of the nodes in their mean at a clock, by their masses.

    A node counts with the mass of its last version: mass that it has sent
    since then still counts for it.

    Args:
      clock: Clock of the replay.

    Returns:
      Numbers that sum to 1. None if nodes have no masses, or all masses are 0.
    """
    nodes = self.nodes
    versions = self.locate(clock).version[: len(nodes)].tolist()
    masses = np.array(
      [
        self.masses.get(each, 1.0)  # All masses are 1 at the start.
        for each in zip(nodes, versions, strict=True)
      ]
    )
    if not self.masses or not masses.any():
      return None
    return masses / masses.sum()


def make_plan(
  trace: traces.Trace,
  *,
  num_samples: int,
  batch: int,
  get_rate: Callable[[float], float] | None = None,
  num_updates: int | None = None,
  until: Mapping[int, int] | None = None,
) -> Plan:
  """Makes the plan of a trace.

  Args:
    trace: Trace, from its first update on.
    num_samples: Samples per epoch.
    batch: Samples per minibatch; the simulation may have assumed another size.
    get_rate: Function from the epochs before an update to the factor of its
      rate. A node counts epochs by its own steps, see `count_epochs`.
    num_updates: Number of updates to make, with a server. None: all.
    until: Replica of a node -> version to end with. Operations that these
      versions do not depend on are left out. None: all operations.

  Returns:
    The plan.

  Raises:
    ValueError: if `num_updates` is given without a server, or `until` with one.
    TraceError: if the trace cannot be executed.
  """
  if (until if trace.has_server else num_updates) is not None:
    raise ValueError(
      'num_updates is for traces with a server, and until for those without.'
    )
  with _without_collector():
    if trace.has_server:
      made = _push_reader.read_pushes(trace, num_updates)
    else:
      made = _record_reader.read_records(trace, until)
  make = _plan_server if trace.has_server else _plan_nodes
  return make(trace, made, get_rate, num_samples, batch)


def count_epochs(
  num_steps: int, *, num_nodes: int, batch: int, num_samples: int
) -> float:
  """Epochs of all nodes together, if each node has made `num_steps`.

  The rate of a node depends on these epochs, since it knows only its own steps.

  Args:
    num_steps: Number of steps that the node has made.
    num_nodes: Number of nodes.
    batch: Samples per step.
    num_samples: Samples per epoch.

  Returns:
    The number of epochs.

  Examples:
    >>> from jasgd import engine
    >>> engine.count_epochs(10, num_nodes=4, batch=16, num_samples=320)
    2.0
  """
  return num_steps * num_nodes * batch / num_samples


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
  """Turns off garbage collection.

  It would search millions of small objects for cycles, and they have none.
  """
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()


# --- A server.


def _plan_server(
  trace: traces.Trace,
  made: _operations.Operations,
  get_rate: Callable[[float], float] | None,
  num_samples: int,
  batch: int,
) -> Plan:
  """Makes the plan of a trace with a server."""
  columns = made.columns
  kind, size = columns['kind'], len(columns['kind'])
  is_update, is_push = kind == _operations.STEP, kind != _operations.FETCH
  ends = np.append(0, np.flatnonzero(is_update) + 1)
  per_push = batch * int(trace.header.get('steps_per_push', 1))
  if made.num_locals:
    num_pushes = np.append(0, np.cumsum(is_push))[ends]
  else:
    num_pushes = ends
  samples = num_pushes * per_push
  slots, num_slots = _slots.allocate(
    (columns['own'], columns['source']), columns['write']
  )
  # One more slot, which is never read, takes versions that nothing reads. So it
  # does for steps without a new version: the index -1 finds the last entry.
  slots[slots < 0] = num_slots
  slots = np.append(slots, np.int32(num_slots))
  zeros = np.broadcast_to(np.int32(0), size)
  rate = local_rate = np.broadcast_to(np.float64(1.0), size)
  if get_rate is not None:
    epochs = (samples / num_samples).tolist()
    rates = np.array([get_rate(each) for each in epochs])
    rate = rates[np.cumsum(is_update) - is_update]
    local_rate = rates[columns['local_version']]
  columns |= {
    'own': zeros,
    'source': slots[columns['source']],
    'write': slots[columns['write']],
    'state_read': zeros,
    'state_write': zeros,
    'rate': rate,
    'local_rate': local_rate,
  }
  return Plan(
    steps=Steps(*(columns[name] for name in Steps._fields)),
    mixes=Mixes(*(np.zeros(0, int) for _ in Mixes._fields)),
    step_ends=ends,
    mix_ends=np.broadcast_to(np.int32(0), size + 1),
    time=np.append(0.0, columns['time'][ends[1:] - 1]),
    samples=samples,
    replicas=made.replicas,
    num_slots=num_slots + 1,
    num_states=1,
    num_locals=made.num_locals,
    has_server=True,
    has_rates=get_rate is not None,
    is_single=len(ends) - 1 == np.count_nonzero(is_push),
    averages_gradients=False,
    wire_dtype=str(trace.header.get('wire_dtype', 'float32')),
    fragments=_read_fragments(trace),
    masses={},
    digests=_read_digests(trace),
    moves=None,
  )


def _read_fragments(
  trace: traces.Trace,
) -> dict[int, list[int] | None] | None:
  """The leaves of each replica, if learners push differences of weights."""
  if trace.header.get('pushes') != 'differences':
    return None
  leaves = trace.header.get('fragments', [None])
  return {SERVER - number: each for number, each in enumerate(leaves)}


def _read_digests(trace: traces.Trace) -> dict[int, int]:
  """Clock after an update -> digest that the server recorded."""
  records = trace.records
  is_known = records['digest'] != 0
  if not np.any(is_known):
    return {}
  is_known &= ~trace.is_void
  versions = records['version'][is_known].tolist()
  return dict(zip(versions, records['digest'][is_known].tolist(), strict=True))


# --- Nodes.


def _plan_nodes(
  trace: traces.Trace,
  made: _operations.Operations,
  get_rate: Callable[[float], float] | None,
  num_samples: int,
  batch: int,
) -> Plan:
  """Makes the plan of a trace of nodes."""
  columns = made.columns
  is_step = np.isin(columns.get('kind', []), _operations.STEP_KINDS)
  if not np.any(is_step):
    raise traces.TraceError('A trace without any step cannot be replayed.')
  columns['rate'] = np.ones(len(is_step))
  columns['local_rate'] = columns['rate']
  if get_rate is not None:
    steps, place = np.unique(columns['step'], return_inverse=True)
    sizes = {'batch': batch, 'num_samples': num_samples}
    rates = [
      get_rate(count_epochs(step, num_nodes=trace.num_workers, **sizes))
      for step in steps.tolist()
    ]
    columns['rate'] = np.array(rates, float)[place]
  moves, num_slots, num_states = _place(made)
  num_done = np.cumsum(is_step)
  num_steps = int(num_done[-1])
  # Moves before the first step belong to the first update.
  clock = np.maximum(1, np.append(0, num_done)[moves.clock])
  counts = np.arange(num_steps + 1)
  return Plan(
    steps=Steps(*(columns[name][is_step] for name in Steps._fields)),
    mixes=Mixes(*(columns[name][~is_step] for name in Mixes._fields)),
    step_ends=counts,
    mix_ends=np.searchsorted(num_done[~is_step], counts, 'right'),
    time=np.append(0.0, columns['time'][is_step]),
    samples=counts * batch,
    replicas=made.replicas,
    num_slots=num_slots,
    num_states=num_states,
    num_locals=0,
    has_server=False,
    has_rates=get_rate is not None,
    is_single=True,
    averages_gradients=trace.header.get('averages') == 'gradients',
    wire_dtype=str(trace.header.get('wire_dtype', 'float32')),
    fragments=None,
    masses=_find_masses(trace),
    digests={},
    moves=moves._replace(clock=clock),
  )


def _place(made: _operations.Operations) -> tuple[_Moves, int, int]:
  """Gives all values slots.

  Args:
    made: Operations; their columns of values become columns of slots, in place.

  Returns:
    The moves of replicas, with the number of operations before as clock; the
    number of slots for weights; and the number of slots for states.
  """
  columns, changes = made.columns, made.changes
  assert changes is not None
  num_replicas = len(made.replicas)
  slots, num_slots = _slots.allocate(
    (columns['own'], columns['source']),
    columns['write'],
    (changes.replica, changes.value, changes.after),
    num_replicas,
  )
  states, num_states = _slots.allocate(
    (columns['state_read'],),
    columns['state_write'],
    (changes.replica, changes.state, changes.after),
    num_replicas,
  )
  # One more slot, which is never read, takes the values that nothing needs.
  if np.any(slots < 0):
    slots[slots < 0] = num_slots
    num_slots += 1
  if np.any(states < 0):
    states[states < 0] = num_states
    num_states += 1
  for name in ('own', 'source', 'write'):
    columns[name] = slots[columns[name]]
  # An operation that does not change a state writes it to its old slot.
  read = np.maximum(columns['state_read'], 0)
  written = columns['state_write']
  columns['state_read'] = states[read]
  columns['state_write'] = states[np.where(written < 0, read, written)]
  rows: dict[int, int] = {each: row for row, each in enumerate(made.replicas)}
  row = np.array([rows[each] for each in changes.replica.tolist()], int)
  return (
    _Moves(
      changes.after,
      row,
      slots[changes.value],
      states[changes.state],
      changes.version,
    ),
    num_slots,
    num_states,
  )


def _find_masses(trace: traces.Trace) -> dict[tuple[int, int], float]:
  """(node, version) -> mass of the node when the version was made."""
  records: Any = trace.records
  if not records['mass'].any():
    return {}
  kinds = (
    traces.Kind.STEP,
    traces.Kind.MIX,
    traces.Kind.RESTART,
    traces.Kind.JOIN,
  )
  made = records[np.isin(records['kind'], kinds)]
  names = zip(made['replica'].tolist(), made['version'].tolist(), strict=True)
  masses = dict(zip(names, made['mass'].tolist(), strict=True))
  if trace.header.get('is_recorded'):  # A node without records has no mass.
    nodes = range(trace.num_workers)
    missing = set(nodes).difference(records['replica'].tolist())
    masses |= {(node, 0): 0.0 for node in missing}
  return masses
