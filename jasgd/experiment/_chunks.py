"""Training chunk by chunk in this process, in a folder that can be resumed."""

from collections.abc import Callable, Mapping
import os
import threading
import time
from typing import Any, Generic, Protocol, TextIO, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import workdir as workdirs
from jasgd.experiment import _signals

OnMetrics = Callable[[int, Mapping[str, Any]], None]


class Replay(Protocol):
  """What computes a run: `engine.Replay` and the like."""

  clock: int
  is_diverged: bool

  @property
  def is_done(self) -> bool:
    """Whether there is nothing left to do."""
    ...

  @property
  def carry(self) -> Any:
    """A tree of arrays: with `clock`, all that is needed to go on."""
    ...

  def advance(self) -> dict[str, np.ndarray]:
    """Makes a chunk; gives its history. The clock grows."""
    ...

  def restore(self, clock: int, carry: Any) -> None:
    """Goes on from a `carry` that was saved at `clock`."""
    ...


_Replay = TypeVar('_Replay', bound=Replay)


class Run(Generic[_Replay]):
  """A run under way, and what there is to say of it.

  Attributes:
    replay: What computes it.
    unit: What its clock counts, as the progress line says it.
  """

  unit = 'clock'

  def __init__(self, replay: _Replay) -> None:
    self.replay = replay

  @property
  def num_updates(self) -> int:
    """The clock at which it ends."""
    raise NotImplementedError

  @property
  def weights(self) -> tuple[Any, Any]:
    """The (params, stats) that people want."""
    raise NotImplementedError

  def measure(self, history: dict[str, np.ndarray]) -> dict[str, Any]:
    """The metrics of the chunk that was just made."""
    raise NotImplementedError


def run_in_folder(
  settings: dict[str, Any],
  workdir: str | os.PathLike[str],
  make_run: Callable[[workdirs.Workdir], Run],
  *,
  has_init: bool,
  checkpoint_seconds: float,
  on_metrics: OnMetrics | None = None,
  stream: TextIO | None = None,
) -> dict[str, Any]:
  """Makes a run, or what is left of it, and leaves everything in a folder.

  Args:
    settings: The config, as a dict.
    workdir: The folder.
    make_run: Makes the run, at its start; the folder is there then.
    has_init: Whether it starts from weights that are not in the folder.
    checkpoint_seconds: Between checkpoints.
    on_metrics: As in `train_and_evaluate`.
    stream: As in `train_and_evaluate`.

  Returns:
    What is in `result.json`.

  Raises:
    KeyboardInterrupt: after Ctrl-C or SIGTERM, when the chunk that was under
      way is saved; after a second one, at once.
  """
  folder = workdirs.open_workdir(workdir, settings)
  if folder.result.exists():
    return workdirs.read_json(folder.result)
  run = make_run(folder)
  if has_init:  # From now on that other run may change, or go.
    _save(run, folder, 0)
  metrics_position = _restore(run, folder)
  writer = workdirs.MetricsWriter(
    folder, resume_at=metrics_position, on_metrics=on_metrics
  )
  stopped = threading.Event()
  with writer, _signals.take_signals(stopped, is_once=True):
    metrics = _train(run, folder, writer, checkpoint_seconds, stream, stopped)
  result = {
    'clock': run.replay.clock,
    **metrics,
    'is_diverged': run.replay.is_diverged,
  }
  workdirs.write_json(folder.result, result)
  return result


def _train(
  run: Run,
  folder: workdirs.Workdir,
  writer: workdirs.MetricsWriter,
  checkpoint_seconds: float,
  stream: TextIO | None,
  stopped: threading.Event,
) -> dict[str, Any]:
  """Makes all chunks that are left; gives the last metrics."""
  if run.replay.is_done:  # It was killed after its last checkpoint.
    return _read_last(folder)
  history = run.replay.advance()  # Compiles: that is not in the rate.
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
          writer.flush(sync=True)
          _save(run, folder, writer.position)
          saved_at = now
      progress.update(run.replay.clock, **_choose_shown(metrics))
      if run.replay.is_done:
        return metrics
      if is_ending:
        raise KeyboardInterrupt
      history = run.replay.advance()


def _restore(run: Run, folder: workdirs.Workdir) -> int:
  """Goes to the last checkpoint, if there is one; gives the metrics' place.

  One that cannot be read is set aside, and the one before it is used.
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
  """A checkpoint; the metrics up to that position are on the disk already."""
  params, stats = run.weights
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
  """The last metrics of a run that had nothing left to do."""
  columns = workdirs.read_metrics(folder)
  columns.pop('clock')
  return {name: column[-1].item() for name, column in columns.items()}


def _choose_shown(metrics: Mapping[str, Any]) -> dict[str, float]:
  """What of the metrics the progress line shows."""
  names = {
    'staleness': 'server/staleness_mean',
    'max_staleness': 'server/staleness_max',
    'age': 'gossip/age_mean',
    'max_age': 'gossip/age_max',
    'loss': 'train/loss',
    'acc': 'test/accuracy',
  }
  return {
    name: metrics[metric] for name, metric in names.items() if metric in metrics
  }
