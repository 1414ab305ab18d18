"""The optimum of a convex task, to many digits."""

from typing import Any

import jax
from jax import flatten_util
import jax.numpy as jnp
import numpy as np

from jasgd.tasks import _task


def find_optimum(
  task: _task.Task, *, tolerance: float = 1e-10, max_steps: int = 100
) -> Any:
  """Where the loss of a task's test data is smallest, by Newton's method.

    w <- w - t H(w)^-1 g(w),    until |g(w)| <= tolerance

  in float64, with t = 1 halved until the loss falls. For strictly convex tasks
  with few weights that are evaluated on their whole objective, as `'quadratic'`
  and `'logistic'` are.

  Args:
    task: With a twice differentiable, strictly convex loss and no stats.
    tolerance: Largest norm of the gradient.
    max_steps: After which to give up.

  Returns:
    The weights: a tree of numpy arrays, float64.

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
  """Floats in double precision, and whole numbers as they are."""
  is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
  return leaf.astype(jnp.float64) if is_float else leaf


def _minimise(
  measure: Any, flat: jax.Array, tolerance: float, max_steps: int
) -> jax.Array:
  """Damped Newton steps; a ValueError if they do not arrive."""
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
    # At the optimum itself rounding may hide a descent: then the step stands.
    while measure(flat - step * direction) > value and step > 1e-3:
      step /= 2
    flat = flat - step * direction
  raise ValueError(
    f"Newton's method did not reach a gradient of {tolerance} in {max_steps} "
    f'steps, but {norm}. Is the loss strictly convex?'
  )
