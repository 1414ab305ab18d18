"""What does a trace do to the weights? Gradients, updates, replay.

`replay` executes a trace, and `Replay` does so chunk by chunk. `make_gradient`,
`make_update` and the like compile the work of learners, servers and nodes. Real
processes call these functions, and so does exact replay: hence the same bits.
"""

from jasgd.engine._device_runners import RUNNERS
from jasgd.engine._devices import check_devices
from jasgd.engine._devices import DeviceProgram
from jasgd.engine._devices import make_device_program
from jasgd.engine._gradient import choose_devices
from jasgd.engine._gradient import Gradient
from jasgd.engine._gradient import make_gradient
from jasgd.engine._gradient import place_data
from jasgd.engine._layout import BufferViews
from jasgd.engine._layout import Layout
from jasgd.engine._layout import make_layout
from jasgd.engine._layout import WIRE_DTYPES
from jasgd.engine._mean import count_mean_messages
from jasgd.engine._mean import make_group_average
from jasgd.engine._node_functions import make_node_functions
from jasgd.engine._node_functions import NodeState
from jasgd.engine._operations import SERVER
from jasgd.engine._plan import count_epochs
from jasgd.engine._plan import make_plan
from jasgd.engine._plan import Plan
from jasgd.engine._readers import count_devices
from jasgd.engine._replay import MODES
from jasgd.engine._replay import Replay
from jasgd.engine._replay import replay
from jasgd.engine._replay import Replayed
from jasgd.engine._server_functions import LocalReplica
from jasgd.engine._server_functions import make_learner
from jasgd.engine._server_functions import make_server
from jasgd.engine._server_functions import make_update
from jasgd.engine._server_functions import Push
from jasgd.engine._server_functions import ServerState
from jasgd.engine._server_functions import Update
from jasgd.engine._slots import check_memory

__all__ = [
  'MODES',
  'RUNNERS',
  'SERVER',
  'WIRE_DTYPES',
  'BufferViews',
  'DeviceProgram',
  'Gradient',
  'Layout',
  'LocalReplica',
  'NodeState',
  'Plan',
  'Push',
  'Replay',
  'Replayed',
  'ServerState',
  'Update',
  'check_devices',
  'check_memory',
  'choose_devices',
  'count_devices',
  'count_epochs',
  'count_mean_messages',
  'make_device_program',
  'make_gradient',
  'make_group_average',
  'make_layout',
  'make_learner',
  'make_node_functions',
  'make_plan',
  'make_server',
  'make_update',
  'place_data',
  'replay',
]
