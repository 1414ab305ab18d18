"""Validation sets, held out of a training set to choose settings on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import tasks


def _make_task(validation, num_samples=10):
  train = {'image': np.arange(num_samples)[:, None] * 1.0}
  train['label'] = np.arange(num_samples) % 2
  return tasks.from_functions(
    lambda key: (jnp.zeros((1, 2)), {}),
    lambda params, stats, inputs, key: (inputs @ params, stats),
    train,
    {'image': -np.ones((3, 1)), 'label': np.zeros(3, int)},
    batch=2,
    validation=validation,
  )


@pytest.mark.parametrize('share', [0.1, 0.25, 0.9])
def test_every_example_is_on_one_side(share):
  task = _make_task(share, 40)
  trained = np.ravel(task.data['examples']['image'])
  held = np.ravel(task.test_data['image'])
  assert len(held) == round(share * 40)
  assert sorted([*trained, *held]) == list(range(40))
  assert task.num_samples == len(trained)
  # Labels stay with their images, and both sides are spread over the set.
  np.testing.assert_array_equal(task.test_data['label'], held % 2)
  assert not np.array_equal(np.sort(held), np.arange(len(held)))


def test_an_epoch_has_only_what_is_trained_on():
  task = _make_task(0.2)
  draw = jax.jit(task.batches)
  drawn = [draw(task.data, 0, 0, step)['image'] for step in range(4 * 5)]
  held = set(np.ravel(task.test_data['image']).tolist())
  assert not held & set(np.ravel(drawn).tolist())


def test_a_validation_set_never_changes_and_0_means_none():
  first, second = (_make_task(0.3).test_data['image'] for _ in range(2))
  np.testing.assert_array_equal(first, second)
  whole = _make_task(0.0)
  assert whole.num_samples == 10
  np.testing.assert_array_equal(whole.test_data['image'], -np.ones((3, 1)))


@pytest.mark.parametrize('share', [-0.1, 1.0, 1.5, 0.001, 0.999])
def test_a_side_must_not_be_empty(share):
  with pytest.raises(ValueError, match=f'got {share} of 10 examples'):
    _make_task(share)


def test_the_digits_can_be_held_out_of_by_name():
  whole = tasks.make_task('digits', batch=4)
  task = tasks.make_task('digits', batch=4, validation=0.1)
  assert task.num_samples == whole.num_samples - 144
  assert len(task.test_data['label']) == 144
  # All digits occur.
  assert set(np.asarray(task.test_data['label']).tolist()) == set(range(10))
  # Both sides together are the training set, and no image of the test set.
  kept, held, images = (
    np.asarray(images).reshape(-1, 64)
    for images in (
      task.data['examples']['image'],
      task.test_data['image'],
      whole.data['examples']['image'],
    )
  )
  sides = np.concatenate([kept, held])
  np.testing.assert_array_equal(np.sort(sides, axis=0), np.sort(images, axis=0))


def test_a_task_without_examples_says_so():
  with pytest.raises(ValueError, match='does not take validation'):
    tasks.make_task('quadratic', batch=1, validation=0.1)
