"""Requirements for every task, tested on all of them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import tasks
from tests import marks
from tests import trees
from tests.tasks import cases


def test_every_task_and_model_is_listed():
  listed = {(case.name, case.arguments.get('model')) for case in cases.CASES}
  known = set()
  for name in tasks.TASKS:
    with pytest.raises(ValueError, match='model') as caught:
      tasks.make_task(name, batch=8, model='nothing')
    models = re.match(
      "Unknown model 'nothing'. Known: (.*)[.]", str(caught.value)
    )
    # None: the task has no models to choose from.
    names = models[1].split(', ') if models else [None]
    known |= {(name, model) for model in names}
  assert listed == known


@cases.every_case
def test_sizes(case_id):
  case = cases.EVERY[case_id]
  task, params, stats = cases.make_initial(case_id)
  assert sum(leaf.size for leaf in jax.tree.leaves(params)) == case.num_params
  assert bool(jax.tree.leaves(stats)) == case.has_stats
  assert task.num_samples == case.num_samples
  assert task.name == case.name
  assert not task.is_streamed
  # A batch that is normalised as a whole cannot be divided.
  assert not (case.has_stats and task.chunk)


@cases.every_case
def test_init_depends_on_its_key_alone(case_id):
  task, init = cases.make_task(case_id), cases.make_init(case_id)
  first, again, other = (init(jax.random.key(i)) for i in (1, 1, 2))
  trees.assert_same_bits(first, again)
  trees.assert_same_types(first, other)
  if task.name != 'logistic':  # Its first weights are 0.
    leaves = zip(*map(jax.tree.leaves, (first[0], other[0])), strict=True)
    assert any((a != b).any() for a, b in leaves)


@cases.every_case
def test_loss_is_a_mean_with_a_finite_gradient(case_id):
  case = cases.EVERY[case_id]
  task, params, stats = cases.make_initial(case_id)
  batch = jax.jit(task.batches)(task.data, 3, 1, 2)
  key = tasks.fold_key(3, 1, 2)
  grad = cases.make_gradient(case_id)
  (loss, new_stats), grads = grad(params, stats, batch, key)
  assert loss.shape == ()
  assert loss.dtype == jnp.float32
  trees.assert_same_types(new_stats, stats)
  trees.assert_same_types(grads, params)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
  assert any((leaf != 0).any() for leaf in jax.tree.leaves(grads))
  if case.has_stats:
    return  # The statistics of two halves are not those of the whole.
  # Each half twice, in place of the whole: the mean of both is the gradient.
  halves = [
    jax.tree.map(lambda leaf, part=part: jnp.repeat(leaf[part], 2, 0), batch)
    for part in (slice(0, 4), slice(4, 8))
  ]
  parts = [grad(params, stats, half, key)[1] for half in halves]
  mean = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
  trees.assert_close(mean, grads, rtol=1e-4, atol=1e-5)


@cases.every_case
def test_a_batch_depends_on_seed_learner_and_step_alone(case_id):
  """The ways to call it are compared in full in `test_shuffles.py`."""
  task = cases.make_task(case_id)
  jitted = jax.jit(task.batches)
  first = jitted(task.data, 5, 1, 7)
  assert {leaf.shape[0] for leaf in jax.tree.leaves(first)} == {task.batch}
  trees.assert_same_bits(jitted(task.data, 5, 1, 7), first)
  numbers = jnp.array([[5, 1, 7], [6, 1, 7], [5, 2, 7], [5, 1, 8]])
  rows = jax.jit(
    lambda data: jax.lax.map(
      lambda row: task.batches(data, row[0], row[1], row[2]), numbers
    )
  )(task.data)
  # Floats of a quadratic's noise may differ by rounding, samples may not.
  is_exact = task.name != 'quadratic'
  check = trees.assert_same_bits if is_exact else trees.assert_close
  check(jax.tree.map(lambda leaf: leaf[0], rows), first)
  rows = jax.tree.map(np.asarray, rows)
  for other in (1, 2, 3):
    differs = jax.tree.map(
      lambda leaf, o=other: (leaf[o] != leaf[0]).any(), rows
    )
    assert any(jax.tree.leaves(differs))


@cases.every_case
def test_metrics_are_means_in_evaluation(case_id):
  task, params, stats = cases.make_initial(case_id)
  part = jax.tree.map(lambda leaf: leaf[:100], task.test_data)
  small = dataclasses.replace(task, test_data=part)
  metrics = tasks.evaluate(small, params, stats, batch_size=50)
  assert 'loss' in metrics
  assert ('accuracy' in metrics) == (task.name != 'quadratic')
  whole = jax.jit(task.metrics)(params, stats, part)
  trees.assert_close(metrics, whole, rtol=1e-4)


@cases.every_case
def test_a_task_learns(case_id):
  """A few steps on one batch bring its loss down."""
  task, params, stats = cases.make_initial(case_id)
  batch = jax.jit(task.batches)(task.data, 0, 0, 0)
  grad = cases.make_gradient(case_id)
  key = tasks.fold_key(0, 0, 0)
  losses = []
  for _ in range(10):
    (loss, stats), grads = grad(params, stats, batch, key)
    params = jax.tree.map(lambda a, b: a - 0.05 * b, params, grads)
    losses.append(float(loss))
  assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize('model', marks.slow_but(['mlp', 'lenet'], 'mlp'))
def test_digits_are_learned_in_a_few_epochs(model):
  task = tasks.make_task('digits', batch=32, model=model)
  params, stats = task.init(jax.random.key(0))

  @jax.jit
  def train(params, data):
    def step(carry, index):
      params, momentum = carry
      batch = task.batches(data, 0, 0, index)
      key = tasks.fold_key(0, 0, index)
      grads, _ = jax.grad(task.loss, has_aux=True)(params, stats, batch, key)
      momentum = jax.tree.map(lambda a, b: 0.9 * a + b, momentum, grads)
      params = jax.tree.map(lambda a, b: a - 0.05 * b, params, momentum)
      return (params, momentum), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    num_steps = 8 * (task.num_samples // task.batch)
    return jax.lax.scan(step, (params, zeros), jnp.arange(num_steps))[0][0]

  metrics = tasks.evaluate(task, train(params, task.data), stats)
  assert metrics['accuracy'] >= 0.95
