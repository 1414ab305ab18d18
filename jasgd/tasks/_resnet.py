"""Residual networks for small images.

References:
  He et al., `Deep Residual Learning for Image Recognition
  <https://arxiv.org/abs/1512.03385>`_, 2016
"""

import functools

from flax import linen
import jax
import jax.numpy as jnp

from jasgd.tasks import _layers


class ResNet(linen.Module):
  """A residual network of 6 n + 2 layers; n = 3 is ResNet-20.

  A convolution, three stages of n blocks with 16, 32 and 64 channels, each
  stage on a quarter of the pixels of the one before it, the mean over all
  pixels, and a dense layer. Where the shape changes, the shortcut takes every
  second pixel and adds channels of zeros (option A): it has no weights.
  ResNet-20 has 269,722.

  Attributes:
    num_blocks: n.
    features: Channels of the stages.
    num_classes: Number of logits.
  """

  num_blocks: int = 3
  features: tuple[int, ...] = (16, 32, 64)
  num_classes: int = 10

  @linen.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    """Logits."""
    values = _layers.Conv(self.features[0], 3, padding=1, use_bias=False)(
      images
    )
    values = linen.relu(_normalise(train)(values))
    for stage, features in enumerate(self.features):
      for block in range(self.num_blocks):
        stride = 2 if stage > 0 and block == 0 else 1
        values = Block(features, stride)(values, train)
    return linen.Dense(self.num_classes)(values.mean(axis=(1, 2)))


class Block(linen.Module):
  """relu(x + BN(conv(relu(BN(conv(x))))))."""

  features: int
  stride: int = 1

  @linen.compact
  def __call__(self, values: jax.Array, train: bool) -> jax.Array:
    """[batch, height, width, channels] -> features, 1/stride of the size."""
    conv = functools.partial(
      _layers.Conv, self.features, 3, padding=1, use_bias=False
    )
    inner = conv(stride=self.stride)(values)
    inner = linen.relu(_normalise(train)(inner))
    inner = _normalise(train)(conv()(inner))
    shortcut = values[:, :: self.stride, :: self.stride]
    missing = self.features - shortcut.shape[-1]
    before = missing // 2
    shortcut = jnp.pad(
      shortcut, ((0, 0), (0, 0), (0, 0), (before, missing - before))
    )
    return linen.relu(shortcut + inner)


def _normalise(train: bool) -> linen.BatchNorm:
  """Batch normalisation by the batch in training, else by the statistics."""
  return linen.BatchNorm(
    use_running_average=not train, momentum=0.9, epsilon=1e-5
  )
