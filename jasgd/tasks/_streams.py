"""Batches of sets that do not fit in memory, read by grain when asked for."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import numpy as np

from jasgd.tasks import _shards
from jasgd.tasks import _task

if TYPE_CHECKING:
  import grain

# Ways to divide a stream. Labels are not known without reading it all.
STREAM_SHARDS: tuple[str, ...] = ('shards', 'whole')

# transform(example, rng) -> a tree of arrays
Transform = Callable[[Any, np.random.Generator], Any]


def stream(
  task: _task.Task,
  source: Sequence[Any],
  transform: Transform | None = None,
  *,
  shards: str = 'whole',
  num_learners: int = 1,
) -> _task.Task:
  """The same task, with its training examples read from a source.

  A batch is grain's `dataset[step]`, a random access and no iterator: it is a
  function of (seed, learner, step), in any order, and nothing has to be kept to
  go on where a run ended. Each epoch is shuffled anew; what is left of it after
  the last whole batch is left out, as in `draw_samples`, whose shuffles these
  are not.

  Args:
    task: Says how big a batch is, and how to learn from it.
    source: Training examples with `len` and random access, such as
      `tfds.data_source(...)['train']`.
    transform: `transform(example, rng) -> arrays`: decodes and augments one
      example, as a pure function of its arguments. None: as in the source.
    shards: `'whole'`, every learner reads everything in an order of its own, or
      `'shards'`, learner l owns every num_learners-th example from the l-th on.
    num_learners: Among how many learners the source is divided.

  Returns:
    A streamed `Task`, whose `batches` runs on the host and gives numpy arrays.

  Raises:
    ValueError: if `shards` is unknown, a number is out of range, or a batch is
      larger than a shard.

  Examples:
    >>> from jasgd import tasks
    >>> task = tasks.make_task('quadratic', batch=2)
    >>> task = tasks.stream(task, range(6))
    >>> print(*(task.batches(None, 0, 0, step) for step in range(3)))
    [0 1] [4 3] [2 5]
  """
  _task.check_choice('shards', shards, STREAM_SHARDS)
  _task.check_count('num_learners', num_learners)
  num_shards = num_learners if shards == 'shards' else 1
  _shards.check_shard(len(source), task.batch, num_shards)

  # A run asks for few different learners, again and again.
  @functools.lru_cache(maxsize=1024)
  def open_shard(run_seed: int, learner: int) -> 'grain.MapDataset':
    import grain

    dataset = grain.MapDataset.source(source)
    if num_shards > 1:
      # Not shuffled before: grain would divide it anew in each epoch.
      dataset = dataset[learner % num_shards :: num_shards]
    dataset = dataset.seed(_make_seed(run_seed, learner)).shuffle()
    if transform is not None:
      dataset = dataset.random_map(transform)
    return dataset.batch(task.batch, drop_remainder=True).repeat()

  def batches(data: Any, seed: Any, learner: Any, step: Any) -> Any:
    del data  # It is in the source.
    return open_shard(int(seed), int(learner))[int(step)]

  return dataclasses.replace(
    task,
    num_samples=len(source),
    batches=batches,
    data=None,
    is_streamed=True,
  )


def _make_seed(*numbers: int) -> int:
  """One number of the 32 bits that grain has for it, from several."""
  return int(np.random.SeedSequence(numbers).generate_state(1)[0])
