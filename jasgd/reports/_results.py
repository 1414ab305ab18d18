"""Tables of runs: results, fates of gradients, settings, provenance."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jasgd import traces
from jasgd.reports import _formats
from jasgd.reports import _members
from jasgd.reports import _runs
from jasgd.reports import _words

_number = _formats.format_number

# Fates of gradients, in words.
_FATES = {
  traces.Fate.APPLIED: 'applied',
  traces.Fate.PENDING: 'pending: its update was not made yet',
  traces.Fate.DROPPED_LATE: 'dropped: came after its update',
  traces.Fate.DROPPED_STALE: 'dropped: too stale',
  traces.Fate.LOST_HISTORY: 'dropped: of weights lost with a server',
  traces.Fate.DROPPED_GONE: 'dropped: its learner was gone',
  traces.Fate.AFTER_END: 'dropped: the run was over',
  traces.Fate.NOT_FINITE: 'dropped: not finite',
}


def make_results(runs: Sequence[_runs.Run]) -> _formats.Table | None:
  """Table of the runs' ends, last metrics and rates."""
  columns = [_list_results(run) for run in runs]
  if len(runs) > 1:
    folders = _runs.name_folders(runs)
    columns = [
      {'workdir': folder, **column}
      for folder, column in zip(folders, columns, strict=True)
    ]
  return _join('Results', 'result', columns, runs)


def make_fates(runs: Sequence[_runs.Run]) -> _formats.Table | None:
  """Table of the gradients' fates; None if there is no server."""
  columns = [_list_fates(run) for run in runs]
  return _join('Fates of gradients', 'fate', columns, runs)


def make_settings(runs: Sequence[_runs.Run]) -> _formats.Table | None:
  """The configs; rows where they differ are marked."""
  return _compare('Settings', 'setting', [run.config for run in runs], runs)


def make_provenance(runs: Sequence[_runs.Run]) -> _formats.Table | None:
  """Versions, machine and seeds; rows where they differ are marked."""
  trees = [run.provenance for run in runs]
  return _compare('Provenance', 'field', trees, runs)


def _join(
  title: str,
  name: str,
  columns: Sequence[Mapping[str, str]],
  runs: Sequence[_runs.Run],
) -> _formats.Table | None:
  labels = [run.label for run in runs]
  return _formats.join_columns(title, name, columns, labels)


def _compare(
  title: str,
  name: str,
  trees: Sequence[Mapping[str, Any]],
  runs: Sequence[_runs.Run],
) -> _formats.Table | None:
  """Values by key, a column for each run."""
  columns = [
    {key: _formats.format_value(value) for key, value in tree.items()}
    for tree in trees
  ]
  table = _join(title, name, columns, runs)
  marked = frozenset(_runs.find_differences(trees))
  if table is None or not marked:
    return table
  return table._replace(marked=marked, note='≠ where the runs differ.')


def _list_results(run: _runs.Run) -> dict[str, str]:
  """The results of one run by name."""
  end = _words.say_end(run)
  results = {'end': end} if end else {}
  for group in ('test/', 'centre/', 'local/'):
    results |= _list_metrics(run, group)
  for name, title in (
    ('train/loss', 'train/loss, final'),
    ('gossip/consensus_error', 'consensus error, final'),
  ):
    point = run.find_last(name)
    if point is not None:
      results[title] = _format_point(run, point)
  epoch = run.find_last('epoch')
  if epoch is not None:
    results['epochs'] = _number(epoch.value)
  if run.duration is not None:
    results['time (s), virtual if simulated'] = _number(run.duration)
  if run.trace is not None and run.summary is not None:
    results |= _list_work(run, run.summary)
    results |= _list_ages(run, run.summary)
    results |= _members.list_changes(run.trace)
    results |= _list_losses(run, run.summary)
  return results


def _list_metrics(run: _runs.Run, group: str) -> dict[str, str]:
  """The last and the best value of each metric of a group."""
  results = {}
  for name in sorted(name for name in run.metrics if name.startswith(group)):
    last, best = run.find_last(name), run.find_best(name)
    if last is not None and best is not None:
      results[f'{name}, final'] = _format_point(run, last)
      results[f'{name}, best'] = _format_point(run, best)
  return results


def _list_work(run: _runs.Run, summary: traces.Summary) -> dict[str, str]:
  """Gradients, updates and mixes, and their rates."""
  duration = run.active_duration
  rate = traces.statistics.divide(summary.num_gradients, duration)
  results = {f'{run.worker}s': _number(summary.num_workers)}
  if run.has_server:
    if run.clock is not None:
      results['updates'] = _number(run.clock)
    results['updates in the trace'] = _number(summary.num_updates)
    results['updates per second'] = _number(summary.updates_per_second)
  else:
    results['steps'] = _number(summary.num_gradients)
    results['mixes'] = _number(summary.num_mixes)
  return results | {
    'time of the trace (s)': _number(duration),
    'gradients per second': _number(rate),
    'speed-up': _number(summary.speedup),
  }


def _list_ages(run: _runs.Run, summary: traces.Summary) -> dict[str, str]:
  """Staleness of gradients, or age and lag of mixes."""
  results = {}
  staleness = summary.staleness
  if run.has_server and staleness.count:
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
  for name, spread in (('age', summary.age), ('lag', summary.lag)):
    if spread.count:
      results[f'{name} of mixes, mean'] = _number(spread.mean)
      results[f'{name} of mixes, max'] = _number(spread.max)
  return results


def _list_losses(run: _runs.Run, summary: traces.Summary) -> dict[str, str]:
  """Restarts, and messages and masses that were lost; none if none were."""
  refused = run.find_last('gossip/refused_full')
  counts = {
    'restarts of the server': summary.num_restarts if run.has_server else 0,
    'messages lost': summary.num_lost,
    'questions refused': summary.num_refused,
    'messages refused, as there was no room': refused.value if refused else 0,
    'gradients missing': summary.num_missing,
  }
  results = {name: _number(count) for name, count in counts.items() if count}
  if summary.lost_mass:
    share = _formats.format_share(summary.lost_mass, summary.num_workers)
    results['mass lost'] = f'{_number(summary.lost_mass)} ({share})'
  return results


def _list_fates(run: _runs.Run) -> dict[str, str]:
  """Number of gradients with each fate that occurs."""
  summary = run.summary
  if summary is None or not run.has_server or not summary.num_gradients:
    return {}
  fates = {
    _FATES[fate]: (
      f'{_number(count)} ({_formats.format_share(summary.shares[fate])})'
    )
    for fate, count in summary.fates.items()
    if count or fate == traces.Fate.APPLIED
  }
  fates['all'] = _number(summary.num_gradients)
  if summary.num_void:
    fates['lost with a server, not counted above'] = _number(summary.num_void)
  return fates


def _format_point(run: _runs.Run, point: _runs.Point) -> str:
  where = f'{run.unit} {_number(point.clock)}'
  if np.isfinite(point.epoch):
    where += f', epoch {_number(point.epoch)}'
  return f'{_number(point.value)} ({where})'
