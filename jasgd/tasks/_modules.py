"""Tasks of flax modules: linen and nnx. Flax is imported on the first call."""

from collections.abc import Callable
import inspect
import itertools
from typing import Any, TYPE_CHECKING

import jax

from jasgd.tasks import _functions
from jasgd.tasks import _task

if TYPE_CHECKING:
  from flax import linen
  from flax import nnx


def from_linen(
  module: 'linen.Module',
  train: dict[str, Any],
  test: dict[str, Any] | None = None,
  *,
  batch: int,
  prepare: _functions.Prepare = _functions.scale_bytes,
  **options: Any,
) -> _task.Task:
  """Makes a task of a linen module and of examples that fit in memory.

  The module is called with the images, and with `train=True` or `False` if it
  takes a keyword `train`. The collection `'batch_stats'` becomes the task's
  stats; the random stream `'dropout'` gets the gradient's key.

  Args:
    module: Module from a batch of images to outputs, such as logits.
    train: Training examples: arrays with a leading axis of examples, `'image'`
      and, for a classifier, `'label'`.
    test: Test examples of the same form.
    batch: Samples per gradient.
    prepare: Function from stored images to the module's input.
    **options: Arguments of `from_functions`: `name`, `measure`, `augment`,
      `shards`, ...

  Returns:
    A `Task`.

  Raises:
    ValueError: if `from_functions` refuses an argument, or the module has a
      collection besides `'params'` and `'batch_stats'`.

  Examples:
    >>> from flax import linen
    >>> import jax.numpy as jnp
    >>> from jasgd import tasks
    >>> train = {'image': jnp.eye(4), 'label': jnp.arange(4)}
    >>> task = tasks.from_linen(linen.Dense(4), train, train, batch=2)
    >>> params, stats = task.init(tasks.fold_key(0, 0, 0))
    >>> sorted(params), stats
    (['bias', 'kernel'], {})
    >>> sorted(tasks.evaluate(task, params, stats))
    ['accuracy', 'loss']
  """
  takes_train = 'train' in inspect.signature(module.__call__).parameters
  inputs = _functions.first_input(prepare, train)

  def init(key: _task.Key) -> tuple[_task.Tree, _task.Tree]:
    keywords: dict[str, Any] = {'train': False} if takes_train else {}
    variables = dict(module.init(key, inputs, **keywords))
    params = variables.pop('params', {})
    stats = variables.pop('batch_stats', {})
    if variables:
      raise ValueError(
        "A module may have the collections 'params' and 'batch_stats', got "
        f'also {sorted(variables)}.'
      )
    return params, stats

  def apply(params: Any, stats: Any, inputs: Any, key: Any) -> Any:
    is_training = key is not None
    keywords: dict[str, Any] = {'train': is_training} if takes_train else {}
    variables = {'params': params, 'batch_stats': stats}
    if not is_training:
      return module.apply(variables, inputs, **keywords), stats
    outputs, changed = module.apply(
      variables,
      inputs,
      rngs={'dropout': key},
      mutable=['batch_stats'],
      **keywords,
    )
    return outputs, changed.get('batch_stats', {})

  return _functions.from_functions(
    init, apply, train, test, batch=batch, prepare=prepare, **options
  )


def from_nnx(
  make_module: Callable[['nnx.Rngs'], 'nnx.Module'],
  train: dict[str, Any],
  test: dict[str, Any] | None = None,
  *,
  batch: int,
  **options: Any,
) -> _task.Task:
  """Makes a task of an nnx module and of examples that fit in memory.

  `nnx.Param` variables are the task's params and `nnx.BatchStat` variables its
  stats, both as plain dicts. Random streams of the module, such as those of
  `nnx.Dropout`, are seeded from the key of each gradient. All other variables
  keep their initial values.

  Args:
    make_module: Function `make_module(rngs) -> module`; the module is called
      with the images, after `module.train()` or `module.eval()`.
    train: Training examples, as in `from_linen`.
    test: Test examples of the same form.
    batch: Samples per gradient.
    **options: Arguments of `from_functions`: `name`, `measure`, `augment`,
      `shards`, ...

  Returns:
    A `Task`.

  Raises:
    ValueError: if `from_functions` refuses an argument.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> from jasgd import tasks
    >>> train = {'image': jnp.eye(4), 'label': jnp.arange(4)}
    >>> task = tasks.from_nnx(
    ...   lambda rngs: nnx.Linear(4, 4, rngs=rngs), train, train, batch=2
    ... )
    >>> params, stats = task.init(tasks.fold_key(0, 0, 0))
    >>> sorted(params), stats
    (['bias', 'kernel'], {})
  """
  from flax import nnx

  split = lambda module: nnx.split(module, nnx.Param, nnx.BatchStat, ...)
  graph, _, _, others = split(make_module(nnx.Rngs(0)))
  is_key = lambda variable: isinstance(variable, nnx.RngKey)

  def init(key: _task.Key) -> tuple[_task.Tree, _task.Tree]:
    _, params, stats, _ = split(make_module(nnx.Rngs(key)))
    return nnx.to_pure_dict(params), nnx.to_pure_dict(stats)

  def seed_streams(key: _task.Key) -> Any:
    counter = itertools.count()
    return jax.tree.map(
      lambda variable: (
        variable.replace(jax.random.fold_in(key, next(counter)))
        if is_key(variable)
        else variable
      ),
      others,
      is_leaf=is_key,
    )

  def apply(params: Any, stats: Any, inputs: Any, key: Any) -> Any:
    if key is None:
      module = nnx.merge(graph, params, stats, others)
      module.eval()
      return module(inputs), stats
    module = nnx.merge(graph, params, stats, seed_streams(key))
    module.train()
    outputs = module(inputs)
    return outputs, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

  return _functions.from_functions(
    init, apply, train, test, batch=batch, **options
  )
