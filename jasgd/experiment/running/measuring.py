"""Metrics of runs: of replays in virtual time, and of real nodes."""

from collections.abc import Collection, Mapping
import math
import time
from typing import Any

import jax
import numpy as np

from jasgd import engine
from jasgd import tasks
from jasgd import traces
from jasgd import workdir as workdirs

_Kind = traces.Kind
_Weights = tuple[Any, Any]  # (params, stats)

# Counters in the status of nodes -> the metric, which is their sum.
_COUNTS = {'num_full': 'gossip/refused_full', 'num_done': 'gossip/refused_done'}
# Names in the progress line -> metrics.
_SHOWN = {
  'staleness': 'server/staleness_mean',
  'max_staleness': 'server/staleness_max',
  'age': 'gossip/age_mean',
  'max_age': 'gossip/age_max',
  'loss': 'train/loss',
  'acc': 'test/accuracy',
}


def choose_shown(metrics: Mapping[str, Any]) -> dict[str, float]:
  """The metrics in the progress line, by their names there."""
  return {
    name: metrics[metric]
    for name, metric in _SHOWN.items()
    if metric in metrics
  }


class ReplayMeter:
  """Measures the chunks of a replay.

  Args:
    replay: The replay.
    trace: The trace, if it is of nodes.
  """

  def __init__(self, replay: engine.Replay, trace: traces.Trace | None) -> None:
    self._replay = replay
    self._mixes = None
    if trace is not None:
      self._mixes = MixMeter(trace)
      # Times by the number of steps; mixes after the last step count too.
      times = np.maximum.accumulate(replay.plan.time[1:])
      self._times = np.array([0.0, *times[:-1], np.inf])

  def measure(self, history: dict[str, np.ndarray]) -> dict[str, Any]:
    """The metrics of the chunk that was just made, and of the weights now."""
    replay = self._replay
    evaluation = replay.evaluate()
    first = int(history['clock'][0]) - 1
    metrics = {
      'epoch': float(evaluation.pop('epoch')),
      'time': float(evaluation.pop('time')),
      'train/loss': float(history['loss'].mean()),
    }
    del evaluation['clock']
    if self._mixes is None:
      metrics |= self._measure_staleness(history, first)
    else:
      since, until = self._times[[first, replay.clock]]
      metrics |= {
        'train/rate': float(replay.plan.steps.rate[replay.clock - 1]),
        'gossip/consensus_error': float(evaluation.pop('consensus')),
        **self._mixes.measure(since, until),
      }
    for name, value in evaluation.items():
      group, _, rest = name.partition('_')
      is_group = self._mixes is not None and group in ('centre', 'local')
      metrics[f'{group}/{rest}' if is_group else f'test/{name}'] = value
    return metrics

  def _measure_staleness(
    self, history: dict[str, np.ndarray], first: int
  ) -> dict[str, Any]:
    plan = self._replay.plan
    start, stop = plan.step_ends[[first, self._replay.clock]].tolist()
    return {
      'server/staleness_mean': float(history['staleness'].mean()),
      'server/staleness_max': int(plan.steps.staleness[start:stop].max()),
      'server/factor_mean': float(history['factor'].mean()),
      'server/gap_mean': float(history['gap'].mean()),
      'server/rate': float(plan.steps.rate[stop - 1]),
    }


class MixMeter:
  """Measures the mixes in a part of a run of nodes.

  Args:
    trace: Trace of the run.
  """

  def __init__(self, trace: traces.Trace) -> None:
    mixes = trace.of_kind(_Kind.MIX)
    self._times = mixes['end_time']
    self._ages = traces.statistics.measure_ages(trace)
    self._lag_times = mixes['end_time'][mixes['source'] >= 0]
    self._lags = traces.statistics.measure_lags(trace)
    self._has_mass = bool(np.any(trace.records['mass']))
    is_lost = np.isin(trace.records['kind'], (_Kind.LEAVE, _Kind.LOST))
    self._lost = trace.records[is_lost]

  def measure(self, since: float, until: float) -> dict[str, float]:
    """The metrics of mixes that ended after `since`, up to `until`."""
    metrics = {}
    ages = self._ages[(self._times > since) & (self._times <= until)]
    if len(ages):
      metrics['gossip/age_mean'] = float(ages.mean())
      metrics['gossip/age_max'] = float(ages.max())
    lags = self._lags[(self._lag_times > since) & (self._lag_times <= until)]
    if len(lags):
      metrics['gossip/lag_mean'] = float(lags.mean())
    if self._has_mass:
      lost = self._lost[self._lost['end_time'] <= until]
      metrics['gossip/mass_lost'] = float(lost['mass'].sum())
    return metrics


class NodeMeter:
  """Measures real nodes from time to time: changes since the last call.

  Args:
    folder: Folder of the run; traces that lie elsewhere are not read.
  """

  def __init__(self, folder: workdirs.Workdir) -> None:
    self._folder = folder
    self._tail = traces.TraceTail(folder.trace)
    # Records that are needed to measure later ones: see `_keep`.
    self._kept = np.zeros(0, traces.RECORD)
    self._mixes: dict[str, float] = {'time': 0.0}

  def measure(
    self, statuses: Mapping[int, dict[str, Any]], lost: Collection[int]
  ) -> dict[str, float]:
    """Time, loss, the mixes since the last call, and refused messages.

    Args:
      statuses: The last status of each node by number, and of the centre.
      lost: Members that are lost.

    Returns:
      Metrics.
    """
    nodes = {node: each for node, each in statuses.items() if node >= 0}
    if not nodes:
      return {}
    metrics = self._measure_mixes(nodes, lost)
    losses = [
      status['loss']
      for node, status in nodes.items()
      if node not in lost and status['loss'] is not None
    ]
    if losses:
      metrics['train/loss'] = float(np.mean(losses))
    for name, metric in _COUNTS.items():
      counts = [status[name] for status in nodes.values() if name in status]
      if counts:
        metrics[metric] = float(sum(counts))
    return metrics

  def _measure_mixes(
    self, nodes: Mapping[int, dict[str, Any]], lost: Collection[int]
  ) -> dict[str, float]:
    """The metrics of the traces, as far as they can be read from here."""
    if not self._folder.trace.exists():
      origin = next(iter(nodes.values()))['origin']
      return {'time': time.time() - origin}
    new = self._tail.read()
    records = np.concatenate([self._kept, new])
    now = float(new['end_time'].max(initial=self._mixes['time']))
    meter = MixMeter(traces.Trace(records))
    # Without a new mix, the last metrics stay.
    self._mixes |= {'time': now, **meter.measure(-math.inf, now)}
    self._kept = _keep(records)
    metrics = dict(self._mixes)
    if 'gossip/mass_lost' in metrics:  # A killed node does not record its mass.
      metrics['gossip/mass_lost'] += sum(
        status['mass'] for node, status in nodes.items() if node in lost
      )
    return metrics


def _keep(records: np.ndarray) -> np.ndarray:
  """The records that are needed to measure later ones; mixes are not."""
  kind = records['kind']
  is_progress = np.isin(kind, (_Kind.STEP, _Kind.MOVE, _Kind.RESTART))
  progress = records[is_progress][::-1]
  _, last = np.unique(progress['replica'], return_index=True)
  is_lost = np.isin(kind, (_Kind.LEAVE, _Kind.LOST))
  return np.concatenate([records[is_lost], progress[last]])


def count_steps(trace: traces.Trace) -> int:
  """The steps of all nodes at the end of a trace."""
  own = [trace.of_replica(node)['step'] for node in range(trace.num_workers)]
  return sum(int(steps[-1]) for steps in own if len(steps))


@np.errstate(invalid='ignore', over='ignore')  # In a run that diverges.
def describe_nodes(
  task: tasks.Task,
  nodes: list[_Weights],
  masses: list[float],
  centre: _Weights | None,
) -> tuple[_Weights, dict[str, float]]:
  """The mean of nodes, and its metrics.

  Args:
    task: The task.
    nodes: (params, stats) of each node.
    masses: Weights of the nodes in the mean; []: all are equal.
    centre: (params, stats) of the centre, if there is one: it is evaluated
      too, and so is every node by itself, as `local`.

  Returns:
    The mean, and the metrics that are finite.
  """
  stacked = jax.tree.map(lambda *rows: np.stack(rows), *nodes)
  shares = np.array(masses) / np.sum(masses) if any(masses) else None
  mean = jax.device_get(engine.average_nodes(stacked, shares))
  groups: dict[str, Mapping[str, Any]] = {}
  metrics = evaluate(task, mean)
  if task.test_data is not None and centre is not None:
    groups['centre'] = tasks.evaluate(task, *centre)
    groups['local'] = tasks.evaluate_all(task, nodes)
  metrics |= {'gossip/consensus_error': _measure_distance(nodes)} | {
    f'{group}/{name}': float(value)
    for group, values in groups.items()
    for name, value in values.items()
  }
  return mean, keep_finite(metrics)


def evaluate(task: tasks.Task, weights: _Weights) -> dict[str, float]:
  """The finite metrics of weights on the test data, if there is any."""
  if task.test_data is None:
    return {}
  found = tasks.evaluate(task, *weights)
  return keep_finite(
    {f'test/{name}': float(value) for name, value in found.items()}
  )


def keep_finite(metrics: Mapping[str, float]) -> dict[str, float]:
  """The metrics that are finite: a run that diverges may have none."""
  return {
    name: value for name, value in metrics.items() if math.isfinite(value)
  }


def _measure_distance(nodes: list[_Weights]) -> float:
  """The root mean squared distance of the nodes from their plain mean."""
  total = 0.0
  for leaves in zip(
    *(jax.tree.leaves(params) for params, _ in nodes), strict=True
  ):
    # Not float32: nodes with equal weights must have a distance of 0.
    rows = np.stack([np.asarray(leaf, np.float64) for leaf in leaves])
    total += float(np.sum((rows - rows.mean(axis=0)) ** 2))
  return math.sqrt(total / len(nodes))
