"""Random peers, a function of seed, number of nodes and round alone.

Philox is a function of a key and a counter. The key is (seed, kind of draw),
and round r of n nodes has its own range of the counter. Only raw bits of numpy
are used: they are equal on all machines and in all versions of numpy, while the
numbers that a `numpy.random.Generator` derives from them are not.
"""

import numpy as np

from jasgd import protocols

# Kind of draw -> second half of the key. Never renumber: runs depend on it.
_STREAMS = {'independent': 0, 'permutation': 1, 'matching': 2, 'regular': 3}
_WORDS_PER_BLOCK = 4  # Philox gives four numbers of 64 bits per counter.

PEERS: tuple[str, ...] = ('independent', 'matching', 'permutation')


def draw_peers(
  peers: str,
  num_nodes: int,
  num_rounds: int = 1,
  *,
  seed: int = 0,
  first_round: int = 0,
) -> np.ndarray:
  """Draws a peer for every node in every round.

  ===============  =========================================  =================
  peers            draw                                       matrix W
  ===============  =========================================  =================
  `'independent'`  each node draws among all nodes, itself    row-stochastic
                   included
  `'permutation'`  a permutation: each node is drawn once     doubly stochastic
  `'matching'`     pairs; with an odd number of nodes one of  symmetric
                   them is idle
  ===============  =========================================  =================

  Round r depends on the seed, n and r alone: it is the same on every machine,
  whichever rounds are drawn with it.

  Args:
    peers: Kind of draw, from the table.
    num_nodes: Number of nodes, n, at least 1.
    num_rounds: Number of rounds to draw.
    seed: Seed of the draws, from 0 to 2^64 - 1.
    first_round: Number of the first round.

  Returns:
    int32 [num_rounds, num_nodes]: the peer of each node. A node that is its own
    peer is idle in this round.

  Raises:
    ValueError: if the name is unknown or a number is out of range.

  Examples:
    >>> from jasgd import gossip
    >>> print(gossip.draw_peers('matching', 6, 2, seed=1))
    [[4 2 1 5 0 3]
     [3 4 5 0 1 2]]
    >>> print(gossip.draw_peers('matching', 6, seed=1, first_round=1))
    [[3 4 5 0 1 2]]

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016; Salmon et al., `Parallel Random
    Numbers: As Easy as 1, 2, 3 <https://doi.org/10.1145/2063384.2063405>`_,
    2011
  """
  protocols.check_choice('peers', peers, PEERS)
  num_nodes = protocols.check_count('num_nodes', num_nodes)
  num_rounds = protocols.check_count('num_rounds', num_rounds)
  first_round = protocols.check_count('first_round', first_round, 0)
  blocks_per_round = -(-num_nodes // _WORDS_PER_BLOCK)
  # The upper half of the counter is n, so that other sizes get other bits.
  counter = (num_nodes << 128) + first_round * blocks_per_round
  words = make_philox(peers, seed, counter).random_raw(
    num_rounds * blocks_per_round * _WORDS_PER_BLOCK
  )
  words = np.reshape(words, (num_rounds, -1))[:, :num_nodes]
  if peers == 'independent':
    return _to_integers(words, num_nodes)
  order = order_by(words)
  return order if peers == 'permutation' else _pair_up(order)


def make_philox(stream: str, seed: int, counter: int = 0) -> np.random.Philox:
  """A source of raw bits, keyed by the seed and the kind of draw."""
  seed = protocols.check_count('seed', seed, 0)
  if seed >= 2**64:
    raise ValueError(f'seed must be below 2**64, got {seed}.')
  key = np.array([seed, _STREAMS[stream]], np.uint64)
  return np.random.Philox(key=key, counter=counter)


def order_by(words: np.ndarray) -> np.ndarray:
  """Converts random words to permutations along the last axis: int32."""
  # Two of n words are equal with probability n^2 / 2^65; a stable sort gives
  # the same order on all machines even then.
  return np.argsort(words, axis=-1, kind='stable').astype(np.int32)


def _to_integers(words: np.ndarray, bound: int) -> np.ndarray:
  """Converts random words to integers below `bound`: int32."""
  # The upper 53 bits are a double in [0, 1 - 2^-53]. Its product with a bound
  # below 2^53 stays below the bound when rounded, and the integers are uniform
  # up to bound / 2^53.
  fractions = (words >> np.uint64(11)) * 2.0**-53
  return (fractions * bound).astype(np.int32)


def _pair_up(order: np.ndarray) -> np.ndarray:
  """Pairs first and second node, third and fourth, and so on."""
  num_nodes = order.shape[-1]
  peers = np.tile(np.arange(num_nodes, dtype=np.int32), (len(order), 1))
  num_paired = num_nodes // 2 * 2
  left, right = order[:, 0:num_paired:2], order[:, 1:num_paired:2]
  np.put_along_axis(peers, left, right, axis=-1)
  np.put_along_axis(peers, right, left, axis=-1)
  return peers
