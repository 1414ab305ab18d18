"""Protocols of a parameter server: when it updates and which learners wait.

A protocol is a state machine without weights. Each function below builds a new
one; its `describe()` says the rule in words.

=======================  =======================================  =============
protocol                 gradients of an update                   waiting
=======================  =======================================  =============
`hardsync()`             one of every learner                     all learners
`backup(b)`              all but b, of the current clock          those in time
`softsync(n)`            1/n of the number of learners, any       none
`asynchronous()`         one                                      none
`constant_delay(d)`      one, of d + 1 learners in rotation       none
`downpour(push, fetch)`  one sum over several local steps         none
`ssp(s)`                 one                                      the fastest
`rennala(s)`             s of the current clock                   none
`ringmaster(r)`          one of staleness r or less               none
`ramp_up(p, k)`          as p; learners enter over k updates      as p
=======================  =======================================  =============

`Protocol` is the base class; its docstring shows how to write your own.
`Protocol.to_config` stores a protocol as name and arguments;
`jasgd.gossip.make_strategy` builds it again. The names outside `__all__` are
for other rooms of jasgd, and not promised to users.

Examples:
  >>> from jasgd import protocols
  >>> protocol = protocols.softsync(2)
  >>> protocol.init(num_learners=4)
  >>> protocol.on_push(learner=0, step=0, read_clock=0).updates
  False
  >>> protocol.on_push(learner=0, step=1, read_clock=0).updates
  True
  >>> protocol.clock
  1
"""

from jasgd.protocols._base import Decision
from jasgd.protocols._base import Fate
from jasgd.protocols._base import Protocol
from jasgd.protocols._checks import check_choice as check_choice
from jasgd.protocols._checks import check_count as check_count
from jasgd.protocols._checks import check_number as check_number
from jasgd.protocols._configurable import build as build
from jasgd.protocols._configurable import Configurable as Configurable
from jasgd.protocols._configurable import find_named as find_named
from jasgd.protocols.algorithms._asynchronous import (
  Asynchronous as asynchronous,
)
from jasgd.protocols.algorithms._backup import Backup as backup
from jasgd.protocols.algorithms._constant_delay import (
  ConstantDelay as constant_delay,
)
from jasgd.protocols.algorithms._downpour import Downpour as downpour
from jasgd.protocols.algorithms._hardsync import Hardsync as hardsync
from jasgd.protocols.algorithms._ramp_up import RampUp as ramp_up
from jasgd.protocols.algorithms._rennala import Rennala as rennala
from jasgd.protocols.algorithms._ringmaster import Ringmaster as ringmaster
from jasgd.protocols.algorithms._softsync import Softsync as softsync
from jasgd.protocols.algorithms._ssp import Ssp as ssp

__all__ = [
  'Decision',
  'Fate',
  'Protocol',
  'asynchronous',
  'backup',
  'constant_delay',
  'downpour',
  'hardsync',
  'ramp_up',
  'rennala',
  'ringmaster',
  'softsync',
  'ssp',
]

# All protocols by name.
PROTOCOLS: dict[str, type[Protocol]] = {
  kind.name: kind
  for kind in (
    asynchronous,
    backup,
    constant_delay,
    downpour,
    hardsync,
    ramp_up,
    rennala,
    ringmaster,
    softsync,
    ssp,
  )
}
