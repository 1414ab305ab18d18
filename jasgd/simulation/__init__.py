"""How long does everything take? Time models x protocol -> trace."""

from jasgd.simulation._compare import compare
from jasgd.simulation._compare import Comparison
from jasgd.simulation._failures import draw_failures
from jasgd.simulation._failures import Failure
from jasgd.simulation._network import make_network
from jasgd.simulation._network import Network
from jasgd.simulation._nodes import check_nodes
from jasgd.simulation._nodes import simulate_nodes
from jasgd.simulation._predict import predict
from jasgd.simulation._resampled import resampled
from jasgd.simulation._simulate import check_setup
from jasgd.simulation._simulate import simulate
from jasgd.simulation._times import ComputeTime
from jasgd.simulation._times import constant
from jasgd.simulation._times import exponential
from jasgd.simulation._times import gamma
from jasgd.simulation._times import lognormal
from jasgd.simulation._times import normal
from jasgd.simulation._times import pareto
from jasgd.simulation._times import recorded
from jasgd.simulation._times import with_slow_minority
from jasgd.simulation._times import with_slow_spells
from jasgd.simulation._times import with_speeds

__all__ = [
  'Comparison',
  'ComputeTime',
  'Failure',
  'Network',
  'check_nodes',
  'check_setup',
  'compare',
  'constant',
  'draw_failures',
  'exponential',
  'gamma',
  'lognormal',
  'make_network',
  'normal',
  'pareto',
  'predict',
  'recorded',
  'resampled',
  'simulate',
  'simulate_nodes',
  'with_slow_minority',
  'with_slow_spells',
  'with_speeds',
]
