"""Evaluation: the metrics of weights over a task's test data."""

from collections.abc import Callable, Iterable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from jasgd import protocols
from jasgd.tasks import _task


def evaluate(
  task: _task.Task, params: Any, stats: Any, *, batch_size: int = 1000
) -> _task.Metrics:
  """Mean of each metric over all of a task's test data.

  The test data are divided into batches. The last batch may be smaller, and is
  weighted by its number of examples. The function is compiled once per task and
  batch size.

  Args:
    task: Task with `test_data`.
    params: Weights.
    stats: Statistics of the model, as in `Task`.
    batch_size: Number of examples evaluated at a time.

  Returns:
    Name of each metric -> its mean, a scalar on the device.

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
  protocols.check_count('batch_size', batch_size)
  return _measure(task.metrics, batch_size, params, stats, task.test_data)


def evaluate_all(
  task: _task.Task, weights: Iterable[tuple[Any, Any]]
) -> dict[str, float]:
  """Evaluates several weights separately; returns the means of the metrics.

  Args:
    task: Task with `test_data`.
    weights: Pairs (params, stats), at least one.

  Returns:
    Name of each metric -> its mean over the weights. For a convex loss, the
    mean loss is at least the loss of the mean of the weights.
  """
  rows = [jax.device_get(evaluate(task, *each)) for each in weights]
  return {
    name: sum(float(row[name]) for row in rows) / len(rows) for name in rows[0]
  }


# Takes the task's function and not the task: the cache of compiled programs
# keeps static arguments alive, and the task would keep its data alive.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _measure(
  metrics: Callable[..., _task.Metrics],
  batch_size: int,
  params: Any,
  stats: Any,
  examples: Any,
) -> _task.Metrics:
  """Mean over whole batches and the remainder, weighted by their sizes."""
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
  # A sequential map and not a vmap: batches are there to save memory.
  values = lax.map(lambda part: metrics(params, stats, part), parts)
  sums = jax.tree.map(lambda value: jnp.sum(value) * batch_size, values)
  if num_left:
    left = jax.tree.map(lambda leaf: leaf[num_whole:], examples)
    values = metrics(params, stats, left)
    sums = jax.tree.map(lambda a, b: a + b * num_left, sums, values)
  return jax.tree.map(lambda total: total / num_examples, sums)
