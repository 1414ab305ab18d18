"""Pictures of the staleness of gradients, and of the age and lag of mixes."""

from collections.abc import Sequence
import os

from matplotlib import figure as mpl_figure
from matplotlib import ticker
import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.reports import _figures
from jasgd.reports import _predictions

_MAX_BARS = 200  # Largest number of bars that can be distinguished.
_LABEL = 'staleness: updates since the weights were read'


def plot_staleness(
  trace: traces.Trace,
  path: str | os.PathLike[str] | None = None,
  predicted: Sequence[traces.Trace] = (),
) -> mpl_figure.Figure:
  """Draws the distribution of staleness, of applied and of dropped gradients.

  Args:
    trace: The trace to draw, of a run with a server.
    path: The file to write, if any; its suffix chooses the format.
    predicted: Results of `jasgd.simulation.predict` for the trace. The
      distribution of their applied gradients is drawn as a line.

  Returns:
    The picture. Its title is on applied gradients.
  """
  figure = _figures.make_figure(3.6)
  axes = figure.subplots()
  is_applied = trace.fate == protocols.Fate.APPLIED
  is_pending = trace.fate == protocols.Fate.PENDING
  colors = _figures.COLORS
  groups = {
    'applied': (is_applied, colors['computes']),
    'pending': (is_pending, colors['waits']),
    'dropped': (~is_applied & ~is_pending, colors['communicates']),
  }
  groups = {
    name: (trace.staleness[is_own], color)
    for name, (is_own, color) in groups.items()
    if np.any(is_own)
  }
  expected = _predictions.list_staleness(tuple(predicted))
  largest = max(trace.staleness.max(initial=0), expected.max(initial=0))
  # Below 0 are gradients of weights that were lost with a server.
  edges = _choose_edges(0, int(largest))
  if groups:
    axes.hist(
      [staleness for staleness, _ in groups.values()],
      edges.tolist(),
      stacked=True,
      color=[color for _, color in groups.values()],
      label=list(groups),
      rwidth=0.9,
    )
    if len(expected):  # Scaled to the number of applied gradients.
      counts, _ = np.histogram(expected, edges)
      axes.stairs(
        counts * (np.count_nonzero(is_applied) / len(expected)),
        edges,
        color='black',
        linewidth=1.5,
        label='predicted',
      )
    axes.legend(frameon=False)
  else:
    _figures.say_empty(axes)
  if is_applied.any():
    staleness = trace.staleness[is_applied]
    axes.axvline(staleness.mean(), color='black', linestyle='--', linewidth=1)
    title = f'applied: mean {staleness.mean():.2f}, largest {staleness.max()}'
    if len(expected):
      title += (
        f'; predicted: mean {expected.mean():.2f}, largest {expected.max()}'
      )
    axes.set_title(title, fontsize=10)
  _figures.set_axes(axes, _LABEL, 'gradients', whole='x')
  return _figures.save(figure, path)


def draw_several(
  labelled: Sequence[tuple[traces.Trace, str]],
) -> mpl_figure.Figure:
  """The staleness of several runs: shares, as runs may differ in length."""
  figure = _figures.make_figure(3.4 + 0.2 * len(labelled))
  axes = figure.subplots()
  applied = [_predictions.list_staleness((trace,)) for trace, _ in labelled]
  largest = max(int(staleness.max(initial=0)) for staleness in applied)
  edges = _choose_edges(0, largest)
  colors = _figures.pick_colors(len(labelled))
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
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
  _figures.set_axes(axes, _LABEL, 'share of applied gradients', whole='x')
  _figures.add_legend(figure)
  return figure


def plot_ages(
  trace: traces.Trace, path: str | os.PathLike[str] | None = None
) -> mpl_figure.Figure:
  """Draws the distributions of the age and of the lag of all mixes.

  Args:
    trace: The trace to draw, of a run without a server. For age and lag see
      `jasgd.traces.summarize`.
    path: The file to write, if any; its suffix chooses the format.

  Returns:
    The picture.
  """
  statistics = traces.statistics
  age = statistics.describe(statistics.measure_ages(trace))
  lag = statistics.describe(statistics.measure_lags(trace))
  figure = _figures.make_figure(3.6)
  mixes = trace.of_kind(traces.Kind.MIX)
  has_centre = np.any(mixes['source'] == traces.SERVER)
  since = "the centre's moves" if has_centre else "the peer's steps"
  for axes, spread, label in zip(
    figure.subplots(1, 2),
    (age, lag),
    (f'age: {since} since', "lag: own steps minus the peer's"),
    strict=True,
  ):
    if not spread.count:  # All-reduce has neither, elastic averaging no lag.
      axes.set_axis_off()
      axes.set_title('no mixes with a node', fontsize=10)
      continue
    edges = _choose_edges(int(spread.min), int(spread.max))
    axes.hist(spread.values, edges.tolist(), weights=spread.counts, rwidth=0.9)
    axes.axvline(spread.mean, color='black', linestyle='--', linewidth=1)
    axes.set_title(
      f'mean {spread.mean:.2f}, largest {spread.max:.0f}', fontsize=10
    )
    _figures.set_axes(axes, label, 'mixes', whole='x')
  return _figures.save(figure, path)


def _choose_edges(smallest: int, largest: int) -> np.ndarray:
  """The edges of bars: one per whole number, or wider ones if too many."""
  width = max(1, -(-(largest - smallest + 1) // _MAX_BARS))
  return np.arange(smallest, largest + 2 * width, width) - 0.5
