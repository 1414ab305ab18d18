"""Training of nodes on the devices of this process, all in step."""

import dataclasses
import os
from typing import Any, TextIO

import jax
import numpy as np

from jasgd import engine
from jasgd import tasks
from jasgd import workdir as workdirs
from jasgd.experiment import _chunks
from jasgd.experiment import _node_training
from jasgd.experiment import _train


def run_on_devices(
  config: _node_training.NodeTrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  on_metrics: _chunks.OnMetrics | None = None,
  stream: TextIO | None = None,
) -> dict[str, Any]:
  """Trains on devices; see `train_and_evaluate`, which calls it.

  There is a node on each device of this process; if it has too few, all nodes
  are on the first: see `runtime.runner`. Nobody is ahead of anybody, so there
  is no trace.
  """
  config.validate()
  settings = dataclasses.asdict(config)
  has_begun = bool(workdirs.list_checkpoints(workdir))
  init = None if has_begun else _train.load_init(config)

  def make_run(folder: workdirs.Workdir) -> DeviceRun:
    workdirs.write_json(
      folder.provenance, workdirs.describe_run(settings, config.seed)
    )
    return DeviceRun(config, init=init)

  return _chunks.run_in_folder(
    settings,
    workdir,
    make_run,
    has_init=init is not None,
    checkpoint_seconds=config.runtime.checkpoint_seconds,
    on_metrics=on_metrics,
    stream=stream,
  )


class DeviceSteps:
  """Steps of a program on devices, chunk by chunk, which can be saved.

  Attributes:
    clock: Steps of all nodes that were made.
    is_diverged: Whether a loss was not finite.
    state: Of the program.
  """

  def __init__(
    self,
    program: engine.DeviceProgram,
    *,
    num_nodes: int,
    num_steps: int,
    chunk: int,
  ) -> None:
    """Starts at clock 0.

    Args:
      program: What `make_device_program` gave.
      num_nodes: How many nodes it has.
      num_steps: Of each node.
      chunk: Steps of each node per `advance`.
    """
    self._program = program
    self._num_nodes = num_nodes
    self._num_steps = num_steps
    self._chunk = chunk
    self.clock = 0
    self.is_diverged = False
    self.state = program.init()

  @property
  def is_done(self) -> bool:
    """Whether all steps were made, or there is no use in making more."""
    return self.state.step >= self._num_steps or self.is_diverged

  @property
  def carry(self) -> Any:
    """All that is needed, with `clock`, to go on: a tree of arrays."""
    return self._program.fetch(self.state)

  def restore(self, clock: int, carry: Any) -> None:
    """Goes on from a `carry` that was saved at `clock`."""
    self.clock = clock
    arrays = jax.tree.map(np.asarray, carry)
    self.state = self._program.place(arrays, clock // self._num_nodes)

  def advance(self) -> dict[str, np.ndarray]:
    """Makes the steps of one chunk; gives the `loss` of each."""
    start = self.state.step
    # Chunks end at multiples, so that a resumed run has the same ones.
    stop = min((start // self._chunk + 1) * self._chunk, self._num_steps)
    losses = []
    for _ in range(start, stop):
      self.state, loss = self._program.step(self.state)
      losses.append(loss)
    self.clock = stop * self._num_nodes
    loss = np.concatenate(jax.device_get(losses))
    self.is_diverged = not np.all(np.isfinite(loss))
    return {'loss': loss}


class DeviceRun(_chunks.Run[DeviceSteps]):
  """A run of nodes on devices."""

  unit = 'steps'

  def __init__(
    self,
    config: _node_training.NodeTrainingConfig,
    *,
    init: tuple[Any, Any] | None = None,
  ) -> None:
    self._task = config.make_task()
    self._num_nodes = config.strategy.num_nodes
    self._num_steps = config.count_steps()
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
    super().__init__(
      DeviceSteps(
        self._program,
        num_nodes=self._num_nodes,
        num_steps=self._num_steps,
        chunk=max(1, round(config.choose_eval_every() / self._num_nodes)),
      )
    )

  @property
  def num_updates(self) -> int:
    """Steps of all nodes, in all."""
    return self._num_steps * self._num_nodes

  @property
  def weights(self) -> tuple[Any, Any]:
    """The mean of the nodes' (params, stats)."""
    return jax.device_get(self._program.mean(self.replay.state))

  def measure(self, history: dict[str, np.ndarray]) -> dict[str, Any]:
    """The metrics of the steps that were just made."""
    state = self.replay.state
    per_step = self._task.batch / self._task.num_samples
    last = (self.replay.clock - self._num_nodes) * per_step
    metrics = {
      'epoch': self.replay.clock * per_step,
      'train/loss': float(history['loss'].mean()),
      'train/rate': self._get_rate(last),
      'gossip/consensus_error': float(self._program.consensus(state)),
    }
    groups = {'test': self.weights}
    if state.arrays.centre is not None:
      groups['centre'] = self._program.centre(state)
    if self._task.test_data is None:
      return metrics
    for group, weights in groups.items():
      found = tasks.evaluate(self._task, *weights)
      metrics |= {f'{group}/{name}': float(v) for name, v in found.items()}
    if 'centre' in groups:
      nodes = self._program.fetch(state).node
      found = tasks.evaluate_all(
        self._task,
        (
          jax.tree.map(lambda leaf, row=row: leaf[row], nodes[:2])
          for row in range(self._num_nodes)
        ),
      )
      metrics |= {f'local/{name}': value for name, value in found.items()}
    return metrics
