"""Config dataclasses, and what they assemble."""

from jasgd.experiment._parts import FailureConfig
from jasgd.experiment._parts import NetworkConfig
from jasgd.experiment._parts import ProtocolConfig
from jasgd.experiment._parts import StrategyConfig
from jasgd.experiment._parts import TimeConfig
from jasgd.experiment._simulations import NodeSimulationConfig
from jasgd.experiment._simulations import SimulationConfig

__all__ = [
  'FailureConfig',
  'NetworkConfig',
  'NodeSimulationConfig',
  'ProtocolConfig',
  'SimulationConfig',
  'StrategyConfig',
  'TimeConfig',
]
