"""From the traces of nodes to what is computed, one event at a time."""

from collections.abc import Callable, Iterator
import dataclasses

import numpy as np

from jasgd import traces

# What an event is: a node's step, its mix with others, the mean of several
# nodes, or keeping weights that are read again after they have changed.
STEP, MIX, MEAN, KEEP = range(4)

_Version = tuple[int, int]  # A row and how often its weights had changed.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodePlan:
  """What replay computes: arrays with an entry for each event.

  The weights of node i are row i, those of the centre the row after the last
  node. Versions that are read after they were overwritten are kept in the rows
  behind these, for as long as they are needed.

  Attributes:
    kind: STEP, MIX, MEAN or KEEP.
    row: Whose weights change; of a KEEP, the row they go to.
    step: Of a STEP, the minibatch.
    sources: [events, k]: the rows that are read. Of a STEP the first, where the
      gradient is computed; of a KEEP the first, which is copied.
    weights: [events, k]: of a MIX, what the sources are multiplied with.
    own_weight: Of a MIX, what the own weights are multiplied with.
    group: Of a MEAN, which row of `members`.
    members: [means, rows]: of each MEAN, 1 for those who take part, else 0.
    rate: Of a STEP, as a factor.
    time: When it ended.
    samples: Of all steps so far.
    num_nodes: Without the centre.
    num_rows: With the centre and kept versions.
    has_centre: Whether there is one.
  """

  kind: np.ndarray
  row: np.ndarray
  step: np.ndarray
  sources: np.ndarray
  weights: np.ndarray
  own_weight: np.ndarray
  group: np.ndarray
  members: np.ndarray
  rate: np.ndarray
  time: np.ndarray
  samples: np.ndarray
  num_nodes: int
  num_rows: int
  has_centre: bool

  @property
  def num_steps(self) -> int:
    """Steps of all nodes."""
    return int(np.count_nonzero(self.kind == STEP))


@dataclasses.dataclass(kw_only=True)
class _Event:
  """One change of weights, before rows are given out."""

  kind: int
  rows: list[int]  # Whose weights change.
  reads: list[_Version]
  weights: list[float] = dataclasses.field(default_factory=list)
  own_weight: float = 1.0
  step: int = 0
  time: float = 0.0


def make_node_plan(
  trace: traces.NodeTrace,
  *,
  num_samples: int,
  batch: int,
  get_rate: Callable[[float], float] | None = None,
) -> NodePlan:
  """Reads a trace of nodes.

  Args:
    trace: What nodes did.
    num_samples: An epoch.
    batch: Samples per step.
    get_rate: From the epochs before a step to the factor of its rate.

  Returns:
    The plan.

  Raises:
    TraceError: if a version is read that does not exist.
  """
  num_nodes = trace.num_nodes
  has_centre = bool(np.any(trace.records['node'] == traces.CENTRE))
  events = list(_list_events(trace, num_nodes))
  if not any(event.kind == STEP for event in events):
    raise traces.TraceError('A trace without any step cannot be replayed.')
  num_rows = num_nodes + has_centre
  rows = _place_events(events, num_rows)
  columns, members, num_rows = _to_arrays(rows, num_rows)
  is_step = columns['kind'] == STEP
  samples = np.cumsum(is_step) * batch
  before = (samples - is_step * batch) / num_samples
  rate = np.ones(len(samples))
  if get_rate is not None:
    rate = np.array([get_rate(float(epoch)) for epoch in before])
  return NodePlan(
    **columns,
    members=members,
    rate=rate,
    samples=samples,
    num_nodes=num_nodes,
    num_rows=num_rows,
    has_centre=has_centre,
  )


def _list_events(trace: traces.NodeTrace, num_nodes: int) -> Iterator[_Event]:
  """Groups records into changes of weights."""

  def get_row(node: int) -> int:
    return num_nodes if node == traces.CENTRE else node

  records = trace.records
  index = 0
  while index < len(records):
    record = records[index]
    node, time = int(record['node']), float(record['end_time'])
    end = index + 1
    if record['kind'] == traces.NodeKind.STEP:
      yield _Event(
        kind=STEP,
        rows=[node],
        reads=[(node, int(record['peer_version']))],
        step=int(record['step']) - 1,
        time=time,
      )
    elif record['kind'] == traces.NodeKind.MIX:
      is_mean = record['peer'] == traces.ALL
      key = 'peer_version' if is_mean else 'mix'
      while (
        end < len(records)
        and records[end]['kind'] == traces.NodeKind.MIX
        and (records[end]['peer'] == traces.ALL) == is_mean
        and (is_mean or records[end]['node'] == node)
        and records[end][key] == record[key]
      ):
        end += 1
      group = records[index:end]
      if is_mean:
        yield _Event(
          kind=MEAN, rows=group['node'].tolist(), reads=[], time=time
        )
      else:
        yield _Event(
          kind=MIX,
          rows=[get_row(node)],
          reads=[
            (get_row(int(part['peer'])), int(part['peer_version']))
            for part in group
          ],
          weights=group['peer_weight'].tolist(),
          own_weight=float(record['own_weight']),
          time=time,
        )
    index = end


def _place_events(
  events: list[_Event], num_rows: int
) -> list[tuple[_Event, list[int]]]:
  """Gives every read a row, and adds a KEEP where a version must be kept."""
  last_read: dict[_Version, int] = {}
  for number, event in enumerate(events):
    for version in event.reads:
      last_read[version] = number
  current = [0] * num_rows
  kept: dict[_Version, int] = {}
  free: list[int] = []
  next_row = num_rows
  placed = []
  for number, event in enumerate(events):
    sources = []
    for row, version in event.reads:
      if version == current[row]:
        sources.append(row)
      elif (row, version) in kept:
        sources.append(kept[row, version])
      else:
        raise traces.TraceError(
          f'Version {version} of node {row} is read, but it has {current[row]}.'
        )
    for row in event.rows:
      version = (row, current[row])
      if last_read.get(version, -1) > number:
        if not free:
          free.append(next_row)
          next_row += 1
        kept[version] = free.pop()
        copy = _Event(kind=KEEP, rows=[kept[version]], reads=[version])
        placed.append((copy, [row]))
      current[row] += 1
    placed.append((event, sources))
    for version in event.reads:
      if last_read[version] == number and version in kept:
        free.append(kept.pop(version))
  return placed


def _to_arrays(
  placed: list[tuple[_Event, list[int]]], num_rows: int
) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
  """The columns of a plan."""
  width = max(1, *(len(sources) for _, sources in placed))
  size = len(placed)
  columns = {
    'kind': np.array([event.kind for event, _ in placed]),
    'row': np.array([event.rows[0] for event, _ in placed]),
    'step': np.array([event.step for event, _ in placed]),
    'own_weight': np.array([event.own_weight for event, _ in placed]),
    'time': np.array([event.time for event, _ in placed]),
    'group': np.zeros(size, int),
    'sources': np.zeros((size, width), int),
    'weights': np.zeros((size, width)),
  }
  num_rows = max(num_rows, int(columns['row'].max()) + 1)
  members = []
  for number, (event, sources) in enumerate(placed):
    columns['sources'][number, : len(sources)] = sources
    columns['weights'][number, : len(event.weights)] = event.weights
    if event.kind == MEAN:
      columns['group'][number] = len(members)
      mask = np.zeros(num_rows)
      mask[event.rows] = 1
      members.append(mask)
  return columns, np.array(members or [np.zeros(num_rows)]), num_rows
