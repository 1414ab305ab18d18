"""Convex tasks with a known optimum: a noisy quadratic, logistic regression."""

import dataclasses
from typing import Any

import jax
from jax import flatten_util
import jax.numpy as jnp
import numpy as np

from jasgd import protocols
from jasgd.tasks import _functions
from jasgd.tasks import _task

_NOISE = 0x6E6F6973  # Makes the noise's random key differ from other keys.


def make_quadratic(
  *,
  batch: int,
  dimension: int = 10,
  condition: float = 10.0,
  noise: float = 0.1,
  num_samples: int = 1000,
) -> _task.Task:
  """Builds a quadratic task with noisy gradients.

    f(w) = 1/2 (w - w*)' A (w - w*)
    gradient = A (w - w*) + mean of `batch` draws of N(0, noise^2 I)

  A has eigenvalues from 1/condition to 1, spaced evenly in the logarithm, and
  is not diagonal. Hence SGD converges for learning rates below 2, and with
  gradients d updates late for rates below 2 sin(pi / (4 d + 2)); the eigenvalue
  1/condition determines the speed of convergence. The optimum w* goes from -1
  to 1 in even steps, and f(w*) = 0. The initial weights are w* plus a standard
  normal vector.

  Args:
    batch: Draws of the noise per gradient.
    dimension: Number of weights.
    condition: Largest eigenvalue of A over the smallest, at least 1.
    noise: Standard deviation of one draw, at least 0.
    num_samples: Number of draws that count as an epoch; there is no data.

  Returns:
    A `Task` whose params are the vector w. Its metrics are `'loss'`, f(w)
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
  protocols.check_count('dimension', dimension)
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
    del key  # The batch holds the noise.
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


def make_logistic(
  *,
  batch: int,
  dimension: int = 20,
  num_samples: int = 1000,
  l2: float = 1e-2,
  seed: int = 0,
  **options: Any,
) -> _task.Task:
  """Builds a task of logistic regression with an L2 penalty.

    f(w) = mean_i log(1 + exp(z_i)) - y_i z_i  +  l2/2 |w|^2,   z_i = x_i'w

  The x_i are standard normal vectors. The labels y_i, 0 or 1, are drawn from
  the model itself with a standard normal w. The test data are the training
  samples, so `evaluate` measures f exactly; `find_optimum` gives its optimum.

  Args:
    batch: Samples per gradient.
    dimension: Number of weights.
    num_samples: Size of the training set.
    l2: Strength of the penalty, above 0.
    seed: Seed of the data and of the shards.
    **options: Arguments of `from_functions`: `shards`, `num_learners`, `alpha`.

  Returns:
    A `Task` whose params are the vector w, initially 0.

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
  protocols.check_count('dimension', dimension)
  protocols.check_count('num_samples', num_samples)
  protocols.check_count('seed', seed, 0)
  l2 = _task.check_positive('l2', l2)
  rng = np.random.Generator(np.random.Philox(key=seed))
  inputs = rng.standard_normal((num_samples, dimension)).astype(np.float32)
  log_odds = inputs @ rng.standard_normal(dimension)
  labels = rng.random(num_samples) < 1 / (1 + np.exp(-log_odds))
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
  """Cross-entropy and accuracy of log odds of label 1 against label 0."""
  labels = batch['label']
  losses = jax.nn.softplus(outputs) - labels * outputs
  hits = (outputs > 0) == (labels > 0)
  return {'loss': losses.mean(), 'accuracy': hits.mean(dtype=outputs.dtype)}


def find_optimum(
  task: _task.Task, *, tolerance: float = 1e-10, max_steps: int = 100
) -> Any:
  """Minimises the loss of a task's test data by Newton's method.

    w <- w - t H(w)^-1 g(w),    until |g(w)| <= tolerance

  in float64, with t = 1 halved until the loss falls. It is meant for strictly
  convex tasks with few weights whose test data give the whole objective, such
  as `'quadratic'` and `'logistic'`.

  Args:
    task: Task with a twice differentiable, strictly convex loss and no stats.
    tolerance: Largest norm of the gradient at the optimum.
    max_steps: Number of Newton steps after which to raise an error.

  Returns:
    The optimal weights: a tree of numpy arrays, float64.

  Raises:
    ValueError: if there is no test data, or if Newton's method fails.

  Examples:
    >>> from jasgd import tasks
    >>> task = tasks.make_task('quadratic', batch=1, dimension=3)
    >>> print(abs(tasks.find_optimum(task) - [-1, 0, 1]).max() < 1e-9)
    True
  """
  if task.test_data is None:
    raise ValueError(f'The task {task.name!r} has no test_data to minimise on.')
  params, stats = task.init(jax.random.key(0))
  with jax.enable_x64(True):
    examples = jax.tree.map(_to_float64, task.test_data)
    flat, unravel = flatten_util.ravel_pytree(jax.tree.map(_to_float64, params))

    @jax.jit
    def measure(flat: jax.Array) -> jax.Array:
      return task.metrics(unravel(flat), stats, examples)['loss']

    flat = _minimise(measure, jnp.zeros_like(flat), tolerance, max_steps)
    return jax.tree.map(np.asarray, unravel(flat))


def _to_float64(leaf: jax.Array) -> jax.Array:
  """Converts floats to double precision; integers stay unchanged."""
  is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
  return leaf.astype(jnp.float64) if is_float else leaf


def _minimise(
  measure: Any, flat: jax.Array, tolerance: float, max_steps: int
) -> jax.Array:
  """Takes damped Newton steps; raises a ValueError if they do not converge."""
  differentiate = jax.jit(jax.value_and_grad(measure))
  curve = jax.jit(jax.hessian(measure))
  norm = np.inf
  for _ in range(max_steps):
    value, gradient = differentiate(flat)
    norm = jnp.linalg.norm(gradient)
    if norm <= tolerance:
      return flat
    direction = jnp.linalg.solve(curve(flat), gradient)
    step = 1.0
    # Near the optimum, rounding may hide the descent; the loop ends all the
    # same, and the short step is taken.
    while measure(flat - step * direction) > value and step > 1e-3:
      step /= 2
    flat = flat - step * direction
  raise ValueError(
    f"Newton's method did not reach a gradient of {tolerance} in {max_steps} "
    f'steps, but {norm}. Is the loss strictly convex?'
  )
