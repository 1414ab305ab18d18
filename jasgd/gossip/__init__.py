"""Who averages with whom: topologies as arrays, and what they are worth.

A topology is data (`Topology`): rounds of edges with weights, that repeat. The
graph and its weights are separate things; each kind comes with weights that
keep the mean, where there are such, and `with_uniform_weights`,
`with_metropolis_weights` and `with_constant_weights` give others.

======================  ============  ==========  ==============  =============
kind                    n             degree      rounds          W
======================  ============  ==========  ==============  =============
`complete`              up to 2,048   n - 1       1               symmetric
`ring`                  any           2           1               symmetric
`torus`                 no prime      4           1               symmetric
`hypercube`             power of 2    log2 n      1               symmetric
`star`                  any           n - 1, 1    1               symmetric
`random_regular`        n d even      d           1               symmetric
`exponential`           any           log2 n      1               doubly stoch.
`one_peer_exponential`  any           1           log2 n          doubly stoch.
`one_peer_hypercube`    power of 2    1           log2 n          symmetric
`random_matching`       any           1 or 0      as many as you  symmetric
`random_permutation`    any           1 or 0      draw            doubly stoch.
`random_independent`    any           1 or 0                      rows only
======================  ============  ==========  ==============  =============

A symmetric W is doubly stochastic. `from_peers` makes a topology of your own
arrays, `make_topology` one from the name of its kind, and `draw_peers` gives
random peers for round r, for any r, without a topology.

`mix`, `mix_elastic` and `consensus_distance` work on trees of arrays, over a
named axis: under `jax.pmap`, `jax.shard_map` and `jax.vmap`. They need jax, and
are loaded when they are first used; nothing else here needs it.
"""

import importlib
from typing import Any, TYPE_CHECKING

from jasgd.gossip._allreduce import AllReduce
from jasgd.gossip._allreduce import AllReduceNode
from jasgd.gossip._consensus import consensus_rate
from jasgd.gossip._consensus import push_consensus_rate
from jasgd.gossip._consensus import topology_consensus_rate
from jasgd.gossip._draws import draw_peers
from jasgd.gossip._draws import PEERS
from jasgd.gossip._elastic import Elastic
from jasgd.gossip._graphs import complete
from jasgd.gossip._graphs import exponential
from jasgd.gossip._graphs import hypercube
from jasgd.gossip._graphs import ring
from jasgd.gossip._graphs import star
from jasgd.gossip._graphs import torus
from jasgd.gossip._kinds import KINDS
from jasgd.gossip._kinds import make_topology
from jasgd.gossip._measures import column_sums
from jasgd.gossip._measures import is_connected
from jasgd.gossip._measures import is_doubly_stochastic
from jasgd.gossip._measures import is_symmetric
from jasgd.gossip._measures import row_sums
from jasgd.gossip._measures import spectral_gap
from jasgd.gossip._pairs import Pairs
from jasgd.gossip._peers import Gossip
from jasgd.gossip._peers import GossipNode
from jasgd.gossip._pull import Pull
from jasgd.gossip._push import Push
from jasgd.gossip._push_sum import PushSum
from jasgd.gossip._regular import random_regular
from jasgd.gossip._rounds import one_peer_exponential
from jasgd.gossip._rounds import one_peer_hypercube
from jasgd.gossip._rounds import random_independent
from jasgd.gossip._rounds import random_matching
from jasgd.gossip._rounds import random_permutation
from jasgd.gossip._strategy import Action
from jasgd.gossip._strategy import Actions
from jasgd.gossip._strategy import Ask
from jasgd.gossip._strategy import Attract
from jasgd.gossip._strategy import Average
from jasgd.gossip._strategy import CENTRE
from jasgd.gossip._strategy import JoinMean
from jasgd.gossip._strategy import Message
from jasgd.gossip._strategy import Mix
from jasgd.gossip._strategy import MixWaiting
from jasgd.gossip._strategy import Outcome
from jasgd.gossip._strategy import PeerNode
from jasgd.gossip._strategy import PeerStrategy
from jasgd.gossip._strategy import Reply
from jasgd.gossip._strategy import Send
from jasgd.gossip._topology import Topology
from jasgd.gossip._weights import from_peers
from jasgd.gossip._weights import with_constant_weights
from jasgd.gossip._weights import with_metropolis_weights
from jasgd.gossip._weights import with_uniform_weights

if TYPE_CHECKING:
  from jasgd.gossip._mix import mix
  from jasgd.gossip._mix_elastic import consensus_distance
  from jasgd.gossip._mix_elastic import mix_elastic

__all__ = [
  'CENTRE',
  'KINDS',
  'PEERS',
  'Action',
  'Actions',
  'AllReduce',
  'AllReduceNode',
  'Ask',
  'Attract',
  'Average',
  'Elastic',
  'Gossip',
  'GossipNode',
  'JoinMean',
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
  'Topology',
  'column_sums',
  'complete',
  'consensus_distance',
  'consensus_rate',
  'draw_peers',
  'exponential',
  'from_peers',
  'hypercube',
  'is_connected',
  'is_doubly_stochastic',
  'is_symmetric',
  'make_topology',
  'mix',
  'mix_elastic',
  'one_peer_exponential',
  'one_peer_hypercube',
  'push_consensus_rate',
  'random_independent',
  'random_matching',
  'random_permutation',
  'random_regular',
  'ring',
  'row_sums',
  'spectral_gap',
  'star',
  'topology_consensus_rate',
  'torus',
  'with_constant_weights',
  'with_metropolis_weights',
  'with_uniform_weights',
]

_NEED_JAX = {
  'consensus_distance': '_mix_elastic',
  'mix': '_mix',
  'mix_elastic': '_mix_elastic',
}


def __getattr__(name: str) -> Any:
  if name not in _NEED_JAX:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_NEED_JAX[name]}')
  globals()[name] = value = getattr(module, name)
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *_NEED_JAX})
