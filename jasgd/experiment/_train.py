"""Training from a config, in a folder that can be resumed."""

from collections.abc import Callable, Mapping
import dataclasses
import os
import time
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import engine
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _training

OnMetrics = Callable[[int, Mapping[str, Any]], None]


def run_simulated(
  config: _training.TrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  on_metrics: OnMetrics | None = None,
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
  folder = workdirs.open_workdir(workdir, settings)
  if folder.result.exists():
    return workdirs.read_json(folder.result)
  trace = _find_trace(config, folder, settings)
  run = make_replay(config, trace, init=init)
  if init is not None:  # From now on that other run may change, or go.
    _save(run, folder, 0)
  position = _restore(run, folder)
  writer = workdirs.MetricsWriter(
    folder, resume_at=position['metrics'], on_metrics=on_metrics
  )
  with writer:
    metrics = _train(config, run, folder, writer, stream)
  result = {
    'clock': run.clock,
    **metrics,
    'is_diverged': run.is_diverged,
  }
  workdirs.write_json(folder.result, result)
  return result


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
    config.make_server(),
    plan,
    seed=config.seed,
    mode=config.runtime.engine,
    local_rate=1.0,  # Times the rate of the plan.
    chunk=_choose_chunk(config, plan),
    init=init,
    num_parallel=config.runtime.num_parallel,
    num_slots=num_slots,
  )


def measure_chunk(
  run: engine.Replay, history: dict[str, np.ndarray]
) -> dict[str, Any]:
  """What to say of a chunk of updates that was just made."""
  first = int(history['clock'][0]) - 1
  events = slice(run.plan.ends[first], run.plan.ends[run.clock])
  evaluation = run.evaluate()
  named = ('clock', 'epoch', 'time')
  return {
    'epoch': float(evaluation['epoch']),
    'time': float(evaluation['time']),
    'train/loss': float(history['loss'].mean()),
    'server/staleness_mean': float(history['staleness'].mean()),
    'server/staleness_max': int(run.plan.staleness[events].max()),
    'server/factor_mean': float(history['factor'].mean()),
    'server/gap_mean': float(history['gap'].mean()),
    'server/rate': float(run.plan.rate[run.plan.ends[run.clock] - 1]),
    **{
      f'test/{name}': value
      for name, value in evaluation.items()
      if name not in named
    },
  }


def _train(
  config: _training.TrainingConfig,
  run: engine.Replay,
  folder: workdirs.Workdir,
  writer: workdirs.MetricsWriter,
  stream: TextIO | None,
) -> dict[str, Any]:
  """Makes all updates that are left; gives the last metrics."""
  if run.is_done:  # It was killed after its last checkpoint.
    return _read_last(folder)
  metrics: dict[str, Any] = {}
  history = run.advance()  # Compiles: that is not in the rate.
  saved_at = time.monotonic()
  with workdirs.Progress(
    run.plan.num_updates, start=run.clock, stream=stream
  ) as progress:
    while True:
      with progress.paused():
        metrics = measure_chunk(run, history)
        writer.write(run.clock, metrics)
        now = time.monotonic()
        if run.is_done or now - saved_at > config.runtime.checkpoint_seconds:
          writer.flush(sync=True)
          _save(run, folder, writer.position)
          saved_at = now
      shown = {'loss': metrics['train/loss']}
      if 'test/accuracy' in metrics:
        shown['acc'] = metrics['test/accuracy']
      progress.update(
        run.clock,
        staleness=metrics['server/staleness_mean'],
        max_staleness=metrics['server/staleness_max'],
        **shown,
      )
      if run.is_done:
        return metrics
      history = run.advance()


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


def _restore(run: engine.Replay, folder: workdirs.Workdir) -> dict[str, Any]:
  """Goes to the last checkpoint, if there is one; gives its position."""
  like = jax.eval_shape(lambda: run.carry)
  found = workdirs.restore_checkpoint(folder, like)
  if found is None:
    return {'metrics': 0}
  clock, carry, position = found
  run.restore(clock, jax.tree.map(jnp.asarray, carry))
  run.is_diverged = position['is_diverged']
  return position


def _save(
  run: engine.Replay, folder: workdirs.Workdir, metrics_position: int
) -> None:
  """A checkpoint; the metrics up to that position are on the disk already."""
  workdirs.save_checkpoint(
    folder,
    run.clock,
    run.carry,
    position={'metrics': metrics_position, 'is_diverged': run.is_diverged},
    params=run.state.params,
    stats=run.state.stats,
  )


def _read_last(folder: workdirs.Workdir) -> dict[str, Any]:
  """The last metrics of a run that had nothing left to do."""
  columns = workdirs.read_metrics(folder)
  columns.pop('clock')
  return {name: column[-1].item() for name, column in columns.items()}


def load_init(
  config: _training.TrainingConfig,
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
