"""`delay_compensation` and `gap_aware`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from tests import trees


def _compensate(transform, gradient, now, read):
  updates, _ = transform.update(
    gradient, transform.init(now), now, stale_params=read
  )
  return updates


def _fitted_slope(xs, ys):
  return np.polyfit(np.log(xs), np.log(np.abs(ys)), 1)[0]


def test_error_falls_quadratically_on_minus_log():
  """There g g = H exactly, so with lambda = 1 the first-order term is right."""
  read = jnp.asarray(2.0)
  drifts = 2.0 ** -np.arange(2, 8)
  compensated, plain = [], []
  for drift in drifts:
    now = read + drift
    fixed = _compensate(jasgd.delay_compensation(1.0), -1 / read, now, read)
    compensated.append(float(fixed + 1 / now))
    plain.append(float(-1 / read + 1 / now))
  np.testing.assert_allclose(_fitted_slope(drifts, compensated), 2, atol=0.1)
  np.testing.assert_allclose(_fitted_slope(drifts, plain), 1, atol=0.1)


def test_strength_zero_is_plain_asgd():
  gradient = {'w': jnp.array([1.0, -2.0]), 'b': jnp.array(0.5)}
  now = {'w': jnp.array([3.0, 1.0]), 'b': jnp.array(-1.0)}
  read = {'w': jnp.array([2.0, 4.0]), 'b': jnp.array(1.0)}
  for adaptive in (False, True):
    zero = jasgd.delay_compensation(0.0, adaptive=adaptive)
    trees.assert_same_bits(_compensate(zero, gradient, now, read), gradient)


def test_adaptive_against_numpy():
  rng = np.random.default_rng(0)
  transform = jasgd.delay_compensation(
    2.0, adaptive=True, decay=0.95, epsilon=1e-7
  )
  state = transform.init(jnp.zeros(4))
  mean_square = np.zeros(4)
  for _ in range(10):
    gradient, now, read = rng.normal(size=(3, 4))
    mean_square = 0.95 * mean_square + 0.05 * gradient**2
    strength = 2.0 / np.sqrt(mean_square + 1e-7)
    expected = gradient + strength * gradient**2 * (now - read)
    updates, state = transform.update(
      jnp.asarray(gradient, jnp.float32),
      state,
      jnp.asarray(now, jnp.float32),
      stale_params=jnp.asarray(read, jnp.float32),
    )
    np.testing.assert_allclose(updates, expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(
    optax.tree.get(state, 'compensation_mean_square'), mean_square, rtol=1e-5
  )


@pytest.mark.parametrize(('adaptive', 'strength'), [(False, 0.04), (True, 2.0)])
def test_defaults_are_the_papers(adaptive, strength):
  arguments = jnp.array(3.0), jnp.array(1.0), jnp.array(0.5)
  default = jasgd.delay_compensation(adaptive=adaptive)
  explicit = jasgd.delay_compensation(strength, adaptive=adaptive)
  assert _compensate(default, *arguments) == _compensate(explicit, *arguments)


def test_gap_aware_divides_by_steps_moved():
  """Weights that moved by 0, 1 and 9 typical steps get 1, 1/2 and 1/10."""
  rate, gradient = 0.1, jnp.array([2.0, 2.0, -2.0])
  now = jnp.zeros(3)
  read = now + rate * 2.0 * jnp.array([0.0, 1.0, -9.0])
  transform = jasgd.gap_aware(rate)
  updates = _compensate(transform, gradient, now, read)
  np.testing.assert_allclose(
    updates, gradient / jnp.array([1, 2, 10]), rtol=1e-5
  )


def test_gap_aware_does_not_look_at_the_count():
  transform = jasgd.gap_aware(0.1)
  x = jnp.array(1.0)
  for staleness in (0, 5, 500):
    updates, _ = transform.update(
      x, transform.init(x), x, stale_params=x, staleness=staleness
    )
    assert updates == x


def test_gap_aware_against_numpy():
  rng = np.random.default_rng(1)
  transform = jasgd.gap_aware(0.3, decay=0.9, epsilon=1e-8)
  state = transform.init(jnp.zeros(4))
  mean_square = np.zeros(4)
  for step in range(10):
    gradient, now, read = rng.normal(size=(3, 4))
    mean_square = 0.9 * mean_square + 0.1 * gradient**2
    typical = 0.3 * np.sqrt(mean_square / (1 - 0.9 ** (step + 1)) + 1e-16)
    expected = gradient / (1 + np.abs(now - read) / typical)
    updates, state = transform.update(
      jnp.asarray(gradient, jnp.float32),
      state,
      jnp.asarray(now, jnp.float32),
      stale_params=jnp.asarray(read, jnp.float32),
    )
    np.testing.assert_allclose(updates, expected, rtol=1e-4)


def test_gap_aware_leaves_zero_gradients_alone():
  transform = jasgd.gap_aware(0.1)
  x = jnp.array([0.0, 0.0])
  updates = _compensate(transform, x, x, x + 1.0)
  np.testing.assert_array_equal(updates, [0, 0])


@pytest.mark.parametrize(
  'transform',
  [
    jasgd.delay_compensation(),
    jasgd.gap_aware(0.1),
    jasgd.monitor_staleness(measure_gap=True),
  ],
  ids=['delay_compensation', 'gap_aware', 'monitor_staleness'],
)
def test_both_weights_are_required(transform):
  x = jnp.array(1.0)
  state = transform.init(x)
  with pytest.raises(ValueError, match='needs the keyword `stale_params`'):
    transform.update(x, state, x, staleness=0)
  with pytest.raises(ValueError, match='needs the current weights'):
    transform.update(x, state, stale_params=x, staleness=0)


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: jasgd.delay_compensation(-1.0), 'strength must be at least 0'),
    (lambda: jasgd.delay_compensation(decay=1.0), r'decay must be in \[0, 1\)'),
    (lambda: jasgd.delay_compensation(epsilon=0), 'epsilon must be above 0'),
    (lambda: jasgd.gap_aware(0.0), 'rate must be above 0, got 0.0'),
    (lambda: jasgd.gap_aware(0.1, decay=-0.1), r'decay must be in \[0, 1\)'),
    (lambda: jasgd.gap_aware(0.1, epsilon=-1), 'epsilon must be at least'),
    (lambda: jasgd.gap_aware(float('nan')), 'rate must be finite, got nan'),
  ],
)
def test_impossible_parameters(build, message):
  with pytest.raises(ValueError, match=message):
    build()


def test_gap_aware_can_be_differentiated_at_zero():
  transform = jasgd.gap_aware(0.1)
  x = jnp.array([0.0, 1.0])

  def total(gradient):
    return jnp.sum(_compensate(transform, gradient, x, x + 1.0))

  assert jnp.all(jnp.isfinite(jax.grad(total)(x)))


@pytest.mark.parametrize(
  'transform',
  [
    jasgd.delay_compensation(),
    jasgd.gap_aware(0.1),
    jasgd.monitor_staleness(measure_gap=True),
  ],
  ids=['delay_compensation', 'gap_aware', 'monitor_staleness'],
)
def test_complex_weights_are_refused(transform):
  with pytest.raises(ValueError, match='real weights, got complex64'):
    transform.init(jnp.ones(2, jnp.complex64))
