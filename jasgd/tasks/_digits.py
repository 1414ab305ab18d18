"""Scikit-learn's digits: 1,797 images of 8x8 pixels, without a download."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

from jasgd import protocols
from jasgd.tasks import _models
from jasgd.tasks import _modules
from jasgd.tasks import _task

NUM_TRAIN = 1437


# Name of a model -> (module, `Task.chunk`: examples at a time on CPU).
MODELS = {
  'lenet': (
    _models.LeNet(features=(16, 32), kernel=3, paddings=(1, 1), hidden=(64,)),
    64,
  ),
  'mlp': (_models.Mlp(), None),
}


def make_digits(
  *, batch: int, model: str | None = None, **options: Any
) -> _task.Task:
  """Builds the digits task: 1437 training and 360 test images, a fixed split.

  Inputs are pixels divided by 16, in [0, 1].

  Args:
    batch: Samples per gradient.
    model: Name of the model: `'mlp'`, one hidden layer of 64 (the default), or
      `'lenet'`, two convolutions of 3x3 with 16 and 32 channels and pooling,
      and one hidden layer of 64.
    **options: Arguments of `from_functions`: `shards`, `num_learners`,
      `alpha`, `seed`, `augment`, `validation`.

  Returns:
    A `Task`.

  Raises:
    ValueError: if the model is unknown, or `from_functions` refuses an option.
  """
  model = model or 'mlp'
  protocols.check_choice('model', model, MODELS)
  module, chunk = MODELS[model]
  train, test = load_digits()
  return _modules.from_linen(
    module,
    train,
    test,
    batch=batch,
    name='digits',
    prepare=scale_digits,
    chunk=chunk,
    **options,
  )


def load_digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """Training and test set: images, uint8 [n, 8, 8, 1], 0 to 16; and labels."""
  images, labels = datasets.load_digits(return_X_y=True)
  order = np.random.Generator(np.random.Philox(key=0)).permutation(len(labels))
  examples = {
    'image': images[order].reshape(-1, 8, 8, 1).astype(np.uint8),
    'label': labels[order].astype(np.int32),
  }
  return (
    {name: array[:NUM_TRAIN] for name, array in examples.items()},
    {name: array[NUM_TRAIN:] for name, array in examples.items()},
  )


def scale_digits(images: jax.Array) -> jax.Array:
  """Scales pixels from 0 to 16 to floats in [0, 1]."""
  return images.astype(jnp.float32) / 16
