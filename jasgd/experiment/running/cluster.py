"""One process of a run on many hosts: learner, node, centre, or observer."""

import dataclasses
import functools
import logging
import os
import signal
import threading
from typing import Any, TextIO

import jax

from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.experiment.configs import training
from jasgd.experiment.running import children
from jasgd.experiment.running import local
from jasgd.experiment.running import recipe as recipes
from jasgd.experiment.running import result as results
from jasgd.experiment.running import signals
from jasgd.experiment.running import supervisor as supervisors
from jasgd.experiment.running import views

_log = logging.getLogger(__name__)

# Seconds between two checks of a child.
_INTERVAL = 0.2
# Seconds that a process has to end after a request.
_END_TIMEOUT = 60.0
_NODE_ROLES = ('node', 'centre')


def list_roles(config: training.TrainingConfig) -> tuple[str, ...]:
  """The roles of processes in a cluster."""
  if config.strategy.is_peer:
    return (*_NODE_ROLES, 'watch')
  return ('server', 'learner')


def run_role(
  config: training.TrainingConfig,
  workdir: str | os.PathLike[str] | None,
  role: str,
  *,
  server: str = '',
  node: int | None = None,
  peers: tuple[str, ...] = (),
  listen: str = '',
  stopped: threading.Event | None = None,
  stream: TextIO | None = None,
  on_metrics: views.OnMetrics | None = None,
) -> results.Result | str | None:
  """Plays one role in a run on many hosts, until the run is over.

  A server waits for learners from elsewhere. Nodes find each other by their
  addresses in the workdir, if it is a folder that all can see, or through any
  node that is there already. A node that was here before goes on from its
  checkpoint; a node that comes late begins with the weights of another one. A
  watch evaluates the mean of the nodes, and ends them when all have made their
  steps. Ctrl-C and SIGTERM end the process in good order; of a watch, only the
  watch.

  Args:
    config: The config, the same for all processes.
    workdir: Folder of the run: one for all, or each its own. A learner that is
      given `server` needs none.
    role: One of `list_roles(config)`.
    server: 'HOST:PORT' of the server, for a learner without the workdir.
    node: Number of a node; None: the lowest that is free in the workdir.
    peers: 'HOST:PORT' of any node that does not share the workdir. In an
      all-reduce: the address where node 0 waits for the others, the same for
      all.
    listen: 'HOST' or 'HOST:PORT' of this machine, for a node or a centre; '':
      the config's host.
    stopped: Ends a learner when set.
    stream: As in `train_and_evaluate`.
    on_metrics: As in `train_and_evaluate`.

  Returns:
    The result, of a server or a watch; the reason for the end, of a learner.

  Raises:
    ValueError: if the arguments make no sense, or the folder is of another run.
    RunError: if the process ended badly.
  """
  config.validate()
  if role not in list_roles(config):
    raise ValueError(
      f'Unknown role {role!r} with strategy.name={config.strategy.name!r}. '
      f'Known: {", ".join(list_roles(config))}.'
    )
  if role == 'learner':
    path = '' if workdir is None else os.fspath(workdir)
    job = children.make_learner_job(config, path, server)
    return runtime.learn(**job, stopped=stopped or threading.Event())
  if workdir is None:
    raise ValueError(f'A {role} needs a workdir.')
  options: dict[str, Any] = {'stream': stream, 'on_metrics': on_metrics}
  if role == 'server':
    return local.run_local(config, workdir, num_workers=0, **options)
  if role == 'watch':
    return _watch(config, workdir, peers, **options)
  _run_member(config, workdir, role, node, peers, listen)
  return None


def _run_member(
  config: training.TrainingConfig,
  workdir: str | os.PathLike[str],
  role: str,
  node: int | None,
  peers: tuple[str, ...],
  listen: str,
) -> None:
  """Runs a node or a centre in a child process."""
  _check_member(config, role, node, peers)
  _split_listen(listen)  # Raises if it is not an address; so does the next.
  runtime.Registry(workdirs.Workdir(workdir), peers, wire=config.runtime.wire)
  settings = dataclasses.asdict(config)
  folder = workdirs.open_workdir(workdir, settings)
  stop_signal = threading.Event()
  with signals.take_signals(stop_signal):
    child = runtime.Child(
      role if node is None else f'{role}-{node}',
      f'{__name__}:{serve_member.__name__}',
      {
        'config': settings,
        'workdir': os.fspath(folder),
        'role': role,
        'node': node,
        'peers': peers,
        'listen': listen,
      },
      num_threads=config.processes.num_threads,
    )
    try:
      while child.code is None and not stop_signal.wait(_INTERVAL):
        pass
    finally:
      code = child.end(_END_TIMEOUT)
  if code:
    raise results.RunError(
      f'The {role} ended with exit code {code}{explain_code(config, code)}. '
      'The same command goes on from its last checkpoint, or from the start if '
      'it has none.'
    )


def explain_code(config: training.TrainingConfig, code: int) -> str:
  """The meaning of an exit code of a node or centre."""
  if code > 0:
    return '; the reason is above'
  kind: Any = config.strategy.find_class()
  if code == -signal.SIGABRT and kind.is_collective:
    return (
      ': jax has ended it, as it does if node 0, where all nodes meet, is '
      'gone, or if other nodes are silent or have not arrived in time'
    )
  return ', as it was killed'


def _check_member(
  config: training.TrainingConfig,
  role: str,
  node: int | None,
  peers: tuple[str, ...],
) -> None:
  """Raises a ValueError if a process cannot be in this run."""
  num_nodes = config.num_workers
  kind: Any = config.strategy.find_class()
  rules = {
    f'num_workers={num_nodes} nodes have the numbers 0 to {num_nodes - 1}, '
    f'got {node}.': node is None or 0 <= node < num_nodes,
    'Without a folder that all can see, nodes cannot choose their numbers: a '
    'node that is given peers must be given its number, too.': (
      not peers or node is not None or role == 'centre'
    ),
    'Only elastic averaging has a centre, got '
    f'strategy.name={config.strategy.name!r}.': (
      role != 'centre' or kind.has_centre
    ),
    'The processes of an all-reduce must be given their numbers, and one '
    f'address where they meet, got {node} and {peers}.': (
      not kind.is_collective or (node is not None and len(peers) == 1)
    ),
  }
  problems = [rule for rule, holds in rules.items() if not holds]
  if problems:
    raise ValueError(' '.join(problems))


def _split_listen(text: str) -> tuple[str, int]:
  """Host and port, 0 if there is none, of 'HOST' or 'HOST:PORT'."""
  host, colon, port = text.rpartition(':')
  if not colon:
    return text, 0
  if not port.isdecimal() or not host:
    raise ValueError(
      f'The address to listen at must be HOST or HOST:PORT, got {text!r}.'
    )
  return host, int(port)


def serve_member(
  config: dict[str, Any],
  workdir: str,
  *,
  role: str,
  node: int | None,
  peers: list[str],
  listen: str,
  stopped: threading.Event,
) -> None:
  """The process of a node, or of the centre; see `run_role`."""
  parsed = training.read_config(config)
  kind: Any = parsed.strategy.find_class()
  if kind.is_collective:
    assert node is not None  # It was checked.
    deadlines = parsed.deadlines.make()
    runtime.join_group(peers[0], parsed.num_workers, node, deadlines, stopped)
    # Finding devices needs all processes at once. Later, only some of them may
    # have to make a header, which needs the devices.
    jax.devices()
    peers = []
  folder = workdirs.Workdir(workdir)
  recipe = recipes.from_config(parsed)
  others = tuple(peer for peer in peers if peer != listen)
  registry = recipe.make_registry(folder, others)
  options: dict[str, Any] = {
    'header': recipe.find_header(folder, find_origin(registry, others)),
    'registry': registry,
    'bind': recipe.make_bind_address(*_split_listen(listen)),
    'linger': parsed.deadlines.end,
    'stopped': stopped,
  }
  if role == 'centre':
    member = children.make_member(recipe, folder, recipes.SERVER, **options)
  elif node is None:
    with runtime.claim_number(folder, recipe.num_workers) as number:
      member = children.make_member(recipe, folder, number, **options)
  else:
    member = children.make_member(recipe, folder, node, **options)
  member.run()


def find_origin(
  registry: runtime.Registry, peers: tuple[str, ...]
) -> float | None:
  """The time of day at which the run began; None if no node is there yet.

  Nodes are asked once: they may be waiting for this one. Nodes that meet later
  take the earliest time.

  Args:
    registry: Registry that knows the addresses.
    peers: The addresses, for a warning.

  Returns:
    The time.
  """
  origins = [status['origin'] for status in registry.contact_addresses()]
  if peers and not origins:
    _log.warning('No node answers at %s yet.', ', '.join(peers))
  return min(origins, default=None)


def _watch(
  config: training.TrainingConfig,
  workdir: str | os.PathLike[str],
  peers: tuple[str, ...],
  *,
  stream: TextIO | None,
  on_metrics: views.OnMetrics | None,
) -> results.Result:
  """Watches nodes that other launchers have started.

  The mean is that of snapshots, rounded as messages are, which are pulled one
  after the other while the nodes go on. Traces are read if the folder is also
  that of the nodes.
  """
  folder = workdirs.Workdir(workdir)
  recipe = recipes.from_config(config)
  registry = recipe.make_registry(folder, peers)
  workdirs.open_workdir(folder, recipe.settings)
  find_origin(registry, peers)  # Warns if no node is there yet.
  return local.supervise(
    recipe,
    folder,
    lambda: {
      member: functools.partial(supervisors.Remote, runtime.name_member(member))
      for member in local.list_members(recipe)
    },
    registry=registry,
    is_owner=False,
    stream=stream,
    on_metrics=on_metrics,
  )
