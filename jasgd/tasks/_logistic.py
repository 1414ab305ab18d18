"""Regularised logistic regression on synthetic data: strictly convex."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jasgd.tasks import _checks
from jasgd.tasks import _functions
from jasgd.tasks import _task


def make_logistic(
  *,
  batch: int,
  dimension: int = 20,
  num_samples: int = 1000,
  l2: float = 1e-2,
  seed: int = 0,
  **options: Any,
) -> _task.Task:
  """Logistic regression with an L2 penalty.

    f(w) = mean_i log(1 + exp(z_i)) - y_i z_i  +  l2/2 |w|^2,   z_i = x_i'w

  The x_i are standard normal vectors; the labels y_i are 0 or 1 with the odds
  that a standard normal w gives them. What is evaluated is f over all training
  samples, so that `evaluate` gives the distance to the optimum's loss exactly;
  `find_optimum` gives the optimum.

  Args:
    batch: Samples per gradient.
    dimension: Number of weights.
    num_samples: Of the training set.
    l2: Strength of the penalty, above 0.
    seed: Of the data and of the shards.
    **options: `shards`, `num_learners`, `alpha`, as in `from_functions`.

  Returns:
    A `Task` whose params are the vector w; it begins at 0.

  Raises:
    ValueError: if a number is out of range.

  Examples:
    >>> import jax
    >>> from jasgd import tasks
    >>> task = tasks.make_task('logistic', batch=8)
    >>> params, stats = task.init(jax.random.key(0))
    >>> print(f'{tasks.evaluate(task, params, stats)["loss"]:.4f}')
    0.6931
  """
  _checks.check_count('dimension', dimension)
  _checks.check_count('num_samples', num_samples)
  _checks.check_count('seed', seed, 0)
  l2 = _checks.check_positive('l2', l2)
  rng = np.random.Generator(np.random.Philox(key=seed))
  inputs = rng.standard_normal((num_samples, dimension)).astype(np.float32)
  odds = inputs @ rng.standard_normal(dimension)
  labels = rng.random(num_samples) < 1 / (1 + np.exp(-odds))
  examples = {'image': inputs, 'label': labels.astype(np.int32)}
  task = _functions.from_functions(
    lambda key: (jnp.zeros(dimension), {}),
    lambda params, stats, inputs, key: (inputs @ params, stats),
    examples,
    examples,
    batch=batch,
    name='logistic',
    measure=measure_binary,
    seed=seed,
    **options,
  )

  def loss(params: Any, stats: Any, batch: Any, key: Any) -> Any:
    value, stats = task.loss(params, stats, batch, key)
    return value + 0.5 * l2 * params @ params, stats

  def metrics(params: Any, stats: Any, batch: Any) -> _task.Metrics:
    values = task.metrics(params, stats, batch)
    return {**values, 'loss': values['loss'] + 0.5 * l2 * params @ params}

  return dataclasses.replace(task, loss=loss, metrics=metrics)


def measure_binary(
  outputs: jax.Array, batch: dict[str, jax.Array]
) -> _task.Metrics:
  """Cross-entropy and accuracy of the odds of label 1 against label 0."""
  labels = batch['label']
  losses = jax.nn.softplus(outputs) - labels * outputs
  hits = (outputs > 0) == (labels > 0)
  return {'loss': losses.mean(), 'accuracy': hits.mean(dtype=outputs.dtype)}
