"""Replay: the effect of a trace on the weights; gradients and updates.

`replay` executes a trace, and `Replay` does so chunk by chunk. `make_learner`,
`make_server` and `make_node_functions` compile the work of learners, servers
and nodes. Real processes and exact replay call the same compiled functions, and
therefore compute the same bits.

Names that are imported here and are not in `__all__` are for other rooms, and
not promised to users.
"""

from jasgd.engine._device_runners import RUNNERS as RUNNERS
from jasgd.engine._devices import check_devices as check_devices
from jasgd.engine._devices import DeviceProgram
from jasgd.engine._devices import make_device_program
from jasgd.engine._gradient import choose_devices as choose_devices
from jasgd.engine._gradient import Gradient
from jasgd.engine._gradient import make_gradient
from jasgd.engine._gradient import place_data as place_data
from jasgd.engine._layout import BufferViews as BufferViews
from jasgd.engine._layout import Layout
from jasgd.engine._layout import make_layout
from jasgd.engine._layout import WIRE_DTYPES
from jasgd.engine._mean import count_mean_messages as count_mean_messages
from jasgd.engine._mean import make_group_average as make_group_average
from jasgd.engine._node_functions import make_node_functions
from jasgd.engine._node_functions import NodeState as NodeState
from jasgd.engine._operations import SERVER
from jasgd.engine._plan import count_epochs
from jasgd.engine._plan import make_plan
from jasgd.engine._plan import Plan
from jasgd.engine._push_reader import count_devices as count_devices
from jasgd.engine._replay import average_nodes as average_nodes
from jasgd.engine._replay import MODES
from jasgd.engine._replay import Replay
from jasgd.engine._replay import replay
from jasgd.engine._replay import Replayed
from jasgd.engine._server_functions import LocalReplica as LocalReplica
from jasgd.engine._server_functions import make_learner
from jasgd.engine._server_functions import make_server
from jasgd.engine._server_functions import make_update
from jasgd.engine._server_functions import Push as Push
from jasgd.engine._server_functions import ServerState as ServerState
from jasgd.engine._server_functions import Update
from jasgd.engine._slots import check_memory as check_memory

__all__ = [
  'MODES',
  'SERVER',
  'WIRE_DTYPES',
  'DeviceProgram',
  'Gradient',
  'Layout',
  'Plan',
  'Replay',
  'Replayed',
  'Update',
  'count_epochs',
  'make_device_program',
  'make_gradient',
  'make_layout',
  'make_learner',
  'make_node_functions',
  'make_plan',
  'make_server',
  'make_update',
  'replay',
]
