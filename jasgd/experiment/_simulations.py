"""Configs of simulations, and what they stand for."""

from collections.abc import Callable
import dataclasses
from typing import Any

from jasgd import simulation
from jasgd import traces
from jasgd.experiment import _parts


@dataclasses.dataclass(kw_only=True)
class SimulationConfig:
  """Learners and a server: who computes what when, without weights."""

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
  # Gradients that the server handles.
  num_gradients: int = 10_000
  # Whether a learner pulls before its push is applied.
  overlap: bool = False
  # Of all that is random.
  seed: int = 0

  def validate(self) -> None:
    """Raises one ValueError that names everything that is wrong."""
    num_learners = self.protocol.count_learners()
    problems = list_problems(
      self.protocol.make,
      self.time.make,
      self.network.make,
      lambda: self.failures.make(num_learners, self.seed),
    )
    if self.num_gradients < 1:
      problems.append(
        f'num_gradients must be at least 1, got {self.num_gradients}.'
      )
    problems = problems or list_problems(
      lambda: simulation.check_setup(**self._arguments(), batch=1)
    )
    if problems:
      raise ValueError('Bad config: ' + ' '.join(problems))

  def describe(self) -> str:
    """Who waits for what, in words."""
    return self.protocol.make().describe()

  def simulate(self) -> traces.Trace:
    """Runs it; the trace's header holds the config."""
    trace = simulation.simulate(**self._arguments())
    config = dataclasses.asdict(self)
    return dataclasses.replace(trace, header={**trace.header, 'config': config})

  def _arguments(self) -> dict[str, Any]:
    """What `jasgd.simulate` is to be called with."""
    num_learners = self.protocol.count_learners()
    return {
      'protocol': self.protocol.make(),
      'num_learners': num_learners,
      'num_gradients': self.num_gradients,
      'compute': self.time.make(),
      'network': self.network.make(),
      'failures': self.failures.make(num_learners, self.seed),
      'overlap': self.overlap,
      'seed': self.seed,
    }


@dataclasses.dataclass(kw_only=True)
class NodeSimulationConfig:
  """Nodes without a server: who steps and averages when, without weights."""

  strategy: _parts.StrategyConfig = dataclasses.field(
    default_factory=_parts.StrategyConfig
  )
  time: _parts.TimeConfig = dataclasses.field(default_factory=_parts.TimeConfig)
  network: _parts.NetworkConfig = dataclasses.field(
    default_factory=_parts.NetworkConfig
  )
  failures: _parts.FailureConfig = dataclasses.field(
    default_factory=_parts.FailureConfig
  )
  # Steps that each node makes.
  num_steps: int = 500
  # Of all that is random.
  seed: int = 0

  def validate(self) -> None:
    """Raises one ValueError that names everything that is wrong."""
    num_nodes = self.strategy.num_nodes
    problems = list_problems(
      lambda: self.strategy.make(self.seed),
      self.time.make,
      self.network.make,
      lambda: self.failures.make(num_nodes, self.seed),
    )
    problems = problems or list_problems(
      lambda: simulation.check_nodes(**self._arguments())
    )
    if problems:
      raise ValueError('Bad config: ' + ' '.join(problems))

  def describe(self) -> str:
    """Who waits for what, in words."""
    return self.strategy.make(self.seed).describe()

  def simulate(self) -> traces.NodeTrace:
    """Runs it; the trace's header holds the config."""
    trace = simulation.simulate_nodes(**self._arguments())
    config = dataclasses.asdict(self)
    return dataclasses.replace(trace, header={**trace.header, 'config': config})

  def _arguments(self) -> dict[str, Any]:
    """What `simulate_nodes` is to be called with."""
    num_nodes = self.strategy.num_nodes
    return {
      'strategy': self.strategy.make(self.seed),
      'num_nodes': num_nodes,
      'num_steps': self.num_steps,
      'compute': self.time.make(),
      'network': self.network.make(),
      'failures': self.failures.make(num_nodes, self.seed),
      'seed': self.seed,
    }


def list_problems(*checks: Callable[[], Any]) -> list[str]:
  """The messages of the checks that refuse something, or miss a file."""
  problems = []
  for check in checks:
    try:
      check()
    except (ValueError, FileNotFoundError) as error:
      problems.append(str(error))
  return problems
