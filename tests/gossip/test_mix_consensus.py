"""Mixing: where it leads, without gradients."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from tests.gossip import mix_cases
from tests.gossip import mix_vmap

pytestmark = pytest.mark.usefixtures('quick_compiler')


@pytest.mark.parametrize('rule', [gossip.Pull, gossip.Push])
def test_a_random_consensus_is_the_mean_on_average(rule):
  """Of independent draws: 500 keys, a tolerance from what they give."""
  start = jnp.asarray(np.random.default_rng(2).normal(size=8) + 3)
  mix = mix_vmap.make_mix(rule(peers='independent'))

  def run(key):
    def step(values, number):
      return mix(values, number, key), None

    return lax.scan(step, start, jnp.arange(1, 101))[0]

  last = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(mix_vmap.KEY, 500)))
  np.testing.assert_allclose(last, last[:, :1].repeat(8, 1), atol=1e-5)
  error = last[:, 0].std() / 500**0.5
  assert 0.001 < error < 0.05  # Random, and yet
  assert abs(last[:, 0].mean() - start.mean()) < 4 * error


def test_push_sum_finds_the_mean_where_push_does_not():
  uneven = gossip.with_uniform_weights(gossip.star(8))
  start = jnp.arange(8.0)
  values, mass, pushed = start, jnp.ones(8), start

  @jax.jit
  def step(values, mass, pushed):
    mix = jax.vmap(
      lambda row, mass: gossip.mix(
        row, mix_vmap.AXIS, gossip.PushSum(peers=uneven), mass=mass
      ),
      axis_name=mix_vmap.AXIS,
    )
    pushed = mix_vmap.mix_all(pushed, gossip.Push(peers=uneven))
    return *mix(values, mass), pushed

  for _ in range(200):
    values, mass, pushed = step(values, mass, pushed)
  np.testing.assert_allclose(values / mass, start.mean(), rtol=1e-5)
  np.testing.assert_allclose(pushed, pushed[0], rtol=1e-5)
  assert abs(pushed[0] - start.mean()) > 0.05


def test_elastic_with_a_centre_of_its_own_dtype():
  values = {'x': jnp.arange(4.0), 'n': jnp.arange(4)}
  centre = {'x': jnp.zeros((), jnp.bfloat16), 'n': jnp.zeros((), int)}
  mixed, moved = jax.vmap(
    lambda row, centre: gossip.mix_elastic(
      row, centre, mix_vmap.AXIS, gossip.Elastic(rate=0.25)
    ),
    (0, None),
    (0, None),
    axis_name=mix_vmap.AXIS,
  )(values, centre)
  np.testing.assert_allclose(mixed['x'], [0, 0.75, 1.5, 2.25])
  assert (moved['x'], moved['x'].dtype) == (1.5, jnp.bfloat16)
  np.testing.assert_array_equal(mixed['n'], values['n'])
  assert moved['n'] == 0


def test_consensus_distance():
  nodes = {
    'a': np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),
    'b': np.random.default_rng(1).normal(size=(5, 2, 2)).astype(np.float32),
    'n': np.arange(5),
  }

  def measure(row):
    return gossip.consensus_distance(row, mix_vmap.AXIS)

  distances = mix_vmap.run(measure, nodes)
  total = sum(
    np.square(nodes[name] - nodes[name].mean(axis=0)).sum() for name in 'ab'
  )
  np.testing.assert_allclose(distances, (total / 5) ** 0.5, rtol=1e-6)
  half = mix_vmap.run(measure, jnp.array([[1.0], [5.0]], jnp.bfloat16))
  assert (half[0], half.dtype) == (2, jnp.float32)


@pytest.mark.parametrize(
  'strategy',
  [
    gossip.Pull(),
    gossip.Pull(peers=gossip.ring(8)),
    gossip.Pairs(peers='matching'),
    gossip.PushSum(peers='permutation'),
    gossip.AllReduce(),
  ],
  ids=lambda each: each.describe().split(':')[0] + each.describe()[-20:],
)
def test_gradients_flow_through_a_mix(strategy):
  """Back to where values came from, by the transposed of W."""
  values, weights = jnp.arange(8.0), jnp.arange(8.0) ** 2
  mix = mix_vmap.make_mix(strategy)
  matrix = mix_cases.make_matrix(strategy, 0, mix_vmap.KEY, 8)
  grads = jax.grad(lambda x: weights @ mix(x, 1, mix_vmap.KEY))(values)
  np.testing.assert_allclose(grads, matrix.T @ weights, rtol=1e-5)


@pytest.mark.parametrize(
  'strategy',
  [gossip.Push(), gossip.PushSum(), gossip.Pull(peers=gossip.star(8))],
  ids=['push', 'push-sum', 'star'],
)
def test_gradients_do_not_flow_through_a_loop(strategy):
  """As many are added as have come: jax says so, and so does the docstring."""
  mix = mix_vmap.make_mix(strategy)
  with pytest.raises(ValueError, match='Reverse-mode differentiation'):
    jax.grad(lambda x: mix(x, 1, mix_vmap.KEY).sum())(jnp.arange(8.0))
