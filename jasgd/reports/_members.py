"""Presence of workers: joins, losses and absences, and a picture of them."""

from collections.abc import Container
import os
from typing import Any, NamedTuple

from matplotlib import axes as mpl_axes
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.reports import _figures

_Kind = traces.Kind

_MAX_NAMED = 8  # Workers that one cell of a table has room for.
_MAX_ROWS = 32
_PRESENT_COLOR = '#9db4d8'
# Fates of gradients that a protocol decided on: the run was going on.
_DECIDED = (
  protocols.Fate.APPLIED,
  protocols.Fate.DROPPED_LATE,
  protocols.Fate.DROPPED_STALE,
)
# Event of a worker -> its marker.
_MARKS: dict[str, dict[str, Any]] = {
  'gradient dropped': {'marker': '|', 'color': '#dd8452', 'markersize': 8},
  'message lost': {'marker': '|', 'color': '#8172b3', 'markersize': 8},
  'came': {'marker': '>', 'color': 'black', 'markersize': 6},
  'left or lost': {'marker': 'X', 'color': '#c44e52', 'markersize': 8},
}


class Changes(NamedTuple):
  """Records of workers that came and went while a run went on, by time."""

  came: np.ndarray  # Joins after the first gradient, and returns.
  left: np.ndarray  # Departures before the end, losses included.


class Span(NamedTuple):
  """Time from `start` to `end` of a worker, in seconds of the trace."""

  worker: int
  start: float
  end: float


class _Members(NamedTuple):
  """The records of joins and leaves, worker by worker."""

  records: np.ndarray
  is_departure: np.ndarray  # The worker's last record before it was away.
  is_return: np.ndarray  # The worker's first record after that.


def find_origin(trace: traces.Trace) -> float:
  """The time at which the first gradient was begun; 0 if it is not known."""
  origin = np.fmin.reduce(trace.start_time, initial=np.inf)
  return float(origin) if np.isfinite(origin) else 0.0


def find_changes(trace: traces.Trace) -> Changes:
  """Finds the workers that came or left while the run went on.

  When a run is over or interrupted, all learners leave; that is no loss.
  """
  members = _find_members(trace)
  came = members.records[members.is_return]
  left = members.records[members.is_departure]
  if trace.has_server:
    came = came[came['end_time'] > find_origin(trace)]
    is_before = left['end_time'] < _find_last_signs(trace, left['incarnation'])
    left = left[is_before]
  return Changes(*(part[np.argsort(part['end_time'])] for part in (came, left)))


def list_changes(trace: traces.Trace) -> dict[str, str]:
  """Cells of a table on workers that came or left, by names of rows."""
  changes = find_changes(trace)
  noun = name_worker(trace.has_server)
  cells = {
    f'{noun}s that left or were lost': _say(trace, changes.left),
    f'{noun}s that joined late or came back': _say(trace, changes.came),
  }
  cells = {name: cell for name, cell in cells.items() if cell}
  server = trace.records[trace.records['replica'] == traces.SERVER]
  last = int(server['incarnation'].max(initial=0))
  if last:
    owner = 'server' if trace.has_server else 'centre'
    cells[f'incarnations of the {owner}'] = f'{last + 1:,}'
  return cells


def name_worker(*has_server: bool) -> str:
  """Noun for the workers of some runs: learners, nodes, or workers."""
  if all(has_server):
    return 'learner'
  return 'worker' if any(has_server) else 'node'


def list_absences(trace: traces.Trace) -> list[Span]:
  """Absences of workers; the end is infinity if a worker never came back."""
  records, is_departure, is_return = _find_members(trace)
  workers = _get_workers(trace, records)
  returns = np.flatnonzero(is_return)
  absences = []
  for index in np.flatnonzero(is_departure).tolist():
    worker, end = int(workers[index]), np.inf
    following = returns[np.searchsorted(returns, index + 1) :][:1]
    if len(following) and workers[following[0]] == worker:
      end = float(records['end_time'][following[0]])
    absences.append(Span(worker, float(records['end_time'][index]), end))
  return absences


def list_spans(trace: traces.Trace) -> list[Span]:
  """Times in which workers were present, by worker and time."""
  origin = find_origin(trace)
  num_first = 0
  if trace.has_server:  # All other learners have a record of their join.
    num_first = int(trace.header.get('num_present', trace.num_workers))
  since = dict.fromkeys(range(num_first), origin)
  records = _find_members(trace).records
  workers, first = np.unique(_get_workers(trace, records), return_index=True)
  times = records['end_time' if trace.has_server else 'start_time'][first]
  since = dict(zip(workers.tolist(), times.tolist(), strict=True)) | since
  end = float(np.fmax.reduce(trace.records['end_time'], initial=origin))
  spans = []
  for absence in list_absences(trace):
    if absence.worker in since:
      spans.append(
        Span(absence.worker, since.pop(absence.worker), absence.start)
      )
    if absence.end < np.inf:
      since[absence.worker] = absence.end
  spans += [Span(worker, start, end) for worker, start in since.items()]
  return sorted(spans)


def plot_members(
  trace: traces.Trace, path: str | os.PathLike[str] | None = None
) -> mpl_figure.Figure:
  """Draws when workers were present, joined and left, and server restarts.

  Args:
    trace: The trace to draw.
    path: The file to write, if any; its suffix chooses the format.

  Returns:
    The picture. Its time counts from the first gradient.
  """
  num_rows = min(_MAX_ROWS, trace.num_workers)
  figure = _figures.make_figure(1.4 + 0.25 * num_rows)
  axes = figure.subplots()
  origin = find_origin(trace)
  spans = [span for span in list_spans(trace) if span.worker < num_rows]
  axes.hlines(
    [span.worker for span in spans],
    [span.start - origin for span in spans],
    [span.end - origin for span in spans],
    color=_PRESENT_COLOR,
    linewidth=6,
    label='there',
    capstyle='butt',
  )
  _draw_server(axes, trace, origin)
  draw_marks(axes, trace, num_rows)
  axes.set_ylim(max(1, num_rows) - 0.5, -0.5)
  noun = name_worker(trace.has_server)
  _figures.set_axes(axes, 'time (s)', noun, whole='y')
  _figures.add_legend(figure, loc='outside upper right', ncols=7, fontsize=8)
  return _figures.save(figure, path)


def draw_marks(
  axes: mpl_axes.Axes,
  trace: traces.Trace,
  num_rows: int,
  labels: Container[str] = tuple(_MARKS),
  window: tuple[float, float] = (-np.inf, np.inf),
) -> list[mpl_lines.Line2D]:
  """Marks joins, leaves and losses; returns the marks drawn."""
  changes = find_changes(trace)
  pushes = trace.of_kind(_Kind.PUSH)
  # A gradient that arrives after the end is always dropped: that is no loss.
  is_dropped = (pushes['fate'] > protocols.Fate.PENDING) & (
    pushes['fate'] != protocols.Fate.AFTER_END
  )
  lost = trace.of_kind(_Kind.LOST)
  drawn = []
  for (label, style), records in zip(
    _MARKS.items(),
    (pushes[is_dropped], lost, changes.came, changes.left),
    strict=True,
  ):
    times = records['end_time'] - find_origin(trace)
    workers = _get_workers(trace, records)
    is_seen = (times >= window[0]) & (times <= window[1]) & (workers < num_rows)
    if label in labels and np.any(is_seen):
      (line,) = axes.plot(
        times[is_seen], workers[is_seen], linestyle='', label=label, **style
      )
      drawn.append(line)
  return drawn


def _draw_server(
  axes: mpl_axes.Axes, trace: traces.Trace, origin: float
) -> None:
  """Lines for restarts and for the end of a server or centre."""
  owner = 'server' if trace.has_server else 'centre'
  for label, kind, style in (
    (f'{owner} restarted', _Kind.RESTART, '-'),
    ('end', _Kind.END, '--'),
  ):
    records = trace.of_kind(kind)
    times = records['end_time'][records['replica'] == traces.SERVER] - origin
    if len(times):
      style = {'linestyle': style, 'linewidth': 1.2, 'label': label}
      _figures.draw_times(axes, times, **style)


def _get_workers(trace: traces.Trace, records: np.ndarray) -> np.ndarray:
  """The worker of each record: a node is the owner of a replica."""
  return records['worker' if trace.has_server else 'replica']


def _say(trace: traces.Trace, records: np.ndarray) -> str:
  """Number of workers, their names and clocks; '' if there are none."""
  if not len(records):
    return ''
  unit, field = ('clock', 'version') if trace.has_server else ('step', 'step')
  named = ', '.join(
    f'{worker} at {unit} {when:,}'
    for worker, when in zip(
      _get_workers(trace, records[:_MAX_NAMED]).tolist(),
      records[field][:_MAX_NAMED].tolist(),
      strict=True,
    )
  )
  rest = ', ...' if len(records) > _MAX_NAMED else ''
  noun = name_worker(trace.has_server)
  return f'{len(records):,} ({noun} {named}{rest})'


def _find_last_signs(
  trace: traces.Trace, incarnations: np.ndarray
) -> np.ndarray:
  """Last time at which the run was going on, in each given incarnation."""
  records = np.asarray(trace.records)[~trace.is_void]
  is_sign = (records['kind'] == _Kind.END) | (
    (records['kind'] == _Kind.PUSH) & np.isin(records['fate'], _DECIDED)
  )
  signs = records[is_sign]
  # Records are in the order of time: the last one of an incarnation is kept.
  last = dict(
    zip(signs['incarnation'].tolist(), signs['end_time'].tolist(), strict=True)
  )
  return np.array([last.get(each, -np.inf) for each in incarnations.tolist()])


def _find_members(trace: traces.Trace) -> _Members:
  """Finds departures and returns in the records, worker by worker.

  A server records who comes and goes. A node departs by its death.
  """
  if trace.has_server:
    records = trace.of_kind(_Kind.JOIN, _Kind.LEAVE)
    records = records[np.argsort(records['worker'], kind='stable')]
    is_departure = records['kind'] == _Kind.LEAVE
    return _Members(records, is_departure, records['kind'] == _Kind.JOIN)
  records, is_death, is_return = traces.statistics.find_deaths(trace)
  is_first = np.diff(records['replica'], prepend=-1) != 0
  is_late = is_first & (records['kind'] == _Kind.JOIN)
  return _Members(records, is_death, is_return | is_late)
