"""CIFAR-10: 50,000 training and 10,000 test images, 32x32 pixels in colour."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import protocols
from jasgd.tasks import _datasets
from jasgd.tasks import _functions
from jasgd.tasks import _models
from jasgd.tasks import _modules
from jasgd.tasks import _task

VERSION = '3.0.2'

# Name of a model -> (module, `Task.chunk`: examples at a time on CPU).
# None: batch normalisation needs the whole batch at once.
MODELS = {
  'a1': (_models.A1Net(), 8),
  'resnet20': (_models.ResNet(), None),
}


def make_cifar10(
  *,
  batch: int,
  model: str | None = None,
  data_dir: str | None = None,
  **options: Any,
) -> _task.Task:
  """Builds the CIFAR-10 task, with standardised pixels as inputs.

    input = (pixel - mean of that pixel) / standard deviation of all of them

  Both are measured on the training set. There is a mean per pixel and channel,
  as in both papers, and a single deviation, so that inputs have variance 1, as
  the usual initial weights of a first layer assume.

  Args:
    batch: Samples per gradient.
    model: Name of the model: `'a1'`, three convolutions, 89,578 weights (the
      default), or `'resnet20'`, with batch normalisation, 269,722 weights.
    data_dir: Folder of tensorflow-datasets. None: its default folder; the set
      is downloaded if it is missing.
    **options: Arguments of `from_functions`: `shards`, `num_learners`,
      `alpha`, `seed`, `augment`, `validation`.

  Returns:
    A `Task`.

  Raises:
    ValueError: if the model is unknown, or `from_functions` refuses an option.
    MissingDataError: if the set is missing and cannot be downloaded.

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016; He et al., `Deep Residual
    Learning for Image Recognition <https://arxiv.org/abs/1512.03385>`_, 2016
  """
  model = model or 'a1'
  protocols.check_choice('model', model, MODELS)
  module, chunk = MODELS[model]
  train = _datasets.load_split('cifar10', VERSION, 'train', data_dir)
  mean, deviation = measure_pixels(train['image'])
  return _modules.from_linen(
    module,
    train,
    _datasets.load_split('cifar10', VERSION, 'test', data_dir),
    batch=batch,
    name='cifar10',
    prepare=make_standardise(mean, deviation),
    # The fill is about 0 after standardisation, as in the second paper.
    fill=np.rint(mean.mean(axis=(0, 1))),
    chunk=chunk,
    **options,
  )


def measure_pixels(images: np.ndarray) -> tuple[np.ndarray, float]:
  """Mean of each pixel and channel, and the deviation of all from their means.

  Args:
    images: Integers [n, height, width, channels].

  Returns:
    Means, float64 [height, width, channels], and the standard deviation.
  """
  # In parts: as float64, all images would take eight times their memory.
  total, squares = np.zeros(images.shape[1:]), np.zeros(images.shape[1:])
  for start in range(0, len(images), 1000):
    part = images[start : start + 1000].astype(np.float64)
    total += part.sum(axis=0)
    squares += np.square(part).sum(axis=0)
  mean = total / len(images)
  variance = squares / len(images) - np.square(mean)
  return mean, float(np.sqrt(variance.mean()))


def make_standardise(mean: np.ndarray, deviation: float) -> _functions.Prepare:
  """Returns a function that subtracts the mean and divides by the deviation."""
  mean = mean.astype(np.float32)

  def standardise(images: jax.Array) -> jax.Array:
    return (images.astype(jnp.float32) - mean) / deviation

  return standardise
