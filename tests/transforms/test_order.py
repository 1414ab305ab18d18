"""The order of a chain: every row of the table in `jasgd.transforms`."""

import jax.numpy as jnp
import numpy as np
import optax

import jasgd

TAUS = (1, 4, 10, 2)
GRADIENTS = (1.0, -2.0, 3.0, 0.5)


def _updates(*links, params=1.0, stale_params=None):
  """The updates of a chain, one for each gradient of the list above."""
  chain = optax.chain(*links)
  params = jnp.asarray(params)
  state = chain.init(params)
  seen = []
  for gradient, tau in zip(GRADIENTS, TAUS, strict=True):
    updates, state = chain.update(
      jnp.asarray(gradient),
      state,
      params,
      staleness=tau,
      stale_params=stale_params,
    )
    seen.append(float(updates))
  return np.array(seen), state


SCALE = jasgd.scale_by_staleness('inverse')
FACTORS = 1 / np.array(TAUS)


def _momentum(gradients):
  trace, seen = 0.0, []
  for gradient in gradients:
    trace = gradient + 0.9 * trace
    seen.append(-0.1 * trace)
  return np.array(seen)


def test_scaling_before_and_behind_momentum():
  momentum = optax.sgd(0.1, momentum=0.9)
  before, _ = _updates(SCALE, momentum)
  np.testing.assert_allclose(before, _momentum(FACTORS * GRADIENTS), rtol=1e-5)
  behind, _ = _updates(momentum, SCALE)
  np.testing.assert_allclose(behind, FACTORS * _momentum(GRADIENTS), rtol=1e-5)
  assert np.all(np.abs(before - behind)[1:] > 0.01)


def test_scaling_before_and_behind_clipping():
  clip = optax.clip_by_global_norm(1.0)
  clip_first, _ = _updates(clip, SCALE)
  expected = FACTORS * np.clip(GRADIENTS, -1, 1)
  np.testing.assert_allclose(clip_first, expected, rtol=1e-6)
  scale_first, _ = _updates(SCALE, clip)
  expected = np.clip(FACTORS * GRADIENTS, -1, 1)
  np.testing.assert_allclose(scale_first, expected, rtol=1e-6)
  # A gradient of 40 at a staleness of 10: the clip hides the damping.
  chain = optax.chain(SCALE, clip)
  x = jnp.asarray(1.0)
  updates, _ = chain.update(40 * x, chain.init(x), staleness=10)
  assert updates == 1


def test_weight_decay_before_and_behind_scaling():
  decay = optax.add_decayed_weights(0.5)
  not_damped, _ = _updates(SCALE, decay, optax.scale(-1.0), params=2.0)
  np.testing.assert_allclose(not_damped, -(FACTORS * GRADIENTS + 1), rtol=1e-6)
  damped, _ = _updates(decay, SCALE, optax.scale(-1.0), params=2.0)
  np.testing.assert_allclose(
    damped, -FACTORS * (np.array(GRADIENTS) + 1), rtol=1e-6
  )


def test_compensation_before_and_behind_scaling():
  compensate = jasgd.delay_compensation(1.0)
  gradients = np.array(GRADIENTS)
  weights = {'params': 3.0, 'stale_params': jnp.asarray(1.0)}
  first, _ = _updates(compensate, SCALE, **weights)
  np.testing.assert_allclose(
    first, FACTORS * (gradients + 2 * gradients**2), rtol=1e-6
  )
  second, _ = _updates(SCALE, compensate, **weights)
  np.testing.assert_allclose(
    second, FACTORS * gradients + 2 * (FACTORS * gradients) ** 2, rtol=1e-6
  )


def test_delay_advances_adam_and_delayed_does_not():
  fed, state = _updates(jasgd.delay(3), optax.adam(0.1))
  assert optax.tree.get(state, 'count') == 4
  waited, state = _updates(jasgd.delayed(optax.adam(0.1), 3))
  assert optax.tree.get(state, 'count') == 1
  np.testing.assert_allclose(waited, [0, 0, 0, -0.1], atol=1e-6)
  assert abs(fed[3]) < 0.06  # Its bias correction counts 4 steps.


def test_multi_steps_behind_scaling_keeps_each_factor():
  sgd = optax.sgd(0.1, momentum=0.9)
  expected = _momentum((FACTORS * GRADIENTS).reshape(2, 2).mean(axis=1))
  kept, _ = _updates(SCALE, optax.MultiSteps(sgd, 2))
  np.testing.assert_allclose(kept[[1, 3]], expected, rtol=1e-5)
  softsync, _ = _updates(jasgd.softsync(sgd, 2, 'inverse'))
  np.testing.assert_allclose(softsync[[1, 3]], expected, rtol=1e-5)
  np.testing.assert_allclose(softsync[[0, 2]], 0)


def test_multi_steps_around_scaling_takes_the_last_factor():
  sgd = optax.sgd(0.1)
  multi = optax.MultiSteps(optax.chain(SCALE, sgd), 2)
  state = multi.init(jnp.asarray(1.0))
  seen = []
  for gradient, tau in zip(GRADIENTS, TAUS, strict=True):
    updates, state = multi.update(
      jnp.asarray(gradient), state, jnp.asarray(1.0), staleness=tau
    )
    seen.append(float(updates))
  means = np.array(GRADIENTS).reshape(2, 2).mean(axis=1)
  np.testing.assert_allclose(
    [seen[1], seen[3]], -0.1 * FACTORS[[1, 3]] * means, rtol=1e-5
  )
  right = -0.1 * (FACTORS * GRADIENTS).reshape(2, 2).mean(axis=1)
  assert np.all(np.abs([seen[1], seen[3]] - right) > 0.005)


def test_zeros_between_updates_feed_momentum():
  """The naive accumulator: it returns zeros until it has c gradients."""

  def init_fn(params):
    return jnp.zeros_like(params), jnp.int32(0)

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    total, count = state[0] + updates / 2, state[1] + 1
    is_full = count == 2
    return (
      jnp.where(is_full, total, 0.0),
      (jnp.where(is_full, 0.0, total), count % 2),
    )

  naive = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  momentum = optax.sgd(0.1, momentum=0.9)
  fed, _ = _updates(SCALE, naive, momentum)
  softsync, _ = _updates(jasgd.softsync(momentum, 2, 'inverse'))
  np.testing.assert_allclose(fed[1], softsync[1], rtol=1e-6)
  # In its third step the momentum moves the weights with no gradient at all,
  # and by the fourth it has decayed twice where it should have decayed once.
  assert abs(fed[2]) > 0.01
  assert softsync[2] == 0
  first, second = (FACTORS * GRADIENTS).reshape(2, 2).mean(axis=1)
  np.testing.assert_allclose(fed[3], -0.1 * (second + 0.81 * first), rtol=1e-5)
  np.testing.assert_allclose(
    softsync[3], -0.1 * (second + 0.9 * first), rtol=1e-5
  )
