"""The staleness of several runs in one picture."""

from collections.abc import Sequence
import os

from matplotlib import figure as mpl_figure
from matplotlib import ticker
import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.reports import _curves

_MAX_BARS = 200  # As many as the eye can tell apart.


def plot_histograms(
  labelled: Sequence[tuple[traces.Trace, str]], path: str | os.PathLike[str]
) -> None:
  """Draws the staleness of applied gradients of several runs, overlaid."""
  draw_histograms(labelled).savefig(path, dpi=120)


def draw_histograms(
  labelled: Sequence[tuple[traces.Trace, str]],
) -> mpl_figure.Figure:
  """The picture of `plot_histograms`: shares, as runs may differ in length."""
  figure = mpl_figure.Figure(
    figsize=(9, 3.4 + 0.2 * len(labelled)), layout='constrained'
  )
  axes = figure.subplots()
  applied = [
    trace.staleness[trace.fate == protocols.Fate.APPLIED]
    for trace, _ in labelled
  ]
  largest = max(int(staleness.max(initial=0)) for staleness in applied)
  width = max(1, -(-(largest + 1) // _MAX_BARS))
  edges = np.arange(0, largest + 2 * width, width) - 0.5
  colors = _curves.pick_colors(len(labelled))
  for staleness, (_, label), color in zip(
    applied, labelled, colors, strict=True
  ):
    counts, _ = np.histogram(staleness, edges)
    shares = counts / max(1, len(staleness))
    mean = f'mean {staleness.mean():.2f}' if len(staleness) else 'none applied'
    axes.stairs(shares, edges, fill=True, color=color, alpha=0.25)
    axes.stairs(
      shares, edges, color=color, linewidth=1.5, label=f'{label} ({mean})'
    )
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
  axes.spines[['top', 'right']].set_visible(False)
  axes.set_xlabel('staleness: updates since the weights were read')
  axes.set_ylabel('share of applied gradients')
  figure.legend(loc='outside upper left', frameon=False, fontsize=9)
  return figure
