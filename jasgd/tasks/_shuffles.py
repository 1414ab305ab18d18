"""Shuffles that are never stored: where does a sample of an epoch come from?

A keyed Feistel network is a permutation of the numbers of b bits. Split a
number in a left and a right part; then, in turn,

  left ^= hash(right, key_r)      right ^= hash(left, key_r)

Each line can be undone, so that the whole is one-to-one whatever the hash. For
n samples take the smallest b of at least 4 with 2^b >= n, and walk the cycle: a
number that comes out as n or above goes in again, until it is below n. That is
one-to-one on 0..n-1, costs at most two passes per number on average (n > 8),
and needs no memory, so that a batch of an epoch of a billion samples costs as
much as one of a thousand.

Only integer operations are used: the bits are the same on every machine. The
number of samples may be traced, so shards of unequal size are one program.
Twelve rounds are uniform in positions and in pairs as far as 400,000 shuffles
can tell, save that some orders of two or three samples are a few percent
likelier than others.

References:
  Black and Rogaway, `Ciphers with Arbitrary Finite Domains
  <https://doi.org/10.1007/3-540-45760-7_9>`_, 2002
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from jasgd.tasks import _task

# Never change these: runs depend on them.
_NUM_ROUNDS = 12
_MIN_BITS = 4  # On 3 bits, 12 rounds are measurably not uniform.
_GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio: spreads the rounds.
_EPOCHS = 0x65706F63  # Keeps keys of epochs apart from keys of gradients.


def draw_samples(
  seed: Any, learner: Any, step: Any, *, num_samples: Any, batch: int
) -> jax.Array:
  """Which samples a learner's batch consists of.

  Every epoch is a shuffle without replacement of its own. With s the step and
  e = num_samples // batch the steps of an epoch, batch s is the part
  s % e of the shuffle that is keyed by (seed, learner, s // e). What is left of
  a shuffle after e batches, fewer than `batch` samples, is left out; it is
  other samples in each epoch.

  Args:
    seed: Of the run; an integer that may be traced, as are the next two.
    learner: Who draws.
    step: Which of the learner's batches it is.
    num_samples: Of the set, or of the learner's shard; may be traced.
    batch: Samples to draw.

  Returns:
    int32 [batch]: different numbers from 0 to num_samples - 1.

  Raises:
    ValueError: if the batch is larger than the set (unless its size is traced).

  Examples:
    >>> from jasgd import tasks
    >>> for step in range(3):
    ...   print(tasks.draw_samples(0, 0, step, num_samples=8, batch=4))
    [7 5 2 4]
    [1 6 3 0]
    [4 3 0 1]
  """
  _task.check_count('batch', batch)
  if not isinstance(num_samples, jax.core.Tracer) and batch > num_samples:
    raise ValueError(
      f'batch must be at most the number of samples, got batch={batch} of '
      f'{num_samples}.'
    )
  steps_per_epoch = num_samples // batch
  key = jax.random.fold_in(
    _task.fold_key(seed, learner, step // steps_per_epoch), _EPOCHS
  )
  positions = (step % steps_per_epoch) * batch + jnp.arange(batch)
  return permute(positions, num_samples, key)


def permute(positions: Any, num_samples: Any, key: jax.Array) -> jax.Array:
  """Where the positions of a shuffle of 0..num_samples-1 come from.

  Args:
    positions: Integers from 0 to num_samples - 1.
    num_samples: At most 2^31; may be traced.
    key: A jax key: which shuffle.

  Returns:
    int32, of the shape of the positions.
  """
  size = jnp.asarray(num_samples, jnp.uint32)
  num_bits = jnp.maximum(32 - lax.clz(size - 1), _MIN_BITS)
  round_keys = _make_round_keys(key)

  def walk(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    values, is_outside = carry
    further = _encrypt(values, num_bits, round_keys)
    values = jnp.where(is_outside, further, values)
    return values, values >= size

  # All take the first pass; further ones are for those that fell outside.
  values = jnp.asarray(positions, jnp.uint32)
  inside, _ = lax.while_loop(
    lambda carry: jnp.any(carry[1]),
    walk,
    (values, jnp.ones_like(values, bool)),
  )
  return inside.astype(jnp.int32)


def _make_round_keys(key: jax.Array) -> jax.Array:
  """A key for each round, from the two words of a jax key."""
  first, second = jax.random.key_data(key)
  spread = np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint32) * np.uint32(_GOLDEN)
  return _hash(_hash(spread + first) ^ second)


def _encrypt(
  values: jax.Array, num_bits: jax.Array, round_keys: jax.Array
) -> jax.Array:
  """A permutation of the numbers of `num_bits` bits."""
  low_bits = num_bits // 2
  low_mask = (jnp.uint32(1) << low_bits) - 1
  high_mask = (jnp.uint32(1) << (num_bits - low_bits)) - 1
  low, high = values & low_mask, values >> low_bits
  for index in range(0, _NUM_ROUNDS, 2):
    low ^= _hash(high ^ round_keys[index]) & low_mask
    high ^= _hash(low ^ round_keys[index + 1]) & high_mask
  return high << low_bits | low


def _hash(words: jax.Array) -> jax.Array:
  """Mixes 32 bits: the last step of MurmurHash3, which is one-to-one."""
  words = (words ^ words >> 16) * jnp.uint32(0x85EBCA6B)
  words = (words ^ words >> 13) * jnp.uint32(0xC2B2AE35)
  return words ^ words >> 16
