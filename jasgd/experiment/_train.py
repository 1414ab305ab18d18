"""Training with a server, in virtual time."""

import dataclasses
import os
from typing import Any, TextIO

import jax
import numpy as np

from jasgd import engine
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _base
from jasgd.experiment import _chunks
from jasgd.experiment import _training


def run_simulated(
  config: _training.TrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  on_metrics: _chunks.OnMetrics | None = None,
  stream: TextIO | None = None,
) -> dict[str, Any]:
  """Trains in virtual time; see `train_and_evaluate`, which calls it.

  Killed at any time and started again, it goes on from its last checkpoint, and
  the weights, the trace and the metrics are those of an undisturbed run.
  """
  config.validate()
  settings = dataclasses.asdict(config)
  has_begun = bool(workdirs.list_checkpoints(workdir))
  init = None if has_begun else load_init(config)

  def make_run(folder: workdirs.Workdir) -> _chunks.Run:
    trace = _find_trace(config, folder, settings)
    return ServerRun(make_replay(config, trace, init=init))

  return _chunks.run_in_folder(
    settings,
    workdir,
    make_run,
    has_init=init is not None,
    checkpoint_seconds=config.runtime.checkpoint_seconds,
    on_metrics=on_metrics,
    stream=stream,
  )


class ServerRun(_chunks.Run[engine.Replay]):
  """A run with a server."""

  @property
  def num_updates(self) -> int:
    """The clock at which it ends."""
    return self.replay.plan.num_updates

  @property
  def weights(self) -> tuple[Any, Any]:
    """The server's (params, stats)."""
    return self.replay.weights

  def measure(self, history: dict[str, np.ndarray]) -> dict[str, Any]:
    """The metrics of the updates that were just made."""
    return measure_chunk(self.replay, history)


def make_replay(
  config: _training.TrainingConfig,
  trace: traces.Trace,
  *,
  init: tuple[Any, Any] | None = None,
  num_slots: int | None = None,
) -> engine.Replay:
  """The run of a config, at its start: `init`, or what the seed makes."""
  task, plan = config.make_task(), config.make_plan(trace)
  return engine.Replay(
    task,
    config.optimizer.make_optimizer(),
    plan,
    **config.make_update_options(),
    seed=config.seed,
    mode=config.runtime.engine,
    local_rate=1.0,  # Times the rate of the plan.
    chunk=_choose_chunk(config, plan),
    init=init,
    num_slots=num_slots,
  )


def measure_chunk(
  run: engine.Replay, history: dict[str, np.ndarray]
) -> dict[str, Any]:
  """What to say of a chunk of updates that was just made."""
  first = int(history['clock'][0]) - 1
  start, stop = run.plan.step_ends[[first, run.clock]].tolist()
  evaluation = run.evaluate()
  named = ('clock', 'epoch', 'time')
  return {
    'epoch': float(evaluation['epoch']),
    'time': float(evaluation['time']),
    'train/loss': float(history['loss'].mean()),
    'server/staleness_mean': float(history['staleness'].mean()),
    'server/staleness_max': int(run.plan.steps.staleness[start:stop].max()),
    'server/factor_mean': float(history['factor'].mean()),
    'server/gap_mean': float(history['gap'].mean()),
    'server/rate': float(run.plan.steps.rate[stop - 1]),
    **{
      f'test/{name}': value
      for name, value in evaluation.items()
      if name not in named
    },
  }


def _find_trace(
  config: _training.TrainingConfig,
  folder: workdirs.Workdir,
  settings: dict[str, Any],
) -> traces.Trace:
  """The run's trace: that in the folder, or a new one."""
  if folder.trace.exists():
    return traces.Trace.load(folder.trace)
  trace = config.simulate()
  header = {**trace.header, **workdirs.describe_run(settings, config.seed)}
  workdirs.write_json(folder.provenance, header)
  dataclasses.replace(trace, header=header).save(folder.trace)
  return traces.Trace.load(folder.trace)


def load_init(
  config: _base.RunConfig,
) -> tuple[Any, Any] | None:
  """The weights of the run to start from, if there is one, checked."""
  if not config.init_from:
    return None
  weights = workdirs.load_weights(config.init_from)
  expected = jax.eval_shape(config.make_task().init, jax.random.key(0))
  found, wanted = (
    {
      jax.tree_util.keystr(path): (tuple(leaf.shape), str(leaf.dtype))
      for path, leaf in jax.tree.leaves_with_path(tree)
    }
    for tree in (weights, expected)
  )
  names = [
    name
    for name in sorted({*found, *wanted})
    if found.get(name) != wanted.get(name)
  ]
  if names:
    name = names[0]
    raise ValueError(
      f'init_from={config.init_from!r} has other weights than the task, in '
      f'{len(names)} leaves; {name} is {found.get(name)} there and '
      f'{wanted.get(name)} here.'
    )
  return weights


def _choose_chunk(config: _training.TrainingConfig, plan: engine.Plan) -> int:
  """Updates between evaluations."""
  if config.runtime.eval_every:
    return config.runtime.eval_every
  num_epochs = plan.samples[-1] / config.make_task().num_samples
  return max(1, round(plan.num_updates / max(1.0, num_epochs)))
