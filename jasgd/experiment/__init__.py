"""Training from a config or from your own functions: runs, sweeps, checks.

`TrainingConfig` and its parts describe a run. `train_and_evaluate` makes it, in
virtual time, on devices or in processes, and `run_role` is one process of a run
on many hosts. `train` does the same for your own model and optimizer, without
a config. `sweep` and `compare` make many runs, and `verify` replays one.

==============  ==============================================================
folder          content
==============  ==============================================================
`configs/`      the fields of a config, and the parts of a run they define
`running/`      the life cycle of a run; the functions of child processes
`sweeps/`       grids, sweeps, comparisons
`verification`  exact replay of a real run against its checkpoints
==============  ==============================================================

Names that are imported here and are not in `__all__` are for the command line,
and not promised to users.
"""

from jasgd.experiment.configs.optimizer import OptimizerConfig
from jasgd.experiment.configs.optimizer import ScheduleConfig
from jasgd.experiment.configs.parts import FailureConfig as FailureConfig
from jasgd.experiment.configs.parts import NetworkConfig as NetworkConfig
from jasgd.experiment.configs.parts import TaskConfig
from jasgd.experiment.configs.parts import TimeConfig as TimeConfig
from jasgd.experiment.configs.runtime import DeadlineConfig as DeadlineConfig
from jasgd.experiment.configs.runtime import ProcessConfig as ProcessConfig
from jasgd.experiment.configs.runtime import RuntimeConfig
from jasgd.experiment.configs.runtime import ServerConfig as ServerConfig
from jasgd.experiment.configs.strategy import StrategyConfig
from jasgd.experiment.configs.training import read_config as read_config
from jasgd.experiment.configs.training import TrainingConfig
from jasgd.experiment.running.cluster import list_roles as list_roles
from jasgd.experiment.running.cluster import run_role as run_role
from jasgd.experiment.running.result import Result
from jasgd.experiment.running.result import RunError
from jasgd.experiment.running.train import train
from jasgd.experiment.running.train import train_and_evaluate
from jasgd.experiment.sweeps.compare import compare
from jasgd.experiment.sweeps.compare import Compared as Compared
from jasgd.experiment.sweeps.compare import (
  format_comparison as format_comparison,
)
from jasgd.experiment.sweeps.compare import STRATEGIES as STRATEGIES
from jasgd.experiment.sweeps.sweep import list_cells as list_cells
from jasgd.experiment.sweeps.sweep import parse_grid as parse_grid
from jasgd.experiment.sweeps.sweep import read_rows as read_rows
from jasgd.experiment.sweeps.sweep import sweep
from jasgd.experiment.sweeps.sweep import write_csv as write_csv
from jasgd.experiment.verification import get_environment as get_environment
from jasgd.experiment.verification import read_run as read_run
from jasgd.experiment.verification import verify

__all__ = [
  'OptimizerConfig',
  'Result',
  'RunError',
  'RuntimeConfig',
  'ScheduleConfig',
  'StrategyConfig',
  'TaskConfig',
  'TrainingConfig',
  'compare',
  'sweep',
  'train',
  'train_and_evaluate',
  'verify',
]
