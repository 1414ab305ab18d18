"""What a run has left in its workdir, as far as it is there."""

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
from jasgd.reports import _predictions
from jasgd.reports import _run_metrics


class Point(NamedTuple):
  """A number, and when it was measured; NaN where that is not known."""

  value: float
  clock: int
  epoch: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
  """A run as it can be read from its workdir."""

  root: pathlib.Path
  config: dict[str, Any]  # By full path, such as optimizer.rate.
  provenance: dict[str, Any]  # Likewise, without the config.
  trace: traces.Trace | traces.NodeTrace | None
  metrics: dict[str, np.ndarray]  # Columns; 'clock' is always there.
  # Metric -> the last row that has it. (A column has NaN for what is NaN and
  # for what a clock does not have.)
  last_rows: dict[str, int]
  diverged_at: int | None  # The first clock with a loss that is not finite.
  problems: tuple[str, ...]  # What is missing or damaged, in sentences.
  end_reason: str = ''  # What a real run that is over said, if it did.
  has_result: bool = False

  @functools.cached_property
  def summary(self) -> traces.Summary | None:
    """Of the trace, if there is a server."""
    if isinstance(self.trace, traces.Trace):
      return traces.summarize(self.trace)
    return None

  @functools.cached_property
  def node_summary(self) -> traces.NodeSummary | None:
    """Of the trace, if there is none."""
    if isinstance(self.trace, traces.NodeTrace):
      return traces.summarize_nodes(self.trace)
    return None

  @property
  def active_duration(self) -> float:
    """Seconds from nodes' first step to their last record but the end.

    Real nodes have to be started, and to wait for each other, before that. The
    time in which nobody was there, before the run went on, is not in it.
    """
    if not isinstance(self.trace, traces.NodeTrace):
      return 0.0
    records = self.trace.records
    if not self.is_real or not len(self.trace.steps):
      return self.trace.duration
    work = (traces.NodeKind.STEP, traces.NodeKind.MIX)
    is_work = np.isin(records['kind'], work)
    begin = self.trace.steps['start_time'].min()
    _, downtimes = traces.find_downtimes(self.trace)
    return float(records['end_time'][is_work].max() - begin - downtimes.sum())

  @property
  def is_of_nodes(self) -> bool:
    """Whether there is no server."""
    return (
      isinstance(self.trace, traces.NodeTrace) or 'strategy.name' in self.config
    )

  @property
  def unit(self) -> str:
    """What its clock counts: nodes have none, but steps."""
    return 'step' if self.is_of_nodes else 'clock'

  @property
  def is_real(self) -> bool:
    """Whether it was run by real processes."""
    return _predictions.is_real(self.trace)

  @property
  def prediction(self) -> _predictions.Prediction | None:
    """What the simulator says about a real run, if it can."""
    return self._predicted[0]

  @property
  def prediction_problem(self) -> str:
    """Why there is no prediction of a real run; '' if there is one."""
    return self._predicted[1]

  @functools.cached_property
  def _predicted(self) -> tuple[_predictions.Prediction | None, str]:
    if not isinstance(self.trace, traces.Trace) or not self.is_real:
      return None, ''
    try:
      return _predictions.predict_run(self.trace), ''
    except ValueError as error:
      return None, str(error)

  @property
  def clock(self) -> int | None:
    """How far the weights have come; without metrics, the trace."""
    if self.is_real and self.summary:  # They are made as it is written.
      return self.summary.clock
    if len(self.metrics['clock']):
      return int(self.metrics['clock'][-1])
    if self.node_summary:
      return self.node_summary.num_steps
    return self.summary.clock if self.summary else None

  @property
  def asks_updates(self) -> bool:
    """Whether the config asks for a number of updates, not of epochs."""
    asked = self.config.get('num_updates')
    return isinstance(asked, int) and asked > 0

  @property
  def planned_clock(self) -> int | None:
    """How far they were to come, if that is known."""
    known = [self.config['num_updates']] if self.asks_updates else []
    if self.summary and self.summary.clock:
      known.append(self.summary.clock)
    if self.node_summary and not self.is_real:
      known.append(self.node_summary.num_steps)
    return max(known, default=None)

  @property
  def is_unfinished(self) -> bool:
    """Whether the weights have not come as far as they were to."""
    clock, planned = self.clock, self.planned_clock
    if self.diverged_at is not None:
      return False
    if self.is_real:
      if isinstance(self.trace, traces.Trace):
        return self.trace.end_clock is None
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
    """The last number of a metric, NaN too; None if there is none."""
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


def read_run(root: str | os.PathLike[str]) -> Run:
  """Reads all that there is; a WorkdirError if that is nothing at all."""
  paths = workdir.Workdir(root)
  _check_workdir(paths)
  problems: list[str] = []
  trace = _read_trace(paths, problems)
  metrics = _run_metrics.read_columns(paths, problems)
  last_rows, diverged_at = _run_metrics.scan_lines(paths.metrics, metrics)
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
  on_devices = config.get('runtime', {}).get('mode') == 'devices'
  if not paths.trace.exists() and not on_devices:
    problems.append('There is no trace yet.')
  return Run(
    root=paths.root,
    config=_formats.flatten(config),
    provenance=_formats.flatten(
      {
        key: value
        for key, value in provenance.items()
        if key not in ('config', 'in_flight', 'protocol', 'strategy')
      }
    ),
    trace=trace,
    metrics=metrics,
    last_rows=last_rows,
    diverged_at=diverged_at,
    problems=tuple(problems),
    end_reason=str(result.get('end_reason') or ''),
    has_result=bool(result),
  )


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
) -> traces.Trace | traces.NodeTrace | None:
  """The trace, or what there is of it."""
  if not paths.trace.exists():
    return None
  kind = traces.NodeTrace if paths.trace.is_dir() else traces.Trace
  try:
    return kind.load(paths.trace)
  except traces.TraceError as error:
    problem = str(error)
  try:
    trace = kind.load(paths.trace, allow_truncated=True)
  except traces.TraceError:
    problem = problem.replace(f'{paths.root}{os.sep}', '')
    problems.append(f'The trace cannot be read: {problem}')
    return None
  problems.append(
    'The trace ends within a record: its writer was killed, or is still at '
    'work. This is of the whole records.'
  )
  return trace


def _read_json(path: pathlib.Path, problems: list[str]) -> dict | None:
  """A file with a dict; None if there is none."""
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
