"""Which learner owns which samples.

==============  ==============================================================
shards          a learner draws from
==============  ==============================================================
`'whole'`       the whole set, in shuffles of its own
`'shards'`      every num_learners-th sample of one shuffled order
`'dirichlet'`   a shard in which some labels are common and others are rare
==============  ==============================================================

Who owns what belongs to the task and is drawn from the task's seed; in which
order a learner goes through what it owns is drawn from the run's. A learner
whose number is num_learners or more, one that came to replace another, shares
the shard of learner % num_learners, in an order of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jasgd.tasks import _shuffles
from jasgd.tasks import _task

SHARDS: tuple[str, ...] = ('dirichlet', 'shards', 'whole')

# draw(table, seed, learner, step) -> int32 [batch]
Draw = Callable[[Any, Any, Any, Any], jax.Array]

_OWNERS = 0x6F776E73  # Keeps the order of owners apart from keys of gradients.


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
    shards: How, from the table above.
    num_samples: Of the set.
    batch: Samples per gradient.
    num_learners: Among how many to divide.
    labels: A whole number per sample, for `'dirichlet'`.
    alpha: Of `draw_dirichlet_shards`.
    seed: Of the task: who owns what.

  Returns:
    A table, to be passed on as part of a task's data, and
    `draw(table, seed, learner, step)`, which gives the samples of a batch.

  Raises:
    ValueError: if the name is unknown, a number is out of range, or a batch is
      larger than a shard.
  """
  _task.check_choice('shards', shards, SHARDS)
  _task.check_count('num_learners', num_learners)
  _task.check_count('batch', batch)
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
  """Divides samples so that each shard has labels in proportions of its own.

    p_label ~ Dirichlet(alpha, ..., alpha),  one entry for each shard

  Each label's samples are dealt out in the proportions p_label: the smaller
  alpha, the fewer shards share a label; for large alpha all shards are alike.
  Then, while a shard is too small, the largest gives it some of its samples, at
  random.

  Args:
    labels: A whole number per sample.
    num_shards: How many.
    alpha: Concentration, above 0.
    min_size: Samples that each shard must have at least.
    seed: Of the proportions and of who gets which sample.

  Returns:
    For each shard, int32 numbers of samples; each sample is in exactly one.

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
  _task.check_count('num_shards', num_shards)
  _task.check_count('min_size', min_size, 0)
  _task.check_count('seed', seed, 0)
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
    poorest, richest = sizes.argmin(), sizes.argmax()
    # No more than it takes to make the two alike, so that nobody gets poor.
    count = min(
      min_size - sizes[poorest], (sizes[richest] - sizes[poorest]) // 2
    )
    moved = rng.choice(np.flatnonzero(owners == richest), count, replace=False)
    owners[moved] = poorest
    sizes[poorest] += count
    sizes[richest] -= count
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
    del table  # There is none: every learner owns everything.
    return _shuffles.draw_samples(
      seed, learner, step, num_samples=num_samples, batch=batch
    )

  return draw


def _make_strided_draw(
  num_samples: int, batch: int, num_learners: int, owner_seed: int
) -> Draw:
  def draw(table: Any, seed: Any, learner: Any, step: Any) -> jax.Array:
    del table  # There is none: the order of owners is computed, too.
    owner = learner % num_learners
    # Of the samples 0..n-1, those that leave the remainder `owner`.
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
    # As arrays of jax, so that the numbers may be traced or not.
    table = jax.tree.map(jnp.asarray, table)
    index = _shuffles.draw_samples(
      seed, learner, step, num_samples=table['sizes'][owner], batch=batch
    )
    return table['samples'][table['starts'][owner] + index]

  return draw
