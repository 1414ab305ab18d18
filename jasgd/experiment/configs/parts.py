"""Configs of the task, and of times, messages and failures in virtual time."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from jasgd import protocols
from jasgd import simulation
from jasgd import tasks

_TASKS: dict[str, Any] = {
  name: functools.partial(tasks.make_task, name) for name in tasks.TASKS
}
_TIMES: dict[str, Callable[..., simulation.ComputeTime]] = {
  'constant': simulation.constant,
  'exponential': simulation.exponential,
  'gamma': simulation.gamma,
  'lognormal': simulation.lognormal,
  'normal': simulation.normal,
  'pareto': simulation.pareto,
  'recorded': lambda *times: simulation.recorded(times),
}


@dataclasses.dataclass(kw_only=True)
class TaskConfig:
  """Task of a run: model, loss and data."""

  # One of cifar10, digits, logistic, mnist, quadratic; or 'module:name' of your
  # own function that returns a `jasgd.tasks.Task`. It is called with `batch`
  # and `arguments`.
  name: str = 'digits'
  # Further arguments of your own function, such as (('depth', 3),).
  arguments: tuple[tuple[str, Any], ...] = ()
  # Model of the task; '': the task's first model.
  model: str = ''
  # Samples per gradient.
  batch: int = 32
  # Folder of tensorflow-datasets; '': its own default folder.
  data_dir: str = ''
  # Division of the samples among workers: whole, shards or dirichlet.
  shards: str = 'whole'
  # dirichlet: concentration; small values make unequal shards.
  alpha: float = 0.5
  # Augmentation of images: none or flip_crop.
  augment: str = 'none'
  # Share of the training set that is held out and evaluated instead of the test
  # set: for the choice of settings.
  validation: float = 0.0

  def list_problems(self) -> list[str]:
    """Errors in the fields, as sentences. Nothing is loaded."""
    rules = {
      f'task.batch must be at least 1, got {self.batch}.': self.batch >= 1,
      f'Unknown task.shards {self.shards!r}. Known: '
      f'{", ".join(tasks.SHARDS)}.': self.shards in tasks.SHARDS,
      f'Unknown task.augment {self.augment!r}. Known: '
      f'{", ".join(tasks.AUGMENTATIONS)}.': self.augment in tasks.AUGMENTATIONS,
      f'task.validation must be from 0 to below 1, got {self.validation}.': (
        0 <= self.validation < 1
      ),
    }
    return [
      *list_problems(lambda: protocols.find_named('task', _TASKS, self.name)),
      *(rule for rule, holds in rules.items() if not holds),
    ]

  def make(self, num_workers: int, seed: int) -> tasks.Task:
    """The task; its data is loaded.

    Args:
      num_workers: Number of workers that shards are for.
      seed: Seed of the shards.

    Returns:
      The same object for the same config: compiled functions are shared.
    """
    # Only shards depend on these. Otherwise all runs share one task.
    if self.shards == 'whole':
      num_workers, seed = 1, 0
    return _make_task(*dataclasses.astuple(self), num_workers, seed)


@functools.lru_cache(maxsize=4)
def _make_task(
  name: str,
  arguments: tuple[tuple[str, Any], ...],
  model: str,
  batch: int,
  data_dir: str,
  shards: str,
  alpha: float,
  augment: str,
  validation: float,
  num_workers: int,
  seed: int,
) -> tasks.Task:
  make = protocols.find_named('task', _TASKS, name)
  if name not in _TASKS:
    task = make(batch=batch, **dict(arguments))
    if not isinstance(task, tasks.Task):
      raise ValueError(
        f'task.name={name!r} must name a function that returns a '
        f'jasgd.tasks.Task, but it returned {task!r:.80}.'
      )
    return task
  return make(
    batch=batch,
    data_dir=data_dir or None,
    model=model or None,
    num_learners=num_workers,
    shards=shards,
    alpha=alpha,
    seed=seed,
    augment=augment,
    validation=validation,
    **dict(arguments),
  )


@dataclasses.dataclass(kw_only=True)
class TimeConfig:
  """Seconds that a gradient takes, in virtual time."""

  # A function of `jasgd.simulation`: constant, exponential, gamma, lognormal,
  # normal, pareto; or recorded, which takes the times themselves. Or
  # 'module:name' of your own function that returns a `ComputeTime`.
  name: str = 'normal'
  # Arguments of the function, in order.
  arguments: tuple[float, ...] = (1.0, 0.2)
  # Share of the workers that are slower, and the factor on their times.
  slow_fraction: float = 0.0
  slow_factor: float = 1.0
  # Steps in a period, in a part of which a worker is slow; 0: it never is.
  spell_period: int = 0
  spell_length: int = 0
  spell_factor: float = 1.0
  # Speed of each worker; (): all are equal.
  speeds: tuple[float, ...] = ()

  def make(self) -> simulation.ComputeTime:
    """The time model."""
    make = protocols.find_named('time', _TIMES, self.name)
    try:
      time = make(*self.arguments)
    except TypeError as error:
      raise ValueError(
        f'time {self.name!r} does not take arguments {self.arguments}: {error}.'
      ) from None
    if self.slow_fraction:
      time = simulation.with_slow_minority(
        time, self.slow_fraction, self.slow_factor
      )
    if self.spell_period:
      time = simulation.with_slow_spells(
        time, self.spell_period, self.spell_length, self.spell_factor
      )
    if self.speeds:
      time = simulation.with_speeds(time, self.speeds)
    return time


@dataclasses.dataclass(kw_only=True)
class NetworkConfig:
  """Seconds that messages and updates take in virtual time: by default 0."""

  # Number of parameters in a message; 0: those of the task's model.
  num_parameters: int = 0
  # Bytes of one parameter in a message.
  bytes_per_parameter: int = 4
  # Latency of one message, in seconds.
  latency: float = 0.0
  # Bandwidth of a worker's link, in bytes per second.
  bandwidth: float = float('inf')
  # Bandwidth of the server's link, which all learners share.
  server_bandwidth: float = float('inf')
  # Seconds that one update takes.
  server_time: float = 0.0
  # Number of servers among which the weights are split.
  num_shards: int = 1

  def make(self, num_parameters: int = 1) -> simulation.Network:
    """The network.

    Args:
      num_parameters: Parameters of the model, if the config has no number.

    Returns:
      The network.
    """
    fields = dataclasses.asdict(self)
    fields['num_parameters'] = self.num_parameters or num_parameters
    return simulation.make_network(**fields)


@dataclasses.dataclass(kw_only=True)
class FailureConfig:
  """Workers that die and come back, in virtual time. By default none."""

  # (time, worker, until) of each failure; without `until` it is permanent.
  given: tuple[tuple[float, ...], ...] = ()
  # Mean time between random failures of a worker, and mean time until it is
  # back; 0: there are none.
  mean_time_between: float = 0.0
  mean_down_time: float = 1.0
  # Time of the last random failure.
  horizon: float = 1000.0

  def make(self, num_workers: int, seed: int) -> list[simulation.Failure]:
    """The failures."""
    for failure in self.given:
      # A flag may give the worker's number as 1.0.
      if not 2 <= len(failure) <= 3 or not float(failure[1]).is_integer():
        raise ValueError(
          'A failure is given as (time, worker, until), with a whole number '
          f'for the worker, got {failure}.'
        )
    failures = [
      simulation.Failure(failure[0], int(failure[1]), *failure[2:])
      for failure in self.given
    ]
    if self.mean_time_between:
      failures += simulation.draw_failures(
        num_workers,
        self.horizon,
        self.mean_time_between,
        self.mean_down_time,
        seed,
      )
    return failures


def list_problems(*checks: Callable[[], Any]) -> list[str]:
  """The messages of the checks that raise a ValueError."""
  problems = []
  for check in checks:
    try:
      check()
    except ValueError as error:
      problems.append(str(error))
  return problems
