"""The functions that child processes of a run call, by 'module:function'.

Their arguments come as JSON, by the standard input of the child. A child of a
run from a config gets the config. A node of a run by `jasgd.train` gets the
name of the function that makes the task, and the rest of its recipe as text:
see `closures`.
"""

import dataclasses
import threading
from typing import Any

from jasgd import runtime
from jasgd import tasks
from jasgd import workdir as workdirs
from jasgd.experiment.configs import training
from jasgd.experiment.running import closures
from jasgd.experiment.running import recipe as recipes

# Task of a recipe that is sent to a child: each process makes its own task.
_NO_TASK: Any = None

# --- Runs from a config.


def make_task(config: dict[str, Any]) -> tasks.Task:
  """The task of a learner."""
  return training.read_config(config).make_task()


def serve(
  config: dict[str, Any], workdir: str, *, stopped: threading.Event
) -> None:
  """The process of a server.

  Args:
    config: The config of the run.
    workdir: Folder of the run.
    stopped: Ends the run in good order when set.
  """
  folder = workdirs.Workdir(workdir)
  recipe = recipes.from_config(training.read_config(config), folder)
  runtime.serve(
    recipe.make_server_settings(),
    folder,
    recipe.make_bind_address(),
    stopped=stopped,
    on_ready=lambda server: workdirs.write_json(
      folder.provenance, server.get_trace().header
    ),
  )


def make_learner_job(
  config: training.TrainingConfig, workdir: str = '', server: str = ''
) -> dict[str, Any]:
  """The arguments of `runtime.learn` for a run from a config.

  Args:
    config: The config of the run.
    workdir: Folder with the address of the server.
    server: Address of the server, without a workdir.

  Returns:
    A JSON-serialisable dict.
  """
  tls = config.server.make_tls()
  return {
    'make_task': f'{__name__}:{make_task.__name__}',
    'arguments': {'config': dataclasses.asdict(config)},
    'workdir': workdir,
    'server': server,
    'wire': config.runtime.wire,
    'tls': None if tls is None else dataclasses.asdict(tls),
    'seed': config.seed,
    'wire_dtype': config.runtime.wire_dtype,
    'min_seconds': config.processes.min_seconds,
    'patience': config.processes.patience,
  }


def run_member(
  config: dict[str, Any],
  workdir: str,
  *,
  member: int,
  coordinator: str = '',
  stopped: threading.Event,
) -> None:
  """The process of a node or of a centre that its launcher has started.

  Args:
    config: The config of the run.
    workdir: Folder of the run.
    member: Number of the node, or `recipes.SERVER`.
    coordinator: 'HOST:PORT' where the nodes of an all-reduce meet.
    stopped: Ends the process in good order when set.
  """
  parsed = training.read_config(config)
  if coordinator:  # Before anything is computed.
    deadlines = parsed.deadlines.make()
    runtime.join_group(
      coordinator, parsed.num_workers, member, deadlines, stopped
    )
  folder = workdirs.Workdir(workdir)
  recipe = recipes.from_config(parsed)
  make_member(recipe, folder, member, stopped=stopped).run()


def make_member(
  recipe: recipes.Recipe,
  folder: workdirs.Workdir,
  member: int,
  *,
  stopped: threading.Event,
  registry: runtime.Registry | None = None,
  bind: runtime.BindAddress | None = None,
  **options: Any,
) -> Any:
  """A node or a centre in this process; its method `run` does the work.

  Args:
    recipe: Recipe of the run.
    folder: Folder of the run.
    member: Number of the node, or `recipes.SERVER`.
    stopped: Ends it in good order when set.
    registry: Addresses of the other nodes; by default those in the folder.
    bind: Address to listen at; by default that of the recipe.
    **options: `header` of the traces, `linger`.

  Returns:
    A `runtime.Peer`, `runtime.GroupNode` or `runtime.Centre`.
  """
  header = options.pop('header', None) or recipe.find_header(folder)
  arguments: dict[str, Any] = {
    'settings': recipe.make_node_settings(header),
    'run': folder,
    'registry': registry or recipe.make_registry(folder),
    'bind': bind or recipe.make_bind_address(),
    'stopped': stopped,
    **options,
  }
  if member == recipes.SERVER:
    return runtime.Centre(**arguments)
  kind = runtime.GroupNode if recipe.is_collective else runtime.Peer
  return kind(**arguments, node=member)


# --- Nodes of a run by `jasgd.train`.


def make_own_job(
  recipe: recipes.Recipe, name: str, arguments: dict[str, Any]
) -> dict[str, Any]:
  """The arguments of `run_own_member`, except the member.

  Args:
    recipe: Recipe of the run.
    name: Name of the function that makes the task.
    arguments: Arguments of that function.

  Returns:
    A JSON-serialisable dict.

  Raises:
    ValueError: if optimizer, strategy or schedule cannot be sent.
  """
  return {
    'make_task': name,
    'arguments': arguments,
    'recipe': closures.dump(dataclasses.replace(recipe, task=_NO_TASK)),
    'num_workers': recipe.num_workers,
    'deadlines': dataclasses.asdict(recipe.deadlines),
  }


def run_own_member(
  make_task: str,
  arguments: dict[str, Any],
  recipe: str,
  num_workers: int,
  deadlines: dict[str, float],
  *,
  workdir: str,
  member: int,
  coordinator: str = '',
  stopped: threading.Event,
) -> None:
  """The process of a node or of a centre; arguments as of `make_own_job`."""
  if coordinator:  # Before anything is computed, and a recipe is read.
    limits = runtime.Deadlines(**deadlines)
    runtime.join_group(coordinator, num_workers, member, limits, stopped)
  task = runtime.find_function(make_task)(**arguments)
  own = dataclasses.replace(closures.load(recipe), task=task)
  folder = workdirs.Workdir(workdir)
  make_member(own, folder, member, stopped=stopped).run()
