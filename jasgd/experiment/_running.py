"""What the processes of a real run do, from their config."""

import dataclasses
import os
import threading
from typing import Any

from jasgd import runtime
from jasgd import tasks
from jasgd import workdir as workdirs
from jasgd.experiment import _base
from jasgd.experiment import _node_training
from jasgd.experiment import _optimizers
from jasgd.experiment import _parts
from jasgd.experiment import _runtimes
from jasgd.experiment import _train
from jasgd.experiment import _training

_PARTS: dict[str, Any] = {
  'task': _base.TaskConfig,
  'optimizer': _optimizers.OptimizerConfig,
  'schedule': _optimizers.ScheduleConfig,
  'protocol': _parts.ProtocolConfig,
  'strategy': _parts.StrategyConfig,
  'time': _parts.TimeConfig,
  'network': _parts.NetworkConfig,
  'failures': _parts.FailureConfig,
  'runtime': _runtimes.RuntimeConfig,
  'server': _runtimes.ServerConfig,
  'processes': _runtimes.ProcessConfig,
  'deadlines': _runtimes.DeadlineConfig,
}


def read_config(
  settings: dict[str, Any],
) -> _training.TrainingConfig | _node_training.NodeTrainingConfig:
  """A config from what `dataclasses.asdict`, or a workdir's config.json, says.

  Args:
    settings: From JSON: tuples are lists there, and inf is a text.

  Returns:
    The config: of nodes if there is a strategy, else with a server.

  Raises:
    ValueError: if that is no config of a training run.
  """
  try:
    fields: dict[str, Any] = dict(settings)
    for name, make in _PARTS.items():
      if name in settings:
        given = settings[name].items()
        fields[name] = make(**{key: _from_json(value) for key, value in given})
    if 'strategy' in settings:
      return _node_training.NodeTrainingConfig(**fields)
    return _training.TrainingConfig(**fields)
  except (AttributeError, TypeError) as error:
    raise ValueError(f'This is no config of a training run: {error}.') from None


def _from_json(value: Any) -> Any:
  """Lists are tuples, all the way down, and words for numbers are numbers."""
  if isinstance(value, list):
    return tuple(_from_json(entry) for entry in value)
  if value in ('inf', '-inf', 'nan'):  # As `workdirs.write_json` has them.
    return float(value)
  return value


def make_task(config: dict[str, Any]) -> tasks.Task:
  """The task of a config that came as JSON."""
  return read_config(config).make_task()


def make_settings(
  config: _training.TrainingConfig, init: tuple[Any, Any] | None = None
) -> runtime.ServerSettings:
  """What a server of this config is told.

  Args:
    config: Of the run.
    init: The first weights; None: those of the seed.

  Returns:
    The settings.
  """
  task = config.make_task()
  return runtime.ServerSettings(
    task=task,
    update=config.make_server(),
    protocol=config.protocol.make(),
    num_learners=config.protocol.count_learners(),
    seed=config.seed,
    init=init,
    num_updates=config.num_updates or None,
    num_epochs=config.num_epochs,
    get_rate=config.make_schedule(),
    local_rate=1.0,  # Times the rate of the schedule.
    wire_dtype=config.runtime.wire_dtype,
    overlap=config.runtime.overlap,
    eval_every=choose_eval_every(config),
    checkpoint_seconds=config.runtime.checkpoint_seconds,
    max_group=config.server.max_group,
    on_learner_lost=config.server.on_learner_lost,
    deadlines=config.deadlines.make(),
    header=workdirs.describe_run(dataclasses.asdict(config), config.seed),
  )


def count_updates(config: _training.TrainingConfig) -> int:
  """About how many updates a run makes, if nothing is dropped."""
  task = config.make_task()
  per_update = _training.count_gradients_per_update(
    config.protocol.make(), config.protocol.count_learners()
  )
  num_updates = -(
    -config.num_epochs * task.num_samples // (per_update * task.batch)
  )
  return int(min(num_updates, config.num_updates or num_updates))


def choose_eval_every(config: _training.TrainingConfig) -> int:
  """Updates between evaluations: about an epoch, if nobody says."""
  if config.runtime.eval_every:
    return config.runtime.eval_every
  return max(1, round(count_updates(config) / max(1.0, config.num_epochs)))


def serve_config(
  config: dict[str, Any], workdir: str, *, stopped: threading.Event
) -> None:
  """What the server's process does.

  Args:
    config: As JSON says it.
    workdir: Of the run.
    stopped: Set, it stops the run.
  """
  parsed = read_config(config)
  assert isinstance(parsed, _training.TrainingConfig)
  folder = workdirs.Workdir(workdir)
  init = None
  if not workdirs.list_checkpoints(folder):
    init = _train.load_init(parsed)
  settings = make_settings(parsed, init)
  wires = {
    'auto': ('memory', 'flight'),
    'memory': ('memory',),
    'flight': ('flight',),
  }
  runtime.serve(
    settings,
    folder,
    runtime.Place(
      host=parsed.server.host,
      port=parsed.server.port,
      wires=wires[parsed.runtime.wire],
      tls=parsed.server.make_tls(),
    ),
    stopped=stopped,
    on_ready=lambda server: workdirs.write_json(
      folder.provenance, server.get_trace().header
    ),
  )


def make_learner_job(
  config: _training.TrainingConfig,
  workdir: str | os.PathLike[str] | None,
  server: str = '',
) -> dict[str, Any]:
  """What a learner of this config is told: the arguments of `runtime.learn`.

  Args:
    config: Of the run.
    workdir: Where the server's address is.
    server: The address, if there is no workdir.

  Returns:
    What JSON can say.
  """
  tls = config.server.make_tls()
  return {
    'make_task': 'jasgd.experiment:make_task',
    'arguments': {'config': dataclasses.asdict(config)},
    'workdir': '' if workdir is None else os.fspath(workdir),
    'server': server,
    'wire': config.runtime.wire,
    'tls': None if tls is None else dataclasses.asdict(tls),
    'seed': config.seed,
    'wire_dtype': config.runtime.wire_dtype,
    'min_seconds': config.processes.min_seconds,
    'patience': config.processes.patience,
  }
