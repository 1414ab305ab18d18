"""Convolutions and networks against those of jax and flax."""

import contextlib

from flax import linen
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import tasks
from jasgd.tasks import _convolutions
from jasgd.tasks import _models
from tests import marks
from tests import trees

TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}


def in_both_precisions(names, rows):
  """All rows in double precision, and the first and last in single.

  Fast are the first one in single, and every second one in double precision.
  """
  singles = [(*row, np.float32) for row in (rows[0], rows[-1])]
  doubles = [(*row, np.float64) for row in rows]
  return pytest.mark.parametrize(
    (*names, 'dtype'),
    marks.slow_but(singles + doubles, singles[0], *doubles[1::2]),
  )


def draw(shape, dtype, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape), dtype)


def compare(ours, plain, shapes, dtype):
  """Checks that `ours` and `plain` have equal values and gradients."""
  is_double = dtype is np.float64
  with jax.enable_x64(True) if is_double else contextlib.nullcontext():
    arguments = [draw(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    _compare(ours, plain, arguments, dtype)


def _compare(ours, plain, arguments, dtype):
  outputs = jax.eval_shape(plain, *arguments)
  weights = draw(outputs.shape, dtype, 9)  # A different weight per output.

  def measure(function, *args):
    weigh = lambda *args: jnp.sum(function(*args) * weights)
    argnums = tuple(range(len(args)))
    return function(*args), jax.grad(weigh, argnums)(*args)

  actual, expected = jax.jit(
    lambda *args: (measure(ours, *args), measure(plain, *args)),
  )(*arguments)
  trees.assert_close(actual, expected, TOLERANCE[dtype], 10 * TOLERANCE[dtype])


# Shapes of images and kernel, padding, stride: those of the networks first.
CONVOLUTIONS = [
  ((2, 8, 8, 3), (3, 3, 3, 4), 1, 1),
  ((2, 8, 8, 3), (3, 3, 3, 4), 1, 2),
  ((2, 8, 6, 2), (5, 5, 2, 3), 2, 1),
  ((3, 9, 6, 2), (3, 3, 2, 5), 0, 3),
  ((1, 7, 10, 1), (5, 5, 1, 2), 2, 3),
  ((2, 6, 7, 3), (1, 1, 3, 4), 1, 2),
  ((2, 8, 9, 2), (2, 4, 2, 3), 1, 2),
]


@in_both_precisions(('images', 'kernel', 'padding', 'stride'), CONVOLUTIONS)
def test_convolve(images, kernel, padding, stride, dtype):
  def plain(images, kernel):
    return lax.conv_general_dilated(
      images,
      kernel,
      (stride, stride),
      [(padding, padding)] * 2,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )

  def ours(images, kernel):
    return _convolutions.convolve(
      images, kernel, padding=padding, stride=stride
    )

  compare(ours, plain, (images, kernel), dtype)


# With few channels it computes patches, with many a convolution.
POOLED = [
  ((2, 12, 12, 1), 5, 2, 6),
  ((2, 14, 14, 6), 5, 0, 16),
  ((3, 8, 8, 16), 3, 1, 4),
  ((2, 10, 6, 3), 3, 0, 2),
  ((2, 4, 6, 2), 1, 0, 3),
  ((2, 8, 8, 40), 5, 2, 8),
]


@in_both_precisions(('images', 'size', 'padding', 'features'), POOLED)
def test_convolve_and_pool(images, size, padding, features, dtype):
  def plain(images, kernel):
    outputs = lax.conv_general_dilated(
      images,
      kernel,
      (1, 1),
      [(padding, padding)] * 2,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    return linen.max_pool(outputs, (2, 2), (2, 2))

  def ours(images, kernel):
    return _convolutions.convolve_and_pool(images, kernel, padding=padding)

  kernel = (size, size, images[-1], features)
  compare(ours, plain, (images, kernel), dtype)


def test_both_ways_to_pool_are_among_the_cases():
  channels = [images[-1] for images, *_ in POOLED]
  assert min(channels) <= _convolutions._MAX_PATCH_CHANNELS < max(channels)


def test_of_equal_maxima_the_first_gets_the_gradient():
  images = jnp.ones((1, 2, 4, 1))
  grads = jax.grad(lambda x: _convolutions.max_pool(x).sum())(images)
  plain = jax.grad(lambda x: linen.max_pool(x, (2, 2), (2, 2)).sum())(images)
  trees.assert_same_bits(grads, plain)
  np.testing.assert_array_equal(grads[0, :, :, 0], [[1, 0, 1, 0], [0] * 4])


def test_on_accelerators_it_is_the_plain_convolution(monkeypatch):
  images, kernel = (
    draw((2, 8, 8, 3), np.float32),
    draw((3, 3, 3, 4), np.float32),
  )

  def run(images, kernel):
    pooled = _convolutions.convolve_and_pool(images, kernel, padding=1)
    return pooled.sum() + _convolutions.convolve(images, kernel, stride=2).sum()

  on_cpu = jax.jit(jax.value_and_grad(run, (0, 1)))(images, kernel)
  assert 'custom_vjp' in str(jax.make_jaxpr(run)(images, kernel))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  program = str(jax.make_jaxpr(lambda *args: run(*args))(images, kernel))
  assert 'custom_vjp' not in program
  assert 'conv_general_dilated' in program
  elsewhere = jax.jit(jax.value_and_grad(lambda *args: run(*args), (0, 1)))
  trees.assert_close(elsewhere(images, kernel), on_cpu, 1e-5, 1e-4)


@pytest.mark.parametrize(
  ('images', 'kernel'),
  [
    ((1, 7, 8, 1), (3, 3, 1, 1)),
    ((1, 8, 7, 1), (3, 3, 1, 1)),
    ((1, 8, 8, 1), (2, 2, 1, 1)),
    ((1, 8, 8, 1), (3, 5, 1, 1)),
  ],
)
def test_pooling_refuses_what_does_not_divide(images, kernel):
  with pytest.raises(
    ValueError, match='needs an odd, square kernel and an even'
  ):
    _convolutions.convolve_and_pool(
      jnp.zeros(images), jnp.zeros(kernel), padding=1
    )


@pytest.mark.parametrize(('stride', 'use_bias'), [(1, True), (2, False)])
def test_layer_has_the_weights_of_linen(stride, use_bias):
  images = draw((2, 8, 8, 3), np.float32)
  ours = _models.Conv(4, 3, 1, stride, use_bias)
  plain = linen.Conv(4, (3, 3), stride, padding=1, use_bias=use_bias)
  params = jax.jit(plain.init)(jax.random.key(3), images)
  trees.assert_same_bits(jax.jit(ours.init)(jax.random.key(3), images), params)
  trees.assert_close(ours.apply(params, images), plain.apply(params, images))


class PlainNet(linen.Module):
  """The pooled networks in plain flax."""

  features: tuple[int, ...]
  kernel: int
  paddings: tuple[int, ...]
  hidden: tuple[int, ...]

  @linen.compact
  def __call__(self, x):
    for index, features in enumerate(self.features):
      x = linen.Conv(
        features,
        (self.kernel, self.kernel),
        padding=self.paddings[index],
        name=f'PooledConv_{index}',
      )(x)
      x = linen.max_pool(linen.relu(x), (2, 2), (2, 2))
    x = x.reshape(len(x), -1)
    for size in self.hidden:
      x = linen.relu(linen.Dense(size)(x))
    return linen.Dense(10)(x)


@pytest.mark.parametrize(
  ('ours', 'plain', 'shape'),
  [
    pytest.param(
      _models.LeNet(),
      PlainNet((6, 16), 5, (2, 0), (120, 84)),
      (4, 28, 28, 1),
      marks=pytest.mark.slow,
    ),
    (
      _models.A1Net(features=(4, 20, 8)),
      PlainNet((4, 20, 8), 5, (2, 2, 2), ()),
      (2, 16, 16, 3),
    ),
  ],
  ids=['lenet', 'a1'],
)
def test_networks_are_those_of_linen(ours, plain, shape):
  images = draw(shape, np.float32)
  params = jax.jit(plain.init)(jax.random.key(0), images)
  trees.assert_same_types(
    jax.eval_shape(ours.init, jax.random.key(0), images),
    jax.eval_shape(lambda: params),
  )
  weights = draw((len(images), 10), np.float32, 2)
  results = [
    jax.jit(
      jax.value_and_grad(
        lambda p, net=net: jnp.sum(net.apply(p, images) * weights)
      ),
    )(params)
    for net in (ours, plain)
  ]
  trees.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_residual_network_keeps_statistics_of_training_alone():
  """Those of its first layer are the running mean over the batch."""
  rng = np.random.default_rng(1)
  examples = {
    'image': rng.standard_normal((8, 8, 8, 3)).astype(np.float32),
    'label': rng.integers(0, 10, 8).astype(np.int32),
  }
  net = _models.ResNet(num_blocks=1, features=(2, 3, 4))
  task = tasks.from_linen(net, examples, examples, batch=8)
  params, stats = jax.jit(task.init)(jax.random.key(0))
  _, changed = jax.jit(task.loss)(params, stats, examples, jax.random.key(1))
  trees.assert_same_types(changed, stats)
  for old, new in zip(*map(jax.tree.leaves, (stats, changed)), strict=True):
    assert (np.asarray(old) != np.asarray(new)).all()
  first = jax.lax.conv_general_dilated(
    examples['image'],
    params['Conv_0']['kernel'],
    (1, 1),
    'SAME',
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )
  (name,) = (name for name in stats if name.startswith('BatchNorm'))
  np.testing.assert_allclose(
    changed[name]['mean'],
    0.1 * first.mean(axis=(0, 1, 2)),
    rtol=1e-4,
    atol=1e-6,
  )
  # Evaluation takes each example by itself.
  metrics = jax.jit(task.metrics)
  once, twice = (
    {name: leaf[np.array(rows)] for name, leaf in examples.items()}
    for rows in ([0, 1], [0, 1, 0, 1])
  )
  trees.assert_close(
    metrics(params, changed, once), metrics(params, changed, twice)
  )
