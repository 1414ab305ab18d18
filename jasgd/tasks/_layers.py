"""The convolutions as layers of linen, with the weights of `linen.Conv`."""

from flax import linen
import jax

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
