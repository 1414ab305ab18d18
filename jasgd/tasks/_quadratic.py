"""A quadratic with gradient noise: everything about it is known in advance."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jasgd.tasks import _checks
from jasgd.tasks import _task

_NOISE = 0x6E6F6973  # Keeps the noise apart from other uses of a key.


def make_quadratic(
  *,
  batch: int,
  dimension: int = 10,
  condition: float = 10.0,
  noise: float = 0.1,
  num_samples: int = 1000,
) -> _task.Task:
  """A quadratic whose gradients are noisy.

    f(w) = 1/2 (w - w*)' A (w - w*)
    gradient = A (w - w*) + mean of `batch` draws of N(0, noise^2 I)

  A has eigenvalues from 1/condition to 1, spaced evenly in the logarithm, and
  is not diagonal. So SGD converges for rates below 2, with gradients d updates
  late for rates below 2 sin(pi / (4 d + 2)), and the rate of convergence is
  that of the eigenvalue 1/condition. The optimum w* goes from -1 to 1 in even
  steps, and f(w*) = 0. The weights begin at w* plus a standard normal vector.

  Args:
    batch: Draws of the noise per gradient.
    dimension: Number of weights.
    condition: Largest eigenvalue of A over the smallest, at least 1.
    noise: Standard deviation of one draw, at least 0.
    num_samples: Draws that are called an epoch: there is no data.

  Returns:
    A `Task` whose params are the vector w, with the metrics `'loss'`, f(w)
    without noise, and `'distance'`, |w - w*|.

  Raises:
    ValueError: if a number is out of range.

  Examples:
    >>> import jax
    >>> from jasgd import tasks
    >>> task = tasks.make_task('quadratic', batch=1, dimension=2, noise=0.0)
    >>> batch = task.batches(task.data, 0, 0, 0)
    >>> key = tasks.fold_key(0, 0, 0)
    >>> loss, _ = task.loss(jax.numpy.array([-1.0, 1.0]), {}, batch, key)
    >>> print(loss)
    0.0
  """
  _checks.check_count('dimension', dimension)
  if not 1 <= condition < np.inf:
    raise ValueError(f'condition must be finite and >= 1, got {condition}.')
  if not 0 <= noise < np.inf:
    raise ValueError(f'noise must be finite and at least 0, got {noise}.')
  curvature = _make_curvature(dimension, condition)
  optimum = np.linspace(-1, 1, dimension)

  def init(key: _task.Key) -> tuple[_task.Tree, _task.Tree]:
    return jnp.asarray(optimum) + jax.random.normal(key, (dimension,)), {}

  def measure(params: jax.Array) -> jax.Array:
    error = params - optimum.astype(params.dtype)
    return 0.5 * error @ curvature.astype(params.dtype) @ error

  def loss(params: Any, stats: Any, batch: Any, key: Any) -> Any:
    del key  # The noise is in the batch.
    error = params - optimum.astype(params.dtype)
    return measure(params) + jnp.mean(batch['noise'] @ error), stats

  def metrics(params: Any, stats: Any, batch: Any) -> _task.Metrics:
    del stats, batch  # There is no data.
    error = params - optimum.astype(params.dtype)
    return {'loss': measure(params), 'distance': jnp.linalg.norm(error)}

  def batches(data: Any, seed: Any, learner: Any, step: Any) -> Any:
    del data  # There is none.
    key = jax.random.fold_in(_task.fold_key(seed, learner, step), _NOISE)
    return {'noise': noise * jax.random.normal(key, (batch, dimension))}

  return _task.Task(
    name='quadratic',
    batch=batch,
    num_samples=num_samples,
    init=init,
    loss=loss,
    metrics=metrics,
    batches=batches,
    data={},
    test_data={'noise': jnp.zeros((1, dimension))},
  )


def _make_curvature(dimension: int, condition: float) -> np.ndarray:
  """A = Q diag(eigenvalues) Q with the reflection Q = I - 2 v v' / v'v."""
  eigenvalues = np.geomspace(1 / condition, 1, dimension)
  if dimension == 1:
    eigenvalues = np.ones(1)
  direction = np.arange(1.0, dimension + 1)
  direction /= np.linalg.norm(direction)
  reflection = np.eye(dimension) - 2 * np.outer(direction, direction)
  return reflection @ np.diag(eigenvalues) @ reflection
