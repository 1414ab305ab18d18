"""What a task is: the one contract between data, model and everything else."""

from collections.abc import Callable, Iterable
import dataclasses
import operator
from typing import Any

import jax
import numpy as np

# A tree of arrays: weights, statistics, a batch.
Tree = Any
Key = jax.Array
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Task:
  """What is learned: a model, its loss, and which samples it sees when.

  A learner has no state. Its gradient is a function of the weights that it read
  and of three numbers,

    batch = batches(data, seed, learner, step)
    gradient = d loss(params, stats, batch, fold_key(seed, learner, step))

  so that any gradient of any run can be computed again, by anybody.

  Everything but `init` and a streamed `batches` is called inside of jit, `data`
  being an argument of the compiled program and not a constant in it. So the
  functions must be pure, and small arrays are all that they may close over.

  Attributes:
    name: For reports.
    batch: Samples per gradient.
    num_samples: Size of the training set; that many samples are an epoch.
    init: `init(key) -> (params, stats)`. Stats are what the model keeps and
      does not train, such as the statistics of batch normalisation; `{}` if
      there is nothing.
    loss: `loss(params, stats, batch, key) -> (loss, stats)`: the mean over the
      batch, in training mode. The key is for dropout and the like.
    metrics: `metrics(params, stats, batch) -> {name: mean over the batch}`, in
      evaluation mode; has `'loss'`, and `'accuracy'` if it is a classifier.
    batches: `batches(data, seed, learner, step) -> batch`, for int32 scalars
      that may be traced. Every leaf of a batch has a leading axis of `batch`
      examples. Which samples, and how they are augmented, depends on nothing
      else.
    data: What `batches` draws from: a tree of arrays.
    test_data: What `evaluate` runs over: a tree of arrays with a leading axis
      of examples. None: there is nothing to evaluate on.
    is_streamed: Whether `batches` runs on the host, outside of jit, and gives
      numpy arrays; `data` is None then.
    chunk: Number of examples at a time for which a gradient is computed fastest
      on a CPU, where a batch is worked off in parts that fit the cache (see
      `choose_chunk`). None: the whole batch at once, as batch normalisation
      demands. It changes a gradient by rounding only.

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
    check_count('batch', self.batch)
    check_count('num_samples', self.num_samples)
    if self.batch > self.num_samples:
      raise ValueError(
        f'batch must be at most num_samples, got batch={self.batch} of '
        f'num_samples={self.num_samples}.'
      )
    if self.chunk is not None:
      check_count('chunk', self.chunk)
    if self.is_streamed and self.data is not None:
      raise ValueError(
        f'The streamed task {self.name!r} must have no data: its batches are '
        'not drawn on the device.'
      )
    if self.test_data is not None:
      count_examples('test_data', self.test_data)


def fold_key(seed: Any, learner: Any, step: Any) -> Key:
  """The one random key of a gradient.

    fold_in(fold_in(key(seed), learner), step)

  It is always of the threefry kind, whatever jax's configuration says, for its
  bits are the same on every machine. Fold in a number of your own for each
  further use, as augmentation does, so that no two uses share random numbers.

  Args:
    seed: Of the run; an integer that may be traced, as are the others.
    learner: Who computes the gradient.
    step: Which of the learner's gradients it is.

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
  """How many examples of a batch to work on at a time.

  The largest divisor of `batch` that is at most `chunk`, for parts of unequal
  size would have to be compiled one by one and would weigh differently.

  Args:
    batch: Samples per gradient.
    chunk: The number wished for, as in `Task.chunk`. None: all of them.

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
  check_count('batch', batch)
  if chunk is None:
    return batch
  check_count('chunk', chunk)
  return next(
    size for size in range(min(batch, chunk), 0, -1) if batch % size == 0
  )


def check_count(name: str, value: Any, minimum: int = 1) -> int:
  """Gives `value` as an int; a ValueError if it is none, or too small."""
  try:
    if isinstance(value, bool):
      raise TypeError
    count = operator.index(value)
  except TypeError:
    raise ValueError(f'{name} must be an integer, got {value!r}.') from None
  if count < minimum:
    raise ValueError(f'{name} must be at least {minimum}, got {count}.')
  return count


def check_positive(name: str, value: Any) -> float:
  """Gives `value` as a float; a ValueError unless finite and above 0."""
  try:
    number = float(value)
  except (TypeError, ValueError):
    raise ValueError(f'{name} must be a number, got {value!r}.') from None
  if not 0 < number < np.inf:
    raise ValueError(f'{name} must be finite and above 0, got {value}.')
  return number


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
  """Raises a ValueError unless `value` is one of the choices."""
  choices = sorted(choices)
  if value not in choices:
    raise ValueError(f'Unknown {name} {value!r}. Known: {", ".join(choices)}.')


def count_examples(name: str, examples: Any) -> int:
  """The length that the leading axes of all leaves share.

  Args:
    name: What the examples are, for the error.
    examples: A tree of arrays.

  Returns:
    The number of examples.

  Raises:
    ValueError: if there is no array, or their lengths differ.
  """
  shapes = [np.shape(leaf) for leaf in jax.tree.leaves(examples)]
  lengths = {shape[0] if shape else -1 for shape in shapes}
  if len(lengths) != 1 or -1 in lengths:
    raise ValueError(
      f'The arrays of {name} must share a leading axis of examples, got the '
      f'shapes {shapes}.'
    )
  return lengths.pop()
