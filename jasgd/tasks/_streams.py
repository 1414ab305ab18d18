"""Streamed tasks: batches of sets that do not fit in memory, read by grain."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import numpy as np

from jasgd import protocols
from jasgd.tasks import _shards
from jasgd.tasks import _task

if TYPE_CHECKING:
  import grain

# No 'dirichlet': labels are unknown before the whole source is read.
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
  """Copies a task, with training examples that are read from a source.

  A batch is grain's `dataset[step]`, a random access and no iterator: it is a
  function of (seed, learner, step), and a run that continues needs no saved
  iterator. Each epoch is a new shuffle, made by grain and not by
  `draw_samples`; its remainder after the last whole batch is not used.

  Args:
    task: Task with the batch size, the model and the loss.
    source: Training examples with `len` and random access, such as
      `tfds.data_source(...)['train']`.
    transform: Pure function `transform(example, rng) -> arrays` that decodes
      and augments one example. None: examples are used as they are.
    shards: Division of the source: `'whole'`, every learner reads all examples
      in its own order, or `'shards'`, learner l owns every num_learners-th
      example from the l-th on.
    num_learners: Number of learners that the source is divided among.

  Returns:
    A streamed `Task`: `batches` runs on the host and returns numpy arrays.

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
  protocols.check_choice('shards', shards, STREAM_SHARDS)
  protocols.check_count('num_learners', num_learners)
  num_shards = num_learners if shards == 'shards' else 1
  _shards.check_shard(len(source), task.batch, num_shards)

  # A run uses few learners, each of them many times.
  @functools.lru_cache(maxsize=1024)
  def open_shard(run_seed: int, learner: int) -> 'grain.MapDataset':
    import grain

    dataset = grain.MapDataset.source(source)
    if num_shards > 1:
      # Before the shuffle: otherwise the shards would change in each epoch.
      dataset = dataset[learner % num_shards :: num_shards]
    dataset = dataset.seed(_make_seed(run_seed, learner)).shuffle()
    if transform is not None:
      dataset = dataset.random_map(transform)
    return dataset.batch(task.batch, drop_remainder=True).repeat()

  def batches(data: Any, seed: Any, learner: Any, step: Any) -> Any:
    del data  # The source holds the data.
    return open_shard(int(seed), int(learner))[int(step)]

  return dataclasses.replace(
    task,
    num_samples=len(source),
    batches=batches,
    data=None,
    is_streamed=True,
  )


def _make_seed(*numbers: int) -> int:
  """Combines several numbers into one seed of 32 bits, as grain needs it."""
  return int(np.random.SeedSequence(numbers).generate_state(1)[0])
