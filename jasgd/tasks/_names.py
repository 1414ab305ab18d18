"""The table of named tasks, and `make_task`, which builds them."""

from collections.abc import Callable
import importlib
import inspect
from typing import Any

from jasgd import protocols
from jasgd.tasks import _task

# Name -> module of its factory. It is imported when the task is made, since
# some modules need flax, scikit-learn or tensorflow-datasets.
_MODULES = {
  'cifar10': 'jasgd.tasks._cifar10',
  'digits': 'jasgd.tasks._digits',
  'logistic': 'jasgd.tasks._convex',
  'mnist': 'jasgd.tasks._mnist',
  'quadratic': 'jasgd.tasks._convex',
}

TASKS: tuple[str, ...] = tuple(_MODULES)

# The arguments that the `**options` of a factory accept.
_SHARED = {
  'alpha',
  'augment',
  'num_learners',
  'seed',
  'shards',
  'validation',
}


def make_task(
  name: str,
  *,
  batch: int,
  data_dir: str | None = None,
  model: str | None = None,
  num_learners: int = 1,
  shards: str = 'whole',
  alpha: float = 0.5,
  seed: int = 0,
  augment: str = 'none',
  validation: float = 0.0,
  **arguments: Any,
) -> _task.Task:
  """Builds a task by name.

  ============  =======================================  =====================
  name          data                                     models
  ============  =======================================  =====================
  `cifar10`     50,000 colour images of 32x32            `a1`, `resnet20`
  `digits`      1,437 images of 8x8, without download    `mlp`, `lenet`
  `logistic`    convex, synthetic, optimum known         its own
  `mnist`       60,000 images of 28x28                   `lenet`
  `quadratic`   convex, stability known in closed form   its own
  ============  =======================================  =====================

  Args:
    name: Name of the task, one of `TASKS`.
    batch: Samples per gradient.
    data_dir: Folder of tensorflow-datasets, for `cifar10` and `mnist`. None:
      its default folder; a set is downloaded if it is missing.
    model: Name of a model in the table. None: the first.
    num_learners: Number of learners that the samples are divided among.
    shards: Division of the samples among learners: `'whole'`, every learner
      owns all samples; `'shards'`, equal parts; `'dirichlet'`, parts in which
      the proportions of the labels differ.
    alpha: Concentration of `'dirichlet'`: small values make unequal shards.
    seed: Seed of the shards and of synthetic data.
    augment: Augmentation: `'none'`, or for images `'flip_crop'`.
    validation: Share of the training set that replaces the test set and is not
      trained on; for images.
    **arguments: Further arguments of the task, such as `dimension`.

  Returns:
    A `Task`.

  Raises:
    ValueError: if a name is unknown, a number is out of range, or the task does
      not take an argument.
    MissingDataError: if a set is missing and cannot be downloaded.

  Examples:
    >>> from jasgd import tasks
    >>> task = tasks.make_task('quadratic', batch=4, dimension=3)
    >>> task.batches(task.data, 0, 0, 0)['noise'].shape
    (4, 3)
  """
  protocols.check_choice('task', name, TASKS)
  module = importlib.import_module(_MODULES[name])
  factory = getattr(module, f'make_{name}')
  known = _list_arguments(factory)
  # A task without data ignores the arguments about data and learners, so that
  # one config fits all tasks. Arguments that ask for something other than the
  # default are refused by a task that does not have them.
  context = {
    'data_dir': data_dir,
    'num_learners': num_learners,
    'alpha': alpha,
    'seed': seed,
  }
  choices = {  # Name -> (value, default).
    'model': (model, None),
    'augment': (augment, 'none'),
    'shards': (shards, 'whole'),
    'validation': (validation, 0.0),
  }
  given = {key: value for key, value in context.items() if key in known}
  given |= {
    key: value for key, (value, default) in choices.items() if value != default
  }
  given |= arguments
  unknown = sorted(set(given) - known)
  if unknown:
    raise ValueError(
      f'The task {name!r} does not take {", ".join(unknown)}. '
      f'Known: {", ".join(sorted(known))}.'
    )
  return factory(batch=batch, **given)


def _list_arguments(factory: Callable[..., _task.Task]) -> set[str]:
  """Names of the arguments that a factory takes besides the batch."""
  parameters = inspect.signature(factory).parameters
  names = {*parameters} - {'batch', 'options'}
  return names | _SHARED if 'options' in parameters else names
