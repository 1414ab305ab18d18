"""What the processes of a run of nodes do, from its config."""

import dataclasses
import threading
import time
from typing import Any

from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.experiment import _node_training
from jasgd.experiment import _running
from jasgd.experiment import _train

_WIRES = {
  'auto': ('memory', 'flight'),
  'memory': ('memory',),
  'flight': ('flight',),
}


def make_node_settings(
  config: _node_training.NodeTrainingConfig,
  *,
  origin: float = 0.0,
  header: dict[str, Any] | None = None,
) -> runtime.NodeSettings:
  """What nodes of this config are told.

  Args:
    config: Of the run.
    origin: The time of day at which it began.
    header: Of the traces.

  Returns:
    The settings.
  """
  return runtime.NodeSettings(
    task=config.make_task(),
    optimizer=config.make_optimizer(),
    strategy=config.make_strategy(),
    num_nodes=config.strategy.num_nodes,
    num_steps=config.count_steps(),
    seed=config.seed,
    init=_train.load_init(config),
    get_rate=config.make_schedule(),
    wire_dtype=config.runtime.wire_dtype,
    checkpoint_seconds=config.runtime.checkpoint_seconds,
    min_seconds=tuple(config.processes.min_seconds),
    deadlines=config.deadlines.make(),
    origin=origin,
    header=header or {},
  )


def run_peer(
  config: dict[str, Any],
  workdir: str,
  *,
  node: int,
  origin: float,
  header: dict[str, Any],
  stopped: threading.Event,
) -> None:
  """What a node's process does.

  Args:
    config: As JSON says it.
    workdir: Of the run.
    node: Its number.
    origin: The time of day at which the run began.
    header: Of its trace.
    stopped: Set, it ends the node in good order.
  """
  parsed = _read(config)
  run = workdirs.Workdir(workdir)
  runtime.Peer(
    make_node_settings(parsed, origin=origin, header=header),
    run,
    node,
    make_registry(parsed, run),
    make_place(parsed),
    stopped=stopped,
  ).run()


def run_centre(
  config: dict[str, Any],
  workdir: str,
  *,
  origin: float,
  header: dict[str, Any],
  stopped: threading.Event,
) -> None:
  """What the centre's process does; arguments as of `run_peer`."""
  parsed = _read(config)
  run = workdirs.Workdir(workdir)
  runtime.Centre(
    make_node_settings(parsed, origin=origin, header=header),
    run,
    make_registry(parsed, run),
    make_place(parsed),
    stopped=stopped,
  ).run()


def run_group_node(
  config: dict[str, Any],
  workdir: str,
  *,
  node: int,
  origin: float,
  header: dict[str, Any],
  coordinator: str,
  stopped: threading.Event,
) -> None:
  """What a node's process does in an all-reduce.

  Args:
    config: As JSON says it.
    workdir: Of the run.
    node: Its number.
    origin: The time of day at which the run began.
    header: Of its trace.
    coordinator: Where all processes meet.
    stopped: Set, it asks all to end in good order.
  """
  parsed = _read(config)
  run = workdirs.Workdir(workdir)
  join_group(parsed, coordinator, node, stopped)
  runtime.GroupNode(
    make_node_settings(parsed, origin=origin, header=header),
    run,
    node,
    make_registry(parsed, run),
    make_place(parsed),
    stopped=stopped,
  ).run()


def join_group(
  config: _node_training.NodeTrainingConfig,
  coordinator: str,
  node: int,
  stopped: threading.Event,
) -> None:
  """Makes this process one of an all-reduce; before anything is computed.

  Args:
    config: Of the run.
    coordinator: 'HOST:PORT', where node 0 listens.
    node: Which one this is.
    stopped: Set, it does not wait for the others any longer.
  """
  runtime.join_group(
    coordinator,
    config.strategy.num_nodes,
    node,
    config.deadlines.make(),
    stopped,
  )


def make_registry(
  config: _node_training.NodeTrainingConfig,
  run: workdirs.Workdir,
  peers: tuple[str, ...] = (),
) -> runtime.Registry:
  """Where the nodes of a run are.

  Args:
    config: Of the run.
    run: Its folder.
    peers: Addresses of nodes that do not see it.

  Returns:
    What is known.
  """
  return runtime.Registry(
    run, peers, wire=config.runtime.wire, tls=config.server.make_tls()
  )


def find_header(
  config: _node_training.NodeTrainingConfig,
  folder: workdirs.Workdir,
  began_at: float | None = None,
) -> dict[str, Any]:
  """What ran, and on what: as it was when the run began.

  Args:
    config: Of the run.
    folder: Of the run, where it is kept. Several processes may ask at once.
    began_at: The time of day at which it began elsewhere; None: it begins here.

  Returns:
    The header of traces.

  Raises:
    WorkdirError: if another process holds it back for too long.
  """
  if not folder.provenance.exists():
    # Before the lock: the processes of a group find devices together.
    header = workdirs.describe_run(dataclasses.asdict(config), config.seed)
    # Of the processes, not of this one: bits depend on it.
    header['num_threads'] = config.processes.num_threads
    header['began_at'] = time.time() if began_at is None else began_at
    path, patience = folder.root / 'header.lock', config.deadlines.start
    with workdirs.lock_file(path, patience=patience) as is_mine:
      if not is_mine:
        raise workdirs.WorkdirError(
          f'Another process has held {str(path)!r} for {patience:g} s, and has '
          'not written what runs here: end it first.'
        )
      if not folder.provenance.exists():
        workdirs.write_json(folder.provenance, header)
  return workdirs.read_json(folder.provenance)


def _read(config: dict[str, Any]) -> _node_training.NodeTrainingConfig:
  parsed = _running.read_config(config)
  assert isinstance(parsed, _node_training.NodeTrainingConfig)
  return parsed


def make_place(
  config: _node_training.NodeTrainingConfig, host: str = '', port: int = 0
) -> runtime.Place:
  """Where a node listens.

  Args:
    config: Of the run.
    host: An address of this machine; '': the config's.
    port: 0: any that is free, as there may be several nodes here.

  Returns:
    The place.
  """
  return runtime.Place(
    host=host or config.server.host,
    port=port,
    wires=_WIRES[config.runtime.wire],
    tls=config.server.make_tls(),
  )
