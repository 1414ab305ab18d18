"""Training of nodes on the devices of this process, all in step."""

import dataclasses
import os
from typing import Any, TextIO

import jax
import numpy as np

from jasgd import engine
from jasgd import tasks
from jasgd import workdir as workdirs
from jasgd.experiment.configs import training
from jasgd.experiment.running import result as results
from jasgd.experiment.running import virtual


def run_on_devices(
  config: training.TrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  on_metrics: virtual.OnMetrics | None = None,
  stream: TextIO | None = None,
) -> results.Result:
  """Trains nodes on devices.

  Each node has a device of this process; if there are too few, all nodes are on
  the first one: see `runtime.runner`. All nodes are at the same step at any
  time, so there is no trace.

  Args:
    config: The config; its `runtime.mode` is 'devices'.
    workdir: As in `train_and_evaluate`.
    on_metrics: As in `train_and_evaluate`.
    stream: As in `train_and_evaluate`.

  Returns:
    The result.
  """

  def make(
    folder: workdirs.Workdir, init: tuple[Any, Any] | None
  ) -> virtual.Run:
    settings = dataclasses.asdict(config)
    header = workdirs.describe_run(settings, config.seed)
    workdirs.write_json(folder.provenance, header)
    steps = DeviceSteps(config, init)
    num_updates = config.count_steps() * config.num_workers
    return virtual.Run(steps, steps.measure, num_updates, 'steps')

  config.validate()
  config.check_devices()  # Before the folder is made.
  return virtual.run_in_folder(
    config, workdir, make, on_metrics=on_metrics, stream=stream
  )


class DeviceSteps:
  """Steps of nodes on devices, chunk by chunk, which can be saved.

  Attributes:
    clock: Steps of all nodes that were made.
    is_diverged: Whether a loss was not finite.
  """

  def __init__(
    self, config: training.TrainingConfig, init: tuple[Any, Any] | None
  ) -> None:
    """Starts at clock 0.

    Args:
      config: The config of the run.
      init: The first (params, stats); None: drawn from the seed.
    """
    self._task = config.make_task()
    self._num_nodes = config.num_workers
    self._num_steps = config.count_steps()
    self._chunk = max(1, round(config.choose_eval_every() / self._num_nodes))
    self._get_rate = config.make_schedule()
    self._program = engine.make_device_program(
      self._task,
      config.make_optimizer(),
      config.make_strategy(),
      **config.choose_devices(),
      seed=config.seed,
      get_rate=self._get_rate,
      init=init,
    )
    self.clock = 0
    self.is_diverged = False
    self._state = self._program.init()

  @property
  def is_done(self) -> bool:
    """Whether all steps were made, or further ones would be useless."""
    return self._state.step >= self._num_steps or self.is_diverged

  @property
  def carry(self) -> Any:
    """A tree of arrays: with `clock`, the whole state."""
    return self._program.fetch(self._state)

  @property
  def weights(self) -> tuple[Any, Any]:
    """The mean of the nodes' (params, stats)."""
    return jax.device_get(self._program.mean(self._state))

  def restore(self, clock: int, carry: Any) -> None:
    """Goes on from a `carry` that was saved at `clock`."""
    self.clock = clock
    arrays = jax.tree.map(np.asarray, carry)
    self._state = self._program.place(arrays, clock // self._num_nodes)

  def advance(self) -> dict[str, np.ndarray]:
    """Makes the steps of one chunk; returns the `loss` of each."""
    start = self._state.step
    # Chunks end at multiples, so that a resumed run has the same ones.
    stop = min((start // self._chunk + 1) * self._chunk, self._num_steps)
    losses = []
    for _ in range(start, stop):
      self._state, loss = self._program.step(self._state)
      losses.append(loss)
    self.clock = stop * self._num_nodes
    loss = np.concatenate(jax.device_get(losses))
    self.is_diverged = not np.all(np.isfinite(loss))
    return {'loss': loss}

  def measure(self, history: dict[str, np.ndarray]) -> dict[str, Any]:
    """The metrics of the chunk that was just made, and of the weights now."""
    state, task = self._state, self._task
    per_step = task.batch / task.num_samples
    last = (self.clock - self._num_nodes) * per_step
    metrics = {
      'epoch': self.clock * per_step,
      'train/loss': float(history['loss'].mean()),
      'train/rate': self._get_rate(last),
      'gossip/consensus_error': float(self._program.consensus(state)),
    }
    if task.test_data is None:
      return metrics
    groups: dict[str, Any] = {'test': tasks.evaluate(task, *self.weights)}
    if state.arrays.centre is not None:
      nodes = self._program.fetch(state).node[:2]
      groups['centre'] = tasks.evaluate(task, *self._program.centre(state))
      groups['local'] = tasks.evaluate_all(
        task,
        (
          jax.tree.map(lambda leaf, row=row: leaf[row], nodes)
          for row in range(self._num_nodes)
        ),
      )
    return metrics | {
      f'{group}/{name}': float(value)
      for group, values in groups.items()
      for name, value in values.items()
    }
