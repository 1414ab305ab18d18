"""A task whose statistics stay equal to its weights if both are mixed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import tasks

NUM_SAMPLES, BATCH = 50, 2
# With it, weights and statistics both move by the mean of the minibatch.
OPTIMIZER = optax.identity()


@functools.cache
def make_task():
  """A task that adds the mean of a minibatch to weights and statistics."""
  rows = np.random.default_rng(0).normal(size=(NUM_SAMPLES, 3))
  data = rows.astype(np.float32)

  def draw(data, seed, learner, step):
    index = tasks.draw_samples(
      seed, learner, step, num_samples=NUM_SAMPLES, batch=BATCH
    )
    return data[index]

  def loss(params, stats, batch, key):
    del key
    mean = batch.mean(axis=0)
    return params @ mean, {'twin': stats['twin'] + mean, 'count': 7}

  return tasks.Task(
    name='twins',
    batch=BATCH,
    num_samples=NUM_SAMPLES,
    init=lambda key: (jnp.zeros(3), {'twin': jnp.zeros(3), 'count': 7}),
    loss=loss,
    metrics=lambda params, stats, batch: {'loss': params @ batch.mean(axis=0)},
    batches=draw,
    data=jnp.asarray(data),
    test_data=data,
  )


def list_means(num_nodes, num_steps, seed):
  """The mean that each node adds at each step: [num_steps, num_nodes, 3]."""
  task = make_task()

  def draw(step, node):
    return task.batches(task.data, seed, node, step).mean(axis=0)

  draw_all = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))
  return np.asarray(
    jax.jit(draw_all)(jnp.arange(num_steps), jnp.arange(num_nodes))
  )


def check(params, stats):
  """Checks weights against statistics, and that nodes are not all equal."""
  np.testing.assert_allclose(stats['twin'], params, atol=1e-5)
  np.testing.assert_array_equal(stats['count'], 7)
  assert np.abs(params).max() > 0.5
