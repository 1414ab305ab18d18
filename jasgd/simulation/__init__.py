"""How long does everything take? Time models and a strategy give a trace."""

from jasgd.simulation._failures import draw_failures
from jasgd.simulation._failures import Failure
from jasgd.simulation._network import make_network
from jasgd.simulation._network import Network
from jasgd.simulation._predict import compare
from jasgd.simulation._predict import Comparison
from jasgd.simulation._predict import measure_exchanges
from jasgd.simulation._predict import predict
from jasgd.simulation._simulate import check_simulation
from jasgd.simulation._simulate import simulate
from jasgd.simulation._times import ComputeTime
from jasgd.simulation._times import constant
from jasgd.simulation._times import exponential
from jasgd.simulation._times import gamma
from jasgd.simulation._times import lognormal
from jasgd.simulation._times import normal
from jasgd.simulation._times import pareto
from jasgd.simulation._times import recorded
from jasgd.simulation._times import resampled
from jasgd.simulation._times import with_slow_minority
from jasgd.simulation._times import with_slow_spells
from jasgd.simulation._times import with_speeds

__all__ = [
  'Comparison',
  'ComputeTime',
  'Failure',
  'Network',
  'check_simulation',
  'compare',
  'constant',
  'draw_failures',
  'exponential',
  'gamma',
  'lognormal',
  'make_network',
  'measure_exchanges',
  'normal',
  'pareto',
  'predict',
  'recorded',
  'resampled',
  'simulate',
  'with_slow_minority',
  'with_slow_spells',
  'with_speeds',
]
