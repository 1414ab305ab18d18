"""Shards: the division of a training set among learners.

==============  ==============================================================
shards          samples of a learner
==============  ==============================================================
`'whole'`       the whole set, shuffled differently for each learner
`'shards'`      every num_learners-th sample of one shuffled order
`'dirichlet'`   a shard in which some labels are common and others are rare
==============  ==============================================================

The division belongs to the task and is drawn from the task's seed. The order in
which a learner reads its shard is drawn from the run's seed. A learner that
replaced another one may have a number of num_learners or more; it shares the
shard of learner % num_learners, in a different order.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import protocols
from jasgd.tasks import _shuffles
from jasgd.tasks import _task

SHARDS: tuple[str, ...] = ('dirichlet', 'shards', 'whole')

# draw(table, seed, learner, step) -> int32 [batch]
Draw = Callable[[Any, Any, Any, Any], jax.Array]

_OWNERS = 0x6F776E73  # Makes the key of the division differ from other keys.


def make_draw(
  shards: str,
  *,
  num_samples: int,
  batch: int,
  num_learners: int = 1,
  labels: Any = None,
  alpha: float = 0.5,
  seed: int = 0,
) -> tuple[dict[str, np.ndarray], Draw]:
  """Divides a set of samples among learners.

  Args:
    shards: Kind of division, from the table above.
    num_samples: Size of the set.
    batch: Samples per gradient.
    num_learners: Number of shards.
    labels: Label of each sample, an integer, for `'dirichlet'`.
    alpha: Concentration, as in `draw_dirichlet_shards`.
    seed: Seed of the division.

  Returns:
    A table of the shards, which becomes part of the task's data, and a function
    `draw(table, seed, learner, step)` that returns the samples of a batch.

  Raises:
    ValueError: if the name is unknown, a number is out of range, or a batch is
      larger than a shard.
  """
  protocols.check_choice('shards', shards, SHARDS)
  protocols.check_count('num_learners', num_learners)
  protocols.check_count('batch', batch)
  if shards == 'whole':
    check_shard(num_samples, batch, 1)
    return {}, _make_whole_draw(num_samples, batch)
  check_shard(num_samples, batch, num_learners)
  if shards == 'shards':
    return {}, _make_strided_draw(num_samples, batch, num_learners, seed)
  if labels is None:
    raise ValueError("shards='dirichlet' needs labels, got None.")
  parts = draw_dirichlet_shards(
    labels, num_learners, alpha=alpha, min_size=batch, seed=seed
  )
  sizes = np.array([len(part) for part in parts], np.int32)
  table = {
    'samples': np.concatenate(parts),
    'starts': np.cumsum(sizes, dtype=np.int32) - sizes,
    'sizes': sizes,
  }
  return table, _make_table_draw(batch, num_learners)


def draw_dirichlet_shards(
  labels: Any,
  num_shards: int,
  *,
  alpha: float = 0.5,
  min_size: int = 1,
  seed: int = 0,
) -> list[np.ndarray]:
  """Divides samples so that the proportions of labels differ between shards.

    p_label ~ Dirichlet(alpha, ..., alpha),  one entry for each shard

  The samples of each label are divided in the proportions p_label: the smaller
  alpha, the fewer shards share a label; for large alpha all shards are alike.
  Then, while a shard is too small, random samples of the largest shard move to
  it.

  Args:
    labels: Label of each sample, an integer.
    num_shards: Number of shards.
    alpha: Concentration, above 0.
    min_size: Smallest number of samples of a shard.
    seed: Seed of the proportions and of the division.

  Returns:
    For each shard, the int32 indices of its samples. Each sample is in exactly
    one shard.

  Raises:
    ValueError: if a number is out of range, or there are too few samples.

  Examples:
    >>> from jasgd import tasks
    >>> print(*tasks.draw_dirichlet_shards([0, 1, 0, 1, 0, 1], 2, alpha=0.1))
    [1 3 5] [0 2 4]

  References:
    Hsu et al., `Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification <https://arxiv.org/abs/1909.06335>`_, 2019
  """
  labels = np.asarray(labels)
  protocols.check_count('num_shards', num_shards)
  protocols.check_count('min_size', min_size, 0)
  protocols.check_count('seed', seed, 0)
  alpha = _task.check_positive('alpha', alpha)
  check_shard(len(labels), min_size, num_shards)
  rng = np.random.Generator(np.random.Philox(key=seed))
  owners = np.empty(len(labels), np.int32)
  for label in np.unique(labels):
    (members,) = np.nonzero(labels == label)
    proportions = rng.dirichlet(np.full(num_shards, alpha))
    bounds = np.rint(np.cumsum(proportions)[:-1] * len(members)).astype(int)
    for owner, part in enumerate(np.split(rng.permutation(members), bounds)):
      owners[part] = owner
  sizes = np.bincount(owners, minlength=num_shards)
  while sizes.min() < min_size:
    smallest, largest = sizes.argmin(), sizes.argmax()
    # At most half of the difference, so that the largest does not become the
    # smaller one of the two.
    count = min(
      min_size - sizes[smallest], (sizes[largest] - sizes[smallest]) // 2
    )
    moved = rng.choice(np.flatnonzero(owners == largest), count, replace=False)
    owners[moved] = smallest
    sizes[smallest] += count
    sizes[largest] -= count
  return [
    np.flatnonzero(owners == owner).astype(np.int32)
    for owner in range(num_shards)
  ]


def check_shard(num_samples: int, batch: int, num_shards: int) -> None:
  """Raises a ValueError if a batch would be larger than the smallest shard."""
  smallest = num_samples // num_shards
  if batch > smallest:
    raise ValueError(
      f'batch must be at most the size of the smallest shard, got '
      f'batch={batch} where {num_samples} samples among {num_shards} make '
      f'{smallest}. Use fewer learners, a smaller batch, or shards="whole".'
    )


def _make_whole_draw(num_samples: int, batch: int) -> Draw:
  def draw(table: Any, seed: Any, learner: Any, step: Any) -> jax.Array:
    del table  # Empty: every learner owns all samples.
    return _shuffles.draw_samples(
      seed, learner, step, num_samples=num_samples, batch=batch
    )

  return draw


def _make_strided_draw(
  num_samples: int, batch: int, num_learners: int, owner_seed: int
) -> Draw:
  def draw(table: Any, seed: Any, learner: Any, step: Any) -> jax.Array:
    del table  # Empty: the division is computed, not stored.
    owner = learner % num_learners
    # Number of positions that are equal to `owner` modulo num_learners.
    size = (num_samples - owner + num_learners - 1) // num_learners
    index = _shuffles.draw_samples(
      seed, learner, step, num_samples=size, batch=batch
    )
    order = jax.random.key(owner_seed, impl='threefry2x32')
    return _shuffles.permute(
      owner + num_learners * index,
      num_samples,
      jax.random.fold_in(order, _OWNERS),
    )

  return draw


def _make_table_draw(batch: int, num_learners: int) -> Draw:
  def draw(table: Any, seed: Any, learner: Any, step: Any) -> jax.Array:
    owner = learner % num_learners
    # As jax arrays: a numpy array cannot be indexed by a traced number.
    table = jax.tree.map(jnp.asarray, table)
    index = _shuffles.draw_samples(
      seed, learner, step, num_samples=table['sizes'][owner], batch=batch
    )
    return table['samples'][table['starts'][owner] + index]

  return draw
