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
    features: Number of output channels.
    kernel: Height and width of the kernel.
    padding: Number of zeros on each side of an image.
    stride: Stride of the kernel, in both directions.
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
  """relu(convolution + bias), then the maxima in windows of 2x2.

  Bias and relu are applied after the maxima, to a quarter of the numbers. Both
  are monotonic, so the result is the same.

  Attributes:
    features: Number of output channels.
    kernel: Height and width of the kernel, odd.
    padding: Number of zeros on each side of an image.
  """

  features: int
  kernel: int
  padding: int = 0

  @linen.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """[batch, height, width, channels] -> half the size, features."""
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
    """Computes the logits of a batch of images."""
    hidden = linen.Dense(self.num_hidden)(images.reshape(len(images), -1))
    return linen.Dense(self.num_classes)(linen.relu(hidden))


class LeNet(linen.Module):
  """LeNet-5 with relu and max pooling: 61,706 weights for images of 28x28x1.

  Attributes:
    features: Output channels of the two convolutions.
    kernel: Height and width of their kernels.
    paddings: Number of zeros on each side of the inputs of each convolution.
    hidden: Sizes of the hidden dense layers.
    num_classes: Number of logits.

  References:
    LeCun et al., `Gradient-based learning applied to document recognition
    <https://doi.org/10.1109/5.726791>`_, 1998
  """

  features: tuple[int, int] = (6, 16)
  kernel: int = 5
  paddings: tuple[int, int] = (2, 0)
  hidden: tuple[int, ...] = (120, 84)
  num_classes: int = 10

  @linen.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Computes the logits of a batch of images."""
    for features, padding in zip(self.features, self.paddings, strict=True):
      images = PooledConv(features, self.kernel, padding)(images)
    values = images.reshape(len(images), -1)
    for size in self.hidden:
      values = linen.relu(linen.Dense(size)(values))
    return linen.Dense(self.num_classes)(values)


class A1Net(linen.Module):
  """Three pooled convolutions and one dense layer: 89,578 weights.

  The network for CIFAR-10 of the paper on staleness-aware async-SGD. The paper
  says: three convolutions, each followed by pooling, one dense layer to ten
  classes, close to Caffe's network for CIFAR-10, about 90 thousand weights.
  Channels and kernels are those of Caffe's cifar10_quick without its second
  dense layer. Caffe pools windows of 3x3 with stride 2, some of them by the
  mean; here all poolings are maxima of 2x2.

  Attributes:
    features: Output channels of the convolutions.
    num_classes: Number of logits.

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """

  features: tuple[int, ...] = (32, 32, 64)
  num_classes: int = 10

  @linen.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Computes the logits of a batch of images."""
    for features in self.features:
      images = PooledConv(features, kernel=5, padding=2)(images)
    return linen.Dense(self.num_classes)(images.reshape(len(images), -1))


class ResNet(linen.Module):
  """A residual network of 6 n + 2 layers; n = 3 is ResNet-20.

  Its parts are a convolution, three stages of n blocks with 16, 32 and 64
  channels, the mean over all pixels, and a dense layer. Each stage has a
  quarter of the pixels of the stage before. Where the shape changes, the
  shortcut takes every second pixel and adds channels of zeros (option A): it
  has no weights. ResNet-20 has 269,722 weights.

  Attributes:
    num_blocks: Number of blocks per stage, n.
    features: Channels of the stages.
    num_classes: Number of logits.

  References:
    He et al., `Deep Residual Learning for Image Recognition
    <https://arxiv.org/abs/1512.03385>`_, 2016
  """

  num_blocks: int = 3
  features: tuple[int, ...] = (16, 32, 64)
  num_classes: int = 10

  @linen.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    """Computes the logits of a batch of images."""
    values = Conv(self.features[0], 3, padding=1, use_bias=False)(images)
    values = linen.relu(_normalise(train)(values))
    for stage, features in enumerate(self.features):
      for block in range(self.num_blocks):
        stride = 2 if stage > 0 and block == 0 else 1
        values = Block(features, stride)(values, train)
    return linen.Dense(self.num_classes)(values.mean(axis=(1, 2)))


class Block(linen.Module):
  """Residual block: relu(x + BN(conv(relu(BN(conv(x))))))."""

  features: int
  stride: int = 1

  @linen.compact
  def __call__(self, values: jax.Array, train: bool) -> jax.Array:
    """[batch, height, width, channels] -> 1/stride of the size, features."""
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
  """Batch normalisation: by the batch in training, else by the statistics."""
  return linen.BatchNorm(
    use_running_average=not train, momentum=0.9, epsilon=1e-5
  )
