"""Tasks of a model in plain functions and examples in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import protocols
from jasgd.tasks import _augmentation
from jasgd.tasks import _shards
from jasgd.tasks import _task

# apply(params, stats, inputs, key) -> (outputs, stats). key=None: evaluation.
Apply = Callable[
  [_task.Tree, _task.Tree, jax.Array, _task.Key | None],
  tuple[jax.Array, _task.Tree],
]
# measure(outputs, batch) -> {name: mean over the batch}
Measure = Callable[[jax.Array, _task.Tree], _task.Metrics]
Prepare = Callable[[jax.Array], jax.Array]


def measure_classifier(
  outputs: jax.Array, batch: dict[str, jax.Array]
) -> _task.Metrics:
  """Cross-entropy and accuracy of logits, as means over the batch.

    loss = log sum exp(logits) - logits[label]

  Args:
    outputs: Logits [batch, classes].
    batch: Batch with `'label'`, integers [batch].

  Returns:
    The metrics `'loss'` and `'accuracy'`.

  Examples:
    >>> import jax.numpy as jnp
    >>> from jasgd import tasks
    >>> batch = {'label': jnp.array([0, 1])}
    >>> values = tasks.measure_classifier(jnp.zeros((2, 2)), batch)
    >>> print(values['loss'], values['accuracy'])
    0.6931472 0.5
  """
  labels = batch['label']
  chosen = jnp.take_along_axis(outputs, labels[:, None], axis=-1)[:, 0]
  losses = jax.nn.logsumexp(outputs, axis=-1) - chosen
  hits = jnp.argmax(outputs, axis=-1) == labels
  return {'loss': losses.mean(), 'accuracy': hits.mean(dtype=outputs.dtype)}


def scale_bytes(images: jax.Array) -> jax.Array:
  """Scales integers from 0 to 255 to floats in [0, 1]; floats are unchanged."""
  if jnp.issubdtype(images.dtype, jnp.floating):
    return images
  return images.astype(jnp.float32) / 255


def from_functions(
  init: Callable[[_task.Key], tuple[_task.Tree, _task.Tree]],
  apply: Apply,
  train: dict[str, Any],
  test: dict[str, Any] | None = None,
  *,
  batch: int,
  name: str = 'task',
  measure: Measure = measure_classifier,
  prepare: Prepare = scale_bytes,
  augment: str = 'none',
  fill: Any = 0,
  shards: str = 'whole',
  num_learners: int = 1,
  alpha: float = 0.5,
  seed: int = 0,
  chunk: int | None = None,
  validation: float = 0.0,
) -> _task.Task:
  """Makes a task of two functions and of examples that fit in memory.

  Args:
    init: Function `init(key) -> (params, stats)`, as in `Task`.
    apply: Function `apply(params, stats, inputs, key) -> (outputs, stats)`; the
      key is None in evaluation.
    train: Training examples: a dict of arrays with a leading axis of examples.
      `'image'` is the model's input. Batches are drawn on the device, where the
      arrays keep their dtypes.
    test: Test examples of the same form.
    batch: Samples per gradient.
    name: Name of the task in reports.
    measure: Function `measure(outputs, batch) -> {name: mean over the batch}`.
      Training minimises its `'loss'`.
    prepare: Function from stored images to the model's input.
    augment: Augmentation of the stored images: `'none'` or `'flip_crop'`.
    fill: Pixel value outside a shifted image.
    shards: Division of the samples among learners: `'whole'`, `'shards'` or
      `'dirichlet'`, which needs a `'label'`.
    num_learners: Number of learners that the samples are divided among.
    alpha: Concentration of `'dirichlet'`: small values make unequal shards.
    seed: Seed of the shards. All other draws use the seed of the run.
    chunk: Examples at a time on CPU, as in `Task`.
    validation: Share of `train` that replaces `test` and is not trained on, to
      choose settings without the test set. The examples are always the same.
      0: no validation set.

  Returns:
    A `Task`.

  Raises:
    ValueError: if a name is unknown, a number is out of range, or a batch is
      larger than a shard.

  Examples:
    >>> import jax.numpy as jnp
    >>> from jasgd import tasks
    >>> train = {'image': jnp.eye(4), 'label': jnp.arange(4)}
    >>> task = tasks.from_functions(
    ...   lambda key: (jnp.zeros((4, 4)), {}),
    ...   lambda params, stats, inputs, key: (inputs @ params, stats),
    ...   train,
    ...   train,
    ...   batch=2,
    ... )
    >>> params, stats = task.init(tasks.fold_key(0, 0, 0))
    >>> print(tasks.evaluate(task, params, stats)['loss'])
    1.3862944
  """
  protocols.check_choice('augment', augment, _augmentation.AUGMENTATIONS)
  if validation:
    train, test = hold_out(train, validation)
  num_samples = _task.count_examples('train', train)
  if augment != 'none' and np.ndim(train['image']) != 4:
    raise ValueError(
      f'augment={augment!r} needs images [n, height, width, channels], got '
      f'the shape {np.shape(train["image"])}.'
    )
  table, draw = _shards.make_draw(
    shards,
    num_samples=num_samples,
    batch=batch,
    num_learners=num_learners,
    labels=train.get('label'),
    alpha=alpha,
    seed=seed,
  )

  def batches(data: Any, seed: Any, learner: Any, step: Any) -> Any:
    index = draw(data['shards'], seed, learner, step)
    examples = jax.tree.map(lambda leaf: leaf[index], data['examples'])
    key = _task.fold_key(seed, learner, step)
    image = _augmentation.augment_images(augment, key, examples['image'], fill)
    return {**examples, 'image': image}

  loss, metrics = make_loss_and_metrics(apply, measure, prepare)
  return _task.Task(
    name=name,
    batch=batch,
    num_samples=num_samples,
    init=init,
    loss=loss,
    metrics=metrics,
    batches=batches,
    data=jax.tree.map(jnp.asarray, {'examples': train, 'shards': table}),
    test_data=None if test is None else jax.tree.map(jnp.asarray, test),
    chunk=chunk,
  )


def make_loss_and_metrics(
  apply: Apply, measure: Measure, prepare: Prepare
) -> tuple[Callable[..., Any], Callable[..., _task.Metrics]]:
  """Makes the `loss` and the `metrics` of a task."""

  def loss(params: Any, stats: Any, batch: Any, key: Any) -> Any:
    outputs, stats = apply(params, stats, prepare(batch['image']), key)
    return measure(outputs, batch)['loss'], stats

  def metrics(params: Any, stats: Any, batch: Any) -> _task.Metrics:
    outputs, _ = apply(params, stats, prepare(batch['image']), None)
    return measure(outputs, batch)

  return loss, metrics


def first_input(prepare: Prepare, train: dict[str, Any]) -> jax.Array:
  """One prepared image, to initialise a model of the right shape."""
  return prepare(jnp.asarray(np.asarray(train['image'][:1])))


def hold_out(
  train: dict[str, Any], share: float
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Splits off a validation set: always the same for a share and a size.

  Args:
    train: Arrays with a leading axis of examples.
    share: Share of the examples to hold out, above 0 and below 1.

  Returns:
    The training examples and the validation examples.

  Raises:
    ValueError: if one of the two would be empty.
  """
  num_samples = _task.count_examples('train', train)
  num_held = round(share * num_samples) if 0 < share < 1 else 0
  if not 0 < num_held < num_samples:
    raise ValueError(
      'validation must be 0, or a share of the training set that leaves '
      'examples for training and for validation, got '
      f'{share} of {num_samples} examples.'
    )
  # Drawn at random, since a set may be sorted by label.
  generator = np.random.Generator(np.random.Philox(key=num_samples))
  order = generator.permutation(num_samples)
  arrays = {name: np.asarray(array) for name, array in train.items()}
  held_out, remaining = np.sort(order[:num_held]), np.sort(order[num_held:])
  return (
    {name: array[remaining] for name, array in arrays.items()},
    {name: array[held_out] for name, array in arrays.items()},
  )
