"""Every task by its name, for configs and for tests."""

from collections.abc import Callable
import importlib
import inspect
from typing import Any

from jasgd.tasks import _task

# Name -> the module with its factory, loaded when the task is made: some need
# flax, scikit-learn or tensorflow-datasets.
_MODULES = {
  'cifar10': 'jasgd.tasks._cifar10',
  'digits': 'jasgd.tasks._digits',
  'logistic': 'jasgd.tasks._convex',
  'mnist': 'jasgd.tasks._mnist',
  'quadratic': 'jasgd.tasks._convex',
}

TASKS: tuple[str, ...] = tuple(_MODULES)

# What `**options` of a factory stands for.
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
  """Builds a task from its name.

  ============  =======================================  =====================
  name          what                                     models
  ============  =======================================  =====================
  `cifar10`     50,000 colour images of 32x32            `a1`, `resnet20`
  `digits`      1,437 images of 8x8, without download    `mlp`, `lenet`
  `logistic`    convex, synthetic, optimum known         its own
  `mnist`       60,000 images of 28x28                   `lenet`
  `quadratic`   convex, stability known in closed form   its own
  ============  =======================================  =====================

  Args:
    name: One of `TASKS`.
    batch: Samples per gradient.
    data_dir: Where tensorflow-datasets keeps `cifar10` and `mnist`. None: its
      default folder, and a download if need be.
    model: From the table; None: the first.
    num_learners: Among how many learners samples are divided.
    shards: Who owns which samples: `'whole'`, every learner all of them;
      `'shards'`, equal parts; `'dirichlet'`, parts with labels in proportions
      of their own.
    alpha: How alike the shards of `'dirichlet'` are.
    seed: Of what belongs to the task: shards, and synthetic data.
    augment: `'none'`, or for images `'flip_crop'`.
    validation: Share of the training set to evaluate on instead of the test
      set, and not to train on; for images.
    **arguments: What else the task takes, such as `dimension`.

  Returns:
    A `Task`.

  Raises:
    ValueError: if a name is unknown, a number is out of range, or the task does
      not take an argument.
    MissingDataError: if a set is neither there nor to be had.

  Examples:
    >>> from jasgd import tasks
    >>> task = tasks.make_task('quadratic', batch=4, dimension=3)
    >>> task.batches(task.data, 0, 0, 0)['noise'].shape
    (4, 3)
  """
  _task.check_choice('task', name, TASKS)
  module = importlib.import_module(_MODULES[name])
  factory = getattr(module, f'make_{name}')
  known = _list_arguments(factory)
  # Where things are and how many learn may be told to any task; what it is to
  # do differently only to one that can.
  context = {
    'data_dir': data_dir,
    'num_learners': num_learners,
    'alpha': alpha,
    'seed': seed,
  }
  wishes = {'model': (model, None), 'augment': (augment, 'none')}
  wishes |= {'shards': (shards, 'whole'), 'validation': (validation, 0.0)}
  given = {key: value for key, value in context.items() if key in known}
  given |= {
    key: value for key, (value, usual) in wishes.items() if value != usual
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
  """The names of what a factory takes besides the batch."""
  parameters = inspect.signature(factory).parameters
  names = {*parameters} - {'batch', 'options'}
  return names | _SHARED if 'options' in parameters else names
