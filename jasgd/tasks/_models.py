"""Networks for images: LeNet, the paper's CIFAR-10 network, residual networks.

`Conv` and `PooledConv` are linen layers with the weights of `linen.Conv`; their
gradients stay fast inside a compiled loop on CPU (see `_convolutions`).
"""

import functools

from flax import linen
import jax
import jax.numpy as jnp

from jasgd.tasks import _convolutions


class Conv(linen.Module):
  """A convolution.

  Attributes:
    features: Number of outputs.
    kernel: Height and width of the kernel.
    padding: Zeros on each side of an image.
    stride: Of the kernel, in both directions.
    use_bias: Whether a bias is added.
  """

  features: int
  kernel: int
  padding: int = 0
  stride: int = 1
  use_bias: bool = True

  @linen.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """[batch, height, width, channels] -> [batch, height, width, features]."""
    shape = (self.kernel, self.kernel, images.shape[-1], self.features)
    kernel = self.param('kernel', linen.initializers.lecun_normal(), shape)
    outputs = _convolutions.convolve(
      images, kernel, padding=self.padding, stride=self.stride
    )
    if not self.use_bias:
      return outputs
    return outputs + self.param(
      'bias', linen.initializers.zeros_init(), (self.features,)
    )


class PooledConv(linen.Module):
  """relu(convolution + bias), and the maxima of that in windows of 2x2.

  The bias and relu are taken after the maxima, of which there are a quarter as
  many: both grow with their argument, so that the result is the same.

  Attributes:
    features: Number of outputs.
    kernel: Height and width of the kernel, odd.
    padding: Zeros on each side of an image.
  """

  features: int
  kernel: int
  padding: int = 0

  @linen.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """[batch, height, width, channels] -> half the size, with features."""
    shape = (self.kernel, self.kernel, images.shape[-1], self.features)
    kernel = self.param('kernel', linen.initializers.lecun_normal(), shape)
    bias = self.param('bias', linen.initializers.zeros_init(), (self.features,))
    pooled = _convolutions.convolve_and_pool(
      images, kernel, padding=self.padding
    )
    return linen.relu(pooled + bias)


class Mlp(linen.Module):
  """A network with one hidden layer."""

  num_hidden: int = 64
  num_classes: int = 10

  @linen.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Logits."""
    hidden = linen.Dense(self.num_hidden)(images.reshape(len(images), -1))
    return linen.Dense(self.num_classes)(linen.relu(hidden))


class LeNet(linen.Module):
  """LeNet-5 with relu and max pooling: 61,706 weights for images of 28x28x1.

  Attributes:
    features: Outputs of the two convolutions.
    kernel: Height and width of their kernels.
    paddings: Zeros on each side of what each of them sees.
    hidden: Sizes of the hidden dense layers.
    num_classes: Number of logits.
  """

  features: tuple[int, int] = (6, 16)
  kernel: int = 5
  paddings: tuple[int, int] = (2, 0)
  hidden: tuple[int, ...] = (120, 84)
  num_classes: int = 10

  @linen.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Logits."""
    for features, padding in zip(self.features, self.paddings, strict=True):
      images = PooledConv(features, self.kernel, padding)(images)
    values = images.reshape(len(images), -1)
    for size in self.hidden:
      values = linen.relu(linen.Dense(size)(values))
    return linen.Dense(self.num_classes)(values)


class A1Net(linen.Module):
  """Three pooled convolutions and one dense layer: 89,578 weights.

  The paper says: three convolutions, each followed by pooling, one dense layer
  to ten classes, close to Caffe's network for CIFAR-10, about 90 thousand
  weights. Channels and kernels are those of Caffe's cifar10_quick without its
  second dense layer. Caffe pools windows of 3x3, two pixels apart, some by the
  mean; here all are maxima of 2x2.

  Attributes:
    features: Outputs of the convolutions.
    num_classes: Number of logits.
  """

  features: tuple[int, ...] = (32, 32, 64)
  num_classes: int = 10

  @linen.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Logits."""
    for features in self.features:
      images = PooledConv(features, kernel=5, padding=2)(images)
    return linen.Dense(self.num_classes)(images.reshape(len(images), -1))


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
    values = Conv(self.features[0], 3, padding=1, use_bias=False)(images)
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
    conv = functools.partial(Conv, self.features, 3, padding=1, use_bias=False)
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
