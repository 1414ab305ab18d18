"""Real processes: server, learners, and the wires between them.

A `Server` owns the weights, in one thread; a `Learner` computes gradients and
exchanges them for weights. `serve` gives a server its wires: shared memory for
processes of its host, Arrow Flight for all others, a queue for threads. `learn`
is a learner in a process of its own. A `Peer` trains without a server, and
averages with others; a `Centre` is what elastic averaging needs besides.
"""

from jasgd.runtime._crash import POINTS as CRASH_POINTS
from jasgd.runtime._crash import VARIABLE as CRASH_VARIABLE
from jasgd.runtime._flight_security import Tls
from jasgd.runtime._group_losses import GROUP_LOST
from jasgd.runtime._group_losses import GroupError
from jasgd.runtime._group_mesh import join_group
from jasgd.runtime._messages import Flag
from jasgd.runtime._messages import Message
from jasgd.runtime._messages import Verb
from jasgd.runtime._node_settings import NodeSettings
from jasgd.runtime._saver import restore as restore_server
from jasgd.runtime._settings import Deadlines
from jasgd.runtime._settings import make_fingerprint
from jasgd.runtime._settings import ON_LEARNER_LOST
from jasgd.runtime._settings import ServerSettings
from jasgd.runtime._wire import Connection
from jasgd.runtime._wire import RefusedError
from jasgd.runtime._wire import WireError
from jasgd.runtime.addresses import find_free_port
from jasgd.runtime.addresses import make_connect
from jasgd.runtime.addresses import WIRES
from jasgd.runtime.centre import Centre
from jasgd.runtime.group import GroupNode
from jasgd.runtime.hosting import Place
from jasgd.runtime.hosting import serve
from jasgd.runtime.hosting import serve_threads
from jasgd.runtime.learner import Learner
from jasgd.runtime.learning import learn
from jasgd.runtime.members import claim_number
from jasgd.runtime.members import find_folder
from jasgd.runtime.members import list_members
from jasgd.runtime.members import name_member
from jasgd.runtime.members import Registry
from jasgd.runtime.peer import Peer
from jasgd.runtime.processes import Child
from jasgd.runtime.processes import CHILD_VARIABLES
from jasgd.runtime.processes import compute_in_place
from jasgd.runtime.processes import find_function
from jasgd.runtime.processes import name_function
from jasgd.runtime.server import Server

__all__ = [
  'CHILD_VARIABLES',
  'CRASH_POINTS',
  'CRASH_VARIABLE',
  'GROUP_LOST',
  'ON_LEARNER_LOST',
  'WIRES',
  'Centre',
  'Child',
  'Connection',
  'Deadlines',
  'Flag',
  'GroupError',
  'GroupNode',
  'Learner',
  'Message',
  'NodeSettings',
  'Peer',
  'Place',
  'RefusedError',
  'Registry',
  'Server',
  'ServerSettings',
  'Tls',
  'Verb',
  'WireError',
  'claim_number',
  'compute_in_place',
  'find_folder',
  'find_free_port',
  'find_function',
  'join_group',
  'learn',
  'list_members',
  'make_connect',
  'make_fingerprint',
  'name_function',
  'name_member',
  'restore_server',
  'serve',
  'serve_threads',
]
