"""What does a trace do to the weights? Learners' and server's work, and replay.

`make_gradient` and `make_update` compile what a learner and a server do. A real
run calls them, and so does `replay`, which executes a trace.
"""

from jasgd.engine._gradient import Gradient
from jasgd.engine._gradient import make_gradient
from jasgd.engine._memory import check_memory
from jasgd.engine._nodes import NodesReplayed
from jasgd.engine._plan import make_plan
from jasgd.engine._plan import Plan
from jasgd.engine._replay import find_difference
from jasgd.engine._replay import replay
from jasgd.engine._replay import Replayed
from jasgd.engine._run import MODES
from jasgd.engine._run import Replay
from jasgd.engine._update import make_update
from jasgd.engine._update import ServerState
from jasgd.engine._update import Update

__all__ = [
  'MODES',
  'Gradient',
  'NodesReplayed',
  'Plan',
  'Replay',
  'Replayed',
  'ServerState',
  'Update',
  'check_memory',
  'find_difference',
  'make_gradient',
  'make_plan',
  'make_update',
  'replay',
]
