"""Curves of one or several runs: loss, accuracy, staleness, factors, gap."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from matplotlib import axes as mpl_axes
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
import numpy as np

from jasgd.reports import _figures
from jasgd.reports import _formats
from jasgd.reports import _runs

_LOG_RANGE = 50.0  # Ratio above which small values need a logarithmic axis.
_MAX_MARKERS = 40  # Largest number of points that can be distinguished.
_Style = Literal['-', '--', '-.', ':']
_X_LABELS = {'epoch': 'epoch', 'time': 'time (s)', 'clock': 'clock'}


class Panel(NamedTuple):
  """A row of the picture."""

  label: str
  lines: dict[str, tuple[str, _Style]]  # Metric -> its name and its line.
  is_size: bool = False  # Whether a logarithmic axis makes sense.


_PANELS = (
  Panel(
    'loss',
    {
      'train/loss': ('train', '-'),
      'test/loss': ('test', '--'),
      'centre/loss': ('test, of the centre', ':'),
      'local/loss': ("test, the nodes' own", '-.'),
    },
    is_size=True,
  ),
  Panel(
    'test accuracy',
    {
      'test/accuracy': ('test', '-'),
      'centre/accuracy': ('of the centre', ':'),
      'local/accuracy': ("the nodes' own", '-.'),
    },
  ),
  Panel(
    'staleness',
    {
      'server/staleness_mean': ('mean', '-'),
      'server/staleness_max': ('max', ':'),
    },
  ),
  Panel("policy's factor", {'server/factor_mean': ('mean', '-')}),
  Panel('gap |w - w_read|', {'server/gap_mean': ('mean', '-')}, is_size=True),
  Panel(
    'consensus error',
    {'gossip/consensus_error': ('error', '-')},
    is_size=True,
  ),
  Panel(
    'age of mixes',
    {'gossip/age_mean': ('mean', '-'), 'gossip/age_max': ('max', ':')},
  ),
  Panel('lag of mixes', {'gossip/lag_mean': ('mean', '-')}),
)


def draw_curves(runs: Sequence[_runs.Run]) -> mpl_figure.Figure | None:
  """A row for each quantity, against epoch and time; None without metrics.

  Runs that have no epochs are drawn against the clock.
  """
  names = {
    name for run in runs for name in run.metrics if _has_points(run, name)
  }
  panels = [panel for panel in _PANELS if names & set(panel.lines)]
  if not panels:
    return None
  xs = [x for x in ('epoch', 'time') if x in names] or ['clock']
  height = 2.1 * len(panels) + 0.5 + 0.2 * (len(runs) > 1) * len(runs)
  figure = _figures.make_figure(height)
  grid = figure.subplots(len(panels), len(xs), squeeze=False, sharex='col')
  colors = _figures.pick_colors(len(runs))
  for row, panel in zip(grid, panels, strict=True):
    for axes, x in zip(row, xs, strict=True):
      _draw_panel(axes, panel, x, runs, colors)
    row[0].set_ylabel(panel.label)
  for axes, x in zip(grid[-1], xs, strict=True):
    axes.set_xlabel(_X_LABELS[x])
  _add_legend(figure, runs, colors)
  return figure


def _has_points(run: _runs.Run, name: str) -> bool:
  return bool(np.isfinite(run.metrics[name]).any())


def _draw_panel(
  axes: mpl_axes.Axes,
  panel: Panel,
  x: str,
  runs: Sequence[_runs.Run],
  colors: Sequence[str],
) -> None:
  """The lines of all runs, and a cross where one diverged."""
  drawn: dict[str, _Style] = {}
  values = [np.zeros(0)]
  for run, color in zip(runs, colors, strict=True):
    for metric, (name, style) in panel.lines.items():
      xs, ys = run.get_series(metric, x)
      if not len(xs):
        continue
      drawn[name] = style
      values.append(ys)
      marker = '.' if len(xs) <= _MAX_MARKERS else None
      axes.plot(xs, ys, style, color=color, marker=marker, linewidth=1.4)
      if run.diverged_at is not None and style == '-':
        axes.add_line(_make_cross(xs[-1], ys[-1]))
  if panel.is_size:
    _choose_scale(axes, np.concatenate(values))
  axes.grid(alpha=0.25)
  axes.spines[['top', 'right']].set_visible(False)
  if len(drawn) > 1:
    _figures.add_axes_legend(
      axes,
      handles=[
        mpl_lines.Line2D([], [], color='#555555', linestyle=style, label=name)
        for name, style in drawn.items()
      ],
      bbox_to_anchor=(1, 0.97),
      borderpad=0,
    )


def _choose_scale(axes: mpl_axes.Axes, values: np.ndarray) -> None:
  """Makes an axis logarithmic if small values could not be seen otherwise."""
  positive = values[values > 0]
  if not len(positive) or positive.max() < _LOG_RANGE * positive.min():
    return
  if len(positive) == len(values):
    axes.set_yscale('log')
  else:  # A value of 0, such as the gap of hardsync, has no logarithm.
    decade = 10 ** np.floor(np.log10(positive.min()))
    axes.set_yscale('symlog', linthresh=decade)


def _make_cross(x: float | None = None, y: float = 0.0) -> mpl_lines.Line2D:
  """The mark of a run that diverged; without a place, for the legend."""
  place: tuple[list[float], list[float]] = ([], []) if x is None else ([x], [y])
  return mpl_lines.Line2D(
    *place,
    color=_figures.DIVERGED_COLOR,
    marker='x',
    linestyle='',
    markersize=9,
    markeredgewidth=2.5,
    label='diverged',
  )


def _add_legend(
  figure: mpl_figure.Figure,
  runs: Sequence[_runs.Run],
  colors: Sequence[str],
) -> None:
  """Legend: the colour of each run, and the meaning of a cross."""
  handles = [
    mpl_lines.Line2D([], [], color=color, label=_formats.escape_math(run.label))
    for color, run in zip(colors, runs, strict=True)
    if len(runs) > 1
  ]
  if any(run.diverged_at is not None for run in runs):
    handles.append(_make_cross())
  if handles:
    _figures.add_legend(figure, handles=handles)
