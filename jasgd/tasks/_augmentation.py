"""Random flips and crops of images, on the device."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from jasgd import protocols

AUGMENTATIONS: tuple[str, ...] = ('flip_crop', 'none')

_PADDING = 4  # Largest shift of a crop, in pixels.
_AUGMENTATION = 0x61756769  # Makes its random key differ from the loss's key.


def augment_images(
  augment: str, key: jax.Array, images: jax.Array, fill: Any = 0
) -> jax.Array:
  """Augments a batch of images.

  Args:
    augment: Name of the augmentation: `'none'` or `'flip_crop'`.
    key: Random key of the gradient, from `fold_key`.
    images: Array [batch, height, width, channels] of any dtype.
    fill: Pixel value outside an image: a number, or one per channel.

  Returns:
    Images of the same shape and dtype.

  Raises:
    ValueError: if the name is unknown.

  Examples:
    >>> import jax.numpy as jnp
    >>> from jasgd import tasks
    >>> images = jnp.ones((2, 6, 6, 1), jnp.uint8)
    >>> key = tasks.fold_key(0, 0, 0)
    >>> tasks.augment_images('flip_crop', key, images).dtype
    dtype('uint8')
  """
  protocols.check_choice('augment', augment, AUGMENTATIONS)
  if augment == 'none':
    return images
  return _flip_and_crop(jax.random.fold_in(key, _AUGMENTATION), images, fill)


def _flip_and_crop(key: jax.Array, images: jax.Array, fill: Any) -> jax.Array:
  """Mirrors each image with probability 1/2, and shifts it by up to 4 pixels.

  The shift is a crop of the image with 4 pixels around it, uniform over all
  crops. Flip and shift are drawn for each image separately.

  Args:
    key: Random key.
    images: Array [batch, height, width, channels] of any dtype.
    fill: Pixel value outside an image: a number, or one per channel.

  Returns:
    Images of the same shape and dtype.

  References:
    He et al., `Deep Residual Learning for Image Recognition
    <https://arxiv.org/abs/1512.03385>`_, 2016
  """
  batch, height, width, channels = images.shape
  shift_key, flip_key = jax.random.split(key)
  shifts = jax.random.randint(shift_key, (batch, 2), 0, 2 * _PADDING + 1)
  flips = jax.random.bernoulli(flip_key, 0.5, (batch,))
  padded = jnp.broadcast_to(
    jnp.asarray(fill, images.dtype),
    (batch, height + 2 * _PADDING, width + 2 * _PADDING, channels),
  )
  padded = lax.dynamic_update_slice(padded, images, (0, _PADDING, _PADDING, 0))

  def crop(image: jax.Array, shift: jax.Array, flip: jax.Array) -> jax.Array:
    part = lax.dynamic_slice(
      image, (shift[0], shift[1], 0), (height, width, channels)
    )
    return jnp.where(flip, part[:, ::-1], part)

  return jax.vmap(crop)(padded, shifts, flips)
