"""MNIST: 60,000 handwritten digits of 28x28 pixels, and 10,000 to test."""

from typing import Any

from jasgd.tasks import _datasets
from jasgd.tasks import _models
from jasgd.tasks import _modules
from jasgd.tasks import _task

VERSION = '3.0.1'

# Name of a model -> the module, and how many examples it is fastest with.
MODELS = {'lenet': (_models.LeNet(), 32)}


def make_mnist(
  *,
  batch: int,
  model: str | None = None,
  data_dir: str | None = None,
  **options: Any,
) -> _task.Task:
  """MNIST. Pixels are divided by 255: they are in [0, 1].

  Args:
    batch: Samples per gradient.
    model: `'lenet'`: LeNet-5 with relu and max pooling, 61,706 weights.
    data_dir: The folder of tensorflow-datasets. None: its default folder, and
      a download if need be.
    **options: `shards`, `num_learners`, `alpha`, `seed`, `augment`, as in
      `from_functions`.

  Returns:
    A `Task`.

  Raises:
    ValueError: if the model is unknown, or as `from_functions`.
    MissingDataError: if the set is neither there nor to be had.

  References:
    Jain et al., `An Analysis of the Delayed Gradients Problem in Asynchronous
    SGD <https://openreview.net/forum?id=BJLSGcywG>`_, 2018
  """
  model = model or 'lenet'
  _task.check_choice('model', model, MODELS)
  module, chunk = MODELS[model]
  return _modules.from_linen(
    module,
    _datasets.load_split('mnist', VERSION, 'train', data_dir),
    _datasets.load_split('mnist', VERSION, 'test', data_dir),
    batch=batch,
    name='mnist',
    chunk=chunk,
    **options,
  )
