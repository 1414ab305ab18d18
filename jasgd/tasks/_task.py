"""`Task`: the contract between data, model and all other code."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import numpy as np

from jasgd import protocols

# A tree of arrays: weights, statistics, a batch.
Tree = Any
Key = jax.Array
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Task:
  """A model, its loss, its data, and the minibatch of every step.

  A learner has no state. Its gradient is a function of the weights that it read
  and of three numbers,

    batch = batches(data, seed, learner, step)
    gradient = d loss(params, stats, batch, fold_key(seed, learner, step))

  so every gradient of a run can be computed again later, on any machine.

  All functions but `init` and a streamed `batches` are called inside jit. They
  must be pure. `data` is an argument of the compiled program; arrays that a
  function closes over become constants in it, and must be small.

  Attributes:
    name: Name of the task in reports.
    batch: Samples per gradient.
    num_samples: Size of the training set; that many samples are an epoch.
    init: Function `init(key) -> (params, stats)`. Stats are variables of the
      model that are not trained, such as the statistics of batch
      normalisation; `{}` if there are none.
    loss: Function `loss(params, stats, batch, key) -> (loss, stats)`: the mean
      over the batch, in training mode. The key is for dropout and the like.
    metrics: Function `metrics(params, stats, batch) -> {name: mean over the
      batch}`, in evaluation mode. It includes `'loss'` and, for a classifier,
      `'accuracy'`.
    batches: Function `batches(data, seed, learner, step) -> batch` of int32
      scalars that may be traced. Every leaf of a batch has a leading axis of
      `batch` examples. Samples and augmentation depend on nothing else.
    data: Arguments of `batches`: a tree of arrays.
    test_data: Examples for `evaluate`: a tree of arrays with a leading axis of
      examples. None: the task cannot be evaluated.
    is_streamed: Whether `batches` runs on the host, outside jit, and returns
      numpy arrays; `data` is None then.
    chunk: Number of examples whose gradient a CPU computes fastest: a batch is
      divided into parts that fit the cache (see `choose_chunk`). None: the
      whole batch at once, as batch normalisation requires. It changes a
      gradient by rounding only.

  Examples:
    A line through the origin, in plain functions; `from_linen` and `from_nnx`
    make a task of a flax module.

    >>> import jax.numpy as jnp
    >>> from jasgd import tasks
    >>> xs = jnp.linspace(-1.0, 1.0, 100)
    >>> def measure(slope, batch):
    ...   return jnp.mean((slope * batch['x'] - batch['y']) ** 2)
    >>> def draw(data, seed, learner, step):
    ...   index = tasks.draw_samples(
    ...     seed, learner, step, num_samples=100, batch=10
    ...   )
    ...   return {'x': data['x'][index], 'y': data['y'][index]}
    >>> line = tasks.Task(
    ...   name='line',
    ...   batch=10,
    ...   num_samples=100,
    ...   init=lambda key: (jnp.zeros(()), {}),
    ...   loss=lambda slope, stats, batch, key: (measure(slope, batch), stats),
    ...   metrics=lambda slope, stats, batch: {'loss': measure(slope, batch)},
    ...   batches=draw,
    ...   data={'x': xs, 'y': 3 * xs},
    ...   test_data={'x': xs, 'y': 3 * xs},
    ... )
    >>> print(tasks.evaluate(line, jnp.float32(2.0), {})['loss'])
    0.34006733
  """

  name: str
  batch: int
  num_samples: int
  init: Callable[[Key], tuple[Tree, Tree]]
  loss: Callable[[Tree, Tree, Tree, Key], tuple[jax.Array, Tree]]
  metrics: Callable[[Tree, Tree, Tree], Metrics]
  batches: Callable[[Tree, Any, Any, Any], Tree]
  data: Tree = None
  test_data: Tree = None
  is_streamed: bool = False
  chunk: int | None = None

  def __post_init__(self) -> None:
    protocols.check_count('batch', self.batch)
    protocols.check_count('num_samples', self.num_samples)
    if self.batch > self.num_samples:
      raise ValueError(
        f'batch must be at most num_samples, got batch={self.batch} of '
        f'num_samples={self.num_samples}.'
      )
    if self.chunk is not None:
      protocols.check_count('chunk', self.chunk)
    if self.is_streamed and self.data is not None:
      raise ValueError(
        f'The streamed task {self.name!r} must have no data (None): its '
        'batches are read on the host, not drawn on the device.'
      )
    if self.test_data is not None:
      count_examples('test_data', self.test_data)


def fold_key(seed: Any, learner: Any, step: Any) -> Key:
  """Random key of a gradient.

    fold_in(fold_in(key(seed), learner), step)

  The key is always of the threefry kind, independent of jax's configuration,
  since its bits are the same on every machine. For each further use, fold in
  another constant, as augmentation does, so that no two uses share random
  numbers.

  Args:
    seed: Seed of the run, an integer that may be traced.
    learner: Number of the learner; may be traced.
    step: Number of the learner's gradient; may be traced.

  Returns:
    A jax key.

  Examples:
    >>> import jax
    >>> from jasgd import tasks
    >>> print(jax.random.randint(tasks.fold_key(0, 1, 2), (3,), 0, 10))
    [2 0 7]
  """
  key = jax.random.key(seed, impl='threefry2x32')
  return jax.random.fold_in(jax.random.fold_in(key, learner), step)


def choose_chunk(batch: int, chunk: int | None) -> int:
  """Number of examples of a batch to compute at a time.

  It is the largest divisor of `batch` that is at most `chunk`. Parts of unequal
  size would have to be compiled separately and would need weights.

  Args:
    batch: Samples per gradient.
    chunk: Desired number, as in `Task.chunk`. None: the whole batch.

  Returns:
    A divisor of `batch`.

  Raises:
    ValueError: if a number is below 1.

  Examples:
    >>> from jasgd import tasks
    >>> tasks.choose_chunk(128, 32), tasks.choose_chunk(100, 32)
    (32, 25)
    >>> tasks.choose_chunk(4, 32), tasks.choose_chunk(100, None)
    (4, 100)
  """
  protocols.check_count('batch', batch)
  if chunk is None:
    return batch
  protocols.check_count('chunk', chunk)
  return next(
    size for size in range(min(batch, chunk), 0, -1) if batch % size == 0
  )


def check_positive(name: str, value: Any) -> float:
  """Returns `value` as a float; raises a ValueError unless 0 < value < inf."""
  number = protocols.check_number(name, value)
  if not 0 < number < np.inf:
    raise ValueError(f'{name} must be finite and above 0, got {value}.')
  return number


def count_examples(name: str, examples: Any) -> int:
  """Counts examples: the common length of the leading axes of all leaves.

  Args:
    name: Name of the examples, for the error message.
    examples: Tree of arrays.

  Returns:
    The number of examples.

  Raises:
    ValueError: if there is no array, or the lengths differ.
  """
  shapes = [np.shape(leaf) for leaf in jax.tree.leaves(examples)]
  lengths = {shape[0] if shape else -1 for shape in shapes}
  if len(lengths) != 1 or -1 in lengths:
    raise ValueError(
      f'The arrays of {name} must share a leading axis of examples, got the '
      f'shapes {shapes}.'
    )
  return lengths.pop()
