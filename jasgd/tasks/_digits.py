"""Scikit-learn's digits: 1,797 images of 8x8 pixels, without a download."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

from jasgd.tasks import _models
from jasgd.tasks import _modules
from jasgd.tasks import _task

NUM_TRAIN = 1437


# Name of a model -> the module, and how many examples it is fastest with.
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
  """Scikit-learn's digits, 1437 to train on and 360 to test.

  Which are which is fixed. Pixels are divided by 16: they are in [0, 1].

  Args:
    batch: Samples per gradient.
    model: `'mlp'`, one hidden layer of 64 (the default), or `'lenet'`, two
      convolutions of 3x3 with 16 and 32 channels and pooling, and one hidden
      layer of 64.
    **options: `shards`, `num_learners`, `alpha`, `seed`, `augment`, as in
      `from_functions`.

  Returns:
    A `Task`.

  Raises:
    ValueError: if the model is unknown, or as `from_functions`.
  """
  model = model or 'mlp'
  _task.check_choice('model', model, MODELS)
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
  """Training and test set: images uint8 [n, 8, 8, 1] from 0 to 16, labels."""
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
  """Pixels from 0 to 16 to floats in [0, 1]."""
  return images.astype(jnp.float32) / 16
