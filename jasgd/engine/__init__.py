"""What does a trace do to the weights? Learners' and server's work, and replay.

`make_gradient` and `make_update` compile what a learner and a server do. A real
run calls them, and so does `replay`, which executes a trace.
"""

from jasgd.engine._device_runners import RUNNERS
from jasgd.engine._devices import check_devices
from jasgd.engine._devices import DeviceArrays
from jasgd.engine._devices import DeviceProgram
from jasgd.engine._devices import DeviceState
from jasgd.engine._devices import make_device_program
from jasgd.engine._events import count_devices
from jasgd.engine._events import read_digests
from jasgd.engine._flat import Learner
from jasgd.engine._flat import make_learner
from jasgd.engine._flat import make_server
from jasgd.engine._flat import Push
from jasgd.engine._flat import Server
from jasgd.engine._gradient import choose_devices
from jasgd.engine._gradient import Gradient
from jasgd.engine._gradient import make_gradient
from jasgd.engine._gradient import place_data
from jasgd.engine._layout import Layout
from jasgd.engine._layout import make_layout
from jasgd.engine._layout import Parts
from jasgd.engine._layout import WIRE_DTYPES
from jasgd.engine._local import Copy
from jasgd.engine._mean import count_mean_messages
from jasgd.engine._mean import make_group_average
from jasgd.engine._memory import check_memory
from jasgd.engine._node_plan import count_node_epochs
from jasgd.engine._node_plan import make_node_plan
from jasgd.engine._node_plan import NodePlan
from jasgd.engine._node_run import NodeReplay
from jasgd.engine._node_step import make_node_functions
from jasgd.engine._node_step import Node
from jasgd.engine._node_step import NodeFunctions
from jasgd.engine._nodes import NodesReplayed
from jasgd.engine._nodes import replay_nodes
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
  'RUNNERS',
  'WIRE_DTYPES',
  'Copy',
  'DeviceArrays',
  'DeviceProgram',
  'DeviceState',
  'Gradient',
  'Layout',
  'Learner',
  'Node',
  'NodeFunctions',
  'NodePlan',
  'NodeReplay',
  'NodesReplayed',
  'Parts',
  'Plan',
  'Push',
  'Replay',
  'Replayed',
  'Server',
  'ServerState',
  'Update',
  'check_devices',
  'check_memory',
  'choose_devices',
  'count_devices',
  'count_mean_messages',
  'count_node_epochs',
  'find_difference',
  'make_device_program',
  'make_gradient',
  'make_group_average',
  'make_layout',
  'make_learner',
  'make_node_functions',
  'make_node_plan',
  'make_plan',
  'make_server',
  'make_update',
  'place_data',
  'read_digests',
  'replay',
  'replay_nodes',
]
