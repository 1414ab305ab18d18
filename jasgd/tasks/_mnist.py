"""MNIST: 60,000 training and 10,000 test images of digits, 28x28 pixels."""

from typing import Any

from jasgd import protocols
from jasgd.tasks import _datasets
from jasgd.tasks import _models
from jasgd.tasks import _modules
from jasgd.tasks import _task

VERSION = '3.0.1'

# Name of a model -> (module, `Task.chunk`: examples at a time on CPU).
MODELS = {'lenet': (_models.LeNet(), 32)}


def make_mnist(
  *,
  batch: int,
  model: str | None = None,
  data_dir: str | None = None,
  **options: Any,
) -> _task.Task:
  """Builds the MNIST task. Inputs are pixels divided by 255, in [0, 1].

  Args:
    batch: Samples per gradient.
    model: Name of the model, `'lenet'`: LeNet-5 with relu and max pooling,
      61,706 weights.
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
    Jain et al., `An Analysis of the Delayed Gradients Problem in Asynchronous
    SGD <https://openreview.net/forum?id=BJLSGcywG>`_, 2018
  """
  model = model or 'lenet'
  protocols.check_choice('model', model, MODELS)
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
