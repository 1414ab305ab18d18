"""A run of nodes in real processes of this machine, from its config."""

from collections.abc import Callable
import dataclasses
import functools
import os
import time
from typing import Any, TextIO

from jasgd import gossip
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _chunks
from jasgd.experiment import _node_group
from jasgd.experiment import _node_running
from jasgd.experiment import _node_supervisor
from jasgd.experiment import _node_training
from jasgd.experiment import _node_watch
from jasgd.experiment import _supervisor


def run_nodes(
  config: _node_training.NodeTrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  stream: TextIO | None = None,
  on_metrics: _chunks.OnMetrics | None = None,
) -> dict[str, Any]:
  """Runs nodes, and a centre if need be, as processes of this machine.

  Ctrl-C and SIGTERM stop the run in good order; called again, every node goes
  on from its last checkpoint.

  Args:
    config: What to do.
    workdir: The folder; a run that is there goes on.
    stream: Where the progress goes; standard error if None.
    on_metrics: Called with the steps and the metrics of each evaluation.

  Returns:
    How it ended; in `result.json` too, unless it was interrupted.

  Raises:
    RunError: if the run cannot go on.
    ValueError: if the config makes no sense, or the folder is of another run.
  """
  config.validate()
  folder = workdirs.open_workdir(workdir, dataclasses.asdict(config))
  if folder.result.exists():
    return workdirs.read_json(folder.result)
  with workdirs.hold_workdir(folder, 'launcher'):
    position = 0
    if folder.metrics.exists():
      position = folder.metrics.stat().st_size
    with workdirs.MetricsWriter(
      folder, resume_at=position, on_metrics=on_metrics
    ) as writer:
      ended = _supervise(config, folder, writer, stream)
    return _finish(folder, ended)


def _supervise(
  config: _node_training.NodeTrainingConfig,
  folder: workdirs.Workdir,
  writer: workdirs.MetricsWriter,
  stream: TextIO | None,
) -> dict[str, Any]:
  """Runs the processes, as the only one in this folder."""
  settings = _node_running.make_node_settings(config)
  members = list(range(config.strategy.num_nodes))
  if isinstance(settings.strategy, gossip.Elastic):
    members.append(traces.CENTRE)
  for member in members:  # It knows no longer where one was that is gone.
    runtime.find_folder(folder, member).server.unlink(missing_ok=True)
  steps_per_epoch = settings.task.num_samples / settings.task.batch
  return _node_supervisor.NodeSupervisor(
    _node_watch.NodeWatch(
      settings.task,
      settings.make_layout(),
      {
        member: runtime.connect_member(
          folder,
          member,
          wire=config.runtime.wire,
          tls=config.server.make_tls(),
        )
        for member in members
      },
    ),
    _make_starts(config, folder, members),
    folder,
    writer,
    num_steps=settings.num_steps * settings.num_nodes,
    eval_every=config.runtime.eval_every or max(1, round(steps_per_epoch)),
    steps_per_epoch=steps_per_epoch,
    get_rate=config.make_schedule(),
    silence=settings.deadlines.silence,
    is_group=isinstance(settings.strategy, gossip.AllReduce),
    stream=stream,
  ).run()


def _make_starts(
  config: _node_training.NodeTrainingConfig,
  folder: workdirs.Workdir,
  members: list[int],
) -> dict[int, Callable[[], _supervisor.Member]]:
  """Functions that start the processes."""
  described = dataclasses.asdict(config)
  header = _find_header(config, folder)
  job = {
    'config': described,
    'workdir': os.fspath(folder),
    'origin': header['began_at'],
    'header': header,
  }
  jobs = dict.fromkeys(members, job)
  target = 'run_peer'
  if isinstance(config.make_strategy(), gossip.AllReduce):
    jobs = _node_group.make_jobs(config, folder, job)
    target = 'run_group_node'
  starts: dict[int, Callable[[], _supervisor.Member]] = {}
  for member, own_job in jobs.items():
    is_node = member >= 0
    name = f'node-{member}' if is_node else 'centre'
    starts[member] = functools.partial(
      runtime.Child,
      name,
      f'jasgd.experiment:{target if is_node else "run_centre"}',
      {**own_job, 'node': member} if is_node else own_job,
      num_threads=config.processes.num_threads,
      log=folder.logs / f'{name}.log',
    )
  return starts


def _find_header(
  config: _node_training.NodeTrainingConfig, folder: workdirs.Workdir
) -> dict[str, Any]:
  """What ran, and on what: as it was when the run began."""
  if not folder.provenance.exists():
    header = workdirs.describe_run(dataclasses.asdict(config), config.seed)
    # Of the processes, not of this one: bits depend on it.
    header['num_threads'] = config.processes.num_threads
    header['began_at'] = time.time()
    workdirs.write_json(folder.provenance, header)
  return workdirs.read_json(folder.provenance)


def _finish(folder: workdirs.Workdir, ended: dict[str, Any]) -> dict[str, Any]:
  """What is to be known of a run; written down if it is over."""
  summary = traces.summarize_nodes(traces.NodeTrace.load(folder.trace))
  result = {
    'clock': ended['clock'],
    **ended['metrics'],
    **_measure_losses(ended['metrics'], summary),
    'lost_nodes': ended['lost'],
    'is_interrupted': ended['is_interrupted'],
    'is_diverged': ended['is_diverged'],
  }
  if not ended['is_interrupted']:  # Or it can go on.
    if ended['mean'] is not None:
      params, stats = ended['mean']
      workdirs.save_checkpoint(
        folder, ended['clock'], {}, position={}, params=params, stats=stats
      )
    workdirs.write_json(folder.result, result)
  return result


def _measure_losses(
  metrics: dict[str, Any], summary: traces.NodeSummary
) -> dict[str, float]:
  """What was lost, now that all have ended."""
  if 'gossip/mass_lost' not in metrics:
    return {}
  return {'gossip/mass_lost': summary.lost_mass}
