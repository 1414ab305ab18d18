"""All statistics of a trace of nodes together, and as a table for people."""

import dataclasses

import numpy as np

from jasgd.traces import _node_ages
from jasgd.traces import _node_deaths
from jasgd.traces import _node_schema
from jasgd.traces import _nodes
from jasgd.traces import statistics


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
  """A distribution of whole numbers; NaN where there are none."""

  mean: float
  min: float
  max: float
  values: np.ndarray  # Those that occur, ascending.
  counts: np.ndarray  # How often each does.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodeColumns:
  """Arrays with an entry for each node."""

  num_steps: np.ndarray
  num_mixes: np.ndarray
  computing: np.ndarray  # Seconds, of steps that were finished.
  waiting: np.ndarray  # Seconds, for mixes.
  # Messages with weights; those of an all-reduce count by their size.
  num_sent: np.ndarray
  num_received: np.ndarray
  bytes_sent: np.ndarray | None  # None: the header has no bytes_per_message.
  bytes_received: np.ndarray | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodeSummary:
  """What `summarize_nodes` tells; printed, it is a table."""

  num_nodes: int
  num_steps: int
  num_mixes: int  # Of nodes; the centre's moves are not counted.
  duration: float  # In seconds.
  steps_per_second: float
  age: Spread  # Steps of the peer that a mix did not have.
  lag: Spread  # Own steps minus those of the peer, as mixed.
  num_deaths: int
  num_returns: int
  num_lost: int  # Messages that found a dead node.
  num_refused: int  # Questions that did.
  lost_mass: float  # Of push-sum, with messages and with nodes.
  nodes: NodeColumns

  def __str__(self) -> str:
    return format_node_summary(self)


def summarize_nodes(trace: _nodes.NodeTrace) -> NodeSummary:
  """Explains a trace of nodes in numbers.

  The *age* of a mix is how many steps the peer has made when the mix is
  applied, minus those that are in the weights that are mixed in; the steps of
  the centre are its moves. The *lag* is how many steps the node has made, minus
  those in the peer's weights: below 0, the peer is ahead. A mix with the centre
  has no lag, all-reduce neither. Ages depend on the order of what two nodes
  did, which is by their clocks where neither has seen the other: on several
  hosts they are as good as these agree.

  Args:
    trace: A trace.

  Returns:
    A summary.

  Examples:
    >>> import numpy as np
    >>> from jasgd import traces
    >>> records = np.zeros(3, traces.NODE_RECORD)
    >>> records['node'] = [0, 1, 0]
    >>> records['step'] = [1, 1, 1]
    >>> records['kind'] = [0, 0, traces.NodeKind.MIX]
    >>> records['peer'] = [-1, -1, 1]
    >>> records['peer_step'] = [-1, -1, 0]
    >>> summary = traces.summarize_nodes(traces.NodeTrace(records))
    >>> print(summary.num_steps, summary.age.mean, summary.lag.mean)
    2 1.0 1.0
  """
  records, num_nodes = trace.records, trace.num_nodes
  num_records = np.bincount(
    records['kind'], minlength=len(_node_schema.NodeKind)
  )
  is_lost = records['kind'] == _node_schema.NodeKind.LOST
  is_question = is_lost & (records['version'] < 0)
  mixes = trace.mixes[trace.mixes['node'] >= 0]
  nodes = _summarize_columns(trace, keep_first_of_mix(mixes), num_nodes)
  with_nodes = mixes[mixes['peer'] >= 0]
  num_steps = int(num_records[_node_schema.NodeKind.STEP])
  deaths = _node_deaths.count_deaths(trace)
  return NodeSummary(
    num_nodes=num_nodes,
    num_steps=num_steps,
    num_mixes=int(nodes.num_mixes.sum()),
    duration=trace.duration,
    steps_per_second=statistics.divide(num_steps, trace.duration),
    age=_describe(_node_ages.measure_ages(trace)),
    lag=_describe(with_nodes['step'] - with_nodes['peer_step']),
    num_deaths=deaths.num_deaths,
    num_returns=deaths.num_returns,
    num_lost=int(np.count_nonzero(is_lost & ~is_question)),
    num_refused=int(np.count_nonzero(is_question)),
    lost_mass=deaths.lost_mass,
    nodes=nodes,
  )


def format_node_summary(summary: NodeSummary, max_nodes: int = 10) -> str:
  """A summary as a table for people.

  Args:
    summary: What `summarize_nodes` returned.
    max_nodes: How many nodes to list, at least 0.

  Returns:
    Lines of text.

  Raises:
    ValueError: if `max_nodes` is negative.

  Examples:
    >>> import numpy as np
    >>> from jasgd import traces
    >>> records = np.zeros(4, traces.NODE_RECORD)
    >>> records['kind'][2:] = traces.NodeKind.END
    >>> records['node'], records['end_time'] = [0, 1, 0, 1], [1, 2, 2, 2]
    >>> summary = traces.summarize_nodes(traces.NodeTrace(records))
    >>> print(traces.format_node_summary(summary))
    steps    2 in 2 s: 1 per second
    mixes    0
       node  steps  mixes  computing  waiting   sent  received
          0      1      0        50%       0%      0         0
          1      1      0       100%       0%      0         0
  """
  if max_nodes < 0:
    raise ValueError(f'max_nodes must be at least 0, got {max_nodes}.')
  age, lag, nodes = summary.age, summary.lag, summary.nodes
  lines = [
    f'steps    {summary.num_steps} in {summary.duration:.6g} s: '
    f'{summary.steps_per_second:.4g} per second',
    f'mixes    {summary.num_mixes}',
  ]
  if len(age.values):
    lines.append(f'age      mean {age.mean:.2f}, max {age.max:.0f}')
  if len(lag.values):
    lines.append(
      f'lag      mean {lag.mean:.2f}, min {lag.min:.0f}, max {lag.max:.0f}'
    )
  if summary.num_deaths:
    lines.append(
      f'deaths   {summary.num_deaths}, and {summary.num_returns} returns: '
      f'{summary.num_lost} messages lost, {summary.num_refused} questions '
      'refused'
    )
  if summary.lost_mass:
    lost_mass, total = summary.lost_mass, summary.num_nodes
    fate = 'lost' if lost_mass > 0 else 'gained by restarts'
    lines.append(f'mass     {abs(lost_mass):.4g} {fate}, of {total}')
  if nodes.bytes_sent is not None and nodes.bytes_received is not None:
    lines.append(
      f'traffic  sent {nodes.bytes_sent.sum() / 1e6:.4g} MB, received '
      f'{nodes.bytes_received.sum() / 1e6:.4g} MB'
    )
  return '\n'.join(lines + _format_nodes(summary, max_nodes))


def keep_first_of_mix(records: np.ndarray) -> np.ndarray:
  """One record of each mix, however many peers it has, and of nothing else.

  Args:
    records: Some of a trace's.

  Returns:
    Those records.

  Examples:
    >>> import numpy as np
    >>> from jasgd import traces
    >>> records = np.zeros(4, traces.NODE_RECORD)
    >>> records['kind'] = [0, *3 * [traces.NodeKind.MIX]]
    >>> records['mix'], records['peer'] = [-1, 5, 5, 6], [-1, 2, 3, 2]
    >>> print(traces.keep_first_of_mix(records)[['mix', 'peer']])
    [(5, 2) (6, 2)]
  """
  mixes = records[records['kind'] == _node_schema.NodeKind.MIX]
  keys = np.stack([mixes['node'], mixes['mix']], axis=-1)
  _, first = np.unique(keys, axis=0, return_index=True)
  return mixes[np.sort(first)]


def _format_nodes(summary: NodeSummary, max_nodes: int) -> list[str]:
  """A line for each of the first nodes; times are shares of the run's."""
  nodes, num_rows = summary.nodes, min(max_nodes, summary.num_nodes)
  if not num_rows:
    return []
  lines = ['   node  steps  mixes  computing  waiting   sent  received']
  for i in range(num_rows):
    computing, waiting = (
      statistics.divide(float(seconds[i]), summary.duration)
      for seconds in (nodes.computing, nodes.waiting)
    )
    lines.append(
      f'{i:>7}  {nodes.num_steps[i]:>5}  {nodes.num_mixes[i]:>5}  '
      f'{computing:>9.0%}  {waiting:>7.0%}  {nodes.num_sent[i]:>5.4g}  '
      f'{nodes.num_received[i]:>8.4g}'
    )
  if num_rows < summary.num_nodes:
    lines.append(f'    ...  and {summary.num_nodes - num_rows} more')
  return lines


def _summarize_columns(
  trace: _nodes.NodeTrace, mixes: np.ndarray, num_nodes: int
) -> NodeColumns:
  """What each node did; `mixes` has one record of each mix."""
  refusals = trace.records[
    (trace.records['kind'] == _node_schema.NodeKind.LOST)
    & (trace.records['version'] < 0)
  ]
  num_sent, num_received = _count_messages(trace, num_nodes)
  size = trace.header.get('bytes_per_message')
  return NodeColumns(
    num_steps=np.bincount(trace.steps['node'], minlength=num_nodes),
    num_mixes=np.bincount(mixes['node'], minlength=num_nodes),
    computing=_add_times(trace.steps, num_nodes),
    waiting=_add_times(mixes, num_nodes) + _add_times(refusals, num_nodes),
    num_sent=num_sent,
    num_received=num_received,
    bytes_sent=None if size is None else num_sent * size,
    bytes_received=None if size is None else num_received * size,
  )


def _count_messages(
  trace: _nodes.NodeTrace, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
  """Messages that each node sent and received."""
  records, mixes = trace.records, trace.mixes
  is_lost = records['kind'] == _node_schema.NodeKind.LOST
  lost = records[is_lost & (records['version'] >= 0)]
  is_all = mixes['peer'] == _node_schema.ALL
  reduced, mixes = mixes[is_all], mixes[~is_all]
  # By the ring formula, n nodes send 2 (n - 1) pieces of 1/n of a message; or
  # as much as the trace says.
  per_mean = trace.header.get('messages_per_mean')
  pieces = np.bincount(
    reduced['node'],
    2 * (1 - reduced['peer_weight'])
    if per_mean is None
    else np.full(len(reduced), per_mean),
    num_nodes,
  )
  sent = np.concatenate([mixes['peer'], lost['node']])
  received = mixes['node']
  return (
    pieces + np.bincount(sent[sent >= 0], minlength=num_nodes),
    pieces + np.bincount(received[received >= 0], minlength=num_nodes),
  )


def _add_times(records: np.ndarray, num_nodes: int) -> np.ndarray:
  """The seconds that the records of each node took."""
  seconds = records['end_time'] - records['start_time']
  return np.bincount(records['node'], seconds, num_nodes)


def _describe(numbers: np.ndarray) -> Spread:
  """The distribution of some numbers."""
  values, counts = np.unique(numbers, return_counts=True)
  has_some = len(numbers) > 0
  return Spread(
    mean=float(numbers.mean()) if has_some else np.nan,
    min=float(values[0]) if has_some else np.nan,
    max=float(values[-1]) if has_some else np.nan,
    values=values,
    counts=counts,
  )
