"""Optax transformations for stale gradients, and policies.

Each is an `optax.GradientTransformationExtraArgs`. `update` takes the keyword
`staleness`, or `read_clock`, and, where needed, `stale_params`, the weights
that the gradient was computed on. Unknown keywords are ignored, so that other
transformations of a chain can have their own.

The order of a chain matters:

=============================================  =================================
chain                                          effect
=============================================  =================================
scale_by_staleness, sgd(momentum)              each gradient enters the momentum
                                               with its own factor (Zhang)
sgd(momentum), scale_by_staleness              the whole step is scaled, with
                                               the momentum of other gradients
scale_by_staleness, adam                       none, if tau is constant: Adam
                                               divides the factor out again
adam, scale_by_staleness                       a learning rate that depends on
                                               tau
clip, scale_by_staleness                       a stale gradient is clipped, then
                                               damped
scale_by_staleness, clip                       a large stale gradient may keep
                                               the norm of a fresh one
scale_by_staleness, add_decayed_weights, sgd   weight decay is not damped
add_decayed_weights, scale_by_staleness, sgd   weight decay is damped too
delay_compensation, scale_by_staleness         as in the paper
scale_by_staleness, delay_compensation         the correction is damped twice:
                                               it has the gradient squared
delay(d), adam                                 d zeros advance Adam's count
delayed(adam, d)                               Adam waits for the first gradient
scale_by_staleness, MultiSteps(sgd, c)         each gradient has its own factor
MultiSteps(chain(scale_by_staleness, sgd), c)  all get the last one's factor
softsync(sgd, c)                               each gradient has its own factor
=============================================  =================================
"""

from jasgd.transforms import policies
from jasgd.transforms._aggregation import Aggregation
from jasgd.transforms._aggregation import AggregationState
from jasgd.transforms._aggregation import make_aggregation
from jasgd.transforms._aggregation import softsync
from jasgd.transforms._compensation import delay_compensation
from jasgd.transforms._compensation import DelayCompensationState
from jasgd.transforms._delay import delay
from jasgd.transforms._delay import delayed
from jasgd.transforms._delay import DelayedState
from jasgd.transforms._delay import DelayState
from jasgd.transforms._gap import gap_aware
from jasgd.transforms._gap import GapAwareState
from jasgd.transforms._momentum import explicit_momentum
from jasgd.transforms._monitor import monitor_staleness
from jasgd.transforms._monitor import MonitorStalenessState
from jasgd.transforms._scaling import scale_by_staleness
from jasgd.transforms._scaling import ScaleByStalenessState
from jasgd.transforms._scaling import staleness_aware

__all__ = [
  'Aggregation',
  'AggregationState',
  'DelayCompensationState',
  'DelayState',
  'DelayedState',
  'GapAwareState',
  'MonitorStalenessState',
  'ScaleByStalenessState',
  'delay',
  'delay_compensation',
  'delayed',
  'explicit_momentum',
  'gap_aware',
  'make_aggregation',
  'monitor_staleness',
  'policies',
  'scale_by_staleness',
  'softsync',
  'staleness_aware',
]
