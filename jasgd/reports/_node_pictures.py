"""Pictures of a trace of nodes, drawn with matplotlib."""

import itertools
import os

from matplotlib import axes as mpl_axes
from matplotlib import figure as mpl_figure
from matplotlib import ticker
import numpy as np

from jasgd import traces
from jasgd.reports import _pictures

# What a node does -> its colour in a timeline.
_COLORS = {
  'computes': '#4c72b0',
  'waits for a mix': '#dd8452',
  'is dead': '#c8c8c8',
}
_MAX_BARS = 200  # As many as the eye can tell apart.


def plot_node_timeline(
  trace: traces.NodeTrace,
  path: str | os.PathLike[str],
  *,
  max_nodes: int = 16,
  num_rounds: float = 8.0,
) -> None:
  """Draws who computed and who waited for mixes when, in the first part.

  Of real nodes, that is when all have made a step: they compile before.

  A dot is a mix; lines lead to it from the nodes whose weights were mixed in. A
  gap before a death is a step that was lost with the node.

  Args:
    trace: What to draw.
    path: The file to write; its ending chooses the format.
    max_nodes: How many nodes to draw.
    num_rounds: How many steps of a typical node to draw, mixes included.
  """
  figure = draw_node_timeline(trace, max_nodes, num_rounds)
  figure.savefig(path, dpi=120)


def plot_ages(trace: traces.NodeTrace, path: str | os.PathLike[str]) -> None:
  """Draws the distributions of the age and of the lag of all mixes.

  Args:
    trace: What to draw; see `jasgd.traces.summarize_nodes` for the two.
    path: The file to write; its ending chooses the format.
  """
  draw_ages(trace).savefig(path, dpi=120)


def draw_node_timeline(
  trace: traces.NodeTrace, max_nodes: int, num_rounds: float
) -> mpl_figure.Figure:
  """The picture of `plot_node_timeline`: a bar for each thing that was done."""
  figure = mpl_figure.Figure(figsize=(9, 4.2), layout='constrained')
  axes = figure.subplots()
  start = _find_start(trace)
  end = start + num_rounds * _measure_cycle(trace)
  num_drawn = min(max_nodes, trace.num_nodes)
  records = trace.records
  is_drawn = (records['node'] >= 0) & (records['node'] < num_drawn)
  is_drawn &= (records['start_time'] < end) & (records['end_time'] >= start)
  records = records[is_drawn]
  _draw_bars(axes, records, traces.NodeKind.STEP, 'computes')
  mixes = traces.keep_first_of_mix(records)
  _draw_bars(axes, mixes, traces.NodeKind.MIX, 'waits for a mix')
  _draw_bars(axes, records, traces.NodeKind.LOST, 'waits for a mix')
  _draw_deaths(axes, trace, num_drawn, end)
  _draw_mixes(axes, records, num_drawn, end)
  axes.set_xlim(start, end)
  axes.set_ylim(num_drawn - 0.5, -0.5)
  is_real = trace.header.get('is_recorded')
  axes.set_xlabel('time in s' if is_real else 'time')
  axes.set_ylabel('node')
  axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  _pictures.add_legend(axes, _COLORS)
  return figure


def draw_ages(trace: traces.NodeTrace) -> mpl_figure.Figure:
  """The picture of `plot_ages`: a bar per value, if they are not too many."""
  summary = traces.summarize_nodes(trace)
  figure = mpl_figure.Figure(figsize=(9, 3.6), layout='constrained')
  has_centre = np.any(trace.mixes['peer'] == traces.CENTRE)
  since = "the centre's moves" if has_centre else "the peer's steps"
  for axes, spread, label in zip(
    figure.subplots(1, 2),
    (summary.age, summary.lag),
    (f'age: {since} since', "lag: own steps minus the peer's"),
    strict=True,
  ):
    if not len(spread.values):  # All-reduce has neither, elastic no lag.
      axes.set_axis_off()
      axes.set_title('no mixes with a node', fontsize=10)
      continue
    axes.set_xlabel(label)
    axes.set_ylabel('mixes')
    width = max(1, -(-int(spread.max - spread.min + 1) // _MAX_BARS))
    axes.hist(
      spread.values,
      np.arange(spread.min, spread.max + 2 * width, width) - 0.5,
      weights=spread.counts,
      rwidth=0.9,
    )
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.axvline(spread.mean, color='black', linestyle='--', linewidth=1)
    axes.set_title(
      f'mean {spread.mean:.2f}, largest {spread.max:.0f}', fontsize=10
    )
  return figure


def _find_start(trace: traces.NodeTrace) -> float:
  """When all nodes compute: of real ones, not before their first step."""
  steps = trace.steps
  if not trace.header.get('is_recorded') or not len(steps):
    return 0.0
  _, first = np.unique(steps['node'], return_index=True)
  ends = steps['end_time'][first]
  # A node that came late is not waited for.
  middle = (steps['start_time'].min() + steps['end_time'].max()) / 2
  return float(ends[ends <= max(middle, ends.min())].max())


def _measure_cycle(trace: traces.NodeTrace) -> float:
  """How long a step and its mix typically take, together."""
  steps = trace.steps
  starts, ends = np.zeros((2, trace.num_nodes))
  np.maximum.at(ends, steps['node'], steps['end_time'])
  if trace.header.get('is_recorded'):  # The first took longer: it compiled.
    _, first = np.unique(steps['node'], return_index=True)
    starts[steps['node'][first]] = steps['end_time'][first]
    steps = np.delete(steps, first)
  num_steps = np.bincount(steps['node'], minlength=trace.num_nodes)
  has_steps = num_steps > 0
  if not has_steps.any():
    return 1.0
  return float(np.median((ends - starts)[has_steps] / num_steps[has_steps]))


def _draw_bars(
  axes: mpl_axes.Axes, records: np.ndarray, kind: traces.NodeKind, what: str
) -> None:
  """A bar for each record of a kind that took any time."""
  took_time = records['end_time'] > records['start_time']
  records = records[(records['kind'] == kind) & took_time]
  axes.barh(
    records['node'],
    records['end_time'] - records['start_time'],
    left=records['start_time'],
    height=0.8,
    color=_COLORS[what],
    edgecolor='white',
    linewidth=0.5,
  )


def _draw_deaths(
  axes: mpl_axes.Axes, trace: traces.NodeTrace, num_nodes: int, end: float
) -> None:
  """A bar from each death until the node is back."""
  for node in range(num_nodes):
    for time, back in _list_deaths(trace, node):
      until = min(back, max(end, trace.duration))
      if time < min(end, until):
        axes.barh(
          node, until - time, left=time, height=0.8, color=_COLORS['is dead']
        )


def _list_deaths(
  trace: traces.NodeTrace, node: int
) -> list[tuple[float, float]]:
  """When a node died, and when it was back: inf, if it was not."""
  records = trace.of_node(node)
  if trace.header.get('is_recorded'):
    return _list_silences(records, trace.duration)
  deaths = records[records['kind'] == traces.NodeKind.LEAVE]['end_time']
  backs = records[records['kind'] == traces.NodeKind.JOIN]['start_time']
  pairs = itertools.zip_longest(deaths, backs[: len(deaths)], fillvalue=np.inf)
  return [(float(time), float(back)) for time, back in pairs]


def _list_silences(
  records: np.ndarray, duration: float
) -> list[tuple[float, float]]:
  """`_list_deaths` of a real node: its records stop, and do not END before."""
  # Others may have written down what it lost.
  records = records[records['kind'] != traces.NodeKind.LOST]
  if not len(records):
    return []
  kind, times = records['kind'], records['end_time']
  is_return = np.isin(kind, (traces.NodeKind.RESTART, traces.NodeKind.JOIN))
  silences = [
    (float(times[last]), float(records['start_time'][last + 1]))
    for last in np.flatnonzero(is_return[1:])
    if kind[last] != traces.NodeKind.END
  ]
  # If the others went on for no longer than it ever took, it may be alive.
  is_silent = duration - times[-1] > np.diff(times).max(initial=0.0)
  if kind[-1] != traces.NodeKind.END and is_silent:
    silences.append((float(times[-1]), np.inf))
  return silences


def _draw_mixes(
  axes: mpl_axes.Axes, records: np.ndarray, num_nodes: int, end: float
) -> None:
  """A dot where a node's weights were mixed, and lines from its peers."""
  mixes = records[records['kind'] == traces.NodeKind.MIX]
  mixes = mixes[mixes['end_time'] < end]
  drawn = mixes[(mixes['peer'] >= 0) & (mixes['peer'] < num_nodes)]
  axes.vlines(
    drawn['end_time'],
    np.minimum(drawn['node'], drawn['peer']),
    np.maximum(drawn['node'], drawn['peer']),
    color='black',
    linewidth=0.5,
    alpha=0.5,
  )
  axes.scatter(mixes['end_time'], mixes['node'], s=6, color='black', zorder=3)
