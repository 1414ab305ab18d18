"""Config dataclasses, and what they assemble."""

from jasgd.experiment._grid import list_cells
from jasgd.experiment._grid import parse_grid
from jasgd.experiment._optimizers import OptimizerConfig
from jasgd.experiment._optimizers import ScheduleConfig
from jasgd.experiment._parts import FailureConfig
from jasgd.experiment._parts import NetworkConfig
from jasgd.experiment._parts import ProtocolConfig
from jasgd.experiment._parts import StrategyConfig
from jasgd.experiment._parts import TimeConfig
from jasgd.experiment._simulations import NodeSimulationConfig
from jasgd.experiment._simulations import SimulationConfig
from jasgd.experiment._sweep import lock_file
from jasgd.experiment._sweep import read_rows
from jasgd.experiment._sweep import sweep
from jasgd.experiment._sweep import write_csv
from jasgd.experiment._train import make_replay
from jasgd.experiment._train import measure_chunk
from jasgd.experiment._train import train_and_evaluate
from jasgd.experiment._training import RuntimeConfig
from jasgd.experiment._training import TaskConfig
from jasgd.experiment._training import TrainingConfig

__all__ = [
  'FailureConfig',
  'NetworkConfig',
  'NodeSimulationConfig',
  'OptimizerConfig',
  'ProtocolConfig',
  'RuntimeConfig',
  'ScheduleConfig',
  'SimulationConfig',
  'StrategyConfig',
  'TaskConfig',
  'TimeConfig',
  'TrainingConfig',
  'list_cells',
  'lock_file',
  'make_replay',
  'measure_chunk',
  'parse_grid',
  'read_rows',
  'sweep',
  'train_and_evaluate',
  'write_csv',
]
