"""What configs of training runs have in common."""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax

from jasgd import simulation
from jasgd import tasks
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
  # Share of the training set that is evaluated on, instead of the test set, and
  # not trained on: to choose settings by.
  validation: float = 0.0

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
  validation: float,
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
    validation=validation,
  )


@dataclasses.dataclass(kw_only=True)
class RunConfig:
  """A training run, whoever learns: with a server, or nodes without one."""

  task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
  optimizer: _optimizers.OptimizerConfig = dataclasses.field(
    default_factory=_optimizers.OptimizerConfig
  )
  schedule: _optimizers.ScheduleConfig = dataclasses.field(
    default_factory=_optimizers.ScheduleConfig
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
  # Passes over the training set, in samples of applied gradients; of nodes, in
  # samples of the steps of all of them.
  num_epochs: float = 10.0
  # Of everything that is random.
  seed: int = 0
  # A workdir whose weights to start from; '': from the seed.
  init_from: str = ''

  def validate(self) -> None:
    """Raises one ValueError that names everything that is wrong."""
    problems = [
      *self.optimizer.list_problems(),
      *self.schedule.list_problems(),
      *self.runtime.list_problems(),
      *self.server.list_problems(),
      *self.processes.list_problems(),
      *self.deadlines.list_problems(),
      *(rule for rule, holds in self._list_rules().items() if not holds),
      *_simulations.list_problems(
        self._make_way,
        self.time.make,
        self.network.make,
        lambda: self.failures.make(self.count_learners(), self.seed),
      ),
    ]
    task_problems = _simulations.list_problems(self.make_task)
    if not task_problems:
      task_problems = _simulations.list_problems(self._check_task)
    problems += task_problems
    problems = problems or _simulations.list_problems(self._check_way)
    if problems:
      raise ValueError('Bad config: ' + ' '.join(problems))

  def count_learners(self) -> int:
    """How many learners, or nodes, there are."""
    raise NotImplementedError

  def describe(self) -> str:
    """Who waits for what, in words."""
    return self._make_way().describe()

  def make_task(self) -> tasks.Task:
    """What is learned."""
    return self.task.make(self.count_learners(), self.seed)

  def make_schedule(self) -> Callable[[float], float]:
    """The rate as a function of epochs."""
    return self.schedule.make(
      self.optimizer.rate,
      self.num_epochs,
      self._count_gradients_per_update() * self.task.batch,
    )

  def shape_weights(self) -> Any:
    """The shapes of (params, stats)."""
    return jax.eval_shape(self.make_task().init, jax.random.key(0))

  def _make_way(self) -> Any:
    """The protocol, or the strategy."""
    raise NotImplementedError

  def _check_way(self) -> None:
    """Raises a ValueError if it does not fit the rest."""
    raise NotImplementedError

  def _check_task(self) -> None:
    """Raises a ValueError if the task cannot be trained like this."""

  def _count_gradients_per_update(self) -> int:
    """How many gradients an update takes while all learners are there."""
    raise NotImplementedError

  def _make_network(self) -> simulation.Network:
    """The network, for messages of the model's size."""
    config = self.network
    if config.num_parameters == 1:  # The default: nobody gave a size.
      params, _ = self.shape_weights()
      size = sum(leaf.size for leaf in jax.tree.leaves(params))
      config = dataclasses.replace(config, num_parameters=size)
    return config.make()

  def _list_rules(self) -> dict[str, bool]:
    """What is to be said if it does not hold, and whether it holds."""
    return {
      f'num_epochs must be finite and above 0, got {self.num_epochs}.': (
        0 < self.num_epochs < math.inf
      ),
      f'seed must be from 0 to 2^31 - 1, got {self.seed}.': (
        0 <= self.seed < 2**31
      ),
      'failures are those of virtual time, runtime.mode=simulate; real '
      f'processes fail by themselves, got {self.failures} with '
      f'runtime.mode={self.runtime.mode}.': (
        self.runtime.mode == 'simulate'
        or self.failures == _parts.FailureConfig()
      ),
    }
