"""Work of each worker: shares of work and time, rates, messages."""

from collections.abc import Sequence
import textwrap

from matplotlib import axes as mpl_axes
from matplotlib import figure as mpl_figure
from matplotlib import ticker
import numpy as np

from jasgd import traces
from jasgd.reports import _figures
from jasgd.reports import _formats
from jasgd.reports import _members
from jasgd.reports import _runs

_MAX_BARS = 64  # More bars would have no gaps between them.


def measure_step_rates(trace: traces.Trace) -> np.ndarray:
  """Gradients per second of each worker, from its first to its last.

  The time in which a worker compiles does not count, nor the time after its
  last gradient, nor the pause before a run of nodes was resumed.

  Args:
    trace: A trace.

  Returns:
    float64, an entry for each worker: NaN if it made less than two gradients.

  Examples:
    >>> import jasgd
    >>> from jasgd import gossip, reports
    >>> trace = jasgd.simulate(gossip.Pull(), num_workers=2, num_gradients=8)
    >>> reports.measure_step_rates(trace)
    array([1., 1.])
  """
  worker, ends = trace.worker, trace.end_time
  num_workers = trace.num_workers
  counts = np.bincount(worker, minlength=num_workers)
  first = np.full(num_workers, np.inf)
  last = np.full(num_workers, -np.inf)
  np.fmin.at(first, worker, ends)
  np.fmax.at(last, worker, ends)
  active = np.where(counts > 0, last - first, 0.0)
  if not trace.has_server:
    back_at, seconds = traces.statistics.find_downtimes(trace)
    is_within = (back_at > first[:, None]) & (back_at < last[:, None])
    active -= np.sum(is_within * seconds, axis=1)
  rates = np.full(num_workers, np.nan)
  is_known = (counts > 1) & (active > 0)
  rates[is_known] = (counts - 1)[is_known] / active[is_known]
  return rates


# --- Tables.


def make_workers(run: _runs.Run, title: str) -> _formats.Table | None:
  """The work, time and messages of each worker; None without a trace."""
  summary = run.summary
  if summary is None or not summary.num_workers:
    return None
  workers, times = summary.workers, summary.workers.times
  traffic, duration = workers.traffic, run.active_duration
  # Numbers by the names of columns, and the whole that they are a share of.
  columns: dict[str, tuple[np.ndarray, float | None]]
  columns = {'gradients': (workers.num_gradients, None)}
  if run.has_server:
    columns |= {
      'applied': (workers.num_applied, None),
      'share of applied': (workers.num_applied, workers.num_applied.sum()),
      'mean staleness': (workers.mean_staleness.round(2), None),
    }
  else:
    columns |= {
      'share of gradients': (workers.num_gradients, summary.num_gradients),
      'mixes': (workers.num_mixes, None),
    }
  columns |= {
    'busy': (times.busy, duration),
    'waiting': (times.waiting, duration),
  }
  if run.has_server:  # Nodes do not record when messages were under way.
    columns['communication'] = (times.communication, duration)
  columns |= {
    'sent': (traffic.num_sent, None),
    'received': (traffic.num_received, None),
  }
  rows = [
    (str(i), *(_format(array[i], whole) for array, whole in columns.values()))
    for i in range(min(summary.num_workers, _formats.MAX_ROWS))
  ]
  note = _formats.note_rest(
    summary.num_workers,
    'Sent and received are numbers of messages with weights or gradients.',
  )
  return _formats.Table(title, (run.worker, *columns), rows, note=note)


def make_rates(runs: Sequence[_runs.Run]) -> _formats.Table | None:
  """Gradients per second: a row for each worker, a column for each run."""
  known = _list_rates(runs)
  if not known:
    return None
  num_workers = max(len(rates) for _, rates in known)
  rows = [
    (
      str(worker),
      *(_say_rate(rates, known[0][1], worker) for _, rates in known),
    )
    for worker in range(min(num_workers, _formats.MAX_ROWS))
  ]
  labels, note = ['gradients per second'], ''
  if len(known) > 1:
    labels = [run.label for run, _ in known]
    note = 'In brackets: relative to the same worker in the first run.'
  return _formats.Table(
    'Gradients per second',
    (_name_workers(runs), *labels),
    rows,
    note=_formats.note_rest(num_workers, note),
  )


def make_traffic(runs: Sequence[_runs.Run]) -> _formats.Table | None:
  """The traffic of runs in kB; None if no run tells the size of messages."""
  columns = [_list_traffic(run) for run in runs]
  labels = [run.label for run in runs]
  table = _formats.join_columns('Traffic', 'kB', columns, labels)
  if table is None:
    return None
  note = 'A round is as many gradients as there are workers.'
  if not all(run.has_server for run in runs):
    note += (
      ' For an all-reduce, the contents of its messages are counted: small '
      'weights are sent whole, to all nodes; of large weights, each of n nodes '
      'sends 2 (n - 1) / n. '
      'Messages that were refused (gossip/refused_full, gossip/refused_done) '
      'are not counted.'
    )
  return table._replace(note=note)


def _list_traffic(run: _runs.Run) -> dict[str, str]:
  """Traffic of a run by link, beside that of a server in its place.

  A server receives each gradient and sends the weights back, all through its
  one link. Without a server, only a centre has such a link.
  """
  summary = run.summary
  if summary is None or run.trace is None or not summary.num_gradients:
    return {}
  traffic = summary.workers.traffic
  size = run.trace.header.get('bytes_per_push')
  if traffic.sent is None or traffic.received is None or not size:
    return {}
  worker, num_gradients = run.worker, summary.num_gradients
  links = (traffic.sent + traffic.received) * (
    summary.num_workers / num_gradients
  )
  results = {
    'the weights': size,
    f'sent by a {worker}, per gradient': traffic.sent.sum() / num_gradients,
    f'received by a {worker}, per gradient': (
      traffic.received.sum() / num_gradients
    ),
    f"through the busiest {worker}'s link, per round": links.max(),
  }
  has_centre = np.any(run.trace.records['kind'] == traces.Kind.MOVE)
  if run.has_server or has_centre:
    owner = 'server' if run.has_server else 'centre'
    results[f"through the {owner}'s link, per round"] = links.sum()
  if not run.has_server:
    results |= {
      'with a server: sent by a learner, per gradient': size,
      'with a server: received by a learner, per gradient': size,
      "with a server: through the server's link, per round": (
        2 * size * summary.num_workers
      ),
    }
  return {
    name: _formats.format_number(float(value) / 1e3)
    for name, value in results.items()
  }


def _format(number: float, whole: float | None) -> str:
  """A number, or its share of a whole; a dash for NaN."""
  if whole is not None:
    return _formats.format_share(number, whole)
  return _formats.format_number(None if np.isnan(number) else number)


def _list_rates(
  runs: Sequence[_runs.Run],
) -> list[tuple[_runs.Run, np.ndarray]]:
  """The runs that have gradients, with their rates."""
  return [
    (run, measure_step_rates(run.trace))
    for run in runs
    if run.trace is not None and run.trace.num_gradients
  ]


def _name_workers(runs: Sequence[_runs.Run]) -> str:
  return _members.name_worker(*(run.has_server for run in runs))


def _say_rate(rates: np.ndarray, first: np.ndarray, worker: int) -> str:
  """A worker's rate, and its share of the rate in the first run."""
  if worker >= len(rates) or np.isnan(rates[worker]):
    return _formats.MISSING
  text = f'{rates[worker]:.4g}'
  if rates is not first and worker < len(first) and first[worker] > 0:
    text += f' ({rates[worker] / first[worker]:.0%})'
  return text


# --- Pictures.


def draw_workers(runs: Sequence[_runs.Run]) -> mpl_figure.Figure | None:
  """Shares of the work, and the use of time; None without traces."""
  known = [run for run in runs if run.summary and run.summary.num_workers]
  if not known:
    return None
  figure = _figures.make_figure(2.6 * len(known) + 0.2)
  grid = figure.subplots(len(known), 2, squeeze=False)
  for (left, right), run in zip(grid, known, strict=True):
    _draw_work(left, run)
    _draw_times(right, run)
    for axes in (left, right):
      axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    if len(runs) > 1:
      # A long label in one line would push the two apart.
      title = textwrap.fill(_formats.escape_math(run.label), 48)
      left.set_title(title, loc='left', fontsize=9)
  return figure


def draw_rates(runs: Sequence[_runs.Run]) -> mpl_figure.Figure | None:
  """The picture of `make_rates`: bars side by side, in the colours of runs."""
  known = _list_rates(runs)
  if not known:
    return None
  figure = _figures.make_figure(2.4 + 0.2 * (len(known) > 1) * len(known))
  axes = figure.subplots()
  colors = dict(zip(runs, _figures.pick_colors(len(runs)), strict=True))
  width = 0.8 / len(known)
  for index, (run, rates) in enumerate(known):
    workers = np.arange(len(rates))
    style = {'color': colors[run], 'label': _formats.escape_math(run.label)}
    if len(rates) <= _MAX_BARS:
      place = workers + (index - (len(known) - 1) / 2) * width
      axes.bar(place, rates, width * 0.95, **style)
    else:
      axes.plot(workers, rates, linewidth=1, **style)
  axes.set_ylim(bottom=0)
  y = 'gradients per second'
  _figures.set_axes(axes, _name_workers(runs), y, whole='x')
  if len(runs) > 1:
    _figures.add_legend(figure)
  return figure


def _draw_work(axes: mpl_axes.Axes, run: _runs.Run) -> None:
  """A bar for each worker's share, and a line at equal shares."""
  assert run.summary is not None
  workers = run.summary.workers
  work = workers.num_applied if run.has_server else workers.num_gradients
  shares = work / max(1, work.sum())
  color = _figures.COLORS['computes']
  _draw_bars(axes, shares, np.zeros(len(shares)), color)
  axes.axhline(1 / len(shares), color='black', linestyle='--', linewidth=1)
  kind = 'applied gradients' if run.has_server else 'gradients'
  _figures.set_axes(axes, run.worker, f'share of {kind}', whole='x')


def _draw_times(axes: mpl_axes.Axes, run: _runs.Run) -> None:
  """The shares of a worker's time, stacked."""
  assert run.summary is not None
  times, duration = run.summary.workers.times, run.active_duration
  bottom = np.zeros(run.summary.num_workers)
  for what, seconds in (
    ('computes', times.busy),
    ('communicates', times.communication),
    ('waits', times.waiting),
  ):
    if what == 'communicates' and not run.has_server:
      continue
    shares = seconds / duration if duration else np.zeros(len(seconds))
    _draw_bars(axes, shares, bottom, _figures.COLORS[what], what)
    bottom = bottom + shares
  axes.set_ylim(0, max(1.0, bottom.max(initial=0.0)))
  _figures.set_axes(axes, run.worker, 'share of the time', whole='x')
  _figures.add_axes_legend(axes)


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
  else:  # One outline is drawn fast, for 100,000 workers, too.
    axes.stairs(
      bottom + heights,
      np.arange(len(heights) + 1) - 0.5,
      baseline=bottom,
      fill=True,
      color=color,
      label=label,
    )
