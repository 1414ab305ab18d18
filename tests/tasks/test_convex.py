"""The quadratic and the logistic task: closed forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import tasks


def make_quadratic(**arguments):
  """A task with its first weights beside it."""
  task = tasks.make_task('quadratic', batch=4, **arguments)
  params, _ = task.init(jax.random.key(0))
  return task, params


@pytest.mark.parametrize(
  ('dimension', 'condition'), [(1, 10.0), (2, 1000.0), (7, 1.0)]
)
def test_curvature_and_optimum(dimension, condition):
  task, params = make_quadratic(dimension=dimension, condition=condition)
  value = lambda w: task.metrics(w, {}, task.test_data)['loss']
  curvature = np.asarray(jax.jit(jax.hessian(value))(params), np.float64)
  np.testing.assert_allclose(curvature, curvature.T, atol=1e-6)
  expected = np.geomspace(1 / condition, 1, dimension)
  if dimension == 1:
    expected = [1.0]
  np.testing.assert_allclose(
    np.linalg.eigvalsh(curvature), expected, rtol=1e-3, atol=1e-6
  )
  optimum = np.linspace(-1, 1, dimension)
  metrics = task.metrics(jnp.asarray(optimum), {}, task.test_data)
  assert metrics['loss'] == metrics['distance'] == 0
  np.testing.assert_allclose(tasks.find_optimum(task), optimum, atol=1e-9)
  if dimension > 1 and condition > 1:
    assert np.abs(curvature - np.diag(np.diag(curvature))).max() > 0.01


def test_noise_of_a_gradient():
  """Mean A (w - w*), variance noise^2 / batch, and no two learners alike."""
  task, params = make_quadratic(noise=2.0, dimension=3)
  grad = jax.grad(lambda w, batch: task.loss(w, {}, batch, None)[0])

  def sample(step):
    return grad(params, task.batches(task.data, 0, 1, step))

  grads = np.asarray(jax.jit(jax.vmap(sample))(jnp.arange(20_000)))
  exact = jax.grad(lambda w: task.metrics(w, {}, None)['loss'])(params)
  deviation = 2.0 / np.sqrt(4)
  error = 5 * deviation / np.sqrt(len(grads))
  np.testing.assert_allclose(grads.mean(axis=0), exact, atol=error)
  np.testing.assert_allclose(
    np.cov(grads.T), deviation**2 * np.eye(3), atol=0.06
  )


@pytest.mark.parametrize('delay', [0, 4])
def test_stability_is_as_the_docstring_says(delay):
  """Below 2 sin(pi / (4 d + 2)) it converges, and above it does not."""
  task, params = make_quadratic(noise=0.0)
  bound = 2 * np.sin(np.pi / (4 * delay + 2))
  grad = jax.grad(lambda w, batch: task.loss(w, {}, batch, None)[0])

  @jax.jit
  def run(rate):
    def step(past, index):
      batch = task.batches(task.data, 0, 0, index)
      newest = past[0] - rate * grad(past[-1], batch)
      return jnp.concatenate([newest[None], past[:-1]]), None

    start = jnp.tile(params, (delay + 1, 1))
    last, _ = jax.lax.scan(step, start, jnp.arange(1000))
    return task.metrics(last[0], {}, None)['loss']

  before = task.metrics(params, {}, None)['loss']
  assert run(0.95 * bound) < 1e-3 * before
  assert not run(1.05 * bound) < 1e-3 * before


def test_optimum_of_the_logistic_task():
  """The gradient at the optimum is zero, by numpy, to 1e-10."""
  task = tasks.make_task('logistic', batch=8, dimension=5, l2=0.03, seed=4)
  optimum = tasks.find_optimum(task)
  assert optimum.dtype == np.float64
  inputs, labels = (
    np.asarray(task.data['examples'][name], np.float64)
    for name in ('image', 'label')
  )
  odds = 1 / (1 + np.exp(-inputs @ optimum))
  gradient = inputs.T @ (odds - labels) / len(labels) + 0.03 * optimum
  assert np.linalg.norm(gradient) < 1e-10
  # The loss agrees with its formula.
  expected = -np.mean(np.log(np.where(labels > 0, odds, 1 - odds)))
  expected += 0.015 * optimum @ optimum
  metrics = tasks.evaluate(task, jnp.asarray(optimum, jnp.float32), {})
  np.testing.assert_allclose(metrics['loss'], expected, rtol=1e-5)
  assert metrics['accuracy'] > 0.7


def test_the_logistic_task_depends_on_its_seed():
  first, again, other = (
    tasks.make_task('logistic', batch=8, seed=seed).data['examples']['image']
    for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()


def test_the_mean_over_batches_of_an_epoch_is_the_whole_gradient():
  task = tasks.make_task('logistic', batch=10)
  params = jnp.linspace(-1, 1, 20)
  grad = jax.grad(lambda w, batch: task.loss(w, {}, batch, None)[0])
  grads = jax.jit(
    jax.vmap(lambda step: grad(params, task.batches(task.data, 0, 0, step)))
  )(jnp.arange(100))
  whole = jax.grad(lambda w: task.metrics(w, {}, task.test_data)['loss'])
  np.testing.assert_allclose(
    grads.mean(axis=0), whole(params), rtol=1e-4, atol=1e-6
  )


def test_find_optimum_refuses():
  task = tasks.make_task('quadratic', batch=1)
  with pytest.raises(ValueError, match="'quadratic' has no test_data"):
    tasks.find_optimum(dataclasses.replace(task, test_data=None))
  flat = dataclasses.replace(
    task, metrics=lambda w, stats, batch: {'loss': jnp.exp(w).sum()}
  )
  with pytest.raises(ValueError, match=r'in 5 steps, but .* strictly convex'):
    tasks.find_optimum(flat, max_steps=5)
