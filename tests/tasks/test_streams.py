"""Streams: a batch is a function of (seed, learner, step), in any order."""

import itertools

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds

from jasgd import tasks
from tests import trees
from tests.tasks import cases


def make_stream(source, transform=None, batch=3, **options):
  task = tasks.make_task('quadratic', batch=batch)
  return tasks.stream(task, source, transform, **options)


def draw_epoch(task, learner, epoch, size, seed=0):
  """All samples of an epoch of a learner that owns `size` of them."""
  steps = size // task.batch
  parts = [
    task.batches(None, seed, learner, epoch * steps + step)
    for step in range(steps)
  ]
  return np.concatenate(parts).tolist()


def test_the_same_in_any_order():
  def transform(example, rng):
    return {'x': np.float32(example), 'noise': rng.standard_normal(2)}

  numbers = list(itertools.product((0, 7), (0, 1), (0, 1, 5, 100, 10**9)))
  forth = {
    row: make_stream(range(10), transform).batches(None, *row)
    for row in numbers
  }
  task = make_stream(range(10), transform)
  for row in reversed(numbers):
    batch = task.batches(None, *map(np.int32, row))
    trees.assert_same_bits(batch, forth[row])
    assert batch['noise'].shape == (3, 2)
  # And no two of them share their random numbers.
  first = {batch['noise'].tobytes() for batch in forth.values()}
  assert len(first) == len(numbers)


@pytest.mark.parametrize('size', [9, 10, 11])
def test_an_epoch_has_no_repeats_and_a_new_order(size):
  task = make_stream(range(size))
  epochs = [
    tuple(draw_epoch(task, learner, epoch, size, seed))
    for seed, learner, epoch in itertools.product((0, 1), (0, 1), (0, 1))
  ]
  assert len(set(epochs)) == 8
  for samples in epochs:
    assert len(set(samples)) == len(samples) == size // 3 * 3
    assert set(samples) <= set(range(size))


def test_shards_divide_the_source_for_good():
  task = make_stream(range(20), batch=1, shards='shards', num_learners=3)
  owned = [
    sorted(draw_epoch(task, n, 0, len(range(n, 20, 3)))) for n in range(3)
  ]
  assert owned == [list(range(n, 20, 3)) for n in range(3)]
  for learner in range(6):
    size = len(owned[learner % 3])
    for epoch in (1, 2):
      samples = draw_epoch(task, learner, epoch, size)
      assert sorted(samples) == owned[learner % 3]
  # A newcomer reads its shard in a different order.
  assert draw_epoch(task, 0, 0, 7) != draw_epoch(task, 3, 0, 7)


def test_fields():
  task = make_stream(range(20))
  assert task.is_streamed
  assert task.data is None
  assert (task.batch, task.num_samples) == (3, 20)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'shards': 'dirichlet'},
      "Unknown shards 'dirichlet'. Known: shards, whole",
    ),
    (
      {'num_learners': 0},
      'num_learners must be a whole number of at least 1, got 0',
    ),
    ({'batch': 21}, 'batch=21 where 20 samples among 1 make 20'),
    (
      {'batch': 7, 'shards': 'shards', 'num_learners': 3},
      'batch=7 where 20 samples among 3 make 6',
    ),
  ],
)
def test_refuses(options, message):
  with pytest.raises(ValueError, match=message):
    make_stream(range(20), **options)


@pytest.mark.slow
def test_the_same_examples_as_in_memory():
  """Streamed from tensorflow-datasets: the loss of a real batch is the same."""
  task = cases.EVERY['cifar10-a1'].make()
  _, params, stats = cases.make_initial('cifar10-a1')
  source = tfds.data_source(
    'cifar10', split='train', data_dir=cases.find_data(), download=False
  )

  def transform(example, rng):
    del rng  # Nothing is augmented.
    label = np.int32(example['label'])
    return {'image': example['image'], 'label': label}

  streamed = tasks.stream(task, source, transform)
  batch = streamed.batches(None, 0, 0, 4)
  trees.assert_same_types(
    jax.tree.map(np.asarray, task.batches(task.data, 0, 0, 4)), batch
  )
  images = np.asarray(task.data['examples']['image'])
  for image, label in zip(batch['image'], batch['label'], strict=True):
    (index,) = np.flatnonzero((images == image).all(axis=(1, 2, 3)))
    assert task.data['examples']['label'][index] == label
  gradient = cases.make_gradient('cifar10-a1')
  (loss, _), _ = gradient(params, stats, batch, tasks.fold_key(0, 0, 4))
  assert np.isfinite(loss)
