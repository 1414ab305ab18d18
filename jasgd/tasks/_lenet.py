"""LeNet: two pooled convolutions and some dense layers.

References:
  LeCun et al., `Gradient-based learning applied to document recognition
  <https://doi.org/10.1109/5.726791>`_, 1998
"""

from flax import linen
import jax

from jasgd.tasks import _layers


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
      images = _layers.PooledConv(features, self.kernel, padding)(images)
    values = images.reshape(len(images), -1)
    for size in self.hidden:
      values = linen.relu(linen.Dense(size)(values))
    return linen.Dense(self.num_classes)(values)
