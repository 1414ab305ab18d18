"""A run of nodes on many machines: a process for each, and one who watches."""

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
from jasgd.experiment import _chunks
from jasgd.experiment import _node_local
from jasgd.experiment import _node_running
from jasgd.experiment import _node_training
from jasgd.experiment import _running
from jasgd.experiment import _signals
from jasgd.experiment import _supervisor

_log = logging.getLogger(__name__)

MEMBER_ROLES = ('node', 'centre')

# Between two looks, in seconds.
_INTERVAL = 0.2
# How long a process may take to end once it was asked to, in seconds.
_END_TIMEOUT = 60.0


def run_member(
  config: _node_training.NodeTrainingConfig,
  workdir: str | os.PathLike[str],
  role: str = 'node',
  *,
  node: int | None = None,
  peers: tuple[str, ...] = (),
  listen: str = '',
) -> None:
  """Is one of a run's nodes, or its centre, until all have made their steps.

  Others are found by their addresses in the workdir, if it is a folder that all
  can see, or through any that is there already. A node that was here before
  goes on from its checkpoint; one that comes late begins with the weights of
  another one. Ctrl-C and SIGTERM end it in good order.

  Args:
    config: The same for all.
    workdir: The folder of the run: one for all, or one of its own.
    role: One of `MEMBER_ROLES`.
    node: The number of the node; None: the lowest one that is free in the
      workdir.
    peers: Where others are who do not share the workdir: 'HOST:PORT' of any of
      them. Of an all-reduce: where node 0 is to wait for the others, the same
      for all.
    listen: 'HOST' or 'HOST:PORT' of this machine; '': the config's host.

  Raises:
    ValueError: if that makes no sense, or the folder is of another run.
    RunError: if it ended badly.
  """
  config.validate()
  _check_member(config, role, node, peers)
  split_listen(listen)  # It must be one, and so must be the peers.
  _node_running.make_registry(config, workdirs.Workdir(workdir), peers)
  folder = workdirs.open_workdir(workdir, dataclasses.asdict(config))
  stop_signal = threading.Event()
  with _signals.take_signals(stop_signal):
    child = runtime.Child(
      role if node is None else f'{role}-{node}',
      'jasgd.experiment:serve_member',
      {
        'config': dataclasses.asdict(config),
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
    raise _supervisor.RunError(
      f'The {role} ended with exit code {code}{_explain(config, code)}. The '
      'same command goes on from its last checkpoint, or from the start if it '
      'has none.'
    )


def _explain(config: _node_training.NodeTrainingConfig, code: int) -> str:
  """What an exit code means."""
  if code > 0:
    return '; why is said above'
  if code == -signal.SIGABRT and config.strategy.name == 'allreduce':
    return (
      ': jax has ended it, as it does if node 0, where all meet, is gone, or '
      'others are silent, or have not come in time'
    )
  return ', as it was killed'


def _check_member(
  config: _node_training.NodeTrainingConfig,
  role: str,
  node: int | None,
  peers: tuple[str, ...],
) -> None:
  """Raises a ValueError if somebody cannot be in this run."""
  num_nodes, name = config.strategy.num_nodes, config.strategy.name
  rules = {
    f'Unknown role {role!r}. Known: {", ".join(MEMBER_ROLES)}.': (
      role in MEMBER_ROLES
    ),
    f'strategy.num_nodes={num_nodes} have the numbers 0 to {num_nodes - 1}, '
    f'got {node}.': node is None or 0 <= node < num_nodes,
    'Without a folder that all can see, numbers cannot be shared out: a node '
    'that is given peers must be given its number, too.': (
      not peers or node is not None or role == 'centre'
    ),
    f'Only elastic averaging has a centre, got strategy.name={name!r}.': (
      role != 'centre' or name == 'elastic'
    ),
    'The processes of an all-reduce must be given their numbers, and one '
    f'address where they meet, got {node} and {peers}.': (
      name != 'allreduce' or (node is not None and len(peers) == 1)
    ),
  }
  problems = [rule for rule, holds in rules.items() if not holds]
  if problems:
    raise ValueError(' '.join(problems))


def split_listen(text: str) -> tuple[str, int]:
  """Host and port, 0 if there is none, of 'HOST' or 'HOST:PORT'."""
  host, colon, port = text.rpartition(':')
  if not colon:
    return text, 0
  if not port.isdecimal() or not host:
    raise ValueError(
      f'Where to listen must be HOST or HOST:PORT, got {text!r}.'
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
  """What the process of a node, or of the centre, does; see `run_member`."""
  parsed = _running.read_config(config)
  assert isinstance(parsed, _node_training.NodeTrainingConfig)
  is_group = parsed.strategy.name == 'allreduce'
  if is_group:
    assert node is not None  # It was checked.
    _node_running.join_group(parsed, peers[0], node, stopped)
    jax.devices()  # Whoever has the header need not: all find them together.
    peers = []
  run = workdirs.Workdir(workdir)
  others = tuple(peer for peer in peers if peer != listen)
  registry = _node_running.make_registry(parsed, run, others)
  header = _node_running.find_header(
    parsed, run, _find_origin(registry, others)
  )
  parts: dict[str, Any] = {
    'settings': _node_running.make_node_settings(
      parsed, origin=header['began_at'], header=header
    ),
    'run': run,
    'registry': registry,
    'place': _node_running.make_place(parsed, *split_listen(listen)),
    'linger': parsed.deadlines.end,
    'stopped': stopped,
  }
  if role == 'centre':
    runtime.Centre(**parts).run()
  elif node is None:
    with runtime.claim_number(run, parsed.strategy.num_nodes) as number:
      peer = runtime.Peer(**parts, node=number)
    peer.run()
  elif is_group:
    runtime.GroupNode(**parts, node=node).run()
  else:
    runtime.Peer(**parts, node=node).run()


def _find_origin(
  registry: runtime.Registry, peers: tuple[str, ...]
) -> float | None:
  """When the run began, as others have it; None if nobody is there yet.

  They are asked once: they may be waiting for this one to be there, too. Those
  who meet later take the earliest.

  Args:
    registry: Knows where they are.
    peers: Their addresses.

  Returns:
    The time of day.
  """
  origins = [status['origin'] for status in registry.ask_strangers()]
  if peers and not origins:
    _log.warning('Nobody answers at %s yet.', ', '.join(peers))
  return min(origins, default=None)


class _Remote:
  """A process elsewhere, which can be looked at, and no more."""

  code = None

  def __init__(self, name: str) -> None:
    self.name = name

  def end(self, timeout: float) -> int:
    """Leaves it alone: it ends by itself, or when it is told."""
    del timeout
    return 0

  def read_log(self) -> str:
    """What it says is said elsewhere."""
    return ''


def watch_nodes(
  config: _node_training.NodeTrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  peers: tuple[str, ...] = (),
  stream: TextIO | None = None,
  on_metrics: _chunks.OnMetrics | None = None,
) -> dict[str, Any]:
  """Looks at nodes that others have started: progress, metrics, the mean.

  It ends the nodes when all have made their steps. Ctrl-C ends the watch alone;
  called again, it goes on. The mean is that of snapshots which it pulls one
  after the other, as messages have them, while the nodes go on.

  Args:
    config: The nodes'.
    workdir: Where metrics and results go. Traces, and with them ages and bytes,
      are seen if it is the nodes' own.
    peers: Where nodes are who do not share it: 'HOST:PORT' of any of them.
    stream: Where the progress goes; standard error if None.
    on_metrics: Called with the steps and the metrics of each evaluation.

  Returns:
    How it ended; in `result.json` too, unless it was interrupted.

  Raises:
    RunError: if all nodes are gone.
    ValueError: if the config makes no sense, or the folder is of another run.
  """
  config.validate()
  folder = workdirs.Workdir(workdir)
  registry = _node_running.make_registry(config, folder, peers)
  workdirs.open_workdir(folder, dataclasses.asdict(config))
  _find_origin(registry, peers)  # Says so if nobody is there yet.
  return _node_local.supervise(
    config,
    folder,
    registry,
    {
      member: functools.partial(_Remote, runtime.name_member(member))
      for member in _node_local.list_expected(config)
    },
    is_owner=False,
    stream=stream,
    on_metrics=on_metrics,
  )
