"""The life cycle of a run in processes or threads of this machine.

The same steps for every strategy: hold the workdir, start the members, watch
them, collect weights and metrics when all have ended, write the result.
"""

from collections.abc import Callable
import dataclasses
import functools
import os
import sys
import threading
from typing import Any, TextIO

from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment.configs import training
from jasgd.experiment.running import children
from jasgd.experiment.running import measuring
from jasgd.experiment.running import recipe as recipes
from jasgd.experiment.running import result as results
from jasgd.experiment.running import supervisor as supervisors
from jasgd.experiment.running import views

Connect = Callable[[int], runtime.Connection]


def run_local(
  config: training.TrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  num_workers: int | None = None,
  stream: TextIO | None = None,
  on_metrics: views.OnMetrics | None = None,
) -> results.Result:
  """Runs a config in processes of this machine.

  Args:
    config: The config.
    workdir: Folder of the run; a run that is there goes on.
    num_workers: Learners to start here, if others come from elsewhere; None:
      all workers.
    stream: As in `train_and_evaluate`.
    on_metrics: As in `train_and_evaluate`.

  Returns:
    The result.

  Raises:
    RunError: if the run cannot go on.
    ValueError: if the config makes no sense, or the folder is of another run.
  """
  config.validate()
  # Before the folder is made: after an error the user may give other flags.
  recipe = recipes.from_config(config, workdirs.Workdir(workdir))
  folder = workdirs.open_workdir(workdir, recipe.settings)
  return supervise(
    recipe,
    folder,
    functools.partial(_make_starts, config, recipe, folder, num_workers),
    stream=stream,
    on_metrics=on_metrics,
  )


def _make_starts(
  config: training.TrainingConfig,
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  num_workers: int | None,
) -> supervisors.Starts:
  """Functions that start the processes of a config."""
  settings, workdir = dataclasses.asdict(config), os.fspath(folder)
  job = {'config': settings, 'workdir': workdir}
  if recipe.is_peer:
    return make_node_starts(recipe, folder, children.run_member, job)
  learner_job = children.make_learner_job(config, workdir)
  if num_workers is None:
    num_workers = recipe.num_workers
  return {
    recipes.SERVER: make_start(recipe, folder, 'server', children.serve, job),
    **make_learner_starts(recipe, folder, learner_job, num_workers),
  }


def make_start(
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  name: str,
  target: Callable[..., object],
  job: dict[str, Any],
) -> Callable[[], supervisors.Process]:
  """A function that starts a process.

  Args:
    recipe: Recipe of the run.
    folder: Folder of the run, for the log.
    name: Name of the process.
    target: Function of a module that the process calls.
    job: Arguments of the function, JSON-serialisable.

  Returns:
    The function.
  """
  return functools.partial(
    runtime.Child,
    name,
    f'{target.__module__}:{target.__name__}',
    job,
    num_threads=recipe.num_threads,
    log=folder.logs / f'{name}.log',
  )


def make_learner_starts(
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  job: dict[str, Any],
  num_workers: int,
) -> supervisors.Starts:
  """Functions that start learners; `job` has the arguments of `learn`."""
  return {
    learner: make_start(
      recipe, folder, f'learner-{learner}', runtime.learn, job
    )
    for learner in range(num_workers)
  }


def make_node_starts(
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  target: Callable[..., object],
  job: dict[str, Any],
) -> supervisors.Starts:
  """Functions that start nodes, and a centre if there is one.

  Args:
    recipe: Recipe of the run.
    folder: Folder of the run.
    target: Function that takes `member` beside the arguments of the job.
    job: Arguments of the function.

  Returns:
    The functions by member.
  """
  recipe.find_header(folder)  # Made now, it has the time of the run's start.
  if recipe.is_collective:
    job['coordinator'] = f'127.0.0.1:{runtime.find_free_port()}'
  return {
    member: make_start(
      recipe, folder, name_process(member), target, {**job, 'member': member}
    )
    for member in list_members(recipe)
  }


def list_members(recipe: recipes.Recipe) -> list[int]:
  """The members of a run of nodes: nodes, and the centre if there is one."""
  members = list(range(recipe.num_workers))
  return members if recipe.owner is None else [*members, recipe.owner]


def name_process(member: int) -> str:
  """The name of the process of a node or of a centre."""
  return 'centre' if member == recipes.SERVER else f'node-{member}'


# --- The life cycle.


def supervise(
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  make_starts: Callable[[], supervisors.Starts],
  *,
  connect: Connect | None = None,
  registry: runtime.Registry | None = None,
  is_owner: bool = True,
  stream: TextIO | None = None,
  on_metrics: views.OnMetrics | None = None,
) -> results.Result:
  """Runs the members of a run, as the only launcher in its folder.

  Args:
    recipe: Recipe of the run.
    folder: Folder of the run. A run that is over is only read.
    make_starts: Gives the functions that start the members; called when this
      process holds the folder.
    connect: Connects to the server; by default by its address in the folder.
    registry: Addresses of nodes; by default those in the folder.
    is_owner: As in `Supervisor`.
    stream: As in `train_and_evaluate`.
    on_metrics: As in `train_and_evaluate`.

  Returns:
    The result.
  """
  if found := results.read_result(folder):
    return found
  with workdirs.hold_workdir(folder, 'launcher'):
    if is_owner:
      _remove_addresses(recipe, folder)
    starts = make_starts()
    if not recipe.is_peer:
      connect = connect or runtime.make_connect(
        folder, wire=recipe.wire, tls=recipe.tls
      )
      server = views.ServerView(recipe, folder, connect, on_metrics)
      supervisor = supervisors.Supervisor(
        server, starts, recipe, folder, is_owner=is_owner, stream=stream
      )
      supervisor.run()
      return _finish_server(recipe, folder, server, supervisor).write()
    clock = _find_saved_clock(recipe, folder) if is_owner else sys.maxsize
    with workdirs.MetricsWriter(
      folder,
      resume_at=workdirs.find_metrics_position(folder, clock),
      on_metrics=on_metrics,
    ) as writer:
      registry = registry or recipe.make_registry(folder)
      nodes = views.NodesView(recipe, folder, registry, starts, writer)
      supervisor = supervisors.Supervisor(
        nodes, starts, recipe, folder, is_owner=is_owner, stream=stream
      )
      supervisor.run()
      return _finish_nodes(
        recipe, folder, nodes, supervisor, writer, is_owner=is_owner
      ).write()


def _remove_addresses(recipe: recipes.Recipe, folder: workdirs.Workdir) -> None:
  """Removes the addresses that dead processes left behind."""
  folder.server.unlink(missing_ok=True)
  if recipe.is_peer:
    for member in list_members(recipe):
      own = runtime.find_folder(folder, member)
      own.server.unlink(missing_ok=True)


def _find_saved_clock(recipe: recipes.Recipe, folder: workdirs.Workdir) -> int:
  """Steps of all nodes in the checkpoints that they go on from."""
  num_nodes = recipe.num_workers
  saved = [
    supervisors.list_saved_steps(folder, node) for node in range(num_nodes)
  ]
  if recipe.is_collective:  # All nodes go on from the same step.
    return num_nodes * max(set.intersection(*saved), default=0)
  return sum(max(steps, default=0) for steps in saved)


def _finish_server(
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  view: views.ServerView,
  supervisor: supervisors.Supervisor,
) -> results.Result:
  """The result of a run with a server, from the server's last status.

  The last checkpoint is evaluated, because the view has weights that were
  rounded in messages, and after an interruption only earlier ones.
  """
  status = view.status
  num_refused = sum(
    count for reason, count in status['counts'].items() if reason != 'accepted'
  )
  return results.Result(
    workdir=os.fspath(folder),
    clock=status['clock'],
    metrics={
      'epoch': status['epoch'],
      'time': status['time'],
      **view.metrics,
      **measuring.evaluate(recipe.task, workdirs.load_weights(folder)),
      'server/num_refused': num_refused,
      'server/num_restarts': status['incarnation'],
    },
    end_reason=status['end_reason'] or '',
    lost=supervisor.list_lost(),
    is_diverged=status['is_diverged'],
    is_interrupted=status['is_interrupted'],
    is_failed=status['is_failed'],
  )


def _finish_nodes(
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  view: views.NodesView,
  supervisor: supervisors.Supervisor,
  writer: workdirs.MetricsWriter,
  *,
  is_owner: bool,
) -> results.Result:
  """The result of a run of nodes; saves their mean, and the last metrics.

  A launcher reads the files of its own nodes once all have ended: traces have
  all steps, and checkpoints have weights that were not rounded in messages.
  """
  clock, metrics, mean = view.clock, view.metrics, view.mean
  unwritten_at = view.unwritten_at
  if is_owner and any(folder.trace.glob('node-*')):
    trace = results.load_trace(folder)
    clock = measuring.count_steps(trace)
    if 'gossip/mass_lost' in metrics:
      lost = traces.summarize(trace).lost_mass
      metrics = {**metrics, 'gossip/mass_lost': lost}
  if is_owner:
    found = _describe_checkpoints(recipe, folder, supervisor.lost)
    if found is not None:
      mean, exact = found
      metrics = {**metrics, **exact, **view.describe_clock(clock)}
      unwritten_at = clock
  if unwritten_at is not None:
    writer.write(unwritten_at, metrics)
  is_interrupted = supervisor.is_interrupted
  # A launcher that was killed before it wrote the result may have saved it.
  is_saved = clock in workdirs.list_checkpoints(folder)
  if mean is not None and not is_saved:
    params, stats = mean
    workdirs.save_checkpoint(
      folder, clock, {}, position={}, params=params, stats=stats
    )
  reason = f'All {recipe.num_steps} steps of each node were made.'
  if is_interrupted:
    reason = 'It was interrupted.'
  elif view.is_diverged:
    reason = 'The loss of a node was not finite.'
  return results.Result(
    workdir=os.fspath(folder),
    clock=clock,
    metrics=metrics,
    end_reason=reason,
    lost=supervisor.list_lost(),
    is_diverged=view.is_diverged,
    is_interrupted=is_interrupted,
  )


def _describe_checkpoints(
  recipe: recipes.Recipe, folder: workdirs.Workdir, lost: set[int]
) -> tuple[Any, dict[str, float]] | None:
  """Mean and metrics of the last checkpoints of the nodes.

  Returns:
    Both; None if a node that is not lost has no checkpoint.
  """
  weights, masses = {}, {}
  for member in runtime.list_members(folder):
    own = runtime.find_folder(folder, member)
    position = workdirs.read_position(own)
    if member not in lost and position is not None:
      weights[member] = workdirs.load_weights(own)
      masses[member] = position['mass']
  centre = weights.pop(recipes.SERVER, None)
  num_lost = sum(member >= 0 for member in lost)
  if not weights or len(weights) < recipe.num_workers - num_lost:
    return None
  return measuring.describe_nodes(
    recipe.task,
    list(weights.values()),
    [masses[node] for node in weights],
    centre,
  )


def start_threads(
  recipe: recipes.Recipe, folder: workdirs.Workdir
) -> supervisors.Starts:
  """Functions that start nodes, and a centre, as threads of this process."""

  def run(member: int, stopped: threading.Event) -> None:
    children.make_member(recipe, folder, member, stopped=stopped).run()

  recipe.find_header(folder)
  return {
    member: functools.partial(
      supervisors.Thread,
      name_process(member),
      functools.partial(run, member),
    )
    for member in list_members(recipe)
  }
