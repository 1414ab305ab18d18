"""Tasks of the user's own modules: linen, nnx, and plain functions."""

from flax import linen
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import tasks
from tests import trees

MOMENTUM = 0.9


class LinenNet(linen.Module):
  """Batch normalisation of the input, dropout, and a dense layer."""

  rate: float = 0.0

  @linen.compact
  def __call__(self, x, train):
    x = linen.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(x)
    x = linen.Dropout(self.rate, deterministic=not train)(x)
    return linen.Dense(3)(x)


class NnxNet(nnx.Module):
  """The same; two dropouts, which must not drop the same."""

  def __init__(self, rngs, rate=0.0):
    self.norm = nnx.BatchNorm(4, momentum=MOMENTUM, rngs=rngs)
    self.first = nnx.Dropout(rate, rngs=rngs)
    self.second = nnx.Dropout(rate, rngs=rngs)
    self.dense = nnx.Linear(4, 3, rngs=rngs)

  def __call__(self, x):
    return self.dense(self.second(self.first(self.norm(x))))


def make_examples():
  rng = np.random.default_rng(0)
  return {
    'image': rng.standard_normal((40, 4)).astype(np.float32) + 1,
    'label': rng.integers(0, 3, 40).astype(np.int32),
  }


def make_linen(rate=0.0, **options):
  examples = make_examples()
  return tasks.from_linen(
    LinenNet(rate), examples, examples, batch=8, **options
  )


def make_nnx(rate=0.0, **options):
  examples = make_examples()
  make = lambda rngs: NnxNet(rngs, rate)
  return tasks.from_nnx(make, examples, examples, batch=8, **options)


every_way = pytest.mark.parametrize('make', [make_linen, make_nnx])


@every_way
def test_batch_statistics(make):
  """They are a running mean in training, and fixed in evaluation."""
  task = make()
  params, stats = task.init(jax.random.key(0))
  batch = task.batches(task.data, 0, 0, 0)
  _, changed = jax.jit(task.loss)(params, stats, batch, jax.random.key(1))
  trees.assert_same_types(changed, stats)
  (mean, variance), (old_mean, old_variance) = (
    [tree[next(iter(tree))][name] for name in ('mean', 'var')]
    for tree in (changed, stats)
  )
  images = np.asarray(batch['image'])
  np.testing.assert_allclose(
    mean, MOMENTUM * old_mean + 0.1 * images.mean(axis=0), rtol=1e-5
  )
  np.testing.assert_allclose(
    variance, MOMENTUM * old_variance + 0.1 * images.var(axis=0), rtol=1e-5
  )
  # Evaluation takes each example by itself.
  alone = jax.tree.map(lambda leaf: leaf[:1], batch)
  twice = jax.tree.map(lambda leaf: leaf[np.array([0, 0])], batch)
  metrics = jax.jit(task.metrics)
  trees.assert_close(
    metrics(params, changed, alone), metrics(params, changed, twice)
  )
  assert (
    metrics(params, changed, alone)['loss']
    != (metrics(params, stats, alone)['loss'])
  )


@every_way
def test_dropout_gets_the_key(make):
  task = make(0.5)
  params, stats = task.init(jax.random.key(0))
  batch = task.batches(task.data, 0, 0, 0)
  loss = jax.jit(task.loss)
  first, again, other = (
    loss(params, stats, batch, jax.random.key(key))[0] for key in (1, 1, 2)
  )
  assert first == again
  assert first != other
  trees.assert_same_bits(
    jax.jit(task.metrics)(params, stats, batch),
    jax.jit(make(0.0).metrics)(params, stats, batch),
  )


def test_two_dropouts_of_nnx_do_not_drop_the_same():
  """Ones survive two dropouts of 1/2 with probability 1/4, and not 1/2."""

  class Twice(nnx.Module):
    def __init__(self, rngs):
      self.scale = nnx.Param(jnp.ones(()))
      self.first = nnx.Dropout(0.5, rngs=rngs)
      self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
      return self.scale[...] * self.second(self.first(x))

  examples = {'image': np.ones((1, 4000), np.float32)}
  task = tasks.from_nnx(
    Twice,
    examples,
    batch=1,
    measure=lambda outputs, batch: {'loss': jnp.mean(outputs > 0)},
  )
  params, stats = task.init(jax.random.key(0))
  share, _ = task.loss(params, stats, examples, jax.random.key(3))
  # Within five standard deviations.
  assert abs(share - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 4000)


@every_way
def test_options_reach_the_task(make):
  task = make(shards='shards', num_learners=2, name='mine', chunk=4)
  assert (task.name, task.chunk, task.num_samples) == ('mine', 4, 40)
  with pytest.raises(
    ValueError, match='batch=8 where 40 samples among 6 make 6'
  ):
    make(shards='shards', num_learners=6)


def test_own_measure_and_preparation():
  examples = {'image': np.arange(6, dtype=np.uint8)[:, None]}
  examples['target'] = 2.0 * np.arange(6, dtype=np.float32)[:, None]
  task = tasks.from_linen(
    linen.Dense(1, use_bias=False),
    examples,
    examples,
    batch=2,
    prepare=lambda images: images.astype(jnp.float32),
    measure=lambda outputs, batch: {
      'loss': jnp.mean((outputs - batch['target']) ** 2)
    },
  )
  params, stats = task.init(jax.random.key(0))
  params = jax.tree.map(jnp.ones_like, params)
  metrics = tasks.evaluate(task, params, stats)
  np.testing.assert_allclose(metrics['loss'], np.mean(np.arange(6) ** 2))


def test_bytes_are_scaled():
  seen = []
  examples = {
    'image': np.array([[0], [255]], np.uint8),
    'label': np.zeros(2, int),
  }
  task = tasks.from_functions(
    lambda key: ({}, {}),
    lambda params, stats, inputs, key: (seen.append(inputs) or inputs, stats),
    examples,
    batch=2,
  )
  task.metrics({}, {}, examples)
  np.testing.assert_array_equal(seen[0], [[0.0], [1.0]])
  assert seen[0].dtype == jnp.float32


def test_an_unknown_collection_is_refused():
  class Counting(linen.Module):
    @linen.compact
    def __call__(self, x):
      self.variable('counts', 'calls', lambda: 0)
      return linen.Dense(3)(x)

  task = tasks.from_linen(Counting(), make_examples(), batch=8)
  with pytest.raises(ValueError, match=r"got also \['counts'\]"):
    task.init(jax.random.key(0))
