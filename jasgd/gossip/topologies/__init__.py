"""Topologies: which peers a node has in which round, and with what weights.

A `Topology` is plain data: rounds of weighted edges, which repeat. Each kind
has weights that keep the mean where such weights exist; `with_uniform_weights`,
`with_metropolis_weights` and `with_constant_weights` set others.

======================  ============  ==========  ==========  =================
kind                    n             degree      rounds      matrix W
======================  ============  ==========  ==========  =================
`complete`              up to 2,048   n - 1       1           symmetric
`ring`                  any           2           1           symmetric
`torus`                 no prime      4           1           symmetric
`hypercube`             power of 2    log2 n      1           symmetric
`star`                  any           n - 1, 1    1           symmetric
`random_regular`        n d even      d           1           symmetric
`exponential`           any           log2 n      1           doubly stochastic
`one_peer_exponential`  any           1           log2 n      doubly stochastic
`one_peer_hypercube`    power of 2    1           log2 n      symmetric
`random_matching`       any           1 or 0      num_rounds  symmetric
`random_permutation`    any           1 or 0      num_rounds  doubly stochastic
`random_independent`    any           1 or 0      num_rounds  row-stochastic
======================  ============  ==========  ==========  =================

A symmetric W is doubly stochastic. `from_peers` builds a topology of your own,
and `make_topology` one of the kinds above by its name.
"""

from jasgd.gossip.topologies._measures import consensus_rate
from jasgd.gossip.topologies._measures import is_connected
from jasgd.gossip.topologies._measures import is_doubly_stochastic
from jasgd.gossip.topologies._measures import is_symmetric
from jasgd.gossip.topologies._measures import spectral_gap
from jasgd.gossip.topologies._rounds import one_peer_exponential
from jasgd.gossip.topologies._rounds import one_peer_hypercube
from jasgd.gossip.topologies._rounds import random_independent
from jasgd.gossip.topologies._rounds import random_matching
from jasgd.gossip.topologies._rounds import random_permutation
from jasgd.gossip.topologies._static import complete
from jasgd.gossip.topologies._static import exponential
from jasgd.gossip.topologies._static import hypercube
from jasgd.gossip.topologies._static import random_regular
from jasgd.gossip.topologies._static import ring
from jasgd.gossip.topologies._static import star
from jasgd.gossip.topologies._static import torus
from jasgd.gossip.topologies._topology import from_peers
from jasgd.gossip.topologies._topology import KINDS
from jasgd.gossip.topologies._topology import make_topology
from jasgd.gossip.topologies._topology import Topology
from jasgd.gossip.topologies._topology import with_constant_weights
from jasgd.gossip.topologies._topology import with_metropolis_weights
from jasgd.gossip.topologies._topology import with_uniform_weights

__all__ = [
  'KINDS',
  'Topology',
  'complete',
  'consensus_rate',
  'exponential',
  'from_peers',
  'hypercube',
  'is_connected',
  'is_doubly_stochastic',
  'is_symmetric',
  'make_topology',
  'one_peer_exponential',
  'one_peer_hypercube',
  'random_independent',
  'random_matching',
  'random_permutation',
  'random_regular',
  'ring',
  'spectral_gap',
  'star',
  'torus',
  'with_constant_weights',
  'with_metropolis_weights',
  'with_uniform_weights',
]
