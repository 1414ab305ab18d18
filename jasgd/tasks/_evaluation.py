"""How good are the weights? Metrics over all of a task's test data."""

from collections.abc import Callable, Iterable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from jasgd.tasks import _task


def evaluate(
  task: _task.Task, params: Any, stats: Any, *, batch_size: int = 1000
) -> _task.Metrics:
  """The mean of each of a task's metrics over all of its test data.

  Worked off in parts of `batch_size`, and a smaller last one that counts for as
  much as it has examples. Compiled once for a task and a batch size.

  Args:
    task: What is learned; must have `test_data`.
    params: Weights.
    stats: What the model keeps besides.
    batch_size: Examples at a time.

  Returns:
    The metrics, scalars on the device.

  Raises:
    ValueError: if the task has no test data or `batch_size` is below 1.

  Examples:
    >>> import jax
    >>> from jasgd import tasks
    >>> task = tasks.make_task('quadratic', batch=1)
    >>> params, stats = task.init(jax.random.key(0))
    >>> sorted(tasks.evaluate(task, params, stats))
    ['distance', 'loss']
  """
  if task.test_data is None:
    raise ValueError(f'The task {task.name!r} has no test_data to evaluate on.')
  _task.check_count('batch_size', batch_size)
  return _measure(task.metrics, batch_size, params, stats, task.test_data)


def evaluate_all(
  task: _task.Task, weights: Iterable[tuple[Any, Any]]
) -> dict[str, float]:
  """The mean of each metric over several weights, each evaluated by itself.

  Args:
    task: What is learned; must have `test_data`.
    weights: (params, stats) of each; at least one.

  Returns:
    The means. That of the losses is no less than the loss of the mean where the
    loss is convex.
  """
  rows = [jax.device_get(evaluate(task, *each)) for each in weights]
  return {
    name: sum(float(row[name]) for row in rows) / len(rows) for name in rows[0]
  }


# The functions of a task are its compiled program's identity, and not the task
# itself: the cache of compiled programs would keep its data alive.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _measure(
  metrics: Callable[..., _task.Metrics],
  batch_size: int,
  params: Any,
  stats: Any,
  examples: Any,
) -> _task.Metrics:
  """The weighted mean over parts of `batch_size` and what is left."""
  num_examples = jax.tree.leaves(examples)[0].shape[0]
  batch_size = min(batch_size, num_examples)
  num_parts, num_left = divmod(num_examples, batch_size)
  num_whole = num_parts * batch_size
  parts = jax.tree.map(
    lambda leaf: leaf[:num_whole].reshape(
      num_parts, batch_size, *leaf.shape[1:]
    ),
    examples,
  )
  # A scan and not a vmap: the parts are there to save memory.
  values = lax.map(lambda part: metrics(params, stats, part), parts)
  sums = jax.tree.map(lambda value: jnp.sum(value) * batch_size, values)
  if num_left:
    left = jax.tree.map(lambda leaf: leaf[num_whole:], examples)
    values = metrics(params, stats, left)
    sums = jax.tree.map(lambda a, b: a + b * num_left, sums, values)
  return jax.tree.map(lambda total: total / num_examples, sums)
