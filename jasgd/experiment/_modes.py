"""Training from a config, where the config says."""

import os
from typing import Any, TextIO

from jasgd.experiment import _local
from jasgd.experiment import _train
from jasgd.experiment import _training


def train_and_evaluate(
  config: _training.TrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  on_metrics: _train.OnMetrics | None = None,
  stream: TextIO | None = None,
) -> dict[str, Any]:
  """Trains, evaluates, and leaves everything in a folder.

  With `runtime.mode` 'simulate' in virtual time, in this process; with 'local'
  in a server's and learners' processes on this machine. Killed at any time and
  started again, a run goes on from its last checkpoint.

  Args:
    config: What to do.
    workdir: The folder; it is made if it is not there.
    on_metrics: Called with the clock and the metrics, for other loggers.
    stream: Where the progress goes; standard error if None.

  Returns:
    What is in `result.json`: the last metrics, and `is_diverged`.

  Raises:
    ValueError: if the config makes no sense, or the folder is of another run.
    RunError: if real processes cannot go on.
  """
  if config.runtime.mode == 'cluster':
    raise ValueError(
      "In a cluster a process is a server or a learner: with runtime.mode='"
      "cluster' call run_server or run_learner."
    )
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
