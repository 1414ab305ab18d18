"""The two ways to train: from a config, and from your own functions."""

from collections.abc import Callable
from concurrent import futures
import contextlib
import functools
import os
import tempfile
import threading
from typing import Any, TextIO

import jax
import optax

from jasgd import gossip
from jasgd import protocols
from jasgd import runtime
from jasgd import tasks
from jasgd import transforms
from jasgd import workdir as workdirs
from jasgd.experiment.configs import training
from jasgd.experiment.running import children
from jasgd.experiment.running import devices
from jasgd.experiment.running import local
from jasgd.experiment.running import recipe as recipes
from jasgd.experiment.running import result as results
from jasgd.experiment.running import supervisor as supervisors
from jasgd.experiment.running import virtual

# Seconds for a server to compile.
_START_TIMEOUT = 60.0


def train_and_evaluate(
  config: training.TrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  on_metrics: virtual.OnMetrics | None = None,
  stream: TextIO | None = None,
) -> results.Result:
  """Trains, evaluates, and leaves all files in a folder.

  `runtime.mode` names the place: 'simulate' is virtual time in this process;
  'local' processes of this machine, those of a server and learners or those of
  nodes; 'devices' the devices of this process, for nodes. Killed at any time
  and started again, a run goes on from its last checkpoint. Ctrl-C and SIGTERM
  stop it in good order.

  Args:
    config: The config.
    workdir: The folder; it is made if it does not exist.
    on_metrics: Called with the clock and the metrics of each evaluation, for
      other loggers.
    stream: Stream of the progress line; standard error if None.

  Returns:
    The result; also in `result.json`, unless the run was interrupted.

  Raises:
    ValueError: if the config makes no sense, or the folder is of another run.
    RunError: if real processes cannot go on.
  """
  mode = config.runtime.mode
  if mode == 'cluster':
    raise ValueError(
      'In a cluster each process has a role and a command of its own: see '
      'python -m launch.train --help.'
    )
  run = virtual.run_simulated
  if mode == 'devices':
    run = devices.run_on_devices
  elif mode == 'local':
    run = local.run_local
  return run(config, workdir, on_metrics=on_metrics, stream=stream)


def train(
  make_task: Callable[..., tasks.Task],
  optimizer: optax.GradientTransformation,
  strategy: gossip.Strategy | None = None,
  *,
  num_workers: int = 4,
  workdir: str | os.PathLike[str] | None = None,
  arguments: dict[str, Any] | None = None,
  num_updates: int | None = None,
  num_epochs: float | None = None,
  policy: transforms.policies.PolicyLike = 'constant',
  per_gradient: optax.GradientTransformation | None = None,
  get_rate: Callable[[float], float] | None = None,
  local_rate: float | None = None,
  seed: int = 0,
  processes: bool = True,
  overlap: bool = False,
  wire_dtype: str = 'float32',
  eval_every: int = 100,
  checkpoint_seconds: float = 30.0,
  min_seconds: tuple[float, ...] = (),
  on_learner_lost: str = 'continue',
  deadlines: runtime.Deadlines | None = None,
  stream: TextIO | None = None,
) -> results.Result:
  """Trains your own model with real workers on this machine.

  With a protocol, the server is a thread of this process, and the workers are
  its learners. With a peer strategy, such as `gossip.Pull()`, the workers are
  nodes, each with its own weights and optimizer state. Workers are processes,
  or threads. On a CPU, processes see as many threads as this process, so that
  an exact replay here has the same bits; set NPROC=1 in the environment, before
  jax is imported, to give each process one.

  A run in a workdir goes on from its last checkpoint. Pass the same optimizer,
  policy and schedule then: functions cannot be compared.

  Args:
    make_task: Function that makes the task. Other processes import it by its
      name: it must be a function of a module, or of the script that runs (and
      calls `train` behind `if __name__ == '__main__':`).
    optimizer: Any optax optimizer: the server's, or that of each node.
    strategy: A protocol or a peer strategy; None: asynchronous.
    num_workers: Number of learners or nodes.
    workdir: Folder of trace, metrics and checkpoints; None: a temporary one.
    arguments: Arguments of `make_task`, JSON-serialisable.
    num_updates: Updates of the server, or steps of all nodes, at the end.
    num_epochs: Passes over the training set at the end; 10 if neither is given.
    policy: Factor on a gradient by its staleness, as in
      `jasgd.scale_by_staleness`. Only with a protocol.
    per_gradient: Transformation of each gradient before the policy. Only with a
      protocol.
    get_rate: Schedule, from epochs to a factor on the optimizer's updates.
    local_rate: Rate of a learner's own steps; needed with a protocol that has
      them (downpour).
    seed: Seed of every random draw in the run.
    processes: Whether workers are processes; False: threads, for notebooks.
    overlap: Whether learners fetch while they compute. Only with a protocol.
    wire_dtype: Type of floats in messages: 'bfloat16' halves their bytes.
    eval_every: Updates, or steps of all nodes, between evaluations.
    checkpoint_seconds: Seconds between checkpoints.
    min_seconds: Least seconds per gradient of each worker, to stand for slower
      ones; the last is for all further workers.
    on_learner_lost: Reaction to the loss of a learner: 'continue' or 'fail'.
      Only with a protocol.
    deadlines: Deadlines of a real run.
    stream: Stream of the progress line; standard error if None.

  Returns:
    The result: weights, metrics, trace. Of nodes, the weights are their mean.

  Raises:
    ValueError: if an argument makes no sense.
    RunError: if the run cannot go on.

  Examples:
    >>> import io, jasgd, optax
    >>> from jasgd import tasks
    >>> result = jasgd.train(
    ...   tasks.make_task,
    ...   optax.sgd(0.05),
    ...   arguments={'name': 'quadratic', 'batch': 1},
    ...   num_workers=2,
    ...   num_updates=20,
    ...   policy='inverse',
    ...   processes=False,
    ...   stream=io.StringIO(),
    ... )
    >>> result.clock, result.trace.num_updates
    (20, 20)
  """
  arguments = arguments or {}
  if num_updates is None and num_epochs is None:
    num_epochs = 10.0
  strategy = protocols.asynchronous() if strategy is None else strategy
  server_options = {
    'policy': policy,
    'per_gradient': per_gradient,
    'local_rate': local_rate,
    'overlap': overlap,
    'on_learner_lost': on_learner_lost,
  }
  _check_strategy(strategy, num_workers, processes, server_options)
  task, name = _call(make_task, arguments, processes)
  settings = {
    'make_task': name,
    'arguments': arguments,
    'strategy': strategy.identify(),
    'num_workers': num_workers,
    'num_updates': num_updates,
    'num_epochs': num_epochs,
    'wire_dtype': wire_dtype,
    'overlap': overlap,
    'local_rate': local_rate,
    'seed': seed,
  }
  recipe = recipes.Recipe(
    task=task,
    optimizer=optimizer,
    strategy=strategy,
    num_workers=num_workers,
    settings=settings,
    num_updates=num_updates,
    num_epochs=num_epochs,
    seed=seed,
    get_rate=get_rate,
    wire_dtype=wire_dtype,
    num_threads=workdirs.describe_run({}, seed)['num_threads'],
    eval_every=eval_every,
    checkpoint_seconds=checkpoint_seconds,
    min_seconds=tuple(min_seconds),
    deadlines=runtime.Deadlines() if deadlines is None else deadlines,
    **{**server_options, 'local_rate': local_rate or 0.0},
  )
  run = _run_nodes if recipe.is_peer else _run_server
  with contextlib.ExitStack() as stack:
    is_kept = workdir is not None
    if not is_kept:
      workdir = stack.enter_context(tempfile.TemporaryDirectory())
    run = functools.partial(run, recipe, is_threaded=not processes)
    folder = workdirs.open_workdir(workdir, settings)
    result = run(folder, stream=stream)
    _load(result, task)
  return result


def _check_strategy(
  strategy: Any,
  num_workers: int,
  processes: bool,
  server_options: dict[str, Any],
) -> None:
  """Raises a ValueError if a strategy cannot be trained with."""
  gossip.check_strategy(strategy)
  protocols.check_count('num_workers', num_workers, 1)
  strategy.check(num_workers)
  if strategy.has_server:
    steps = max(strategy.steps_per_push, strategy.steps_per_fetch)
    if server_options['local_rate'] is None and steps > 1:
      raise ValueError(
        f'With {strategy!r} learners step on their own copies of the weights: '
        'give the rate of these steps as local_rate.'
      )
    return
  if strategy.refusal_of_processes:
    raise ValueError(strategy.refusal_of_processes)
  if strategy.is_collective and not processes:
    raise ValueError(
      f'The nodes of {strategy!r} are processes of one jax.distributed group, '
      'and cannot be threads: leave processes at True.'
    )
  usual = {'policy': 'constant', 'overlap': False}
  usual |= {'per_gradient': None, 'local_rate': None}
  given = [
    name for name, value in usual.items() if server_options[name] != value
  ]
  if given:
    raise ValueError(
      f'{", ".join(given)} is for protocols, which have a server: nodes of '
      f'{strategy!r} step on their own gradients, which are not stale.'
    )


def _call(
  make_task: Callable[..., tasks.Task],
  arguments: dict[str, Any],
  processes: bool,
) -> tuple[tasks.Task, str]:
  """The task, and the name by which other processes find its function."""
  if isinstance(make_task, tasks.Task):
    if processes:
      raise ValueError(
        'make_task must be a function that returns the task, since each '
        'process calls it for itself; got a Task. Write a function of a '
        'module, or train with threads: processes=False.'
      )
    return make_task, f'a task: {make_task.name}'
  if not callable(make_task):
    raise ValueError(
      f'make_task must be a function that returns a Task, got {make_task!r}.'
    )
  name = runtime.name_function(make_task) if processes else repr(make_task)
  task = make_task(**arguments)
  if not isinstance(task, tasks.Task):
    raise ValueError(f'make_task must return a Task, got {task!r:.80}.')
  return task, name


def _load(result: results.Result, task: tasks.Task) -> None:
  """Reads weights and trace now, as the folder may be deleted later.

  A checkpoint holds plain dicts and lists; the weights get the task's types.
  """
  structure = jax.tree.structure(jax.eval_shape(task.init, jax.random.key(0)))
  leaves = jax.tree.leaves(result.weights)
  vars(result)['weights'] = structure.unflatten(leaves)
  _ = result.trace


def _run_nodes(
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  *,
  is_threaded: bool,
  stream: TextIO | None,
) -> results.Result:
  """Trains nodes, which are processes or threads."""
  if is_threaded:
    make_starts = functools.partial(local.start_threads, recipe, folder)
  else:
    job = children.make_own_job(
      recipe, recipe.settings['make_task'], recipe.settings['arguments']
    )
    make_starts = functools.partial(
      local.make_node_starts,
      recipe,
      folder,
      children.run_own_member,
      {**job, 'workdir': os.fspath(folder)},
    )
  return local.supervise(recipe, folder, make_starts, stream=stream)


def _run_server(
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  *,
  is_threaded: bool,
  stream: TextIO | None,
) -> results.Result:
  """Trains learners; the server is a thread, which has the optimizer."""
  settings = recipe.make_server_settings()
  options = {
    'seed': recipe.seed,
    'wire_dtype': recipe.wire_dtype,
    'min_seconds': recipe.min_seconds,
  }
  if not is_threaded:
    job = {
      **options,
      'make_task': recipe.settings['make_task'],
      'arguments': recipe.settings['arguments'],
      'workdir': os.fspath(folder),
    }

    def serve(stopped: threading.Event) -> None:
      runtime.serve(settings, folder, runtime.BindAddress(), stopped=stopped)

    starts = local.make_learner_starts(recipe, folder, job, recipe.num_workers)
    connect = None
  else:
    ready: futures.Future[Any] = futures.Future()

    def serve(stopped: threading.Event) -> None:
      runtime.serve_threads(
        settings, folder, stopped=stopped, on_ready=ready.set_result
      )

    def connect(payload_size: int) -> runtime.Connection:
      del payload_size  # A queue has no size.
      try:
        return ready.result(timeout=_START_TIMEOUT).connect()
      except TimeoutError:
        raise runtime.WireError('The server has not started.') from None

    def learn(stopped: threading.Event) -> None:
      runtime.Learner(recipe.task, connect, stopped=stopped, **options).run()

    starts = {
      learner: functools.partial(
        supervisors.Thread, f'learner-{learner}', learn
      )
      for learner in range(recipe.num_workers)
    }
  server = functools.partial(supervisors.Thread, 'server', serve)
  return local.supervise(
    recipe,
    folder,
    lambda: {recipes.SERVER: server, **starts},
    connect=connect,
    stream=stream,
  )
