"""Pictures of a trace, drawn with matplotlib."""

from collections.abc import Sequence
import os

from matplotlib import axes as mpl_axes
from matplotlib import collections
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
from matplotlib import patches
from matplotlib import ticker
import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.reports import _member_pictures
from jasgd.reports import _members
from jasgd.reports import _predictions

# What a learner does -> its colour.
COLORS = {
  'computes': '#4c72b0',
  'communicates': '#dd8452',
  'waits': '#c8c8c8',
}
_MAX_UPDATES = 300  # As many lines as leave the bars to be seen.


def plot_staleness(
  trace: traces.Trace,
  path: str | os.PathLike[str],
  predicted: Sequence[traces.Trace] = (),
) -> None:
  """Draws the distribution of staleness, of applied and of dropped gradients.

  Args:
    trace: What to draw.
    path: The file to write; its ending chooses the format.
    predicted: What `jasgd.simulation.predict` made of the trace: of all of
      these, the distribution of applied gradients is drawn as a line.
  """
  draw_staleness(trace, predicted).savefig(path, dpi=120)


def plot_timeline(
  trace: traces.Trace,
  path: str | os.PathLike[str],
  *,
  max_learners: int = 16,
  num_rounds: float = 8.0,
) -> None:
  """Draws who computed, communicated and waited when, in the first part.

  Of real processes, that is the part after their first gradients, for which
  they had to compile.

  Args:
    trace: What to draw.
    path: The file to write; its ending chooses the format.
    max_learners: How many learners to draw.
    num_rounds: How many gradients of a typical learner to draw.
  """
  draw_timeline(trace, max_learners, num_rounds).savefig(path, dpi=120)


def draw_staleness(
  trace: traces.Trace, predicted: Sequence[traces.Trace] = ()
) -> mpl_figure.Figure:
  """The picture of `plot_staleness`; its title is of applied gradients."""
  figure = mpl_figure.Figure(figsize=(9, 3.6), layout='constrained')
  axes = figure.subplots()
  is_applied = trace.fate == protocols.Fate.APPLIED
  is_pending = trace.fate == protocols.Fate.PENDING
  groups = {
    'applied': (trace.staleness[is_applied], COLORS['computes']),
    'pending': (trace.staleness[is_pending], COLORS['waits']),
    'dropped': (
      trace.staleness[~is_applied & ~is_pending],
      COLORS['communicates'],
    ),
  }
  groups = {name: group for name, group in groups.items() if len(group[0])}
  expected = np.concatenate(
    [each.staleness[each.fate == protocols.Fate.APPLIED] for each in predicted]
    or [np.zeros(0, np.int64)]
  )
  largest = int(max(trace.staleness.max(initial=0), expected.max(initial=0)))
  # A bar per value, or as many bars as the eye can tell apart.
  width = max(1, -(-(largest + 1) // 200))
  bins = np.arange(0, largest + 2 * width, width) - 0.5
  if groups:
    axes.hist(
      [staleness for staleness, _ in groups.values()],
      bins.tolist(),
      stacked=True,
      color=[color for _, color in groups.values()],
      label=list(groups),
      rwidth=0.9,
    )
    _draw_expected(axes, expected, bins, int(is_applied.sum()))
    axes.legend(frameon=False)
  else:
    _say_empty(axes)
  if is_applied.any():
    staleness = trace.staleness[is_applied]
    axes.axvline(staleness.mean(), color='black', linestyle='--', linewidth=1)
    title = f'applied: mean {staleness.mean():.2f}, largest {staleness.max()}'
    if len(expected):
      title += (
        f'; predicted: mean {expected.mean():.2f}, largest {expected.max()}'
      )
    axes.set_title(title, fontsize=10)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.spines[['top', 'right']].set_visible(False)
  axes.set_xlabel('staleness: updates since the weights were read')
  axes.set_ylabel('gradients')
  return figure


def _draw_expected(
  axes: mpl_axes.Axes, staleness: np.ndarray, bins: np.ndarray, number: int
) -> None:
  """The line of what was predicted, for as many gradients as were applied."""
  if len(staleness):
    counts, _ = np.histogram(staleness, bins)
    axes.stairs(
      counts * (number / len(staleness)),
      bins,
      color='black',
      linewidth=1.5,
      label='predicted',
    )


def draw_timeline(
  trace: traces.Trace, max_learners: int, num_rounds: float
) -> mpl_figure.Figure:
  """The picture of `plot_timeline`; its time counts from the first start."""
  figure = mpl_figure.Figure(figsize=(9, 4.2), layout='constrained')
  axes = figure.subplots()
  start, arrive, wait_end = _align_times(trace)
  begin, end = _choose_window(trace, start, arrive, num_rounds)
  is_drawn = (trace.learner < max_learners) & (start < end)
  is_drawn &= ~(np.fmax(arrive, wait_end) < begin)
  row = trace.learner[is_drawn]
  start, arrived = start[is_drawn], arrive[is_drawn]
  # Where in between the learner computed is not recorded: the pull and the
  # push are drawn as equally long.
  computed = np.minimum(trace.compute_time[is_drawn], arrived - start)
  transfer = (arrived - start - computed) / 2
  begun, done = start + transfer, arrived - transfer
  bars = {
    'computes': (row, begun, done),
    'communicates': (
      np.concatenate([row, row]),
      np.concatenate([start, done]),
      np.concatenate([begun, arrived]),
    ),
    'waits': (row, arrived, wait_end[is_drawn]),
  }
  for what, (rows, starts, ends) in bars.items():
    _draw_bars(axes, rows, starts, ends, what, shortest=1e-6 * (end - begin))
  _draw_updates(axes, trace, arrive, begin, end)
  if not trace.num_gradients:
    _say_empty(axes)
  num_rows = min(max_learners, int(trace.learner.max(initial=0)) + 1)
  marks = _member_pictures.draw_marks(
    axes,
    trace,
    _members.find_origin(trace),
    num_rows,
    labels=('came', 'left or lost'),
    window=(begin, end),
  )
  axes.set_xlim(begin, end)
  axes.set_ylim(num_rows - 0.5, -0.5)
  # A single learner has a tick too, and no halves.
  axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
  axes.set_xlabel('time (s)')
  axes.set_ylabel('learner')
  add_legend(axes, COLORS, marks)
  return figure


def _choose_window(
  trace: traces.Trace, start: np.ndarray, arrive: np.ndarray, num_rounds: float
) -> tuple[float, float]:
  """From when to when to draw."""
  cycle = _measure_cycle(arrive - start)
  begin = 0.0
  if _predictions.is_real(trace) and trace.num_gradients:
    # Those who were there at the beginning had to compile.
    _, first = np.unique(trace.learner, return_index=True)
    first = first[start[first] <= cycle]
    begin = np.fmax.reduce(arrive[first] - cycle, initial=0.0)
  return float(begin), float(begin + num_rounds * cycle)


def _align_times(
  trace: traces.Trace,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Starts, arrivals and ends of waits, in seconds since the first start."""
  origin = _members.find_origin(trace)
  columns = trace.start_time, trace.arrive_time, traces.find_wait_ends(trace)
  start, arrive, wait_end = (column - origin for column in columns)
  return start, arrive, wait_end


def _measure_cycle(durations: np.ndarray) -> float:
  """How long a gradient typically takes, on its way too."""
  durations = durations[np.isfinite(durations) & (durations > 0)]
  return float(np.median(durations)) if len(durations) else 1.0


def _draw_updates(
  axes: mpl_axes.Axes,
  trace: traces.Trace,
  arrive_time: np.ndarray,
  begin: float,
  end: float,
) -> None:
  """A line for each update, unless they would cover everything."""
  # An update is made when the last gradient of its group has come.
  is_applied = trace.apply_clock >= 0
  is_last = np.diff(trace.apply_clock[is_applied], append=-1) != 0
  times = arrive_time[is_applied][is_last]
  times = times[(times >= begin) & (times < end)]
  if 0 < len(times) <= _MAX_UPDATES:
    axes.vlines(
      times,
      0,
      1,
      transform=axes.get_xaxis_transform(),
      color='black',
      linewidth=0.5,
      alpha=0.5,
      label='updates',
    )


def _draw_bars(
  axes: mpl_axes.Axes,
  row: np.ndarray,
  start: np.ndarray,
  end: np.ndarray,
  what: str,
  shortest: float,
) -> None:
  """Bars in learners' rows, as one artist however many they are."""
  is_seen = end - start > shortest  # And not what times round to.
  row, start, end = row[is_seen], start[is_seen], end[is_seen]
  if not len(row):
    return
  x = np.stack([start, start, end, end], axis=-1)
  y = row[:, None] + np.array([-0.4, 0.4, 0.4, -0.4])
  axes.add_collection(
    collections.PolyCollection(
      list(np.stack([x, y], axis=-1)),
      facecolors=COLORS[what],
      linewidths=0,
      label=what,
    ),
    autolim=False,
  )


def _say_empty(axes: mpl_axes.Axes) -> None:
  """Instead of a picture of nothing."""
  axes.text(
    *(0.5, 0.5),
    'no gradients',
    transform=axes.transAxes,
    horizontalalignment='center',
  )


def add_legend(
  axes: mpl_axes.Axes,
  colors: dict[str, str],
  marks: Sequence[mpl_lines.Line2D] = (),
) -> None:
  """Says above the picture which colour is what."""
  bars = [
    patches.Patch(color=color, label=name) for name, color in colors.items()
  ]
  axes.legend(
    handles=[*bars, *marks],
    loc='lower right',
    bbox_to_anchor=(1, 1),
    ncols=len(colors) + len(marks),
    frameon=False,
    fontsize=8,
  )
