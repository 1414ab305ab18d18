"""Flips and crops: each output is one of the possible crops."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jasgd import tasks

augment = jax.jit(functools.partial(tasks.augment_images, 'flip_crop'))


def make_images(batch, dtype=np.uint8):
  """Images whose pixels are all different, and none of them 0 or 250."""
  pixels = np.arange(1, 6 * 5 * 2 + 1, dtype=dtype).reshape(1, 6, 5, 2)
  return np.repeat(pixels, batch, axis=0)


def list_crops(image, fill, padding):
  """Every crop of an image and of its mirror image, by numpy."""
  around = ((padding, padding), (padding, padding), (0, 0))
  is_inside = np.pad(np.ones_like(image), around)
  padded = np.where(is_inside, np.pad(image, around), fill).astype(image.dtype)
  places = itertools.product(range(2 * padding + 1), repeat=2)
  crops = {
    place: padded[place[0] : place[0] + 6, place[1] : place[1] + 5]
    for place in places
  }
  return {
    (*place, flip): crop[:, ::-1] if flip else crop
    for place, crop in crops.items()
    for flip in (0, 1)
  }


@pytest.mark.parametrize('dtype', [np.uint8, np.float32])
@pytest.mark.parametrize('fill', [0, 250, np.array([250, 251])])
def test_each_image_is_one_of_its_crops(dtype, fill):
  images = make_images(64, dtype)
  result = augment(jax.random.key(1), images, fill)
  assert result.dtype == dtype
  assert result.shape == images.shape
  crops = {
    crop.tobytes(): place
    for place, crop in list_crops(images[0], fill, 4).items()
  }
  found = {crops[image.tobytes()] for image in np.asarray(result)}
  assert len(found) > 20  # Crop and flip are drawn per image.


def test_crops_and_flips_are_uniform():
  images = make_images(20_000)
  result = np.asarray(augment(jax.random.key(2), images, 0))
  crops = list_crops(images[0], 0, 4)
  number = {crop.tobytes(): i for i, crop in enumerate(crops.values())}
  assert len(number) == 2 * 9 * 9
  counts = np.bincount([number[image.tobytes()] for image in result])
  assert stats.chisquare(counts).pvalue > 1e-4


def test_none_is_the_identity():
  images = jnp.asarray(make_images(3))
  same = tasks.augment_images('none', jax.random.key(0), images)
  assert same is images


def test_a_task_augments_by_the_gradients_key():
  plain, augmented = (
    tasks.make_task('digits', batch=32, augment=name)
    for name in ('none', 'flip_crop')
  )
  expected = jax.jit(plain.batches)(plain.data, 1, 2, 3)
  batch = jax.jit(augmented.batches)(augmented.data, 1, 2, 3)
  np.testing.assert_array_equal(batch['label'], expected['label'])
  assert (batch['image'] != expected['image']).any()
  by_hand = augment(tasks.fold_key(1, 2, 3), expected['image'])
  np.testing.assert_array_equal(batch['image'], by_hand)
  # Test images are not augmented.
  np.testing.assert_array_equal(
    augmented.test_data['image'], plain.test_data['image']
  )


def test_refuses():
  with pytest.raises(ValueError, match="Unknown augment 'cutout'"):
    tasks.augment_images('cutout', jax.random.key(0), make_images(1))
