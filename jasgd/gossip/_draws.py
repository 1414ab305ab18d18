"""Random peers: a table whose row r is the same however it is asked for.

Philox is a function of a key and a counter. The key is (seed, what is drawn),
and round r of n nodes owns its own stretch of the counter. Only the raw bits of
numpy are used, for those are the same on all machines and in all versions,
which what a `numpy.random.Generator` makes of them is not.
"""

import numpy as np

from jasgd.gossip import _checks

# What is drawn -> second half of the key. Never renumber: runs depend on it.
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

  ===============  ==============================================  ============
  peers            how                                             W
  ===============  ==============================================  ============
  `'independent'`  each node draws from all nodes, itself too      rows sum to 1
  `'permutation'`  row r is a permutation: each is drawn once      columns too
  `'matching'`     pairs; with an odd number one node has nobody   symmetric too
  ===============  ==============================================  ============

  Row r depends on the seed, n and r alone: it is the same whichever rounds are
  drawn with it, on every machine.

  Args:
    peers: How, from the table.
    num_nodes: n, at least 1.
    num_rounds: How many rounds to draw at once.
    seed: From 0 to 2^64 - 1.
    first_round: The first of these rounds.

  Returns:
    int32 [num_rounds, num_nodes]: a node's peer, or the node itself, which
    means that it is idle in this round.

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
  _checks.check_choice('peers', peers, PEERS)
  num_nodes = _checks.check_count('num_nodes', num_nodes)
  num_rounds = _checks.check_count('num_rounds', num_rounds)
  first_round = _checks.check_count('first_round', first_round, 0)
  blocks_per_round = -(-num_nodes // _WORDS_PER_BLOCK)
  # Other sizes get other bits: n stands in the upper half of the counter.
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
  """A source of raw bits, keyed by the seed and what is drawn."""
  key = np.array([_checks.check_seed(seed), _STREAMS[stream]], np.uint64)
  return np.random.Philox(key=key, counter=counter)


def order_by(words: np.ndarray) -> np.ndarray:
  """Random words to random permutations, along the last axis: int32."""
  # Two equal words among n come with probability n^2 / 2^65; stable sorting
  # makes even that the same everywhere.
  return np.argsort(words, axis=-1, kind='stable').astype(np.int32)


def _to_integers(words: np.ndarray, bound: int) -> np.ndarray:
  """Random words to integers below `bound`: int32."""
  # The upper 53 bits are a double in [0, 1 - 2^-53]. Its product with a bound
  # below 2^53 is rounded below the bound, and uniform up to bound / 2^53.
  fractions = (words >> np.uint64(11)) * 2.0**-53
  return (fractions * bound).astype(np.int32)


def _pair_up(order: np.ndarray) -> np.ndarray:
  """Pairs the first with the second, the third with the fourth, and so on."""
  num_nodes = order.shape[-1]
  peers = np.tile(np.arange(num_nodes, dtype=np.int32), (len(order), 1))
  num_paired = num_nodes // 2 * 2
  left, right = order[:, 0:num_paired:2], order[:, 1:num_paired:2]
  np.put_along_axis(peers, left, right, axis=-1)
  np.put_along_axis(peers, right, left, axis=-1)
  return peers
