"""A run, as read from the files in its workdir; some may be missing."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from jasgd import traces
from jasgd import workdir
from jasgd.reports import _formats
from jasgd.reports import _members
from jasgd.reports import _predictions

_Path = str | os.PathLike[str]

# Keys of a header that are not provenance: other parts of a page show them.
_SHOWN_KEYS = ('config', 'in_flight', 'description', 'strategy')
# Largest number of settings in a label, and of letters of each setting.
_MAX_SETTINGS = 3
_MAX_LETTERS = 24


class Point(NamedTuple):
  """A number, with clock and epoch of its measurement; NaN: not known."""

  value: float
  clock: int
  epoch: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
  """A run, as read from the files in its workdir."""

  root: pathlib.Path
  label: str = ''  # Name of the run in a comparison.
  config: dict[str, Any]  # Values by full path, such as optimizer.rate.
  provenance: dict[str, Any]  # Values by full path, without the config.
  trace: traces.Trace | None
  summary: traces.Summary | None  # Of the trace.
  metrics: dict[str, np.ndarray]  # Columns; 'clock' is always there.
  # Metric -> the last row that has it. (A column has NaN for a value that is
  # NaN, and for one that is missing.)
  last_rows: dict[str, int]
  diverged_at: int | None  # The first clock with a loss that is not finite.
  problems: tuple[str, ...]  # Sentences on files that are missing or damaged.
  end_reason: str = ''  # Reason that a real run gave for its end.
  has_result: bool = False

  @property
  def has_server(self) -> bool:
    """Whether learners push to a server; otherwise there are nodes."""
    if self.trace is not None and len(self.trace):
      return self.trace.has_server
    # Nodes that are devices of one program leave no trace.
    return self.config.get('runtime.mode') != 'devices' and not any(
      name.startswith('gossip/') for name in self.metrics
    )

  @property
  def worker(self) -> str:
    """Noun for its workers: 'learner' or 'node'."""
    return _members.name_worker(self.has_server)

  @property
  def unit(self) -> str:
    """Unit of its clock: updates of the server, or steps of nodes."""
    return 'clock' if self.has_server else 'step'

  @property
  def is_real(self) -> bool:
    """Whether it was run by real processes."""
    return self.trace is not None and self.trace.is_recorded

  @property
  def active_duration(self) -> float:
    """Seconds of the trace in which the run went on.

    Leaves out the pauses before a run of nodes was resumed.
    """
    if self.trace is None:
      return 0.0
    if self.has_server or not self.is_real:
      return self.trace.duration
    _, downtimes = traces.statistics.find_downtimes(self.trace)
    return self.trace.duration - float(downtimes.sum())

  @property
  def prediction(self) -> _predictions.Prediction | None:
    """The simulator's prediction of a real run, if there is one."""
    return self._predicted[0]

  @property
  def prediction_problem(self) -> str:
    """Why a real run could not be predicted; '' if it was."""
    return self._predicted[1]

  @functools.cached_property
  def _predicted(self) -> tuple[_predictions.Prediction | None, str]:
    if self.trace is None or not self.is_real or not self.has_server:
      return None, ''
    try:
      return _predictions.predict_run(self.trace), ''
    except ValueError as error:
      return None, str(error)

  @property
  def clock(self) -> int | None:
    """Clock of the last weights; without metrics, of the end of the trace."""
    # In a real run the weights are never behind the trace.
    if len(self.metrics['clock']) and not (self.is_real and self.summary):
      return int(self.metrics['clock'][-1])
    return self.summary.clock if self.summary else None

  @property
  def asks_updates(self) -> bool:
    """Whether the config asks for a number of updates, not of epochs."""
    asked = self.config.get('num_updates')
    return isinstance(asked, int) and asked > 0

  @property
  def planned_clock(self) -> int | None:
    """Clock at which the run is to end, if that is known."""
    known = [self.config['num_updates']] if self.asks_updates else []
    if self.summary and self.summary.clock:
      known.append(self.summary.clock)
    return max(known, default=None)

  @property
  def is_unfinished(self) -> bool:
    """Whether the run has not reached its end, and did not diverge."""
    clock, planned = self.clock, self.planned_clock
    if self.diverged_at is not None:
      return False
    if self.trace is not None and self.is_real:
      if self.has_server:
        return not self.trace.is_ended
      return not self.has_result
    return clock is not None and planned is not None and clock < planned

  @property
  def duration(self) -> float | None:
    """Seconds, virtual or real."""
    last = self.find_last('time')
    if last is not None:
      return last.value
    return self.trace.duration if self.trace is not None else None

  def get_series(self, name: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """Two columns of the metrics, where both are finite."""
    if name not in self.metrics or x not in self.metrics:
      return np.zeros(0), np.zeros(0)
    xs, ys = self.metrics[x], self.metrics[name]
    is_known = np.isfinite(xs) & np.isfinite(ys)
    return xs[is_known], ys[is_known]

  def find_last(self, name: str) -> Point | None:
    """The last number of a metric, which may be NaN; None without any."""
    if name not in self.last_rows:
      return None
    return self._get_point(name, self.last_rows[name])

  def find_best(self, name: str) -> Point | None:
    """The best number of a metric, the first if there are several."""
    column = self.metrics.get(name, np.zeros(0))
    known = np.flatnonzero(np.isfinite(column))
    if not len(known):
      return None
    values = column[known]
    is_lower_better = _formats.is_lower_better(name)
    best = np.argmin(values) if is_lower_better else np.argmax(values)
    return self._get_point(name, known[best])

  def _get_point(self, name: str, row: int) -> Point:
    epochs = self.metrics.get('epoch')
    return Point(
      float(self.metrics[name][row]),
      int(self.metrics['clock'][row]),
      math.nan if epochs is None else float(epochs[row]),
    )


def read_runs(roots: Sequence[_Path]) -> list[Run]:
  """Reads runs, and labels them by the differences of their configs."""
  runs = [read_run(root) for root in roots]
  return [
    dataclasses.replace(run, label=label)
    for run, label in zip(runs, _make_labels(runs), strict=True)
  ]


def read_run(root: _Path) -> Run:
  """Reads all files that a run has left in its workdir.

  Files that are missing or damaged are named in the run's `problems`. If there
  are none at all, a WorkdirError is raised.
  """
  paths = workdir.Workdir(root)
  _check_workdir(paths)
  problems: list[str] = []
  trace, summary = _read_trace(paths, problems)
  metrics = _read_metrics(paths, problems)
  last_rows, diverged_at = _scan_metrics(paths.metrics, metrics)
  result = _read_json(paths.result, problems) or {}
  if diverged_at is None and result.get('is_diverged'):
    diverged_at = int(result.get('clock', 0))
  provenance = _read_json(paths.provenance, problems)
  if provenance is None:  # The same object, unless the trace is simulated.
    provenance = dict(trace.header) if trace is not None else {}
  config = _read_json(paths.config, problems)
  if config is None:
    config = provenance.get('config')
  if not isinstance(config, dict):
    problems.append('There are no settings: no config.json.')
    config = {}
  config = dict(_flatten(config))
  if not paths.trace.exists() and config.get('runtime.mode') != 'devices':
    problems.append('There is no trace yet.')
  provenance = {
    key: value for key, value in provenance.items() if key not in _SHOWN_KEYS
  }
  return Run(
    root=paths.root,
    config=config,
    provenance=dict(_flatten(provenance)),
    trace=trace,
    summary=summary,
    metrics=metrics,
    last_rows=last_rows,
    diverged_at=diverged_at,
    problems=tuple(problems),
    end_reason=_formats.format_value(str(result.get('end_reason') or ''), 500),
    has_result=bool(result),
  )


def find_differences(trees: Sequence[Mapping[str, Any]]) -> list[str]:
  """The keys whose values are not the same in all trees."""
  keys = dict.fromkeys(key for tree in trees for key in tree)
  # Compared as JSON, in which 1 and True differ; '' is a missing value.
  return [
    key
    for key in keys
    if len(
      {
        json.dumps(tree[key], default=str) if key in tree else ''
        for tree in trees
      }
    )
    > 1
  ]


def name_folders(runs: Sequence[Run]) -> list[str]:
  """The folders of runs, without the beginning that all of them share."""
  roots = [run.root.resolve() for run in runs]
  common = os.path.commonpath([root.parent for root in roots])
  return [root.relative_to(common).as_posix() for root in roots]


def _make_labels(runs: Sequence[Run]) -> list[str]:
  """The settings that differ, if they are few and tell runs apart."""
  keys = find_differences([run.config for run in runs])
  if len(runs) > 1 and 0 < len(keys) <= _MAX_SETTINGS:
    labels = [
      ', '.join(
        f'{key}={_formats.format_value(run.config[key], _MAX_LETTERS)}'
        for key in keys
        if key in run.config
      )
      for run in runs
    ]
    if len({*labels}) == len(labels) and all(labels):
      return labels
  return name_folders(runs)


def _flatten(
  tree: Mapping[str, Any], prefix: str = ''
) -> Iterator[tuple[str, Any]]:
  """The leaves of nested dicts by their full paths, such as optimizer.rate."""
  for key, value in tree.items():
    if isinstance(value, dict) and value:
      yield from _flatten(value, f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}', value


# --- Files.


def _check_workdir(paths: workdir.Workdir) -> None:
  """Raises a WorkdirError unless a run has left something."""
  name = repr(os.fspath(paths))
  if not paths.root.exists():
    raise workdir.WorkdirError(f'There is no workdir {name}.')
  if not paths.root.is_dir():
    raise workdir.WorkdirError(f'The workdir {name} must be a folder.')
  files = (paths.config, paths.provenance, paths.trace, paths.metrics)
  if not any(file.exists() for file in files):
    names = ', '.join(file.name for file in files)
    raise workdir.WorkdirError(
      f'{name} is not the workdir of a run: it has none of {names}.'
    )


def _read_trace(
  paths: workdir.Workdir, problems: list[str]
) -> tuple[traces.Trace | None, traces.Summary | None]:
  """The trace and its summary; adds a sentence if either is damaged."""
  if not paths.trace.exists():
    return None, None
  problem = ''
  for is_whole in (True, False):
    try:
      trace = traces.Trace.load(paths.trace, allow_truncated=not is_whole)
      # Raises a TraceError if records hold values that no run can have left.
      summary = traces.summarize(trace)
    except traces.TraceError as error:
      problem = str(error).replace(f'{paths.root}{os.sep}', '')
      continue
    if not is_whole:
      problems.append(
        'The trace ends within a record: its writer was killed, or is still at '
        'work. This report covers the whole records.'
      )
    return trace, summary
  problems.append(f'The trace cannot be read: {problem}')
  return None, None


def _read_json(path: pathlib.Path, problems: list[str]) -> dict | None:
  """A dict from a file; None if there is none."""
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError:
    return None
  except ValueError as error:
    problems.append(f'{path.name} is not a file of JSON: {error}.')
    return None
  if not isinstance(value, dict):
    problems.append(f'{path.name} must hold a dict, got {value!r}.')
    return None
  return value


def _read_metrics(
  paths: workdir.Workdir, problems: list[str]
) -> dict[str, np.ndarray]:
  """The columns of the metrics; adds a sentence if there are none."""
  nothing = {'clock': np.zeros(0, np.int64)}
  if not paths.metrics.exists():
    problems.append('There are no metrics yet.')
    return nothing
  try:
    metrics = workdir.read_metrics(paths)
  except workdir.WorkdirError as error:
    problem = str(error).replace(f'{paths.root}{os.sep}', '')
    problems.append(f'The metrics cannot be read: {problem}')
    return nothing
  if not len(metrics['clock']):
    problems.append('There are no metrics yet.')
  return metrics


def _scan_metrics(
  path: pathlib.Path, metrics: Mapping[str, np.ndarray]
) -> tuple[dict[str, int], int | None]:
  """The last row of each metric, and the clock of the first bad loss.

  Columns cannot distinguish these: in them, a missing value is NaN.
  """
  rows = {clock: row for row, clock in enumerate(metrics['clock'].tolist())}
  last_rows: dict[str, int] = {}
  bad_clocks = []
  lines = path.read_bytes().split(b'\n')[:-1] if rows else []
  for line in lines:
    values = json.loads(line)
    clock = values['clock']
    # The run may have written more since the columns were read.
    if clock not in rows or not values.keys() <= metrics.keys():
      continue
    for name, value in values.items():
      last_rows[name] = max(rows[clock], last_rows.get(name, 0))
      if name.endswith('/loss') and not math.isfinite(float(value)):
        bad_clocks.append(clock)
  return last_rows, min(bad_clocks, default=None)
