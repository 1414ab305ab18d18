"""A run in real processes, from its config: on this machine, or on many."""

import dataclasses
import functools
import os
import threading
from typing import Any, TextIO

import jax

from jasgd import engine
from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.experiment import _observer
from jasgd.experiment import _running
from jasgd.experiment import _supervisor
from jasgd.experiment import _training


def run_server(
  config: _training.TrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  num_learners: int,
  stream: TextIO | None = None,
  on_metrics: _supervisor.OnMetrics | None = None,
) -> dict[str, Any]:
  """Runs a server, and some learners, as processes of this machine.

  The server is started again if it dies. Ctrl-C and SIGTERM stop the run in
  good order; called again, it goes on.

  Args:
    config: What to do.
    workdir: The folder; a run that is there goes on.
    num_learners: How many to start here; others may come from elsewhere.
    stream: Where the progress goes; standard error if None.
    on_metrics: Called with the clock and the metrics of each evaluation.

  Returns:
    How it ended; in `result.json` too, unless it was interrupted.

  Raises:
    RunError: if the run cannot go on.
    ValueError: if the config makes no sense, or the folder is of another run.
  """
  config.validate()
  settings = dataclasses.asdict(config)
  folder = workdirs.open_workdir(workdir, settings)
  if folder.result.exists():
    return workdirs.read_json(folder.result)
  with workdirs.hold_workdir(folder, 'launcher'):
    return _run(config, folder, num_learners, stream, on_metrics)


def _run(
  config: _training.TrainingConfig,
  folder: workdirs.Workdir,
  num_learners: int,
  stream: TextIO | None,
  on_metrics: _supervisor.OnMetrics | None,
) -> dict[str, Any]:
  """Runs the processes, as the only one in this folder."""
  settings = dataclasses.asdict(config)
  # It knows no longer where a server was that is gone.
  folder.server.unlink(missing_ok=True)
  task = config.make_task()
  weights = jax.eval_shape(task.init, jax.random.key(0))
  start = functools.partial(
    runtime.Child, num_threads=config.processes.num_threads
  )
  job = _running.make_learner_job(config, folder)
  status = _supervisor.Supervisor(
    _observer.Observer(
      task,
      engine.make_layout(weights, config.runtime.wire_dtype),
      runtime.make_connect(
        folder, wire=config.runtime.wire, tls=config.server.make_tls()
      ),
    ),
    functools.partial(
      start,
      'server',
      'jasgd.experiment:serve_config',
      {'config': settings, 'workdir': os.fspath(folder)},
      log=folder.logs / 'server.log',
    ),
    [
      functools.partial(
        start,
        f'learner-{number}',
        'jasgd.runtime:learn',
        job,
        log=folder.logs / f'learner-{number}.log',
      )
      for number in range(num_learners)
    ],
    num_updates=_running.count_updates(config),
    stream=stream,
    on_metrics=on_metrics,
  ).run()
  return _finish(folder, status)


def _finish(folder: workdirs.Workdir, status: dict[str, Any]) -> dict[str, Any]:
  """What is to be known of a run; written down if it is over."""
  result = {
    'clock': status['clock'],
    'epoch': status['epoch'],
    'time': status['time'],
    **status['metrics'],
    **status['test'],
    'incarnation': status['incarnation'],
    'num_refused': sum(
      count
      for reason, count in status['counts'].items()
      if reason != 'accepted'
    ),
    'end_reason': status['end_reason'],
    'is_interrupted': status['is_interrupted'],
    'is_diverged': status['is_diverged'],
    'is_failed': status['is_failed'],
  }
  if not status['is_interrupted']:  # Or it can go on.
    workdirs.write_json(folder.result, result)
  return result


def run_learner(
  config: _training.TrainingConfig,
  workdir: str | os.PathLike[str] | None = None,
  server: str = '',
  *,
  stopped: threading.Event,
) -> str:
  """Learns in this process, for a server that runs elsewhere.

  Args:
    config: The server's.
    workdir: Where the server's address and token are.
    server: Its address, if the workdir cannot be seen from here.
    stopped: Set, it ends the learner.

  Returns:
    Why it ended.
  """
  config.validate()
  job = _running.make_learner_job(config, workdir, server)
  return runtime.learn(**job, stopped=stopped)
