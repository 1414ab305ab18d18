"""From the records of nodes to changes of weights, and what they depend on."""

from collections.abc import Mapping
import dataclasses

import numpy as np

from jasgd import traces

# What changes weights: a node's step, its mix with others, its move towards the
# centre, the centre's move by a node's force, the mean of several nodes, and a
# node's return to what it was.
STEP, MIX, PULL, MOVE, MEAN, RETURN = range(6)

# A row, and how often its weights had changed. Node i is row i, and the centre
# the row after the last node. A force is known by the node that it is from, as
# row -1 - i, and by the node's version before it moved.
Version = tuple[int, int]

_Columns = dict[str, list]
_NAMES = (
  *('kind', 'node', 'peer', 'mix', 'step', 'version', 'peer_version'),
  *('own_weight', 'peer_weight', 'end_time'),
)


@dataclasses.dataclass(kw_only=True, slots=True)
class Event:
  """One change of weights.

  Attributes:
    kind: STEP, MIX, PULL, MOVE, MEAN or RETURN.
    rows: Whose weights change: one row, but for a MEAN.
    befores: The versions of these before.
    versions: And after.
    reads: What is read of others; of a STEP where the gradient is computed, and
      of a RETURN what is there again.
    weights: Of a MIX, what the others are multiplied with; of a PULL its rate.
    own_weight: Of a MIX.
    step: Steps that were made before, of a STEP or MEAN.
    time: When it ended.
    is_join: Whether a node that came takes another's weights.
    num_members: Of a MEAN, how many took part.
  """

  # There may be millions: tuples of numbers are not looked at again and again
  # by the collector of garbage, as lists would be.
  kind: int
  rows: tuple[int, ...]
  befores: tuple[int, ...]
  versions: tuple[int, ...]
  reads: tuple[Version, ...]
  weights: tuple[float, ...] = ()
  own_weight: float = 1.0
  step: int = 0
  time: float = 0.0
  is_join: bool = False
  num_members: int = 1

  def list_needs(self) -> tuple[Version, ...]:
    """All versions that must be there before."""
    if self.kind == RETURN:
      return self.reads
    return (*zip(self.rows, self.befores, strict=True), *self.reads)

  def list_results(self) -> tuple[Version, ...]:
    """All versions, and forces, that come about."""
    results = tuple(zip(self.rows, self.versions, strict=True))
    if self.kind == PULL:
      return (*results, (-1 - self.rows[0], self.befores[0]))
    return results


def list_events(
  trace: traces.NodeTrace, until: Mapping[int, int] | None = None
) -> list[Event]:
  """What happened to weights, in order.

  Args:
    trace: What nodes did.
    until: The versions of nodes, and of `CENTRE`, to come to; what these do not
      depend on is left out. None: all.

  Returns:
    The events.

  Raises:
    TraceError: if a version is read, or asked for, that does not exist, or an
      all-reduce was written down by some of its members only and others build
      upon it.
  """
  reader = _Reader(trace)
  events, goals = reader.list_events(), []
  if until is not None:
    goals = [(reader.get_row(node), version) for node, version in until.items()]
    events = _keep_needed(events, goals)
  return _drop_halves(events, goals)


class _Reader:
  """Reads the records of a trace, one after another."""

  def __init__(self, trace: traces.NodeTrace) -> None:
    self._num_nodes = trace.num_nodes
    self._columns: _Columns = {
      name: trace.records[name].tolist() for name in _NAMES
    }
    self._current: dict[int, int] = {}
    self._has_joined: set[int] = set()

  def get_row(self, node: int) -> int:
    return self._num_nodes if node == traces.CENTRE else node

  def list_events(self) -> list[Event]:
    """All changes of weights, in order."""
    columns, events = self._columns, []
    index, kinds = 0, columns['kind']
    while index < len(kinds):
      kind, end = kinds[index], index + 1
      row = self.get_row(columns['node'][index])
      if kind == traces.NodeKind.STEP:
        reads = ((row, columns['peer_version'][index]),)
        events.append(self._make(STEP, index, reads))
      elif kind == traces.NodeKind.MIX:
        end = self._find_end(index)
        events.append(self._read_mix(index, end))
      elif kind == traces.NodeKind.RESTART:
        reads = ((row, columns['peer_version'][index]),)
        events.append(self._make(RETURN, index, reads))
      elif kind == traces.NodeKind.JOIN:
        self._has_joined.add(row)
      index = end
    return events

  def _find_end(self, index: int) -> int:
    """Where the records of one mix, or of one mean, end."""
    columns, end = self._columns, index + 1
    is_mean = columns['peer'][index] == traces.ALL
    key = columns['peer_version' if is_mean else 'mix']
    while (
      end < len(key)
      and columns['kind'][end] == traces.NodeKind.MIX
      and (columns['peer'][end] == traces.ALL) == is_mean
      and (is_mean or columns['node'][end] == columns['node'][index])
      and key[end] == key[index]
    ):
      end += 1
    return end

  def _read_mix(self, index: int, end: int) -> Event:
    """A mix with others or with the centre, a mean, or the centre's move."""
    columns = self._columns
    node, peer = columns['node'][index], columns['peer'][index]
    if peer == traces.ALL:
      event = self._make(MEAN, index, (), end)
      event.num_members = round(1 / columns['peer_weight'][index])
      return event
    if node == traces.CENTRE:
      force = (-1 - peer, columns['peer_version'][index])
      return self._make(MOVE, index, (force,))
    reads = tuple(
      [
        (self.get_row(columns['peer'][i]), columns['peer_version'][i])
        for i in range(index, end)
      ]
    )
    is_join = node in self._has_joined
    is_pull = peer == traces.CENTRE and not is_join
    event = self._make(PULL if is_pull else MIX, index, reads)
    event.weights = tuple(columns['peer_weight'][index:end])
    event.own_weight = columns['own_weight'][index]
    event.is_join = is_join
    return event

  def _make(
    self,
    kind: int,
    index: int,
    reads: tuple[Version, ...],
    end: int | None = None,
  ) -> Event:
    """What a record, or those up to `end`, say of whose weights change."""
    columns = self._columns
    chosen = slice(index, index + 1 if end is None else end)
    rows = tuple([self.get_row(node) for node in columns['node'][chosen]])
    versions = tuple(columns['version'][chosen])
    befores = tuple([self._current.get(row, 0) for row in rows])
    self._current.update(zip(rows, versions, strict=True))
    if self._has_joined:
      self._has_joined.difference_update(rows)
    return Event(
      kind=kind,
      rows=rows,
      befores=befores,
      versions=versions,
      reads=reads,
      # With the step itself, which is one more than there were before.
      step=max(columns['step'][chosen]) - 1,
      time=columns['end_time'][index],
    )


def _keep_needed(events: list[Event], goals: list[Version]) -> list[Event]:
  """The events that some versions depend on, and returns to these versions."""
  existing = {key for event in events for key in event.list_results()}
  for row, version in goals:
    if version and (row, version) not in existing:
      raise traces.TraceError(f'Node {row} never had a version {version}.')
  needed = set(goals)
  kept = []
  for event in reversed(events):
    if needed.intersection(event.list_results()):
      needed.update(event.list_needs())
      kept.append(event)
  kept.reverse()
  last = {
    row: version
    for event in kept
    for row, version in zip(event.rows, event.versions, strict=True)
  }
  time = kept[-1].time if kept else 0.0
  return kept + [
    Event(
      kind=RETURN,
      rows=(row,),
      befores=(last.get(row, 0),),
      versions=(version,),
      reads=((row, version),),
      time=time,
    )
    for row, version in goals
    if last.get(row, 0) != version
  ]


def _drop_halves(events: list[Event], goals: list[Version]) -> list[Event]:
  """Leaves out means that not all members wrote down, and steps after them.

  Those who were killed before they did cannot have gone on from there. Others
  may have made steps before they noticed; they go back to a checkpoint.
  """
  kept, void = [], set()
  for event in events:
    needs = void.intersection(event.list_needs())
    if needs and event.kind != STEP:
      _refuse_half(*needs)
    if needs or (event.kind == MEAN and len(event.rows) < event.num_members):
      void.update(event.list_results())
    else:
      kept.append(event)
  if void.intersection(goals):
    _refuse_half(*void.intersection(goals))
  return kept


def _refuse_half(*versions: Version) -> None:
  """Raises a TraceError: there are versions that cannot be computed."""
  row, version = min(versions)
  raise traces.TraceError(
    f'Version {version} of node {row} comes from an all-reduce that not all of '
    'its nodes have written down, and something was made of it.'
  )


def has_centre(trace: traces.NodeTrace) -> bool:
  """Whether there is a centre, which nodes asked or that moved."""
  records = trace.records
  mixes = records[records['kind'] == traces.NodeKind.MIX]
  is_there = (mixes['node'] == traces.CENTRE) | (mixes['peer'] == traces.CENTRE)
  return bool(np.any(is_there))
