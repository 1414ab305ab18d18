"""Config dataclasses, and what they assemble."""

from jasgd.experiment._simulations import NetworkConfig
from jasgd.experiment._simulations import ProtocolConfig
from jasgd.experiment._simulations import SimulationConfig
from jasgd.experiment._simulations import TimeConfig

__all__ = ['NetworkConfig', 'ProtocolConfig', 'SimulationConfig', 'TimeConfig']
