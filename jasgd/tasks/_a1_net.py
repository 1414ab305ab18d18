"""The network for CIFAR-10 of the paper on staleness-aware async-SGD.

References:
  Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
  <https://arxiv.org/abs/1511.05950>`_, 2016
"""

from flax import linen
import jax

from jasgd.tasks import _layers


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
      images = _layers.PooledConv(features, kernel=5, padding=2)(images)
    return linen.Dense(self.num_classes)(images.reshape(len(images), -1))
