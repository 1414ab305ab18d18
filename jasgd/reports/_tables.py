"""The tables of a report, as text: settings, results, learners."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jasgd import traces
from jasgd.reports import _formats
from jasgd.reports import _labels
from jasgd.reports import _members
from jasgd.reports import _runs
from jasgd.reports import _words

_number = _formats.format_number
_share = _formats.format_share

MAX_LEARNERS = 32


class Table(NamedTuple):
  """Cells of text; the first of each row names it."""

  title: str
  header: tuple[str, ...]
  rows: Sequence[tuple[str, ...]]
  marked: frozenset[str] = frozenset()  # Names of rows that stand out.
  note: str = ''


def make_settings(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> Table | None:
  """The configs; rows where they differ are marked."""
  return _compare('Settings', 'setting', [run.config for run in runs], labels)


def make_provenance(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> Table | None:
  """What ran, and on what."""
  trees = [run.provenance for run in runs]
  return _compare('Provenance', 'field', trees, labels)


def make_results(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> Table | None:
  """How the runs ended, and how fast they were."""
  columns = [_list_results(run) for run in runs]
  if len(runs) > 1:
    folders = _labels.name_folders(runs)
    columns = [
      {'workdir': folder, **column}
      for folder, column in zip(folders, columns, strict=True)
    ]
  return join('Results', 'result', columns, labels)


def make_learners(run: _runs.Run, title: str) -> Table | None:
  """What each learner, or node, did; None if that is not known."""
  if run.summary and run.summary.num_learners:
    return _make_learners(run.summary, title)
  if run.node_summary and run.node_summary.num_nodes:
    return _make_nodes(run, run.node_summary, title)
  return None


def _compare(
  title: str,
  name: str,
  trees: Sequence[dict[str, Any]],
  labels: Sequence[str],
) -> Table | None:
  """Values by key, a column for each tree."""
  columns = [
    {key: _formats.format_value(value) for key, value in tree.items()}
    for tree in trees
  ]
  table = join(title, name, columns, labels)
  marked = frozenset(_labels.find_differences(trees))
  if table is None or not marked:
    return table
  return table._replace(marked=marked, note='≠ where the runs differ.')


def join(
  title: str,
  name: str,
  columns: Sequence[dict[str, str]],
  labels: Sequence[str],
) -> Table | None:
  """A table with a column for each run; None if there is nothing in it."""
  keys = dict.fromkeys(key for column in columns for key in column)
  if not keys:
    return None
  rows = [
    (key, *(column.get(key, _formats.MISSING) for column in columns))
    for key in keys
  ]
  header = (name, *labels) if len(labels) > 1 else (name, 'value')
  return Table(title, header, rows)


def _list_results(run: _runs.Run) -> dict[str, str]:
  """The results of one run by name."""
  end = _words.say_end(run)
  results = {'end': end} if end else {}
  for group in ('test/', 'centre/', 'local/'):
    results |= _list_metrics(run, group)
  loss = run.find_last('train/loss')
  if loss is not None:
    results['train/loss, final'] = _format_point(run, loss)
  epoch = run.find_last('epoch')
  if epoch is not None:
    results['epochs'] = _number(epoch.value)
  if run.duration is not None:
    results['time (s), virtual if simulated'] = _number(run.duration)
  if run.summary:
    if run.clock is not None:
      results['updates'] = _number(run.clock)
    results |= _list_server_results(run)
  if run.node_summary:
    consensus = run.find_last('gossip/consensus_error')
    if consensus is not None:
      results['consensus error, final'] = _format_point(run, consensus)
    results |= _list_node_results(run, run.node_summary)
  return results


def _list_metrics(run: _runs.Run, group: str) -> dict[str, str]:
  """The last and the best of each metric of a group."""
  results = {}
  for name in sorted(name for name in run.metrics if name.startswith(group)):
    last, best = run.find_last(name), run.find_best(name)
    if last is not None and best is not None:
      results[f'{name}, final'] = _format_point(run, last)
      results[f'{name}, best'] = _format_point(run, best)
  return results


def _list_server_results(run: _runs.Run) -> dict[str, str]:
  summary = run.summary
  assert summary is not None
  assert isinstance(run.trace, traces.Trace)
  staleness = summary.staleness
  results = {
    'learners': _number(summary.num_learners),
    'updates in the trace': _number(summary.num_updates),
    'time of the trace (s)': _number(summary.duration),
    'gradients per second': _number(summary.gradients_per_second),
    'updates per second': _number(summary.updates_per_second),
    'speed-up': _number(summary.speedup),
  }
  if staleness.count:
    results |= {
      'staleness, mean': _number(staleness.mean),
      'staleness, 95%': _number(staleness.percentiles[95]),
      'staleness, max': _number(staleness.max),
    }
  if run.prediction is not None:
    variation = run.prediction.comparison.total_variation
    results |= {
      'staleness, mean as predicted': _number(run.prediction.mean_staleness),
      'total variation from the prediction': _number(variation),
    }
  if summary.num_restarts:
    results['restarts of the server'] = _number(summary.num_restarts)
  return results | _members.list_changes(run.trace)


def _list_node_results(
  run: _runs.Run, summary: traces.NodeSummary
) -> dict[str, str]:
  rate = traces.statistics.divide(summary.num_steps, run.active_duration)
  results = {
    'nodes': _number(summary.num_nodes),
    'steps': _number(summary.num_steps),
    'steps per second, of all': _number(rate),
    'mixes': _number(summary.num_mixes),
  }
  for name, spread in (('age', summary.age), ('lag', summary.lag)):
    if len(spread.values):
      results[f'{name} of mixes, mean'] = _number(spread.mean)
      results[f'{name} of mixes, max'] = _number(spread.max)
  if summary.num_deaths:
    results |= {
      'deaths': _number(summary.num_deaths),
      'returns': _number(summary.num_returns),
      'messages lost': _number(summary.num_lost),
      'questions refused': _number(summary.num_refused),
    }
  refused = run.find_last('gossip/refused_full')
  if refused is not None and refused.value:
    results['messages refused, for want of room'] = _number(refused.value)
  if summary.lost_mass:
    share = _share_of(summary.lost_mass, summary.num_nodes)
    results['mass lost'] = f'{_number(summary.lost_mass)} ({share})'
  return results


def _make_learners(summary: traces.Summary, title: str) -> Table:
  learners, times = summary.learners, summary.learners.times
  num_applied = int(learners.num_applied.sum())
  rows = [
    (
      str(i),
      _number(int(learners.num_gradients[i])),
      _number(int(learners.num_applied[i])),
      _share_of(learners.num_applied[i], num_applied),
      format_mean(learners.mean_staleness[i]),
      _share_of(times.busy[i], summary.duration),
      _share_of(times.waiting[i], summary.duration),
      _share_of(times.communication[i], summary.duration),
    )
    for i in range(min(summary.num_learners, MAX_LEARNERS))
  ]
  header = (
    'learner',
    'gradients',
    'applied',
    'share of applied',
    'mean staleness',
    'busy',
    'waiting',
    'communication',
  )
  return Table(title, header, rows, note=note_rest(summary.num_learners))


def _make_nodes(
  run: _runs.Run, summary: traces.NodeSummary, title: str
) -> Table:
  nodes, duration = summary.nodes, run.active_duration
  rows = [
    (
      str(i),
      _number(int(nodes.num_steps[i])),
      _share_of(nodes.num_steps[i], summary.num_steps),
      _number(int(nodes.num_mixes[i])),
      _share_of(nodes.computing[i], duration),
      _share_of(nodes.waiting[i], duration),
      _number(float(nodes.num_sent[i])),
      _number(float(nodes.num_received[i])),
    )
    for i in range(min(summary.num_nodes, MAX_LEARNERS))
  ]
  header = (
    'node',
    'steps',
    'share of steps',
    'mixes',
    'computing',
    'waiting',
    'sent',
    'received',
  )
  return Table(title, header, rows, note=note_rest(summary.num_nodes))


def note_rest(number: int) -> str:
  """How many learners are left out of a table; '' if none."""
  rest = number - MAX_LEARNERS
  return f'... and {rest:,} more' if rest > 0 else ''


def _share_of(part: float, whole: float) -> str:
  return _share(traces.statistics.divide(float(part), float(whole)))


def format_mean(mean: float) -> str:
  """To two digits; a dash for the mean of nothing."""
  return _formats.MISSING if np.isnan(mean) else f'{mean:.2f}'


def _format_point(run: _runs.Run, point: _runs.Point) -> str:
  where = f'{run.unit} {_number(point.clock)}'
  if np.isfinite(point.epoch):
    where += f', epoch {_number(point.epoch)}'
  return f'{_number(point.value)} ({where})'
