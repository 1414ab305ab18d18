"""Random permutations and pairs as a few rounds to draw from.

What a device sends to whom is compiled into its program, so that permutations
drawn at run time come from a set that is known beforehand. The sets here are
such that, over a set, everybody meets everybody equally often. The mean squared
disagreement after a round depends on nothing else, and `consensus_rate` holds
exactly, as for permutations drawn from all n! of them.
"""

import numpy as np

from jasgd.gossip import _draws
from jasgd.gossip import _topology
from jasgd.gossip import _weights

# The most rounds that are compiled, one branch of a switch each. With more
# nodes a set is drawn at random, and rates hold approximately.
MAX_ROUNDS = 64


def make_random_rounds(
  peers: str, num_nodes: int, weight: float = 0.5
) -> _topology.Topology:
  """A topology whose rounds are to be drawn with equal probabilities.

  Args:
    peers: `'permutation'` or `'matching'`.
    num_nodes: n.
    weight: Of the peer.

  Returns:
    For permutations n rounds, for pairs n - 1, or n if that is odd; never more
    than `MAX_ROUNDS`.
  """
  if num_nodes > MAX_ROUNDS:
    tables = _draws.draw_peers(peers, num_nodes, MAX_ROUNDS)
  elif peers == 'matching':
    tables = _list_pairs(num_nodes)
  else:
    # A Latin square. The first row is random, so that few nodes are idle at the
    # same time: all shifts of the identity would have a round without any mix.
    first = _draws.draw_peers('permutation', num_nodes)
    tables = (first + np.arange(num_nodes)[:, None]) % num_nodes
  topology = _weights.from_peers(tables[:, :, None], kind=f'random {peers}')
  return _weights.with_constant_weights(topology, weight)


def _list_pairs(num_nodes: int) -> np.ndarray:
  """A tournament: in round k, i meets j if i + j = k modulo an odd number."""
  odd = num_nodes - 1 + num_nodes % 2
  nodes = np.arange(num_nodes)
  peers = (np.arange(odd)[:, None] - nodes) % odd
  if num_nodes % 2:
    return peers
  # Who would meet itself meets the last one.
  last = num_nodes - 1
  peers[:, last] = np.nonzero(peers[:, :last] == nodes[:last])[1]
  peers[np.arange(odd), peers[:, last]] = last
  return peers
