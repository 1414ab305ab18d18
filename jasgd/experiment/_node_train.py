"""Training of nodes without a server, in virtual time."""

import dataclasses
import os
import pathlib
import shutil
from typing import Any, TextIO

import numpy as np

from jasgd import engine
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _chunks
from jasgd.experiment import _node_training
from jasgd.experiment import _train


def run_simulated_nodes(
  config: _node_training.NodeTrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  on_metrics: _chunks.OnMetrics | None = None,
  stream: TextIO | None = None,
) -> dict[str, Any]:
  """Trains in virtual time; see `train_and_evaluate`, which calls it.

  Killed at any time and started again, it goes on from its last checkpoint, and
  the weights, the traces and the metrics are those of an undisturbed run.
  """
  config.validate()
  settings = dataclasses.asdict(config)
  has_begun = bool(workdirs.list_checkpoints(workdir))
  init = None if has_begun else _train.load_init(config)
  return _chunks.run_in_folder(
    settings,
    workdir,
    lambda folder: NodeRun(
      config, _find_trace(config, folder, settings), init=init
    ),
    has_init=init is not None,
    checkpoint_seconds=config.runtime.checkpoint_seconds,
    on_metrics=on_metrics,
    stream=stream,
  )


class NodeRun(_chunks.Run[engine.Replay]):
  """A run of nodes."""

  unit = 'steps'

  def __init__(
    self,
    config: _node_training.NodeTrainingConfig,
    trace: traces.NodeTrace,
    *,
    init: tuple[Any, Any] | None = None,
  ) -> None:
    plan = config.make_plan(trace)
    replay = engine.Replay(
      config.make_task(),
      config.make_optimizer(),
      plan,
      seed=config.seed,
      mode=config.runtime.engine,
      chunk=config.choose_eval_every(),
      init=init,
    )
    super().__init__(replay)
    self._mixing = Mixing(trace)
    # From how many steps were made to when; mixes behind the last are counted.
    times = np.maximum.accumulate(plan.time[1:])
    self._times = np.array([0.0, *times[:-1], np.inf])

  @property
  def num_updates(self) -> int:
    """Steps of all nodes, in all."""
    return self.replay.plan.num_updates

  @property
  def weights(self) -> tuple[Any, Any]:
    """The mean of the nodes' (params, stats)."""
    return self.replay.weights

  def measure(self, history: dict[str, np.ndarray]) -> dict[str, Any]:
    """The metrics of the steps that were just made, and of their mixes."""
    since, until = self._times[[history['clock'][0] - 1, self.replay.clock]]
    evaluation = self.replay.evaluate()
    metrics = {
      'epoch': float(evaluation['epoch']),
      'time': float(evaluation['time']),
      'train/loss': float(history['loss'].mean()),
      'train/rate': float(self.replay.plan.steps.rate[self.replay.clock - 1]),
      'gossip/consensus_error': float(evaluation['consensus']),
      **self._mixing.measure(since, until),
    }
    named = ('clock', 'epoch', 'time', 'consensus')
    for name, value in evaluation.items():
      if name not in named:
        group, _, rest = name.partition('_')
        if group not in ('centre', 'local'):
          group, rest = 'test', name
        metrics[f'{group}/{rest}'] = value
    return metrics


class Mixing:
  """What there is to say of the mixes in a part of a run.

  Args:
    trace: Of the run.
  """

  def __init__(self, trace: traces.NodeTrace) -> None:
    mixes = trace.mixes[trace.mixes['node'] >= 0]
    mixes = mixes[mixes['peer'] != traces.ALL]
    self._times = mixes['end_time']
    self._ages = traces.measure_ages(trace)
    is_node = mixes['peer'] >= 0
    self._lag_times = mixes['end_time'][is_node]
    self._lags = (mixes['step'] - mixes['peer_step'])[is_node]
    self._has_mass = bool(np.any(trace.records['mass']))
    is_lost = np.isin(
      trace.records['kind'], (traces.NodeKind.LEAVE, traces.NodeKind.LOST)
    )
    self._lost = trace.records[is_lost]

  def measure(self, since: float, until: float) -> dict[str, float]:
    """The metrics of mixes that ended after `since`, and not after `until`."""
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


def _find_trace(
  config: _node_training.NodeTrainingConfig,
  folder: workdirs.Workdir,
  settings: dict[str, Any],
) -> traces.NodeTrace:
  """The run's traces: those in the folder, or new ones."""
  if not folder.trace.exists():
    trace = config.simulate()
    header = {**trace.header, **workdirs.describe_run(settings, config.seed)}
    workdirs.write_json(folder.provenance, header)
    # All files at once, or none.
    part = pathlib.Path(f'{folder.trace}.part')
    shutil.rmtree(part, ignore_errors=True)
    dataclasses.replace(trace, header=header).save(part)
    part.rename(folder.trace)
  return traces.NodeTrace.load(folder.trace)
