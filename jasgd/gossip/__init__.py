"""Training without a server: which nodes average with which, and how.

- Peer strategies (`Pull`, `Push`, `PushSum`, `Pairs`, `Elastic`, `AllReduce`)
  are state machines, one per node. The simulator and real processes drive the
  same objects. `jasgd.gossip.strategies` has a table of them; `PeerStrategy`
  and `PeerNode` are the base classes of your own. `make_strategy` builds a
  strategy, with or without a server, from name and arguments.
- `jasgd.gossip.topologies` has the graphs: ring, torus, hypercube, ... A
  strategy takes one as `peers`, by name or as an object. `draw_peers` draws
  random peers.
- `mix`, `mix_elastic` and `consensus_distance` are for your own program: they
  work on trees of arrays over a named axis, under `jax.pmap`, `jax.shard_map`
  and `jax.vmap`. They need jax, and are loaded when they are first used;
  nothing else here needs it.

The names outside `__all__` are for other rooms of jasgd, and not promised to
users.
"""

import importlib
from typing import Any, TYPE_CHECKING

from jasgd.gossip import topologies
from jasgd.gossip.strategies import check_strategy as check_strategy
from jasgd.gossip.strategies import find_strategy as find_strategy
from jasgd.gossip.strategies import make_strategy
from jasgd.gossip.strategies import STRATEGIES as STRATEGIES
from jasgd.gossip.strategies import Strategy as Strategy
from jasgd.gossip.strategies._allreduce import AllReduce
from jasgd.gossip.strategies._base import Actions as Actions
from jasgd.gossip.strategies._base import Ask
from jasgd.gossip.strategies._base import Attract as Attract
from jasgd.gossip.strategies._base import Average as Average
from jasgd.gossip.strategies._base import CENTRE as CENTRE
from jasgd.gossip.strategies._base import JoinMean as JoinMean
from jasgd.gossip.strategies._base import Message
from jasgd.gossip.strategies._base import Mix
from jasgd.gossip.strategies._base import MixWaiting
from jasgd.gossip.strategies._base import Outcome
from jasgd.gossip.strategies._base import PeerNode
from jasgd.gossip.strategies._base import PeerStrategy
from jasgd.gossip.strategies._base import Reply
from jasgd.gossip.strategies._base import Send
from jasgd.gossip.strategies._elastic import Elastic
from jasgd.gossip.strategies._gossip import Gossip
from jasgd.gossip.strategies._gossip import GossipNode
from jasgd.gossip.strategies._pairs import Pairs
from jasgd.gossip.strategies._pull import Pull
from jasgd.gossip.strategies._push import Push
from jasgd.gossip.strategies._push_sum import PushSum
from jasgd.gossip.topologies._draws import draw_peers
from jasgd.gossip.topologies._draws import PEERS

if TYPE_CHECKING:
  from jasgd.gossip._mix import consensus_distance
  from jasgd.gossip._mix import mix
  from jasgd.gossip._mix import mix_elastic

__all__ = [
  'PEERS',
  'AllReduce',
  'Ask',
  'Elastic',
  'Gossip',
  'GossipNode',
  'Message',
  'Mix',
  'MixWaiting',
  'Outcome',
  'Pairs',
  'PeerNode',
  'PeerStrategy',
  'Pull',
  'Push',
  'PushSum',
  'Reply',
  'Send',
  'consensus_distance',
  'draw_peers',
  'make_strategy',
  'mix',
  'mix_elastic',
  'topologies',
]

_NEED_JAX = ('consensus_distance', 'mix', 'mix_elastic')


def __getattr__(name: str) -> Any:
  if name not in _NEED_JAX:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  value = getattr(importlib.import_module(f'{__name__}._mix'), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *_NEED_JAX})
