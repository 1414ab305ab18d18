"""jasgd: asynchronous SGD for JAX.

A folder of jasgd is a room that answers one question. `help(jasgd.gossip)`, and
so on, lists the contents of a room.

============  ==============================  ===============================
room          question                        to change, open
============  ==============================  ===============================
`transforms`  what becomes of a stale         a policy: `policies.py`
              gradient?
`protocols`   with a server: when does it     a protocol:
              update, which learners wait?    `algorithms/_softsync.py`, ...
`gossip`      without a server: which nodes   a peer strategy:
              mix their weights?              `strategies/_pull.py`, ...; a
                                              topology: `topologies/_static.py`
`traces`      what happened, in which order?  a field of the record:
                                              `_schema.py`
`simulation`  how long does everything take?  a time model: `_times.py`
`tasks`       what is learned?                a task: `_names.py`; a network:
                                              `_models.py`
`workdir`     which files does a run leave?   checkpoints: `_checkpoints.py`
`engine`      what does a trace do to the     records to operations:
              weights?                        `_push_reader.py`,
                                              `_record_reader.py`
`runtime`     how do real processes work      a wire: `wires/_wire.py`, ...
              together?
`reports`     what do people look at?         a picture: `_timeline.py`, ...
`experiment`  how is a run configured,        a config field:
              started and supervised?         `configs/training.py`
============  ==============================  ===============================

Public are the names listed here, those in the `__all__` of a room, and the
fields of their states; a name that begins with an underscore is private. Public
names keep their meaning within a minor version (0.1.x); CHANGELOG.md says what
the next one changes.

A name is loaded when it is first used, so that `import jasgd` costs nothing.
"""

import importlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from jasgd.engine import replay
  from jasgd.experiment import train
  from jasgd.simulation import simulate
  from jasgd.traces import Trace
  from jasgd.transforms import delay
  from jasgd.transforms import delay_compensation
  from jasgd.transforms import delayed
  from jasgd.transforms import explicit_momentum
  from jasgd.transforms import gap_aware
  from jasgd.transforms import make_aggregation
  from jasgd.transforms import monitor_staleness
  from jasgd.transforms import policies
  from jasgd.transforms import scale_by_staleness
  from jasgd.transforms import softsync
  from jasgd.transforms import staleness_aware
  from jasgd.workdir import load_params

__version__ = '0.1.0'

__all__ = [
  'Trace',
  'delay',
  'delay_compensation',
  'delayed',
  'explicit_momentum',
  'gap_aware',
  'load_params',
  'make_aggregation',
  'monitor_staleness',
  'policies',
  'replay',
  'scale_by_staleness',
  'simulate',
  'softsync',
  'staleness_aware',
  'train',
]

# The rooms, and which of them a name comes from if it is not the first.
_ROOMS = (
  'transforms',
  'protocols',
  'gossip',
  'traces',
  'simulation',
  'tasks',
  'workdir',
  'engine',
  'runtime',
  'reports',
  'experiment',
)
_ROOM_OF = {
  'Trace': 'traces',
  'load_params': 'workdir',
  'replay': 'engine',
  'simulate': 'simulation',
  'train': 'experiment',
}


def __getattr__(name: str) -> Any:
  if name in __all__:
    room = importlib.import_module(f'jasgd.{_ROOM_OF.get(name, _ROOMS[0])}')
    value = getattr(room, name)
  elif name in _ROOMS:
    value = importlib.import_module(f'jasgd.{name}')
  else:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  globals()[name] = value  # The next use finds it without coming here.
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__, *_ROOMS})
