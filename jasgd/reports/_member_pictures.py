"""A picture of who was there over a whole run, and what went wrong when."""

from collections.abc import Container
import os
from typing import Any

from matplotlib import axes as mpl_axes
from matplotlib import collections
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
from matplotlib import ticker
import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.reports import _members

_MAX_ROWS = 32
_PRESENT_COLOR = '#9db4d8'
# What happened to a learner -> how that is drawn.
MARKS: dict[str, dict[str, Any]] = {
  'gradient dropped': {'marker': '|', 'color': '#dd8452', 'markersize': 8},
  'came': {'marker': '>', 'color': 'black', 'markersize': 6},
  'left or lost': {'marker': 'X', 'color': '#c44e52', 'markersize': 8},
}


def plot_members(trace: traces.Trace, path: str | os.PathLike[str]) -> None:
  """Draws who was there, who came and went, and the server's restarts.

  Args:
    trace: What to draw.
    path: The file to write; its ending chooses the format.
  """
  draw_members(trace).savefig(path, dpi=120)


def draw_members(trace: traces.Trace) -> mpl_figure.Figure:
  """The picture of `plot_members`; its time counts from the first start."""
  num_rows = min(_MAX_ROWS, traces.statistics.count_learners(trace))
  figure = mpl_figure.Figure(
    figsize=(9, 1.4 + 0.25 * num_rows), layout='constrained'
  )
  axes = figure.subplots()
  origin = _members.find_origin(trace)
  spans = [
    span for span in _members.list_spans(trace) if span.learner < num_rows
  ]
  axes.hlines(
    [span.learner for span in spans],
    [span.start - origin for span in spans],
    [span.end - origin for span in spans],
    color=_PRESENT_COLOR,
    linewidth=6,
    label='there',
    capstyle='butt',
  )
  _draw_server(axes, trace, origin)
  draw_marks(axes, trace, origin, num_rows)
  axes.set_ylim(max(1, num_rows) - 0.5, -0.5)
  axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
  axes.spines[['top', 'right']].set_visible(False)
  axes.set_xlabel('time (s)')
  axes.set_ylabel('learner')
  figure.legend(loc='outside upper right', ncols=6, frameon=False, fontsize=8)
  return figure


def draw_marks(
  axes: mpl_axes.Axes,
  trace: traces.Trace,
  origin: float,
  num_rows: int,
  labels: Container[str] = tuple(MARKS),
  window: tuple[float, float] = (-np.inf, np.inf),
) -> list[mpl_lines.Line2D]:
  """Marks who came and went and what was dropped; gives what it drew."""
  changes = _members.find_changes(trace)
  gradients = np.asarray(trace.records)[~trace.is_void]
  gradients = gradients[gradients['kind'] == traces.Kind.GRADIENT]
  # What arrives when a run is over is dropped as it should be.
  is_dropped = (gradients['fate'] > protocols.Fate.PENDING) & (
    gradients['fate'] != protocols.Fate.AFTER_END
  )
  drawn = []
  for (label, style), records in zip(
    MARKS.items(),
    (gradients[is_dropped], changes.came, changes.left),
    strict=True,
  ):
    times = records['arrive_time'] - origin
    is_seen = (times >= window[0]) & (times <= window[1])
    is_seen &= records['learner'] < num_rows
    if label in labels and np.any(is_seen):
      (line,) = axes.plot(
        times[is_seen],
        records['learner'][is_seen],
        linestyle='',
        label=label,
        **style,
      )
      drawn.append(line)
  return drawn


def _draw_server(
  axes: mpl_axes.Axes, trace: traces.Trace, origin: float
) -> None:
  """A line for each restart of the server, and one for the end."""
  events = trace.events
  for label, kind, style in (
    ('server restarted', traces.Kind.RESTART, '-'),
    ('end', traces.Kind.END, '--'),
  ):
    times = events['arrive_time'][events['kind'] == kind] - origin
    if len(times):
      x = np.repeat(times, 2).reshape(-1, 2)
      y = np.broadcast_to([0.0, 1.0], x.shape)
      axes.add_collection(
        collections.LineCollection(
          list(np.stack([x, y], axis=-1)),
          transform=axes.get_xaxis_transform(),
          colors='black',
          linestyles=style,
          linewidths=1.2,
          label=label,
        ),
        autolim=False,
      )
