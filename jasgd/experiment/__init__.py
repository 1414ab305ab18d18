"""Config dataclasses, and what they assemble."""

from jasgd.experiment._base import RunConfig
from jasgd.experiment._base import TaskConfig
from jasgd.experiment._compare import compare
from jasgd.experiment._compare import Compared
from jasgd.experiment._compare import format_comparison
from jasgd.experiment._compare import STRATEGIES
from jasgd.experiment._grid import list_cells
from jasgd.experiment._grid import parse_grid
from jasgd.experiment._local import run_learner
from jasgd.experiment._local import run_server
from jasgd.experiment._modes import train_and_evaluate
from jasgd.experiment._node_cluster import MEMBER_ROLES
from jasgd.experiment._node_cluster import run_member
from jasgd.experiment._node_cluster import serve_member
from jasgd.experiment._node_cluster import watch_nodes
from jasgd.experiment._node_local import run_nodes
from jasgd.experiment._node_running import run_centre
from jasgd.experiment._node_running import run_group_node
from jasgd.experiment._node_running import run_peer
from jasgd.experiment._node_training import NodeTrainingConfig
from jasgd.experiment._node_verify import NodeVerification
from jasgd.experiment._node_verify import read_nodes
from jasgd.experiment._node_verify import verify_nodes
from jasgd.experiment._optimizers import OptimizerConfig
from jasgd.experiment._optimizers import ScheduleConfig
from jasgd.experiment._own import train
from jasgd.experiment._own_run import Trained
from jasgd.experiment._parts import FailureConfig
from jasgd.experiment._parts import NetworkConfig
from jasgd.experiment._parts import ProtocolConfig
from jasgd.experiment._parts import StrategyConfig
from jasgd.experiment._parts import TimeConfig
from jasgd.experiment._running import make_task
from jasgd.experiment._running import read_config
from jasgd.experiment._running import serve_config
from jasgd.experiment._runtimes import DeadlineConfig
from jasgd.experiment._runtimes import ProcessConfig
from jasgd.experiment._runtimes import RuntimeConfig
from jasgd.experiment._runtimes import ServerConfig
from jasgd.experiment._simulations import NodeSimulationConfig
from jasgd.experiment._simulations import SimulationConfig
from jasgd.experiment._supervisor import RunError
from jasgd.experiment._sweep import read_rows
from jasgd.experiment._sweep import sweep
from jasgd.experiment._sweep import write_csv
from jasgd.experiment._train import make_replay
from jasgd.experiment._train import measure_chunk
from jasgd.experiment._training import TrainingConfig
from jasgd.experiment._verify import get_environment
from jasgd.experiment._verify import read_run
from jasgd.experiment._verify import Verification
from jasgd.experiment._verify import verify

__all__ = [
  'MEMBER_ROLES',
  'STRATEGIES',
  'Compared',
  'DeadlineConfig',
  'FailureConfig',
  'NetworkConfig',
  'NodeSimulationConfig',
  'NodeTrainingConfig',
  'NodeVerification',
  'OptimizerConfig',
  'ProcessConfig',
  'ProtocolConfig',
  'RunConfig',
  'RunError',
  'RuntimeConfig',
  'ScheduleConfig',
  'ServerConfig',
  'SimulationConfig',
  'StrategyConfig',
  'TaskConfig',
  'TimeConfig',
  'Trained',
  'TrainingConfig',
  'Verification',
  'compare',
  'format_comparison',
  'get_environment',
  'list_cells',
  'make_replay',
  'make_task',
  'measure_chunk',
  'parse_grid',
  'read_config',
  'read_nodes',
  'read_rows',
  'read_run',
  'run_centre',
  'run_group_node',
  'run_learner',
  'run_member',
  'run_nodes',
  'run_peer',
  'run_server',
  'serve_config',
  'serve_member',
  'sweep',
  'train',
  'train_and_evaluate',
  'verify',
  'verify_nodes',
  'watch_nodes',
  'write_csv',
]
