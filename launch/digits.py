"""Delayed-gradient training of a small network on scikit-learn's digits.

The data comes with scikit-learn, so that there is something to run right after
the install. All delays of a row are one compiled program: the delay is a traced
number, and the runs are a `jax.vmap` over it.
"""

from collections.abc import Callable, Iterator
import dataclasses
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from matplotlib import figure as mpl_figure
import numpy as np
import optax
from sklearn import datasets

import jasgd


class Row(NamedTuple):
  """A row of the table: an optimizer, from the config's rate and momentum."""

  make: Callable[[float, float], optax.GradientTransformation]
  keep_params: bool = False  # Whether it needs the stale weights.


ROWS = {
  'sgd': Row(optax.sgd),
  'sgd / staleness': Row(
    lambda rate, momentum: jasgd.staleness_aware(optax.sgd(rate, momentum))
  ),
  'sgd, gap-aware': Row(
    lambda rate, momentum: optax.chain(
      jasgd.gap_aware(rate), optax.sgd(rate, momentum)
    ),
    keep_params=True,
  ),
  'adam': Row(lambda rate, momentum: optax.adam(rate / 10)),
  'adam / staleness': Row(
    lambda rate, momentum: jasgd.staleness_aware(
      optax.adam(rate / 10), where='updates'
    )
  ),
}


@dataclasses.dataclass(kw_only=True)
class Config:
  """What to train."""

  # Gradient delays, in updates. A delay d is what d + 1 equal learners make.
  delays: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32, 64)
  # Learning rate of SGD; Adam gets a tenth of it.
  rate: float = 0.03
  # Momentum of SGD.
  momentum: float = 0.9
  # Samples per gradient.
  batch: int = 32
  # Passes over the training set.
  num_epochs: int = 20
  # Of the weights, the split and the order of the samples.
  seed: int = 0

  def validate(self) -> None:
    """Raises one ValueError that names everything that is wrong."""
    are_delays = all(isinstance(delay, int) for delay in self.delays)
    rules = {
      f'delays must be one or more whole numbers >= 0, got {self.delays}': (
        are_delays and len(self.delays) > 0 and min(self.delays) >= 0
      ),
      f'rate must be finite and above 0, got {self.rate}': (
        0 < self.rate < math.inf
      ),
      f'momentum must be in [0, 1), got {self.momentum}': (
        0 <= self.momentum < 1
      ),
      f'batch must be from 1 to {NUM_TRAIN}, got {self.batch}': (
        1 <= self.batch <= NUM_TRAIN
      ),
      f'num_epochs must be at least 1, got {self.num_epochs}': (
        self.num_epochs >= 1
      ),
      f'seed must be at least 0, got {self.seed}': self.seed >= 0,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
      raise ValueError('Bad config: ' + '; '.join(broken))


NUM_TRAIN = 1437
NUM_CLASSES = 10

Arrays = dict[str, jax.Array]


def load_data(seed: int) -> tuple[Arrays, Arrays]:
  """The 1797 images, in [0, 1], split into training and test set."""
  images, labels = datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(seed).permutation(len(labels))
  data = {'image': jnp.asarray(images[order] / 16, jnp.float32)}
  data['label'] = jnp.asarray(labels[order])
  train = {key: value[:NUM_TRAIN] for key, value in data.items()}
  test = {key: value[NUM_TRAIN:] for key, value in data.items()}
  return train, test


def init_params(key: jax.Array, num_hidden: int = 64) -> Arrays:
  """Weights of a network with one hidden layer."""
  first, second = jax.random.split(key)
  glorot = jax.nn.initializers.glorot_normal()
  return {
    'w1': glorot(first, (64, num_hidden)),
    'b1': jnp.zeros(num_hidden),
    'w2': glorot(second, (num_hidden, NUM_CLASSES)),
    'b2': jnp.zeros(NUM_CLASSES),
  }


def predict(params: Arrays, images: jax.Array) -> jax.Array:
  """Logits."""
  hidden = jax.nn.relu(images @ params['w1'] + params['b1'])
  return hidden @ params['w2'] + params['b2']


def measure_loss(params: Arrays, batch: Arrays) -> jax.Array:
  """Mean cross-entropy."""
  return optax.softmax_cross_entropy_with_integer_labels(
    predict(params, batch['image']), batch['label']
  ).mean()


def train_row(config: Config, row: str) -> np.ndarray:
  """Test accuracy after training, one for each of the config's delays."""
  train, test = load_data(config.seed)
  steps_per_epoch = NUM_TRAIN // config.batch

  def make_epoch(key: jax.Array) -> jax.Array:
    order = jax.random.permutation(key, NUM_TRAIN)
    return order[: steps_per_epoch * config.batch].reshape(steps_per_epoch, -1)

  keys = jax.random.split(jax.random.key(config.seed), config.num_epochs + 1)
  batches = jnp.concatenate([make_epoch(key) for key in keys[1:]])

  @jax.jit
  @jax.vmap
  def train_with(delay: jax.Array) -> jax.Array:
    optimizer = jasgd.delayed(
      ROWS[row].make(config.rate, config.momentum),
      delay,
      max_delay=max(config.delays),
      keep_params=ROWS[row].keep_params,
    )

    def step(carry: Any, indices: jax.Array) -> tuple[Any, None]:
      params, state = carry
      batch = {key: value[indices] for key, value in train.items()}
      grads = jax.grad(measure_loss)(params, batch)
      updates, state = optimizer.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    params = init_params(keys[0])
    (params, _), _ = jax.lax.scan(
      step, (params, optimizer.init(params)), batches
    )
    logits = predict(params, test['image'])
    return jnp.mean(jnp.argmax(logits, axis=-1) == test['label'])

  return np.asarray(train_with(jnp.asarray(config.delays)))


def train_table(config: Config) -> Iterator[tuple[str, np.ndarray]]:
  """Trains row by row, and prints the table of accuracies as it grows."""
  print(
    f'Test accuracy on digits after {config.num_epochs} epochs, by the delay '
    'of the gradients:'
  )
  width = max(map(len, ROWS))
  print(f'{"delay":{width}}', *(f'{delay:5d}' for delay in config.delays))
  for row in ROWS:
    start = time.perf_counter()
    accuracies = train_row(config, row)
    seconds = time.perf_counter() - start
    cells = (f'{accuracy:5.3f}' for accuracy in accuracies)
    print(f'{row:{width}}', *cells, f'  {seconds:.1f} s', flush=True)
    yield row, accuracies


def plot_table(table: dict[str, np.ndarray], config: Config, path: str) -> None:
  """Draws accuracy against delay, a line per row."""
  figure = mpl_figure.Figure(figsize=(7, 3.6), layout='constrained')
  axes = figure.subplots()
  positions = np.arange(len(config.delays))
  for row, accuracies in table.items():
    style = '-' if row.startswith('sgd') else '--'
    axes.plot(positions, accuracies, style, marker='o', label=row)
  axes.set_xticks(positions, [str(delay) for delay in config.delays])
  axes.set_xlabel('delay of the gradients, in updates')
  axes.set_ylabel('test accuracy')
  axes.set_ylim(0, 1.02)
  axes.set_title(
    f'digits, rate {config.rate:g}, momentum {config.momentum:g}, '
    f'{config.num_epochs} epochs'
  )
  axes.grid(alpha=0.3)
  axes.legend(loc='lower left')
  figure.savefig(path, dpi=120)
  print(f'Wrote {path}')
