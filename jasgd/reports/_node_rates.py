"""How fast each node stepped, in one run or in several side by side."""

from collections.abc import Sequence

from matplotlib import figure as mpl_figure
from matplotlib import ticker
import numpy as np

from jasgd import traces
from jasgd.reports import _curves
from jasgd.reports import _formats
from jasgd.reports import _runs
from jasgd.reports import _tables

_MAX_BARS = 64  # Beyond it there are no gaps between bars.


def measure_step_rates(trace: traces.NodeTrace) -> np.ndarray:
  """Steps per second of each node, from its first step to its last.

  So neither the time in which it compiles counts, nor that in which it is done
  and others are not; nor that in which nobody was there, before a run went on.

  Args:
    trace: What nodes did.

  Returns:
    float64, an entry for each node: NaN if it made less than two steps.
  """
  node, ends = trace.steps['node'], trace.steps['end_time']
  counts = np.bincount(node, minlength=trace.num_nodes)
  first = np.full(trace.num_nodes, np.inf)
  last = np.full(trace.num_nodes, -np.inf)
  np.minimum.at(first, node, ends)
  np.maximum.at(last, node, ends)
  back_at, seconds = traces.find_downtimes(trace)
  is_within = (back_at > first[:, None]) & (back_at < last[:, None])
  active = last - first - np.sum(is_within * seconds, axis=1)
  rates = np.full(trace.num_nodes, np.nan)
  is_known = (counts > 1) & (active > 0)
  rates[is_known] = (counts - 1)[is_known] / active[is_known]
  return rates


def make_rates(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> _tables.Table | None:
  """A row for each node, a column for each run; None if none has nodes."""
  known = _list_rates(runs, labels)
  if not known:
    return None
  num_nodes = max(len(rates) for rates, _ in known)
  rows = [
    (str(node), *(_say(rates, known[0][0], node) for rates, _ in known))
    for node in range(min(num_nodes, _tables.MAX_LEARNERS))
  ]
  header = ('node', *(label for _, label in known))
  if len(known) == 1:
    header = ('node', 'steps per second')
  note = _tables.note_rest(num_nodes)
  if len(known) > 1:
    share = 'In brackets: of what the same node had in the first run.'
    note = f'{note} {share}'.strip()
  return _tables.Table('Steps per second', header, rows, note=note)


def draw_rates(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> mpl_figure.Figure | None:
  """The picture of `make_rates`: bars side by side, in the colours of runs."""
  known = _list_rates(runs, labels)
  if not known:
    return None
  height = 2.4 + 0.2 * (len(known) > 1) * len(known)
  figure = mpl_figure.Figure(figsize=(9, height), layout='constrained')
  axes = figure.subplots()
  colors = dict(zip(labels, _curves.pick_colors(len(runs)), strict=True))
  width = 0.8 / len(known)
  for index, (rates, label) in enumerate(known):
    nodes = np.arange(len(rates))
    if len(rates) <= _MAX_BARS:
      place = nodes + (index - (len(known) - 1) / 2) * width
      axes.bar(place, rates, width * 0.95, color=colors[label], label=label)
    else:
      axes.plot(nodes, rates, color=colors[label], label=label, linewidth=1)
  axes.set_ylim(bottom=0)
  axes.set_xlabel('node')
  axes.set_ylabel('steps per second')
  axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True))
  axes.spines[['top', 'right']].set_visible(False)
  if len(runs) > 1:
    figure.legend(loc='outside upper left', frameon=False, fontsize=9)
  return figure


def _list_rates(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> list[tuple[np.ndarray, str]]:
  """The rates of those runs that have nodes, and the runs' labels."""
  return [
    (measure_step_rates(run.trace), label)
    for run, label in zip(runs, labels, strict=True)
    if isinstance(run.trace, traces.NodeTrace) and len(run.trace.steps)
  ]


def _say(rates: np.ndarray, first: np.ndarray, node: int) -> str:
  """A node's rate, and which share it is of that in the first run."""
  if node >= len(rates) or np.isnan(rates[node]):
    return _formats.MISSING
  text = f'{rates[node]:.4g}'
  if rates is not first and node < len(first) and first[node] > 0:
    text += f' ({rates[node] / first[node]:.0%})'
  return text
