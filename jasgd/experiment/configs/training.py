"""The config of a training run, and the parts of a run that it defines."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import numpy as np
import optax

from jasgd import engine
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks
from jasgd import traces
from jasgd.experiment.configs import optimizer as optimizers
from jasgd.experiment.configs import parts
from jasgd.experiment.configs import runtime as runtimes
from jasgd.experiment.configs import strategy as strategies

# A run with more workers would not fit in memory, even without weights.
_MAX_WORKERS = 10**7


@dataclasses.dataclass(kw_only=True)
class TrainingConfig:
  """A training run: task, optimizer, strategy, place, and length."""

  task: parts.TaskConfig = dataclasses.field(default_factory=parts.TaskConfig)
  optimizer: optimizers.OptimizerConfig = dataclasses.field(
    default_factory=optimizers.OptimizerConfig
  )
  schedule: optimizers.ScheduleConfig = dataclasses.field(
    default_factory=optimizers.ScheduleConfig
  )
  strategy: strategies.StrategyConfig = dataclasses.field(
    default_factory=strategies.StrategyConfig
  )
  # Number of workers: learners of a server, or nodes without one.
  num_workers: int = 16
  time: parts.TimeConfig = dataclasses.field(default_factory=parts.TimeConfig)
  network: parts.NetworkConfig = dataclasses.field(
    default_factory=parts.NetworkConfig
  )
  failures: parts.FailureConfig = dataclasses.field(
    default_factory=parts.FailureConfig
  )
  runtime: runtimes.RuntimeConfig = dataclasses.field(
    default_factory=runtimes.RuntimeConfig
  )
  server: runtimes.ServerConfig = dataclasses.field(
    default_factory=runtimes.ServerConfig
  )
  processes: runtimes.ProcessConfig = dataclasses.field(
    default_factory=runtimes.ProcessConfig
  )
  deadlines: runtimes.DeadlineConfig = dataclasses.field(
    default_factory=runtimes.DeadlineConfig
  )
  # Passes over the training set, in samples of applied gradients.
  num_epochs: float = 10.0
  # Updates of the server, or steps of all nodes together, at most; 0: as many
  # as num_epochs takes.
  num_updates: int = 0
  # Seed of every random draw in the run.
  seed: int = 0
  # Workdir of a run whose last weights are the first of this run; '': the first
  # weights are drawn from the seed.
  init_from: str = ''

  # --- Validation: checks only. No data is loaded, and nothing is compiled.

  def validate(self) -> None:
    """Raises one ValueError that names every error in the config.

    Errors that only the data can show, such as a batch that is larger than the
    training set, are raised by `make_task`.
    """
    made: list[Any] = []
    unmade = parts.list_problems(lambda: made.append(self.make_strategy()))
    num_workers = self.num_workers
    if made:
      num_workers = strategies.count_workers(made[0], num_workers)
    problems = [
      *self.task.list_problems(),
      *self.optimizer.list_problems(),
      *self.schedule.list_problems(),
      *self.runtime.list_problems(),
      *self.server.list_problems(),
      *self.processes.list_problems(),
      *self.deadlines.list_problems(),
      *(
        rule
        for rule, holds in self._list_rules(num_workers).items()
        if not holds
      ),
      *unmade,
      *parts.list_problems(
        self.time.make,
        self.network.make,
        lambda: self.failures.make(num_workers, self.seed),
      ),
    ]
    if not problems:
      problems = parts.list_problems(lambda: self._check_strategy(made[0]))
    if problems:
      raise ValueError('Bad config: ' + ' '.join(problems))

  def _list_rules(self, num_workers: int) -> dict[str, bool]:
    """The sentence about each error, and whether there is no such error."""
    mode = self.runtime.mode
    return {
      f'num_workers must be from 1 to {_MAX_WORKERS}, got {num_workers}.': (
        1 <= num_workers <= _MAX_WORKERS
      ),
      f'num_epochs must be finite and above 0, got {self.num_epochs}.': (
        0 < self.num_epochs < math.inf
      ),
      f'num_updates must be at least 0, got {self.num_updates}.': (
        self.num_updates >= 0
      ),
      f'seed must be from 0 to 2^31 - 1, got {self.seed}.': (
        0 <= self.seed < 2**31
      ),
      'failures are only for virtual time, runtime.mode=simulate; real '
      f'processes fail by themselves, got {self.failures} with '
      f'runtime.mode={mode}.': (
        mode == 'simulate' or self.failures == parts.FailureConfig()
      ),
    } | (
      self._list_peer_rules()
      if self.strategy.is_peer
      else {
        "runtime.mode 'devices' is for peer strategies, such as pull, got "
        f'strategy.name={self.strategy.name!r}.': mode != 'devices',
      }
    )

  def _list_peer_rules(self) -> dict[str, bool]:
    optimizer = self.optimizer
    return {
      'Nodes step on their own gradients, which are not stale: '
      f'optimizer.policy must be constant, got {optimizer.policy!r}.': (
        optimizer.policy == 'constant'
      ),
      'Nodes step on their own gradients, which are not stale: '
      f'optimizer.correction must be none, got {optimizer.correction!r}.': (
        optimizer.correction == 'none'
      ),
      'Each gradient of a node is an update: use optimizer.clip_update, got '
      f'optimizer.clip_gradient={optimizer.clip_gradient}.': (
        not optimizer.clip_gradient
      ),
      'Nodes do not pull while they push: runtime.overlap must be False.': (
        not self.runtime.overlap
      ),
    }

  def _check_strategy(self, strategy: Any) -> None:
    """Raises a ValueError if the strategy does not fit the other fields."""
    mode = self.runtime.mode
    num_workers = strategies.count_workers(strategy, self.num_workers)
    if strategy.has_server:
      if self.runtime.is_real:  # Its times and failures are its own.
        strategy.check(num_workers)
      else:
        if strategy.needs_equal_times and self.time.name != 'constant':
          raise ValueError(
            f'{strategy!r} needs equal times: set time.name=constant and '
            f'time.arguments=(1.0,), got time.name={self.time.name!r}.'
          )
        simulation.check_simulation(
          **self._list_arguments(strategy), num_gradients=1
        )
      return
    if self.runtime.is_real and strategy.refusal_of_processes:
      raise ValueError(strategy.refusal_of_processes)
    if (
      strategy.is_collective
      and self.runtime.wire_dtype != 'float32'
      and mode != 'devices'
    ):
      raise ValueError(
        'Only an all-reduce on devices can round its messages: otherwise '
        f'runtime.wire_dtype must be float32, got {self.runtime.wire_dtype!r}.'
      )
    if mode == 'devices':
      # Checked as on one device: counting devices would start jax's backend.
      options = self._list_device_options() | {'runner': 'vmap'}
      engine.check_devices(strategy, **options)
    elif mode == 'simulate':
      simulation.check_simulation(
        **self._list_arguments(strategy), num_gradients=1
      )
    else:
      strategy.check(num_workers)

  # --- Parts of the run.

  def describe(self) -> str:
    """The strategy, and on devices the place, in words."""
    text = self.make_strategy().describe()
    if self.runtime.mode != 'devices':
      return text
    runner = self.choose_devices()['runner']
    where = 'one device' if runner == 'vmap' else 'a device each'
    return (
      f'{text} On devices all {self.num_workers} nodes step together: on '
      f'{where} ({runner}), of {jax.local_device_count()} here.'
    )

  def count_workers(self) -> int:
    """Number of learners or nodes."""
    if self.strategy.is_peer:
      return self.num_workers
    return strategies.count_workers(self.make_strategy(), self.num_workers)

  def make_strategy(self) -> Any:
    """A new protocol or peer strategy, before the start of a run."""
    return self.strategy.make(self.num_workers, self.seed)

  def make_task(self) -> tasks.Task:
    """The task, with its data.

    Raises:
      ValueError: if the data does not fit the config.
      MissingDataError: if there is no data.
    """
    task = self.task.make(self.count_workers(), self.seed)
    if task.is_streamed and self.strategy.is_peer:
      raise ValueError(
        f'The task {task.name!r} is streamed, and nodes need its data in '
        "memory: set task.augment='none'."
      )
    return task

  def make_optimizer(self) -> optax.GradientTransformation:
    """The optimizer of the server, or of each node, at rate 1."""
    return self.optimizer.make_optimizer()

  def make_update_options(self) -> dict[str, Any]:
    """Policy and per-gradient transformation of a server."""
    return {
      'policy': self.optimizer.make_policy(),
      'per_gradient': self.optimizer.make_per_gradient(),
    }

  def make_schedule(self) -> Callable[[float], float]:
    """The rate as a function of epochs."""
    num_gradients = 1  # Any value would do if the rate is not scaled.
    if self.schedule.scaling != 'none':
      num_gradients = self.count_gradients_per_update()
    return self.schedule.make(
      self.optimizer.rate, self.num_epochs, num_gradients * self.task.batch
    )

  def shape_weights(self) -> Any:
    """The shapes of (params, stats)."""
    return jax.eval_shape(self.make_task().init, jax.random.key(0))

  def check_devices(self) -> None:
    """Raises a ValueError if there are too few devices; starts jax."""
    engine.check_devices(self.make_strategy(), **self.choose_devices())

  def choose_devices(self) -> dict[str, Any]:
    """Arguments of `engine.make_device_program`; counts the devices."""
    runner = self.runtime.choose_runner(self.num_workers)
    return self._list_device_options() | {'runner': runner}

  def _list_device_options(self) -> dict[str, Any]:
    dtype = self.runtime.wire_dtype
    return {
      'num_nodes': self.num_workers,
      # None sends weights as they are.
      'dtype': None if dtype == 'float32' else dtype,
    }

  # --- Length of the run.

  def count_gradients_per_update(self) -> int:
    """Number of gradients in an update while all workers are present."""
    return strategies.count_gradients_per_update(
      self.make_strategy(), self.count_workers()
    )

  def count_steps(self) -> int:
    """Steps that each node makes."""
    num_steps = self.num_epochs * self._count_updates_per_epoch()
    num_steps = min(num_steps, self.num_updates or num_steps)
    return math.ceil(num_steps / self.num_workers)

  def choose_eval_every(self) -> int:
    """Updates, or steps of all nodes, between evaluations."""
    per_epoch = self._count_updates_per_epoch()
    return self.runtime.eval_every or max(1, round(per_epoch))

  def _count_updates_per_epoch(self) -> float:
    """Updates, or steps of all nodes, in an epoch."""
    task = self.make_task()
    per_update = 1
    if not self.strategy.is_peer:
      per_update = self.count_gradients_per_update()
    return task.num_samples / (per_update * task.batch)

  # --- The trace of virtual time.

  def simulate(self) -> traces.Trace:
    """The trace of the run in virtual time, without weights.

    With a server it ends with the update that reaches the budget.

    Raises:
      ValueError: if the run does not reach its budget, or its weights would
        not fit into memory.
    """
    task = self.make_task()
    strategy = self.make_strategy()
    arguments = self._list_arguments(strategy, self._count_parameters())
    if not strategy.has_server:
      num_gradients = self.count_steps() * self.num_workers
      trace = run_simulation(**arguments, num_gradients=num_gradients)
      # Weights that are mixed in are rounded as in a real run.
      header = {**trace.header, 'wire_dtype': self.runtime.wire_dtype}
      return dataclasses.replace(trace, header=header)
    if strategy.needs_equal_times:
      # Every learner computes on another version, and the server has its own.
      engine.check_memory(self.count_workers() + 1, self.shape_weights())
    num_samples = math.ceil(self.num_epochs * task.num_samples)
    num_gradients = -(-num_samples // (task.batch * strategy.steps_per_push))
    if self.num_updates:
      per_update = strategies.count_gradients_per_update(
        strategy, self.count_workers()
      )
      num_gradients = min(num_gradients, self.num_updates * per_update)
    while True:
      trace = run_simulation(**arguments, num_gradients=num_gradients)
      end = find_end(trace, num_samples, self.num_updates)
      if end is not None:
        return trace[:end]
      if trace.num_gradients < num_gradients:
        raise ValueError(
          f'All learners were gone after {trace.num_gradients} gradients, '
          f'before the {self.num_epochs} epochs were over.'
        )
      # Some gradients were dropped, or are still to be applied.
      num_gradients += num_gradients // 2 + 2 * self.count_workers()

  def make_plan(self, trace: traces.Trace, **bounds: Any) -> engine.Plan:
    """The plan of a replay, with the rate of each update.

    Args:
      trace: Trace of the run.
      **bounds: `num_updates` or `until` of `engine.make_plan`.

    Returns:
      The plan.
    """
    task = self.make_task()
    return engine.make_plan(
      trace,
      num_samples=task.num_samples,
      batch=task.batch,
      get_rate=self.make_schedule(),
      **bounds,
    )

  def _count_parameters(self) -> int:
    params, _ = self.shape_weights()
    return sum(leaf.size for leaf in jax.tree.leaves(params))

  def _list_arguments(
    self, strategy: gossip.Strategy, num_parameters: int = 1
  ) -> dict[str, Any]:
    """The arguments of `run_simulation`, except the number of gradients."""
    num_workers = strategies.count_workers(strategy, self.num_workers)
    return {
      'strategy': strategy,
      'num_workers': num_workers,
      'compute': self.time.make(),
      'network': self.network.make(num_parameters),
      'failures': self.failures.make(num_workers, self.seed),
      'overlap': self.runtime.overlap,
      'batch': self.task.batch,
      'seed': self.seed,
    }


def read_config(settings: dict[str, Any]) -> TrainingConfig:
  """The config that `dataclasses.asdict`, or a workdir's config.json, holds.

  Args:
    settings: Nested dict, possibly after a round trip through JSON: tuples have
      become lists, and infinity a string.

  Returns:
    The config.

  Raises:
    ValueError: if that is not the config of a training run.
  """
  kinds = {
    field.name: field.default_factory
    for field in dataclasses.fields(TrainingConfig)
    if field.default_factory is not dataclasses.MISSING
  }
  unknown = _list_unknown(TrainingConfig, settings)
  for name in kinds.keys() & settings.keys():
    unknown += _list_unknown(kinds[name], settings[name], f'{name}.')
  if unknown:
    raise ValueError(
      'This is not the config of a training run of this version of jasgd: it '
      f'has {", ".join(unknown)}. Run the training again, or use the jasgd '
      'that wrote it.'
    )
  try:
    fields: dict[str, Any] = dict(settings)
    for name in kinds.keys() & settings.keys():
      given = settings[name].items()
      fields[name] = kinds[name](
        **{key: _from_json(value) for key, value in given}
      )
    return TrainingConfig(**fields)
  except (AttributeError, TypeError) as error:
    raise ValueError(
      f'This is not the config of a training run: {error}.'
    ) from None


def _list_unknown(kind: Any, settings: Any, prefix: str = '') -> list[str]:
  """Names in a config that are no fields of its class, sorted."""
  if not isinstance(settings, dict):
    return []  # `read_config` refuses it.
  known = {field.name for field in dataclasses.fields(kind)}
  return [f'{prefix}{name}' for name in sorted({*settings} - known)]


def _from_json(value: Any) -> Any:
  """Tuples for lists at every level, and numbers for their names."""
  if isinstance(value, list):
    return tuple(_from_json(entry) for entry in value)
  if value in ('inf', '-inf', 'nan'):  # As `workdirs.write_json` writes them.
    return float(value)
  return value


# --- The call of the simulator, and the reader of its records.


def run_simulation(
  *, strategy: Any, num_gradients: int, **arguments: Any
) -> traces.Trace:
  """Simulates any strategy.

  Args:
    strategy: A protocol or peer strategy.
    num_gradients: Gradients of all workers together.
    **arguments: As in `TrainingConfig._list_arguments`.

  Returns:
    The trace.
  """
  if strategy.has_server:
    # A copy: the simulator changes the protocol, and may be called again.
    strategy = gossip.make_strategy(strategy.to_config())
  return simulation.simulate(strategy, num_gradients=num_gradients, **arguments)


def find_end(
  trace: traces.Trace, num_samples: int, num_updates: int
) -> int | None:
  """Number of records up to the update that reaches a budget.

  Args:
    trace: Trace of a run with a server.
    num_samples: Samples of applied gradients.
    num_updates: Updates; 0: only the samples count.

  Returns:
    The number; None if the trace ends before.
  """
  records = trace.records
  is_applied = (records['kind'] == traces.Kind.PUSH) & (
    records['fate'] == protocols.Fate.APPLIED
  )
  clocks = records['version'] - records['updates']
  samples = np.cumsum(records['samples'] * is_applied)
  is_enough = is_applied & (samples >= num_samples)
  if num_updates:
    is_enough |= is_applied & (clocks >= num_updates - 1)
  if not np.any(is_enough):
    return None
  # Up to the record that makes this update, which may be a LEAVE.
  clock = clocks[np.argmax(is_enough)]
  is_made = records['version'] > clock
  return int(np.argmax(is_made)) + 1 if np.any(is_made) else None
