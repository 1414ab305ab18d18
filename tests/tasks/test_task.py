"""The contract of a task: keys, chunks, evaluation, refused arguments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import tasks
from tests import trees


def make_tiny(**changes):
  """A task with one weight, whose optimum is the mean of 0..9."""
  data = {'x': jnp.arange(10.0)}
  fields = {
    'name': 'tiny',
    'batch': 2,
    'num_samples': 10,
    'init': lambda key: (jnp.zeros(()), {}),
    'loss': lambda w, stats, batch, key: (jnp.mean((w - batch['x']) ** 2), {}),
    'metrics': lambda w, stats, batch: {
      'loss': jnp.mean((w - batch['x']) ** 2)
    },
    'batches': lambda data, seed, learner, step: data['x'][:2],
    'data': data,
    'test_data': data,
  }
  return tasks.Task(**(fields | changes))


def test_a_task_is_frozen_and_itself():
  task = make_tiny()
  with pytest.raises(dataclasses.FrozenInstanceError):
    task.batch = 3
  assert task != make_tiny()
  assert hash(task) != hash(make_tiny())


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'batch': 0}, 'batch must be a whole number of at least 1, got 0'),
    ({'batch': 1.5}, 'batch must be a whole number of at least 1, got 1.5'),
    ({'batch': True}, 'batch must be a whole number of at least 1, got True'),
    ({'batch': 11}, 'got batch=11 of num_samples=10'),
    (
      {'num_samples': 0},
      'num_samples must be a whole number of at least 1, got 0',
    ),
    ({'chunk': 0}, 'chunk must be a whole number of at least 1, got 0'),
    ({'is_streamed': True}, "streamed task 'tiny' must have no data"),
    (
      {'test_data': {'x': jnp.zeros(3), 'y': jnp.zeros(4)}},
      r'share a leading axis of examples, got the shapes \[\(3,\), \(4,\)\]',
    ),
    ({'test_data': {'x': jnp.zeros(())}}, r'got the shapes \[\(\)\]'),
    ({'test_data': {}}, r'got the shapes \[\]'),
  ],
)
def test_bad_fields(changes, message):
  with pytest.raises(ValueError, match=message):
    make_tiny(**changes)


def test_keys_are_all_different_and_do_not_depend_on_the_configuration():
  keys = jax.vmap(
    lambda row: jax.random.key_data(tasks.fold_key(row[0], row[1], row[2]))
  )(jnp.stack(jnp.meshgrid(*[jnp.arange(10)] * 3), -1).reshape(-1, 3))
  assert len({tuple(key) for key in np.asarray(keys).tolist()}) == 1000
  expected = jax.random.key_data(tasks.fold_key(1, 2, 3))
  try:
    jax.config.update('jax_default_prng_impl', 'rbg')
    actual = jax.random.key_data(tasks.fold_key(1, 2, 3))
  finally:
    jax.config.update('jax_default_prng_impl', 'threefry2x32')
  np.testing.assert_array_equal(actual, expected)


def test_choose_chunk():
  for batch in range(1, 65):
    assert tasks.choose_chunk(batch, None) == batch
    for chunk in range(1, 70):
      divisors = [d for d in range(1, batch + 1) if batch % d == 0]
      expected = max(d for d in divisors if d <= chunk)
      assert tasks.choose_chunk(batch, chunk) == expected


@pytest.mark.parametrize('arguments', [(0, 1), (4, 0)])
def test_choose_chunk_refuses(arguments):
  with pytest.raises(
    ValueError, match='must be a whole number of at least 1, got 0'
  ):
    tasks.choose_chunk(*arguments)


@pytest.mark.parametrize('batch_size', [1, 3, 5, 10, 1000])
def test_evaluate_is_the_mean_over_all_examples(batch_size):
  task = make_tiny()
  metrics = tasks.evaluate(task, jnp.float32(2), {}, batch_size=batch_size)
  expected = np.mean((2 - np.arange(10)) ** 2)
  np.testing.assert_allclose(metrics['loss'], expected, rtol=1e-6)


def test_evaluate_is_compiled_once():
  traces = []

  def metrics(w, stats, batch):
    traces.append(batch['x'].shape)
    return {'loss': jnp.mean((w - batch['x']) ** 2)}

  task = make_tiny(metrics=metrics)
  tasks.evaluate(task, jnp.float32(1), {}, batch_size=4)
  assert traces == [(4,), (2,)]
  # Other weights, or another task with the same functions: nothing is traced.
  tasks.evaluate(task, jnp.float32(2), {}, batch_size=4)
  other = dataclasses.replace(task, test_data={'x': jnp.ones(10)})
  values = tasks.evaluate(other, jnp.float32(2), {}, batch_size=4)
  assert len(traces) == 2
  trees.assert_close(values, {'loss': jnp.float32(1)})


def test_evaluate_refuses():
  with pytest.raises(ValueError, match="'tiny' has no test_data"):
    tasks.evaluate(make_tiny(test_data=None), jnp.float32(0), {})
  with pytest.raises(
    ValueError, match='batch_size must be a whole number of at least 1, got 0'
  ):
    tasks.evaluate(make_tiny(), jnp.float32(0), {}, batch_size=0)


@pytest.mark.parametrize(
  ('name', 'options', 'message'),
  [
    ('nothing', {}, "Unknown task 'nothing'. Known: cifar10, digits"),
    ('digits', {'model': 'vgg'}, "Unknown model 'vgg'. Known: lenet, mlp"),
    ('digits', {'augment': 'mixup'}, "Unknown augment 'mixup'. Known: flip"),
    ('digits', {'shards': 'none'}, "Unknown shards 'none'. Known: dirichlet"),
    ('digits', {'chunk': 3}, "'digits' does not take chunk. Known: alpha"),
    ('quadratic', {'model': 'mlp'}, "'quadratic' does not take model"),
    ('quadratic', {'augment': 'flip_crop'}, 'does not take augment'),
    ('quadratic', {'condition': 0.5}, 'condition must be finite and >= 1'),
    ('quadratic', {'noise': -1.0}, 'noise must be finite and at least 0'),
    (
      'quadratic',
      {'dimension': 0},
      'dimension must be a whole number of at least 1, got 0',
    ),
    ('logistic', {'l2': 0.0}, 'l2 must be finite and above 0, got 0.0'),
    ('logistic', {'l2': 'x'}, "l2 must be a number, got 'x'"),
    (
      'logistic',
      {'seed': -1},
      'seed must be a whole number of at least 0, got -1',
    ),
    (
      'logistic',
      {'augment': 'flip_crop'},
      r"augment='flip_crop' needs images \[n, height, width, channels\], got",
    ),
  ],
)
def test_make_task_refuses(name, options, message):
  with pytest.raises(ValueError, match=message):
    tasks.make_task(name, batch=8, **options)


def test_any_task_takes_data_dir_and_num_learners():
  task = tasks.make_task(
    'quadratic', batch=8, data_dir='nowhere', num_learners=7, seed=3
  )
  assert task.name == 'quadratic'
