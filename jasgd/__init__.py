"""jasgd: asynchronous SGD for JAX.

The table of contents. Public are the names listed here, those in the `__all__`
of a room such as `jasgd.transforms`, and the fields of the states that those
name; what begins with an underscore is private. Public names keep their meaning
within a minor version (0.1.x); CHANGELOG.md says what the next one changes.

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
