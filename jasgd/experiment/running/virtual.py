"""Training in this process, chunk by chunk, in a folder that can be resumed."""

from collections.abc import Callable, Mapping
import dataclasses
import os
import threading
import time
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import engine
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment.configs import training
from jasgd.experiment.running import measuring
from jasgd.experiment.running import result as results
from jasgd.experiment.running import signals

OnMetrics = Callable[[int, Mapping[str, Any]], None]


class Run(NamedTuple):
  """A run in this process.

  Attributes:
    replay: An `engine.Replay`, or an object with the same attributes `clock`,
      `is_done`, `is_diverged`, `carry`, `weights`, `advance` and `restore`.
    measure: Function from the history of the newest chunk to its metrics.
    num_updates: The clock at which the run ends.
    unit: Unit of the clock in the progress line.
  """

  replay: Any
  measure: Callable[[dict[str, np.ndarray]], dict[str, Any]]
  num_updates: int
  unit: str


# Function from the folder and the first weights (None: from the seed) to a run.
Make = Callable[[workdirs.Workdir, tuple[Any, Any] | None], Run]


def run_simulated(
  config: training.TrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  on_metrics: OnMetrics | None = None,
  stream: TextIO | None = None,
) -> results.Result:
  """Trains in virtual time: simulates a trace, and replays it.

  Killed at any time and started again, the run goes on from its last
  checkpoint; weights, trace and metrics are those of an undisturbed run.

  Args:
    config: The config; its `runtime.mode` is 'simulate'.
    workdir: As in `train_and_evaluate`.
    on_metrics: As in `train_and_evaluate`.
    stream: As in `train_and_evaluate`.

  Returns:
    The result.
  """

  def make(folder: workdirs.Workdir, init: tuple[Any, Any] | None) -> Run:
    return make_run(config, _find_trace(config, folder), init=init)

  return run_in_folder(
    config, workdir, make, on_metrics=on_metrics, stream=stream
  )


def make_run(
  config: training.TrainingConfig,
  trace: Any,
  *,
  init: tuple[Any, Any] | None = None,
  num_slots: int | None = None,
) -> Run:
  """The replay of a trace with the settings of a config, at clock 0.

  Args:
    config: The config.
    trace: The trace of `config.simulate`.
    init: The first (params, stats); None: drawn from the seed.
    num_slots: Versions of the weights to have room for; None: as many as the
      trace needs. Runs with the same number share a compilation.

  Returns:
    The run.
  """
  plan = config.make_plan(trace)
  is_peer = config.strategy.is_peer
  replay = engine.Replay(
    config.make_task(),
    config.make_optimizer(),
    plan,
    # The rate of the plan multiplies both optimizer and local steps.
    **({} if is_peer else config.make_update_options() | {'local_rate': 1.0}),
    seed=config.seed,
    mode=config.runtime.engine,
    chunk=config.choose_eval_every(),
    init=init,
    num_slots=num_slots,
  )
  measure = measuring.ReplayMeter(replay, trace if is_peer else None).measure
  unit = 'steps' if is_peer else 'clock'
  return Run(replay, measure, plan.num_updates, unit)


def run_in_folder(
  config: training.TrainingConfig,
  workdir: str | os.PathLike[str],
  make: Make,
  *,
  on_metrics: OnMetrics | None = None,
  stream: TextIO | None = None,
) -> results.Result:
  """Makes a run, or the rest of it, and leaves its files in a folder.

  Ctrl-C and SIGTERM end the run after the chunk under way, which is saved. A
  second signal raises a KeyboardInterrupt at once.

  Args:
    config: The config.
    workdir: The folder; it is made if it does not exist.
    make: Function from the folder and the first weights (None: drawn from the
      seed) to the run at clock 0.
    on_metrics: As in `train_and_evaluate`.
    stream: As in `train_and_evaluate`.

  Returns:
    The result.
  """
  config.validate()
  # Before the folder is made: after an error the user may give other flags.
  config.make_task()
  has_begun = bool(workdirs.list_checkpoints(workdir))
  init = None if has_begun else load_init(config)
  folder = workdirs.open_workdir(workdir, dataclasses.asdict(config))
  if found := results.read_result(folder):
    return found
  with workdirs.hold_workdir(folder, 'launcher'):
    return _run_alone(
      config, folder, make, init, on_metrics=on_metrics, stream=stream
    )


def _run_alone(
  config: training.TrainingConfig,
  folder: workdirs.Workdir,
  make: Make,
  init: tuple[Any, Any] | None,
  *,
  on_metrics: OnMetrics | None,
  stream: TextIO | None,
) -> results.Result:
  """Makes a run, or the rest of it, as the only launcher in its folder."""
  run = make(folder, init)
  if init is not None:  # The other run may be changed or deleted later.
    _save(run, folder, 0)
  metrics_position = _restore(run, folder)
  stopped = threading.Event()
  with (
    workdirs.MetricsWriter(
      folder, resume_at=metrics_position, on_metrics=on_metrics
    ) as writer,
    signals.take_signals(stopped, is_once=True),
  ):
    seconds = config.runtime.checkpoint_seconds
    metrics = _train(run, folder, writer, seconds, stream, stopped)
  replay = run.replay
  reason = f'All {replay.clock} updates were made.'
  if replay.is_diverged:
    reason = f'The loss was not finite before clock {replay.clock}.'
  elif not replay.is_done:
    reason = 'It was interrupted.'
  return results.Result(
    workdir=os.fspath(folder),
    clock=replay.clock,
    metrics=metrics,
    end_reason=reason,
    is_diverged=replay.is_diverged,
    is_interrupted=not replay.is_done,
  ).write()


def load_init(config: training.TrainingConfig) -> tuple[Any, Any] | None:
  """The first (params, stats) from another run; None: from the seed.

  Raises:
    ValueError: if they are not weights of the task.
  """
  if not config.init_from:
    return None
  weights = workdirs.load_weights(config.init_from)
  found, wanted = (
    {
      jax.tree_util.keystr(path): (tuple(leaf.shape), str(leaf.dtype))
      for path, leaf in jax.tree.leaves_with_path(tree)
    }
    for tree in (weights, config.shape_weights())
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


def _find_trace(
  config: training.TrainingConfig, folder: workdirs.Workdir
) -> traces.Trace:
  """The trace in the folder, or a new one, which is saved there."""
  if not folder.trace.exists():
    trace = config.simulate()
    settings = dataclasses.asdict(config)
    header = {**trace.header, **workdirs.describe_run(settings, config.seed)}
    workdirs.write_json(folder.provenance, header)
    dataclasses.replace(trace, header=header).save(folder.trace)
  return results.load_trace(folder)


def _train(
  run: Run,
  folder: workdirs.Workdir,
  writer: workdirs.MetricsWriter,
  checkpoint_seconds: float,
  stream: TextIO | None,
  stopped: threading.Event,
) -> dict[str, Any]:
  """Makes the remaining chunks, until `stopped`; returns the last metrics."""
  if run.replay.is_done:  # It was killed after its last checkpoint.
    return _read_last(folder)
  # The first chunk is not in the rate of the progress line, as it compiles.
  history = run.replay.advance()
  saved_at = time.monotonic()
  with workdirs.Progress(
    run.num_updates, start=run.replay.clock, stream=stream, unit=run.unit
  ) as progress:
    while True:
      with progress.paused():
        metrics = run.measure(history)
        writer.write(run.replay.clock, metrics)
        now = time.monotonic()
        is_ending = run.replay.is_done or stopped.is_set()
        if is_ending or now - saved_at > checkpoint_seconds:
          # Before the checkpoint, which names their position in the file.
          writer.flush(sync=True)
          _save(run, folder, writer.position)
          saved_at = now
      progress.update(run.replay.clock, **measuring.choose_shown(metrics))
      if is_ending:
        return metrics
      history = run.replay.advance()


def _restore(run: Run, folder: workdirs.Workdir) -> int:
  """Restores the last checkpoint, if any; returns the position of its metrics.

  A checkpoint that cannot be read is set aside, and the one before it is used.
  """
  workdirs.set_aside_broken(folder)
  like = jax.eval_shape(lambda: run.replay.carry)
  found = workdirs.restore_checkpoint(folder, like)
  if found is None:
    return 0
  clock, carry, position = found
  run.replay.restore(clock, jax.tree.map(jnp.asarray, carry))
  run.replay.is_diverged = position['is_diverged']
  return position['metrics']


def _save(run: Run, folder: workdirs.Workdir, metrics_position: int) -> None:
  """Saves a checkpoint; metrics up to the position are on the disk already."""
  params, stats = run.replay.weights
  workdirs.save_checkpoint(
    folder,
    run.replay.clock,
    run.replay.carry,
    position={
      'metrics': metrics_position,
      'is_diverged': run.replay.is_diverged,
    },
    params=params,
    stats=stats,
  )


def _read_last(folder: workdirs.Workdir) -> dict[str, Any]:
  """The last metrics of a run that has no chunks left."""
  columns = workdirs.read_metrics(folder)
  columns.pop('clock')
  return {name: column[-1].item() for name, column in columns.items()}
