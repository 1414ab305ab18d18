"""Shuffles: one-to-one, uniform, and equal for all ways to call them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jasgd import tasks
from tests import marks

# Around powers of two, where the walk is shortest and longest.
GOLDEN = [8718, 19241, 22309, 41081, 10206, 50532]

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 1437, 4097)


@pytest.fixture(scope='module')
def permute():
  """Compiled once: the number of samples is traced."""
  return jax.jit(
    lambda n, seed: jax.vmap(
      lambda step: tasks.draw_samples(seed, 0, step, num_samples=n, batch=1)[0]
    )(jnp.arange(4097))
  )


@pytest.mark.parametrize('n', SIZES)
def test_is_a_permutation(permute, n):
  orders = [np.asarray(permute(n, seed))[:n] for seed in range(5)]
  for order in orders:
    assert order.dtype == np.int32
    assert sorted(order) == list(range(n))
  if n >= 15:
    assert len({tuple(order) for order in orders}) == 5


def test_a_large_set_needs_no_memory():
  n = 2**31 - 1
  index = jax.jit(
    lambda step: tasks.draw_samples(1, 2, step, num_samples=n, batch=1000)
  )(2_000_000)
  assert len(set(np.asarray(index).tolist())) == 1000
  assert index.min() >= 0
  # The mean of uniform numbers, within five deviations.
  assert abs(np.mean(index / n) - 0.5) < 5 / np.sqrt(12 * 1000)


@pytest.mark.parametrize(('n', 'batch'), [(10, 3), (12, 4), (9, 1)])
def test_an_epoch_has_no_repeats_and_a_new_order(n, batch):
  draw = jax.jit(
    lambda learner, step: tasks.draw_samples(
      5, learner, step, num_samples=n, batch=batch
    )
  )
  steps = n // batch
  epochs = []
  for learner in (0, 1):
    for epoch in range(3):
      parts = [draw(learner, epoch * steps + step) for step in range(steps)]
      samples = np.concatenate(parts).tolist()
      assert len(set(samples)) == len(samples) == steps * batch
      assert set(samples) <= set(range(n))
      epochs.append(tuple(samples))
  assert len(set(epochs)) == 6


def test_what_an_epoch_leaves_out_varies():
  draw = jax.jit(
    lambda step: tasks.draw_samples(0, 0, step, num_samples=10, batch=9)
  )
  left = [set(range(10)) - set(draw(step).tolist()) for step in range(100)]
  assert {len(rest) for rest in left} == {1}
  assert set().union(*left) == set(range(10))


def draw_four(n, seed, learner, epoch):
  """The first four samples of an epoch of n."""
  return tasks.draw_samples(
    seed, learner, epoch * (n // 4), num_samples=n, batch=4
  )


@pytest.fixture(scope='module', params=['seed', 'learner', 'epoch'])
def draw_many(request):
  """The first four of n, in 20,000 shuffles that differ in one number."""
  numbers = {'seed': 3, 'learner': 4, 'epoch': 5}
  axes = (None, *(0 if name == request.param else None for name in numbers))
  numbers[request.param] = jnp.arange(20_000)
  draw = jax.jit(jax.vmap(draw_four, axes))
  return lambda n: np.asarray(draw(n, *numbers.values()))


@pytest.mark.parametrize('n', marks.slow_but([4, 9, 40], 9, 40))
def test_uniform_in_positions_and_pairs(draw_many, n):
  rows = draw_many(n)
  for column in rows.T:
    counts = np.bincount(column, minlength=n)
    assert stats.chisquare(counts).pvalue > 1e-4
  for first, second in itertools.combinations(range(4), 2):
    pairs = np.bincount(rows[:, first] * n + rows[:, second], minlength=n * n)
    counts = pairs.reshape(n, n)[~np.eye(n, dtype=bool)]
    assert stats.chisquare(counts).pvalue > 1e-4


def test_the_same_in_every_way_of_calling():
  def draw(seed, learner, step):
    return tasks.draw_samples(seed, learner, step, num_samples=1437, batch=16)

  numbers = np.array([[4, 5, 600], [2**31 - 1, 9, 88]])
  eager = np.stack([draw(*map(int, row)) for row in numbers])
  columns = jnp.asarray(numbers, jnp.int32).T
  ways = {
    'jit': np.stack([jax.jit(draw)(*row) for row in columns.T]),
    'vmap': jax.vmap(draw)(*columns),
    'scan': jax.lax.map(lambda row: draw(*row), columns.T),
    'traced size': jax.jit(
      jax.vmap(
        lambda seed, learner, step, n: tasks.draw_samples(
          seed, learner, step, num_samples=n, batch=16
        ),
        (0, 0, 0, None),
      )
    )(*columns, 1437),
  }
  for way, rows in ways.items():
    np.testing.assert_array_equal(rows, eager, err_msg=way)


def test_the_same_on_every_machine():
  """If these numbers change, recorded runs cannot be replayed."""
  index = tasks.draw_samples(2024, 3, 11, num_samples=60_000, batch=6)
  assert index.tolist() == GOLDEN
  mask = 2**32 - 1

  def mix(word):
    word = (word ^ word >> 16) * 0x85EBCA6B & mask
    word = (word ^ word >> 13) * 0xC2B2AE35 & mask
    return word ^ word >> 16

  # The definition, in Python integers.
  key = jax.random.fold_in(tasks.fold_key(2024, 3, 0), 0x65706F63)
  first, second = map(int, jax.random.key_data(key))
  keys = [
    mix(mix(round_ * 0x9E3779B9 + first & mask) ^ second)
    for round_ in range(1, 13)
  ]
  for position, sample in enumerate(GOLDEN, start=11 * 6):
    value = position
    while True:
      low, high = value & 255, value >> 8
      for index in range(0, 12, 2):
        low ^= mix(high ^ keys[index]) & 255
        high ^= mix(low ^ keys[index + 1]) & 255
      value = high << 8 | low
      if value < 60_000:
        break
    assert value == sample


@pytest.mark.parametrize(
  ('batch', 'message'),
  [
    (11, 'got batch=11 of 10'),
    (0, 'batch must be a whole number of at least 1, got 0'),
  ],
)
def test_refuses(batch, message):
  with pytest.raises(ValueError, match=message):
    tasks.draw_samples(0, 0, 0, num_samples=10, batch=batch)
