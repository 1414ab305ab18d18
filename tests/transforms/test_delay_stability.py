r"""Delayed gradient descent on a quadratic, against its exact stability bound.

On f(x) = a x^2 / 2 a delay of d makes x_{t+1} = x_t - r a x_{t-d}, with the
characteristic equation z^{d+1} - z^d + r a = 0. A root crosses the unit circle
at z = e^{i w} with w = pi / (2 d + 1), where r a = 2 sin(w / 2). With momentum
m and d = 1 the equation is z^3 - (1 + m) z^2 + m z + r a = 0, whose roots (by
Jury's criterion) are all inside exactly for r a < 1 - m.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jasgd

NUM_STEPS = 100_000
CURVATURE = 3.0


@functools.partial(jax.jit, static_argnames=('num_late', 'momentum'))
def _final_size(rate, num_late, momentum=None):
  """The largest |x| in the last 5% of a run that starts at x = 1."""
  optimizer = jasgd.delayed(optax.sgd(rate, momentum=momentum), num_late)

  def step(carry, _):
    x, state = carry
    updates, state = optimizer.update(CURVATURE * x, state, x)
    x = optax.apply_updates(x, updates)
    return (x, state), jnp.abs(x)

  x = jnp.array(1.0)
  _, sizes = jax.lax.scan(step, (x, optimizer.init(x)), length=NUM_STEPS)
  # NaN is what float32 makes of the difference of two infinities.
  return jnp.max(jnp.nan_to_num(sizes[-NUM_STEPS // 20 :], nan=jnp.inf))


def _assert_bound(bound, **arguments):
  below, above = (
    float(_final_size(factor * bound / CURVATURE, **arguments))
    for factor in (0.99, 1.01)
  )
  assert below < 0.1, f'1% below the bound {bound} it ended at {below}'
  assert above > 10, f'1% above the bound {bound} it ended at {above}'


@pytest.mark.parametrize('num_late', [0, 1, 4, 16, 64])
def test_delay(num_late):
  bound = 2 * math.sin(math.pi / (2 * (2 * num_late + 1)))
  _assert_bound(bound, num_late=num_late)


@pytest.mark.parametrize('momentum', [0.5, 0.9])
def test_delay_of_one_with_momentum(momentum):
  _assert_bound(1 - momentum, num_late=1, momentum=momentum)
