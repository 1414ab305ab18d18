"""What the processes of a run of nodes do, from its config."""

import functools
import threading
from typing import Any

from jasgd import gossip
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
  waits: bool = True,
) -> None:
  """What a node's process does.

  Args:
    config: As JSON says it.
    workdir: Of the run.
    node: Its number.
    origin: The time of day at which the run began.
    header: Of its trace.
    stopped: Set, it ends the node in good order.
    waits: Whether it waits for that when all is done.
  """
  parsed = _read(config)
  run = workdirs.Workdir(workdir)
  settings = make_node_settings(parsed, origin=origin, header=header)
  runtime.Peer(
    settings,
    run,
    node,
    functools.partial(
      runtime.find_others,
      run,
      node,
      is_elastic=isinstance(settings.strategy, gossip.Elastic),
      wire=parsed.runtime.wire,
      tls=parsed.server.make_tls(),
    ),
    _make_place(parsed),
    waits=waits,
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
  runtime.Centre(
    make_node_settings(parsed, origin=origin, header=header),
    workdirs.Workdir(workdir),
    _make_place(parsed),
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
  resume_at: int | None,
  first_number: int,
  save_every: int,
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
    resume_at: The checkpoint to go on from, if any.
    first_number: Of the next all-reduce.
    save_every: Steps between checkpoints.
    stopped: Set, it asks all to end in good order.
  """
  parsed = _read(config)
  runtime.join_group(coordinator, parsed.strategy.num_nodes, node)
  runtime.GroupNode(
    make_node_settings(parsed, origin=origin, header=header),
    workdirs.Workdir(workdir),
    node,
    _make_place(parsed),
    resume_at=resume_at,
    first_number=first_number,
    save_every=save_every,
    stopped=stopped,
  ).run()


def _read(config: dict[str, Any]) -> _node_training.NodeTrainingConfig:
  parsed = _running.read_config(config)
  assert isinstance(parsed, _node_training.NodeTrainingConfig)
  return parsed


def _make_place(config: _node_training.NodeTrainingConfig) -> runtime.Place:
  """Where a node listens: the port is any, as there are several nodes."""
  return runtime.Place(
    host=config.server.host,
    wires=_WIRES[config.runtime.wire],
    tls=config.server.make_tls(),
  )
