"""A run of nodes in real processes of this machine, from its config."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import os
import sys
from typing import Any, TextIO

from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _chunks
from jasgd.experiment import _node_losses
from jasgd.experiment import _node_running
from jasgd.experiment import _node_supervisor
from jasgd.experiment import _node_training
from jasgd.experiment import _node_watch
from jasgd.experiment import _supervisor

# A function that starts a process, by the number of its node.
Starts = Mapping[int, Callable[[], _supervisor.Member]]


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
  return supervise(
    config,
    folder,
    _node_running.make_registry(config, folder),
    _make_starts(config, folder),
    is_owner=True,
    stream=stream,
    on_metrics=on_metrics,
  )


def supervise(
  config: _node_training.NodeTrainingConfig,
  folder: workdirs.Workdir,
  registry: runtime.Registry,
  starts: Starts,
  *,
  is_owner: bool,
  stream: TextIO | None,
  on_metrics: _chunks.OnMetrics | None,
) -> dict[str, Any]:
  """Watches over nodes, as the only one in this folder, to the end.

  Args:
    config: Of the run.
    folder: Of the run.
    registry: Where the nodes are.
    starts: Functions that start them.
    is_owner: Whether they are this process's own, to be ended with it.
    stream: As in `run_nodes`.
    on_metrics: As in `run_nodes`.

  Returns:
    As of `run_nodes`.
  """
  if folder.result.exists():
    return workdirs.read_json(folder.result)
  with workdirs.hold_workdir(folder, 'launcher'):
    if is_owner:
      for member in starts:  # It knows no longer where one was that is gone.
        runtime.find_folder(folder, member).server.unlink(missing_ok=True)
    # Of nodes elsewhere nobody knows where they go on: all of it is kept.
    clock = _find_saved_clock(config, folder) if is_owner else sys.maxsize
    with workdirs.MetricsWriter(
      folder,
      resume_at=workdirs.find_metrics_position(folder, clock),
      on_metrics=on_metrics,
    ) as writer:
      settings = _node_running.make_node_settings(config)
      per_epoch = settings.task.num_samples / settings.task.batch
      get_rate = config.make_schedule()
      ended = _node_supervisor.NodeSupervisor(
        _node_watch.NodeWatch(settings, starts, registry),
        starts,
        folder,
        writer,
        num_steps=settings.num_steps * settings.num_nodes,
        eval_every=config.runtime.eval_every or max(1, round(per_epoch)),
        steps_per_epoch=per_epoch,
        get_rate=get_rate,
        deadlines=settings.deadlines,
        is_group=settings.strategy.is_collective,
        is_owner=is_owner,
        stream=stream,
      ).run()
      if is_owner and any(folder.trace.glob('node-*')):
        ended |= _read_end(folder, ended)
      if is_owner:
        ended['mean'], metrics = _describe_checkpoints(settings, folder, ended)
        if metrics:  # Of all steps: what was heard last may be of fewer.
          epoch = ended['clock'] / per_epoch
          metrics |= {'epoch': epoch, 'train/rate': get_rate(epoch)}
          ended['metrics'] = ended['metrics'] | metrics
          ended['unwritten_at'] = ended['clock']
      if ended['unwritten_at'] is not None:
        writer.write(ended['unwritten_at'], ended['metrics'])
    return _finish(folder, ended)


def _find_saved_clock(
  config: _node_training.NodeTrainingConfig, folder: workdirs.Workdir
) -> int:
  """The steps of all nodes in the checkpoints that they go on from."""
  num_nodes = config.strategy.num_nodes
  saved = [_node_losses.list_saved(folder, node) for node in range(num_nodes)]
  if config.strategy.name == 'allreduce':  # They go on together.
    return num_nodes * max(set.intersection(*saved), default=0)
  return sum(max(steps, default=0) for steps in saved)


def list_expected(config: _node_training.NodeTrainingConfig) -> list[int]:
  """The members of a run: nodes, and `traces.CENTRE` if there is one."""
  members = list(range(config.strategy.num_nodes))
  if config.strategy.name == 'elastic':
    members.append(traces.CENTRE)
  return members


def _make_starts(
  config: _node_training.NodeTrainingConfig, folder: workdirs.Workdir
) -> Starts:
  """Functions that start the processes."""
  header = _node_running.find_header(config, folder)
  job = {
    'config': dataclasses.asdict(config),
    'workdir': os.fspath(folder),
    'origin': header['began_at'],
    'header': header,
  }
  target = 'run_peer'
  if config.strategy.name == 'allreduce':
    job['coordinator'] = f'127.0.0.1:{runtime.find_free_port()}'
    target = 'run_group_node'
  starts: dict[int, Callable[[], _supervisor.Member]] = {}
  for member in list_expected(config):
    is_node = member >= 0
    name = f'node-{member}' if is_node else 'centre'
    starts[member] = functools.partial(
      runtime.Child,
      name,
      f'jasgd.experiment:{target if is_node else "run_centre"}',
      {**job, 'node': member} if is_node else job,
      num_threads=config.processes.num_threads,
      log=folder.logs / f'{name}.log',
    )
  return starts


def _finish(folder: workdirs.Workdir, ended: dict[str, Any]) -> dict[str, Any]:
  """What is to be known of a run; written down if it is over."""
  result = {
    'clock': ended['clock'],
    **ended['metrics'],
    'lost_nodes': [
      'centre' if member == traces.CENTRE else member
      for member in ended['lost']
    ],
    'is_interrupted': ended['is_interrupted'],
    'is_diverged': ended['is_diverged'],
  }
  if not ended['is_interrupted']:  # Or it can go on.
    # It may have been killed before it wrote the result.
    is_saved = ended['clock'] in workdirs.list_checkpoints(folder)
    if ended['mean'] is not None and not is_saved:
      params, stats = ended['mean']
      workdirs.save_checkpoint(
        folder, ended['clock'], {}, position={}, params=params, stats=stats
      )
    workdirs.write_json(folder.result, result)
  return result


def _describe_checkpoints(
  settings: runtime.NodeSettings,
  folder: workdirs.Workdir,
  ended: dict[str, Any],
) -> tuple[Any, dict[str, float]]:
  """The mean of what nodes had in the end, as it is and not as it travels.

  Returns:
    The mean and metrics of it; if somebody has not saved anything, the mean of
    what was last heard, and no metrics.
  """
  weights, masses = {}, {}
  for member in runtime.list_members(folder):
    own = runtime.find_folder(folder, member)
    position = workdirs.read_position(own)
    if member not in ended['lost'] and position is not None:
      weights[member] = workdirs.load_weights(own)
      masses[member] = position['mass']
  centre = weights.pop(traces.CENTRE, None)
  num_lost = sum(member >= 0 for member in ended['lost'])
  if len(weights) < settings.num_nodes - num_lost:
    return ended['mean'], {}
  return _node_watch.describe_nodes(
    settings.task,
    list(weights.values()),
    [masses[node] for node in weights],
    centre,
  )


def _read_end(
  folder: workdirs.Workdir, ended: dict[str, Any]
) -> dict[str, Any]:
  """Steps and losses, now that all have ended: more than was heard of them."""
  trace = traces.NodeTrace.load(folder.trace, allow_truncated=True)
  own = [trace.of_node(node)['step'] for node in range(trace.num_nodes)]
  found: dict[str, Any] = {
    'clock': sum(int(steps[-1]) for steps in own if len(steps))
  }
  if 'gossip/mass_lost' in ended['metrics']:
    lost = traces.summarize_nodes(trace).lost_mass
    found['metrics'] = {**ended['metrics'], 'gossip/mass_lost': lost}
  return found
