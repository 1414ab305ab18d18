"""From the traces of nodes to what is computed, and where it is kept."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import gc
from typing import NamedTuple

import numpy as np

from jasgd import traces
from jasgd.engine import _node_events
from jasgd.engine import _node_operations
from jasgd.engine import _node_slots


class Steps(NamedTuple):
  """Columns with an entry for each step of any node: see `Operation`.

  What is read and written are slots.
  """

  node: np.ndarray
  step: np.ndarray
  own: np.ndarray
  source: np.ndarray
  write: np.ndarray
  state_read: np.ndarray
  state_write: np.ndarray
  rate: np.ndarray  # As a factor.


class Mixes(NamedTuple):
  """Columns with an entry for each operation that is no step."""

  kind: np.ndarray
  own: np.ndarray
  source: np.ndarray
  write: np.ndarray
  own_weight: np.ndarray
  weight: np.ndarray
  state_read: np.ndarray
  state_write: np.ndarray
  rate: np.ndarray  # Of an UPDATE.


class _Names(NamedTuple):
  """Columns with an entry for each change of what a row has."""

  position: np.ndarray
  row: np.ndarray
  version: np.ndarray
  slot: np.ndarray
  state: np.ndarray


class Held(NamedTuple):
  """Where the rows' weights are, with an entry for each row."""

  slot: np.ndarray
  state: np.ndarray
  version: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodePlan:
  """What replay computes. Weights, and forces and gradients, are in slots.

  A position is how many steps were made, with all mixes up to the next one.

  Attributes:
    steps: What steps read and write.
    mixes: What all other operations do.
    ends: [num_steps + 1]: how many mixes were made at a position; at position
      0 those that come before the first step.
    time: When each step ended.
    samples: Of all steps, with this one.
    num_nodes: Without the centre.
    num_slots: For weights; the first holds the first ones.
    num_states: Likewise, for what optimizers keep.
    has_centre: Whether there is one; it is the row after the last node's.
    averages_gradients: Whether gradients are averaged, and not weights.
    has_rates: Whether there is a schedule.
    wire_dtype: What float32 was rounded to in messages.
    masses: Of push-sum, by (node, version); {}: there are none.
  """

  steps: Steps
  mixes: Mixes
  ends: np.ndarray
  time: np.ndarray
  samples: np.ndarray
  num_nodes: int
  num_slots: int
  num_states: int
  has_centre: bool
  averages_gradients: bool
  has_rates: bool
  wire_dtype: str
  masses: dict[tuple[int, int], float]
  names: _Names

  @property
  def num_steps(self) -> int:
    """Steps of all nodes."""
    return len(self.time)

  def locate(self, position: int) -> Held:
    """Where the weights of all rows are, at a position.

    Args:
      position: As far as `ends` goes.

    Returns:
      Slots, and versions.
    """
    num_rows = self.num_nodes + self.has_centre
    held = Held(*(np.zeros(num_rows, int) for _ in Held._fields))
    end = np.searchsorted(self.names.position, position, 'right')
    rows = self.names.row[:end]
    for name in Held._fields:  # Of several, the last one counts.
      getattr(held, name)[rows] = getattr(self.names, name)[:end]
    return held

  def find_shares(self, position: int) -> np.ndarray | None:
    """The shares of nodes in their mean, at a position: those of their masses.

    Mass that is under way counts for the node that has sent it.

    Args:
      position: As far as `ends` goes.

    Returns:
      Numbers that sum to 1; None if nodes have no masses, or none is left.
    """
    versions = self.locate(position).version[: self.num_nodes]
    masses = np.array(
      [
        self.masses.get((node, version), 1.0)  # It begins with that.
        for node, version in enumerate(versions.tolist())
      ]
    )
    if not self.masses or not masses.any():
      return None
    return masses / masses.sum()


def make_node_plan(
  trace: traces.NodeTrace,
  *,
  num_samples: int,
  batch: int,
  get_rate: Callable[[float], float] | None = None,
  until: Mapping[int, int] | None = None,
) -> NodePlan:
  """Reads a trace of nodes.

  Args:
    trace: What nodes did.
    num_samples: An epoch.
    batch: Samples per step.
    get_rate: From the epochs before a step, see `count_node_epochs`, to the
      factor of its rate.
    until: The version of each node, and of `CENTRE`, to come to; what is not
      needed for that is left out. None: all that happened.

  Returns:
    The plan.

  Raises:
    TraceError: if a version is read that does not exist.
  """
  num_nodes, has_centre = trace.num_nodes, _node_events.has_centre(trace)
  averages_gradients = trace.header.get('averages') == 'gradients'
  with _without_collector():
    made = _node_operations.OperationList(
      _node_events.list_events(trace, until),
      num_nodes + has_centre,
      averages_gradients,
    )
  is_step = np.isin(
    [each.kind for each in made.operations],
    (_node_operations.STEP, _node_operations.GRADIENT),
  )
  if not np.any(is_step):
    raise traces.TraceError('A trace without any step cannot be replayed.')
  columns, names, num_slots, num_states = _place(made, num_nodes + has_centre)
  columns['rate'] = np.ones(len(is_step))
  if get_rate is not None:
    steps, place = np.unique(columns['step'], return_inverse=True)
    rates = [
      get_rate(
        count_node_epochs(
          step, num_nodes=num_nodes, batch=batch, num_samples=num_samples
        )
      )
      for step in steps.tolist()
    ]
    columns['rate'] = np.array(rates, float)[place]
  num_done = np.cumsum(is_step)
  num_steps = int(num_done[-1])
  # What comes before the first step is made with it.
  position = np.maximum(1, np.concatenate([[0], num_done])[names.position])
  return NodePlan(
    steps=Steps(*(columns[name][is_step] for name in Steps._fields)),
    mixes=Mixes(*(columns[name][~is_step] for name in Mixes._fields)),
    ends=np.searchsorted(num_done[~is_step], np.arange(num_steps + 1), 'right'),
    time=columns['time'][is_step],
    samples=np.arange(1, num_steps + 1) * batch,
    num_nodes=num_nodes,
    num_slots=num_slots,
    num_states=num_states,
    has_centre=has_centre,
    averages_gradients=averages_gradients,
    has_rates=get_rate is not None,
    wire_dtype=trace.header.get('wire_dtype', 'float32'),
    masses=_find_masses(trace),
    names=names._replace(position=position),
  )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
  """Millions of small objects without cycles: nothing is to be found there."""
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if was_enabled:
      gc.enable()


def _find_masses(trace: traces.NodeTrace) -> dict[tuple[int, int], float]:
  """The mass that a node had when a version of its weights was made."""
  records = trace.records
  if not records['mass'].any():
    return {}
  kinds = (
    traces.NodeKind.STEP,
    traces.NodeKind.MIX,
    traces.NodeKind.RESTART,
    traces.NodeKind.JOIN,
  )
  made = records[np.isin(records['kind'], kinds)]
  names = zip(made['node'].tolist(), made['version'].tolist(), strict=True)
  masses = dict(zip(names, made['mass'].tolist(), strict=True))
  if trace.header.get('is_recorded'):  # Who never came has never had any.
    missing = set(range(trace.num_nodes)).difference(records['node'].tolist())
    masses |= {(node, 0): 0.0 for node in missing}
  return masses


def count_node_epochs(
  num_steps: int, *, num_nodes: int, batch: int, num_samples: int
) -> float:
  """The epochs of all nodes, if each has made so many steps.

  By these a node finds its rate: it knows its own steps and no others'.

  Args:
    num_steps: That the node has made.
    num_nodes: How many nodes there are.
    batch: Samples per step.
    num_samples: An epoch.

  Returns:
    The epochs.

  Examples:
    >>> from jasgd import engine
    >>> engine.count_node_epochs(10, num_nodes=4, batch=16, num_samples=320)
    2.0
  """
  return num_steps * num_nodes * batch / num_samples


def _place(
  made: _node_operations.OperationList, num_rows: int
) -> tuple[dict[str, np.ndarray], _Names, int, int]:
  """Gives all values slots.

  Args:
    made: The operations.
    num_rows: Of nodes and the centre.

  Returns:
    The columns of the operations, and the names, whose position is the number
    of operations; and the numbers of slots.
  """
  fields = _node_operations.Operation._fields
  values = zip(*made.operations, strict=True)
  columns = {
    name: np.array(column) for name, column in zip(fields, values, strict=True)
  }
  after, row, version, value, state = np.array(made.names).T
  slots, num_slots = _node_slots.allocate(
    num_rows,
    [columns['own'], columns['source']],
    columns['write'],
    (row, value, after),
  )
  states, num_states = _node_slots.allocate(
    num_rows,
    [columns['state_read']],
    columns['state_write'],
    (row, state, after),
  )
  for name in ('own', 'source', 'write'):
    columns[name] = slots[columns[name]]
  read = np.maximum(columns['state_read'], 0)
  written = columns['state_write']
  columns['state_read'] = states[read]
  columns['state_write'] = states[np.where(written < 0, read, written)]
  names = _Names(after, row, version, slots[value], states[state])
  return columns, names, num_slots, num_states
