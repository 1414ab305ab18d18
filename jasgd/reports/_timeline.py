"""The timeline: activities of each worker over time."""

import os
from typing import NamedTuple

from matplotlib import axes as mpl_axes
from matplotlib import collections
from matplotlib import figure as mpl_figure
from matplotlib import patches
import numpy as np

from jasgd import traces
from jasgd.reports import _figures
from jasgd.reports import _members

_MAX_UPDATES = 300  # More lines would hide the bars.


class _Bars(NamedTuple):
  """Bars of one kind, in seconds since the first gradient."""

  worker: np.ndarray
  start: np.ndarray
  end: np.ndarray


def plot_timeline(
  trace: traces.Trace,
  path: str | os.PathLike[str] | None = None,
  *,
  max_workers: int = 16,
  num_rounds: float = 8.0,
) -> mpl_figure.Figure:
  """Draws when workers computed, communicated and waited, in the first part.

  For real processes, the part begins after their first gradients, which include
  compilation. With a server, each line is an update. Without a server, each dot
  is a mix, with lines from the nodes whose weights were mixed in; a gap before
  the death of a node is a step that was lost.

  Args:
    trace: The trace to draw.
    path: The file to write, if any; its suffix chooses the format.
    max_workers: Number of workers to draw.
    num_rounds: Number of gradients of a typical worker to draw, with all that
      the worker waits for.

  Returns:
    The picture. Its time counts from the first gradient.
  """
  figure = _figures.make_figure(4.2)
  axes = figure.subplots()
  origin = _members.find_origin(trace)
  begin, end = _choose_window(trace, num_rounds)
  num_rows = min(max_workers, max(1, trace.num_workers))
  list_bars = _list_learner_bars if trace.has_server else _list_node_bars
  drawn = {'is gone': _list_absence_bars(trace, end)} | list_bars(trace, origin)
  for activity, bars in drawn.items():
    is_seen = (bars.worker < num_rows) & (bars.start < end) & (bars.end > begin)
    # Shorter bars are rounding errors of times.
    is_seen &= bars.end - bars.start > 1e-6 * (end - begin)
    drawn[activity] = _Bars(*(column[is_seen] for column in bars))
    _draw_bars(axes, drawn[activity], activity)
  if trace.has_server:
    _draw_updates(axes, trace, origin, begin, end)
  else:
    _draw_mixes(axes, trace, origin, end, num_rows)
  if not trace.num_gradients:
    _figures.say_empty(axes)
  marks = _members.draw_marks(
    axes, trace, num_rows, labels=('came', 'left or lost'), window=(begin, end)
  )
  axes.set_xlim(begin, end)
  axes.set_ylim(num_rows - 0.5, -0.5)
  noun = _members.name_worker(trace.has_server)
  _figures.set_axes(axes, 'time (s)', noun, whole='y')
  handles = [
    patches.Patch(color=color, label=activity)
    for activity, color in _figures.COLORS.items()
    if activity in drawn
    and (activity != 'is gone' or len(drawn[activity].worker))
  ]
  _figures.add_axes_legend(axes, handles=[*handles, *marks])
  return _figures.save(figure, path)


def _choose_window(
  trace: traces.Trace, num_rounds: float
) -> tuple[float, float]:
  """The first and the last time to draw, since the first gradient."""
  order = np.argsort(trace.worker, kind='stable')
  is_first = np.diff(trace.worker[order], prepend=-1) != 0
  origin = _members.find_origin(trace)
  ends = trace.end_time[order] - origin
  # From one gradient's end to the next: with mixes, messages and waits.
  previous = np.roll(ends, 1)
  previous[is_first] = trace.start_time[order][is_first] - origin
  cycles = ends - previous
  cycles = cycles[np.isfinite(cycles) & (cycles > 0)]
  cycle = float(np.median(cycles)) if len(cycles) else 1.0
  begin = 0.0
  if trace.is_recorded and len(ends):
    # All workers had to compile. One that came in the second half is not
    # waited for.
    firsts = ends[is_first]
    middle = np.fmax(np.fmax.reduce(ends) / 2, np.fmin.reduce(firsts))
    begin = float(np.fmax.reduce(firsts[firsts <= middle], initial=0.0))
  return begin, begin + num_rounds * cycle


def _list_learner_bars(trace: traces.Trace, origin: float) -> dict[str, _Bars]:
  """The bars of learners, by activity."""
  start, end = trace.start_time - origin, trace.end_time - origin
  wait_end = traces.statistics.find_wait_ends(trace) - origin
  # Only the length of the computation is recorded, not its start: the pull and
  # the push are drawn as equally long.
  computing = np.minimum(trace.compute_time, end - start)
  transfer = (end - start - computing) / 2
  begun, done = start + transfer, end - transfer
  return {
    'computes': _Bars(trace.worker, begun, done),
    'communicates': _Bars(
      np.concatenate([trace.worker, trace.worker]),
      np.concatenate([start, done]),
      np.concatenate([begun, end]),
    ),
    'waits': _Bars(trace.worker, end, wait_end),
  }


def _list_node_bars(trace: traces.Trace, origin: float) -> dict[str, _Bars]:
  """The bars of nodes, by activity."""
  questions = trace.of_kind(traces.Kind.LOST)
  questions = questions[questions['read_version'] < 0]
  mixes = traces.statistics.keep_first_of_mix(trace.mixes)
  return {
    activity: _Bars(
      records['replica'],
      records['start_time'] - origin,
      records['end_time'] - origin,
    )
    for activity, records in (
      ('computes', trace.steps),
      ('waits', np.concatenate([mixes, questions])),
    )
  }


def _list_absence_bars(trace: traces.Trace, end: float) -> _Bars:
  """The bars of absent workers, up to the picture's end."""
  absences = _members.list_absences(trace)
  times = np.array(
    [(absence.start, absence.end) for absence in absences], float
  ).reshape(-1, 2)
  times = np.minimum(times - _members.find_origin(trace), end)
  workers = np.array([absence.worker for absence in absences], int)
  return _Bars(workers, times[:, 0], times[:, 1])


def _draw_bars(axes: mpl_axes.Axes, bars: _Bars, activity: str) -> None:
  """Draws bars in workers' rows, as one artist however many they are."""
  if not len(bars.worker):
    return
  x = np.stack([bars.start, bars.start, bars.end, bars.end], axis=-1)
  y = bars.worker[:, None] + np.array([-0.4, 0.4, 0.4, -0.4])
  axes.add_collection(
    collections.PolyCollection(
      list(np.stack([x, y], axis=-1)),
      facecolors=_figures.COLORS[activity],
      edgecolors='white',
      linewidths=0.4,
      label=activity,
    ),
    autolim=False,
  )


def _draw_updates(
  axes: mpl_axes.Axes,
  trace: traces.Trace,
  origin: float,
  begin: float,
  end: float,
) -> None:
  """A line for each update, unless they would hide everything."""
  own = trace.of_replica(traces.SERVER)
  is_update = (own['updates'] > 0) & (own['kind'] != traces.Kind.MOVE)
  times = own['end_time'][is_update] - origin
  times = times[(times >= begin) & (times < end)]
  if 0 < len(times) <= _MAX_UPDATES:
    style = {'linewidth': 0.5, 'alpha': 0.5, 'label': 'updates'}
    _figures.draw_times(axes, times, **style)


def _draw_mixes(
  axes: mpl_axes.Axes,
  trace: traces.Trace,
  origin: float,
  end: float,
  num_rows: int,
) -> None:
  """A dot for each mix of a node, and lines from the nodes it read."""
  mixes = trace.mixes
  mixes = mixes[(mixes['end_time'] - origin < end)]
  mixes = mixes[mixes['replica'] < num_rows]
  is_line = (mixes['kind'] == traces.Kind.MIX) & (mixes['source'] >= 0)
  lines = mixes[is_line & (mixes['source'] < num_rows)]
  axes.vlines(
    lines['end_time'] - origin,
    np.minimum(lines['replica'], lines['source']),
    np.maximum(lines['replica'], lines['source']),
    color='black',
    linewidth=0.5,
    alpha=0.5,
  )
  axes.scatter(
    mixes['end_time'] - origin, mixes['replica'], s=6, color='black', zorder=3
  )
