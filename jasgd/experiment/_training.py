"""The config of a training run, and what it stands for."""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from jasgd import engine
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks
from jasgd import traces
from jasgd.experiment import _optimizers
from jasgd.experiment import _parts
from jasgd.experiment import _runtimes
from jasgd.experiment import _simulations


@dataclasses.dataclass(kw_only=True)
class TaskConfig:
  """What is learned."""

  # One of `jasgd.tasks.TASKS`.
  name: str = 'digits'
  # Of the task; '': its first.
  model: str = ''
  # Samples per gradient.
  batch: int = 32
  # Where tensorflow-datasets keeps its sets; '': its own default folder.
  data_dir: str = ''
  # Who owns which samples: whole, shards or dirichlet.
  shards: str = 'whole'
  # dirichlet: how alike the shards are.
  alpha: float = 0.5
  # Of images: none or flip_crop.
  augment: str = 'none'

  def make(self, num_learners: int, seed: int) -> tasks.Task:
    """The task."""
    # Shards alone depend on them: without, all runs share a task, and what is
    # compiled for it.
    if self.shards == 'whole':
      num_learners, seed = 1, 0
    return _make_task(*dataclasses.astuple(self), num_learners, seed)


# The same object for the same settings: data is loaded, and functions are
# compiled, once.
@functools.lru_cache(maxsize=4)
def _make_task(
  name: str,
  model: str,
  batch: int,
  data_dir: str,
  shards: str,
  alpha: float,
  augment: str,
  num_learners: int,
  seed: int,
) -> tasks.Task:
  return tasks.make_task(
    name,
    batch=batch,
    data_dir=data_dir or None,
    model=model or None,
    num_learners=num_learners,
    shards=shards,
    alpha=alpha,
    seed=seed,
    augment=augment,
  )


@dataclasses.dataclass(kw_only=True)
class TrainingConfig:
  """A training run: what is learned, how, by whom, and for how long."""

  task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
  optimizer: _optimizers.OptimizerConfig = dataclasses.field(
    default_factory=_optimizers.OptimizerConfig
  )
  schedule: _optimizers.ScheduleConfig = dataclasses.field(
    default_factory=_optimizers.ScheduleConfig
  )
  protocol: _parts.ProtocolConfig = dataclasses.field(
    default_factory=_parts.ProtocolConfig
  )
  time: _parts.TimeConfig = dataclasses.field(default_factory=_parts.TimeConfig)
  network: _parts.NetworkConfig = dataclasses.field(
    default_factory=_parts.NetworkConfig
  )
  failures: _parts.FailureConfig = dataclasses.field(
    default_factory=_parts.FailureConfig
  )
  runtime: _runtimes.RuntimeConfig = dataclasses.field(
    default_factory=_runtimes.RuntimeConfig
  )
  server: _runtimes.ServerConfig = dataclasses.field(
    default_factory=_runtimes.ServerConfig
  )
  processes: _runtimes.ProcessConfig = dataclasses.field(
    default_factory=_runtimes.ProcessConfig
  )
  deadlines: _runtimes.DeadlineConfig = dataclasses.field(
    default_factory=_runtimes.DeadlineConfig
  )
  # Passes over the training set, in samples of applied gradients.
  num_epochs: float = 10.0
  # Updates at the most; 0: as many as the epochs take.
  num_updates: int = 0
  # Of everything that is random.
  seed: int = 0
  # A workdir whose weights to start from; '': from the seed.
  init_from: str = ''

  def validate(self) -> None:
    """Raises one ValueError that names everything that is wrong."""
    num_learners = self.protocol.count_learners()
    problems = [
      *self.optimizer.list_problems(),
      *self.schedule.list_problems(),
      *self.runtime.list_problems(),
      *self.server.list_problems(),
      *self.processes.list_problems(),
      *self.deadlines.list_problems(),
      *self._list_own_problems(),
      *_simulations.list_problems(
        self.protocol.make,
        self.time.make,
        self.network.make,
        lambda: self.failures.make(num_learners, self.seed),
      ),
    ]
    task_problems = _simulations.list_problems(self.make_task)
    if not task_problems:
      task_problems = _simulations.list_problems(self._check_memory)
    problems += task_problems
    check = self._check_simulation
    if self.runtime.is_real:
      check = lambda: self.protocol.make().check(num_learners)
    problems = problems or _simulations.list_problems(check)
    if problems:
      raise ValueError('Bad config: ' + ' '.join(problems))

  def _check_simulation(self) -> None:
    simulation.check_setup(**self._simulation(1))

  def make_task(self) -> tasks.Task:
    """What is learned."""
    return self.task.make(self.protocol.count_learners(), self.seed)

  def make_server(self) -> engine.Update:
    """What the server does with gradients."""
    return engine.make_update(
      self.optimizer.make_optimizer(),
      policy=self.optimizer.make_policy(),
      per_gradient=self.optimizer.make_per_gradient(),
    )

  def make_schedule(self) -> Callable[[float], float]:
    """The rate as a function of epochs."""
    per_update = count_gradients_per_update(
      self.protocol.make(), self.protocol.count_learners()
    )
    return self.schedule.make(
      self.optimizer.rate, self.num_epochs, per_update * self.task.batch
    )

  def simulate(self) -> traces.Trace:
    """The trace, which ends with the update that reaches the budget."""
    task = self.make_task()
    protocol = self.protocol.make()
    num_samples = math.ceil(self.num_epochs * task.num_samples)
    per_push = task.batch * protocol.steps_per_push
    num_gradients = -(-num_samples // per_push)
    if self.num_updates:
      per_update = count_gradients_per_update(
        protocol, self.protocol.count_learners()
      )
      num_gradients = min(num_gradients, self.num_updates * per_update)
    while True:
      trace = simulation.simulate(**self._simulation(num_gradients))
      end = self._find_end(trace, num_samples)
      if end is not None:
        return trace[:end]
      num_arrived = trace.num_gradients
      if num_arrived < num_gradients:
        raise ValueError(
          f'All learners were gone after {num_arrived} gradients, before the '
          f'{self.num_epochs} epochs were over.'
        )
      # Some were dropped, or are still to be applied.
      num_gradients += num_gradients // 2 + 2 * trace.header['num_learners']

  def make_plan(self, trace: traces.Trace) -> engine.Plan:
    """What the trace wants to be computed, with the rate of each update."""
    task = self.make_task()
    return engine.make_plan(
      trace,
      num_samples=task.num_samples,
      batch=task.batch,
      get_rate=self.make_schedule(),
    )

  def _find_end(self, trace: traces.Trace, num_samples: int) -> int | None:
    """The number of records up to the update that reaches the budget."""
    records = trace.records
    is_applied = (records['kind'] == traces.Kind.GRADIENT) & (
      records['fate'] == protocols.Fate.APPLIED
    )
    is_enough = is_applied & (records['samples'] >= num_samples)
    if self.num_updates:
      is_enough |= is_applied & (records['apply_clock'] >= self.num_updates - 1)
    if not np.any(is_enough):
      return None
    clock = records['apply_clock'][np.argmax(is_enough)]
    # The whole update, and what made it: somebody's leaving, maybe.
    is_later = records['arrive_clock'] > clock
    return int(np.argmax(is_later)) if np.any(is_later) else len(records)

  def _simulation(self, num_gradients: int) -> dict[str, Any]:
    """What `jasgd.simulate` is to be called with."""
    num_learners = self.protocol.count_learners()
    return {
      'protocol': self.protocol.make(),
      'num_learners': num_learners,
      'num_gradients': num_gradients,
      'compute': self.time.make(),
      'network': self._make_network(),
      'failures': self.failures.make(num_learners, self.seed),
      'overlap': self.runtime.overlap,
      'batch': self.task.batch,
      'seed': self.seed,
    }

  def _make_network(self) -> simulation.Network:
    """The network, for messages of the model's size."""
    config = self.network
    if config.num_parameters == 1:  # The default: nobody gave a size.
      params, _ = self._shape_weights()
      size = sum(leaf.size for leaf in jax.tree.leaves(params))
      config = dataclasses.replace(config, num_parameters=size)
    return config.make()

  def _shape_weights(self) -> Any:
    """The shapes of (params, stats)."""
    return jax.eval_shape(self.make_task().init, jax.random.key(0))

  def _list_own_problems(self) -> list[str]:
    """What is wrong with the fields that are in no part."""
    rules = {
      f'num_epochs must be finite and above 0, got {self.num_epochs}.': (
        0 < self.num_epochs < math.inf
      ),
      f'num_updates must be at least 0, got {self.num_updates}.': (
        self.num_updates >= 0
      ),
      f'seed must be from 0 to 2^31 - 1, got {self.seed}.': (
        0 <= self.seed < 2**31
      ),
      'A constant_delay wants equal times: set time.name=constant and '
      f'time.arguments=(1.0,), got time.name={self.time.name!r}.': (
        self.protocol.name != 'constant_delay'
        or self.time.name == 'constant'
        or self.runtime.is_real
      ),
    }
    return [rule for rule, holds in rules.items() if not holds]

  def _check_memory(self) -> None:
    """Raises a ValueError if a constant delay has no room in memory."""
    if self.protocol.name == 'constant_delay':
      engine.check_memory(self.protocol.delay + 2, self._shape_weights())


def count_gradients_per_update(
  protocol: protocols.Protocol, num_learners: int
) -> int:
  """How many gradients an update takes while all learners are there."""
  if isinstance(protocol, protocols.ramp_up):
    protocol = protocol.protocol
  if isinstance(protocol, protocols.hardsync):  # And backup.
    return num_learners - protocol.num_backups
  if isinstance(protocol, protocols.softsync):
    return max(1, num_learners // protocol.n)
  if isinstance(protocol, protocols.rennala):
    return protocol.s
  return protocol.steps_per_push
