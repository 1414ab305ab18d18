"""Real processes: server, learners, nodes, and the wires between them.

A `Server` owns the weights, in one thread; a `Learner` computes gradients and
exchanges them for weights. `serve` gives a server its wires: shared memory for
processes of its host, Arrow Flight for all others. `learn` is a learner in a
process of its own. A `Peer` trains without a server and mixes weights with its
peers; a `Centre` is what elastic averaging needs besides; a `GroupNode` is a
node of an all-reduce.

The folders are the parts: `wires`, `server`, `nodes`.
"""

# Names that are imported `as` themselves, and `restore_server`, are for
# `jasgd.experiment` and `launch`. They are not in `__all__`: users are promised
# nothing about them.
from jasgd.runtime._checkpoints import restore as restore_server  # noqa: F401
from jasgd.runtime._learner import learn
from jasgd.runtime._learner import Learner
from jasgd.runtime._processes import Child
from jasgd.runtime._processes import CHILD_VARIABLES as CHILD_VARIABLES
from jasgd.runtime._processes import compute_in_place as compute_in_place
from jasgd.runtime._processes import find_function as find_function
from jasgd.runtime._processes import name_function as name_function
from jasgd.runtime._settings import Deadlines
from jasgd.runtime._settings import make_fingerprint as make_fingerprint
from jasgd.runtime._settings import NodeSettings
from jasgd.runtime._settings import ON_LEARNER_LOST as ON_LEARNER_LOST
from jasgd.runtime._settings import ServerSettings
from jasgd.runtime.nodes import Centre
from jasgd.runtime.nodes import claim_number as claim_number
from jasgd.runtime.nodes import find_folder as find_folder
from jasgd.runtime.nodes import GROUP_LOST as GROUP_LOST
from jasgd.runtime.nodes import GroupNode
from jasgd.runtime.nodes import join_group as join_group
from jasgd.runtime.nodes import list_members as list_members
from jasgd.runtime.nodes import name_member as name_member
from jasgd.runtime.nodes import Peer
from jasgd.runtime.nodes import Registry
from jasgd.runtime.server import serve
from jasgd.runtime.server import serve_threads
from jasgd.runtime.server import Server
from jasgd.runtime.wires import BindAddress
from jasgd.runtime.wires import Connection as Connection
from jasgd.runtime.wires import find_free_port as find_free_port
from jasgd.runtime.wires import Flag as Flag
from jasgd.runtime.wires import make_connect
from jasgd.runtime.wires import Message as Message
from jasgd.runtime.wires import RefusedError as RefusedError
from jasgd.runtime.wires import Tls
from jasgd.runtime.wires import Verb as Verb
from jasgd.runtime.wires import WireError as WireError
from jasgd.runtime.wires import WIRES as WIRES

__all__ = [
  'BindAddress',
  'Centre',
  'Child',
  'Deadlines',
  'GroupNode',
  'Learner',
  'NodeSettings',
  'Peer',
  'Registry',
  'Server',
  'ServerSettings',
  'Tls',
  'learn',
  'make_connect',
  'serve',
  'serve_threads',
]
