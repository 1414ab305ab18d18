"""Configs of simulations, and what they stand for."""

from collections.abc import Callable
import dataclasses
from typing import Any

from jasgd import protocols
from jasgd import simulation
from jasgd import traces

_PROTOCOLS: dict[str, Callable[..., protocols.Protocol]] = {
  name: getattr(protocols, name)
  for name in (
    'asynchronous',
    'backup',
    'constant_delay',
    'downpour',
    'hardsync',
    'rennala',
    'ringmaster',
    'softsync',
    'ssp',
  )
}
_TIMES: dict[str, Callable[..., simulation.ComputeTime]] = {
  name: getattr(simulation, name)
  for name in (
    'constant',
    'exponential',
    'gamma',
    'lognormal',
    'normal',
    'pareto',
  )
}


@dataclasses.dataclass(kw_only=True)
class ProtocolConfig:
  """When the server updates, and who waits."""

  # A function of `jasgd.protocols`.
  name: str = 'asynchronous'
  # Its arguments, in order.
  arguments: tuple[int, ...] = ()
  # Number of learners; a constant delay d has d + 1.
  num_learners: int = 16
  # Updates over which the learners are introduced; 0: all at once.
  ramp_up: int = 0

  def make(self) -> protocols.Protocol:
    """The protocol."""
    protocol = _call('protocol', _PROTOCOLS, self.name, self.arguments)
    if self.ramp_up:
      protocol = protocols.ramp_up(protocol, self.ramp_up)
    return protocol


@dataclasses.dataclass(kw_only=True)
class TimeConfig:
  """How long a gradient takes."""

  # A function of `jasgd.simulation`.
  name: str = 'normal'
  # Its arguments, in order.
  arguments: tuple[float, ...] = (1.0, 0.2)
  # The share of learners that is slower, and by which factor.
  slow_fraction: float = 0.0
  slow_factor: float = 1.0

  def make(self) -> simulation.ComputeTime:
    """The time model."""
    time = _call('time', _TIMES, self.name, self.arguments)
    if self.slow_fraction:
      time = simulation.with_slow_minority(
        time, self.slow_fraction, self.slow_factor
      )
    return time


@dataclasses.dataclass(kw_only=True)
class NetworkConfig:
  """How long messages and updates take. By default they take no time."""

  # Size of the model.
  num_parameters: int = 1
  # Of the wire's dtype.
  bytes_per_parameter: int = 4
  # Of one message, in seconds.
  latency: float = 0.0
  # Of a learner's link, in bytes per second.
  bandwidth: float = float('inf')
  # Of the server's link, which all learners share.
  server_bandwidth: float = float('inf')
  # Of one update, in seconds.
  server_time: float = 0.0
  # Servers among which the weights are split.
  num_shards: int = 1

  def make(self) -> simulation.Network:
    """The network."""
    return simulation.make_network(**dataclasses.asdict(self))


@dataclasses.dataclass(kw_only=True)
class SimulationConfig:
  """A simulation: who computes what when, without weights."""

  protocol: ProtocolConfig = dataclasses.field(default_factory=ProtocolConfig)
  time: TimeConfig = dataclasses.field(default_factory=TimeConfig)
  network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
  # Gradients that the server handles.
  num_gradients: int = 10_000
  # Whether a learner pulls before its push is applied.
  overlap: bool = False
  # Of all random times.
  seed: int = 0

  def validate(self) -> None:
    """Raises one ValueError that names everything that is wrong."""
    problems = []
    for part in (self.protocol, self.time, self.network):
      try:
        part.make()
      except ValueError as error:
        problems.append(str(error))
    if self.num_gradients < 1:
      problems.append(
        f'num_gradients must be at least 1, got {self.num_gradients}.'
      )
    if not problems:
      try:
        simulation.check_setup(
          self.protocol.make(),
          num_learners=self.protocol.num_learners,
          num_gradients=self.num_gradients,
          compute=self.time.make(),
          network=self.network.make(),
          failures=(),
          overlap=self.overlap,
          batch=1,
          seed=self.seed,
        )
      except ValueError as error:
        problems.append(str(error))
    if problems:
      raise ValueError('Bad config: ' + ' '.join(problems))

  def simulate(self) -> traces.Trace:
    """Runs it; the trace's header holds the config."""
    trace = simulation.simulate(
      self.protocol.make(),
      num_learners=self.protocol.num_learners,
      num_gradients=self.num_gradients,
      compute=self.time.make(),
      network=self.network.make(),
      overlap=self.overlap,
      seed=self.seed,
    )
    config = dataclasses.asdict(self)
    return dataclasses.replace(trace, header={**trace.header, 'config': config})


def _call(
  what: str, known: dict[str, Callable[..., Any]], name: str, arguments: Any
) -> Any:
  """Calls a function by its name, with errors that say what there is."""
  if name not in known:
    raise ValueError(f'Unknown {what} {name!r}. Known: {", ".join(known)}.')
  try:
    return known[name](*arguments)
  except TypeError as error:
    raise ValueError(
      f'{what} {name!r} does not take arguments {tuple(arguments)}: {error}.'
    ) from None
