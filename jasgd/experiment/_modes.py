"""Training from a config, where the config says."""

import os
from typing import Any, TextIO

from jasgd.experiment import _chunks
from jasgd.experiment import _device_train
from jasgd.experiment import _local
from jasgd.experiment import _node_local
from jasgd.experiment import _node_train
from jasgd.experiment import _node_training
from jasgd.experiment import _train
from jasgd.experiment import _training


def train_and_evaluate(
  config: _training.TrainingConfig | _node_training.NodeTrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  on_metrics: _chunks.OnMetrics | None = None,
  stream: TextIO | None = None,
) -> dict[str, Any]:
  """Trains, evaluates, and leaves everything in a folder.

  With `runtime.mode` 'simulate' in virtual time, in this process; with 'local'
  in processes on this machine, a server's and learners' or those of nodes; with
  'devices', which is for nodes, on the devices of this process. Killed at any
  time and started again, a run goes on from its last checkpoint.

  Args:
    config: What to do.
    workdir: The folder; it is made if it is not there.
    on_metrics: Called with the clock and the metrics, for other loggers. The
      clock of nodes is the steps of all of them together.
    stream: Where the progress goes; standard error if None.

  Returns:
    What is in `result.json`: the last metrics, and `is_diverged`.

  Raises:
    ValueError: if the config makes no sense, or the folder is of another run.
    RunError: if real processes cannot go on.
  """
  if config.runtime.mode == 'cluster':
    raise ValueError(
      'In a cluster a process has one role, and a command of its own: with '
      "runtime.mode='cluster' see launch.train."
    )
  if isinstance(config, _node_training.NodeTrainingConfig):
    return _train_nodes(config, workdir, on_metrics, stream)
  if config.runtime.mode == 'local':
    return _local.run_server(
      config,
      workdir,
      num_learners=config.protocol.count_learners(),
      stream=stream,
      on_metrics=on_metrics,
    )
  return _train.run_simulated(
    config, workdir, on_metrics=on_metrics, stream=stream
  )


def _train_nodes(
  config: _node_training.NodeTrainingConfig,
  workdir: str | os.PathLike[str],
  on_metrics: _chunks.OnMetrics | None,
  stream: TextIO | None,
) -> dict[str, Any]:
  """Trains nodes, where the config says."""
  if config.runtime.mode == 'local':
    return _node_local.run_nodes(
      config, workdir, stream=stream, on_metrics=on_metrics
    )
  run = _node_train.run_simulated_nodes
  if config.runtime.mode == 'devices':
    run = _device_train.run_on_devices
  return run(config, workdir, on_metrics=on_metrics, stream=stream)
