"""Functions of learners and servers on messages, against plain arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jasgd import engine
from jasgd import tasks
from tests import trees

pytestmark = pytest.mark.usefixtures('quick_compiler')


def _make_root_task():
  """A task whose loss is finite at 0, where its gradient is not."""
  return tasks.Task(
    name='root',
    batch=1,
    num_samples=1,
    init=lambda key: ({'good': jnp.ones(2), 'root': jnp.ones(3)}, {}),
    loss=lambda params, stats, batch, key: (
      jnp.sum(jnp.sqrt(params['root'])) + jnp.sum(params['good'] ** 2),
      stats,
    ),
    metrics=lambda params, stats, batch: {},
    batches=lambda data, seed, learner, step: data,
    data=jnp.zeros(1),
  )


def _write(layout, tree):
  """Views of a buffer that holds a tree."""
  buffer = np.empty(layout.size, np.uint8)
  layout.pack(tree, buffer)
  return layout.view(buffer)


@pytest.mark.parametrize('is_local', [False, True])
def test_one_number_that_is_not_finite_is_reported(is_local):
  """Only one leaf of the gradient is not finite; the loss is."""
  task = _make_root_task()
  weights = task.init(jax.random.key(0))
  layout = engine.make_layout(weights)
  functions = engine.make_learner(task, layout)
  where = (task.data, 0, 0, 0)
  for number, is_finite in ((4.0, True), (0.0, False)):
    params = {'good': jnp.ones(2), 'root': jnp.array([1.0, number, 1.0])}
    parts = _write(layout, (params, {}))
    if is_local:  # A learner with its own replica.
      local = functions.step_copy(functions.start_copy(parts), *where, 0.1)
      push, _ = functions.push_copy(local)
    else:
      push = functions.compute(parts, *where)
    assert np.isfinite(push.loss)
    assert bool(push.is_finite) == is_finite


def test_a_gradient_is_computed_in_the_dtype_of_the_weights():
  """The sum is not rounded to the dtype of messages."""
  task = tasks.make_task('logistic', batch=8)
  params = jax.random.normal(jax.random.key(1), (20,))
  layout = engine.make_layout((params, {}), 'bfloat16')
  functions = engine.make_learner(task, layout)
  where = (task.data, 0, 1, 2)
  push = functions.compute(_write(layout, (params, {})), *where)
  rounded = params.astype(jnp.bfloat16).astype(jnp.float32)
  expected = engine.make_gradient(task)(rounded, {}, *where)
  trees.assert_close(push.message[0], expected.gradient, rtol=1e-5)
  trees.assert_close(push.loss, expected.loss, rtol=1e-5)
  assert push.message[0].dtype == jnp.float32
  exact = engine.make_gradient(task)(params, {}, *where).gradient
  assert np.abs(exact - expected.gradient).max() > 1e-4


@pytest.mark.parametrize('num_learners', [2, 5])
def test_statistics_are_a_moving_mean(num_learners):
  """s <- (1 - c / lambda) s + (c / lambda) mean of the group's c."""
  params, stats = jnp.zeros(2), {'mean': jnp.array([1.0, 2.0, 3.0])}
  layout = engine.make_layout((params, stats))
  functions = engine.make_server(engine.make_update(optax.sgd(0.1)), layout)
  state = functions.init(*jax.tree.map(jnp.array, (params, stats)))  # Donated.
  rows = np.arange(6, dtype=np.float32).reshape(2, 3)
  pushes = [_write(layout, (params, {'mean': row})) for row in rows]
  weights = _write(layout, (params, stats))
  state = functions.accumulate(state, pushes[0], 0, weights)
  state = functions.apply(
    state, pushes[1], 0, weights, 1.0, num_learners, is_single=False
  )
  share = 2 / num_learners
  expected = (1 - share) * stats['mean'] + share * rows.mean(axis=0)
  np.testing.assert_allclose(state.stats['mean'], expected, rtol=1e-6)
  # A group of one gradient has its own compiled call.
  before = np.array(state.stats['mean'])
  state = functions.apply(
    state, pushes[0], 0, weights, 1.0, num_learners, is_single=True
  )
  expected = before + (rows[0] - before) / num_learners
  np.testing.assert_allclose(state.stats['mean'], expected, rtol=1e-6)
