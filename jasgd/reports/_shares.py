"""Pictures of learners, or nodes: what each did, and when it had to wait."""

from collections.abc import Sequence
import textwrap
from typing import NamedTuple

from matplotlib import axes as mpl_axes
from matplotlib import figure as mpl_figure
from matplotlib import ticker
import numpy as np

from jasgd.reports import _pictures
from jasgd.reports import _runs

_MAX_BARS = 64  # Beyond it there are no gaps between bars.


class Shares(NamedTuple):
  """Arrays over the learners, or nodes, of a run."""

  noun: str
  what: str
  work: np.ndarray  # The share of each in the work of all.
  times: dict[str, np.ndarray]  # What it did -> the share of the duration.


def measure_shares(run: _runs.Run) -> Shares | None:
  """Who did how much, and spent how much time on it; None without a trace."""
  if run.summary and run.summary.num_learners:
    learners, times = run.summary.learners, run.summary.learners.times
    return Shares(
      'learner',
      'applied gradients',
      _divide(learners.num_applied, learners.num_applied.sum()),
      {
        'computes': _divide(times.busy, run.summary.duration),
        'communicates': _divide(times.communication, run.summary.duration),
        'waits': _divide(times.waiting, run.summary.duration),
      },
    )
  if run.node_summary and run.node_summary.num_nodes:
    nodes, duration = run.node_summary.nodes, run.active_duration
    return Shares(
      'node',
      'steps',
      _divide(nodes.num_steps, nodes.num_steps.sum()),
      {
        'computes': _divide(nodes.computing, duration),
        'waits': _divide(nodes.waiting, duration),
      },
    )
  return None


def draw_learners(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> mpl_figure.Figure | None:
  """Each one's share of the work and use of its time; None without traces."""
  shares = map(measure_shares, runs)
  known = [
    (share, label)
    for share, label in zip(shares, labels, strict=True)
    if share is not None
  ]
  if not known:
    return None
  figure = mpl_figure.Figure(
    figsize=(9, 2.6 * len(known) + 0.2), layout='constrained'
  )
  grid = figure.subplots(len(known), 2, squeeze=False)
  for (left, right), (share, label) in zip(grid, known, strict=True):
    _draw_work(left, share)
    _draw_times(right, share)
    for axes in (left, right):
      axes.set_xlabel(share.noun)
      axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
      axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
      axes.spines[['top', 'right']].set_visible(False)
    if len(runs) > 1:
      # In one line, a long one would push the two apart.
      left.set_title(textwrap.fill(label, 48), loc='left', fontsize=9)
  return figure


def _divide(parts: np.ndarray, whole: float) -> np.ndarray:
  """Shares; 0 of nothing."""
  return parts / whole if whole else np.zeros(len(parts))


def _draw_work(axes: mpl_axes.Axes, shares: Shares) -> None:
  """A bar each, and a line where all would be if they did the same."""
  _draw_bars(
    axes, shares.work, np.zeros(len(shares.work)), _pictures.COLORS['computes']
  )
  axes.axhline(1 / len(shares.work), color='black', linestyle='--', linewidth=1)
  axes.set_ylabel(f'share of {shares.what}')


def _draw_times(axes: mpl_axes.Axes, shares: Shares) -> None:
  """What each did, one on top of the other."""
  bottom = np.zeros(len(shares.work))
  for what, times in shares.times.items():
    _draw_bars(axes, times, bottom, _pictures.COLORS[what], what)
    bottom = bottom + times
  axes.set_ylim(0, max(1.0, bottom.max(initial=0.0)))
  axes.set_ylabel('share of the time')
  axes.legend(
    loc='lower right',
    bbox_to_anchor=(1, 1),
    ncols=3,
    frameon=False,
    fontsize=8,
  )


def _draw_bars(
  axes: mpl_axes.Axes,
  heights: np.ndarray,
  bottom: np.ndarray,
  color: str,
  label: str | None = None,
) -> None:
  if len(heights) <= _MAX_BARS:
    places = np.arange(len(heights))
    axes.bar(places, heights, bottom=bottom, color=color, label=label)
  else:  # One outline is drawn as fast for 100,000.
    axes.stairs(
      bottom + heights,
      np.arange(len(heights) + 1) - 0.5,
      baseline=bottom,
      fill=True,
      color=color,
      label=label,
    )
