"""`scale_by_staleness` and `staleness_aware`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd

GRADIENT = jnp.array([1.0, -2.0])


def test_read_clock_is_compared_with_the_clock():
  scale = jasgd.scale_by_staleness('inverse')
  state = scale.init(GRADIENT)
  factors = []
  # The clock is 0, 1, 2, ... so the staleness is 0, 1, 0, 3, 4.
  for read_clock in (0, 0, 2, 0, 0):
    updates, state = scale.update(GRADIENT, state, read_clock=read_clock)
    factors.append(float(updates[0]))
  np.testing.assert_allclose(factors, [1, 1, 1, 1 / 3, 1 / 4])
  assert optax.tree.get(state, 'clock') == 5
  np.testing.assert_allclose(
    optax.tree.get(state, 'mean_staleness'), (0 + 1 + 0 + 3 + 4) / 5
  )


def test_staleness_wins_over_read_clock():
  scale = jasgd.scale_by_staleness('inverse')
  state = scale.init(GRADIENT)
  updates, _ = scale.update(GRADIENT, state, staleness=4, read_clock=0)
  np.testing.assert_allclose(updates, GRADIENT / 4)


def test_neither_is_an_error_that_names_both():
  scale = jasgd.scale_by_staleness('inverse')
  with pytest.raises(ValueError, match=r'`staleness`.*`read_clock`'):
    scale.update(GRADIENT, scale.init(GRADIENT))


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'staleness': -1}, 'staleness must be at least 0, got -1'),
    ({'staleness': np.float32('nan')}, 'staleness must be finite, got nan'),
    ({'read_clock': -2}, 'read_clock must be at least 0, got -2'),
    ({'staleness': jnp.arange(3)}, r'must be a scalar, got shape \(3,\)'),
    ({'staleness': 2**40}, 'staleness must be at most 2147483647'),
    ({'staleness': '3'}, "staleness must be a number, got '3'"),
    ({'read_clock': 2.7}, 'read_clock must be whole, got 2.7'),
  ],
)
def test_impossible_staleness(arguments, message):
  scale = jasgd.scale_by_staleness('inverse')
  with pytest.raises(ValueError, match=message):
    scale.update(GRADIENT, scale.init(GRADIENT), **arguments)


def test_a_traced_staleness_below_zero_counts_as_fresh():
  scale = jasgd.scale_by_staleness('inverse_plus_one')
  state = scale.init(GRADIENT)
  updates, state = jax.jit(scale.update)(GRADIENT, state, staleness=-1)
  np.testing.assert_allclose(updates, GRADIENT)
  # So does a read clock from the future (say, of a server that has restarted).
  updates, _ = jax.jit(scale.update)(GRADIENT, state, read_clock=7)
  np.testing.assert_allclose(updates, GRADIENT)


def test_a_dropped_gradient_may_be_nan():
  scale = jasgd.scale_by_staleness(('drop_above', 3))
  state = scale.init(GRADIENT)
  broken = jnp.array([jnp.nan, jnp.inf])
  updates, state = scale.update(broken, state, staleness=4)
  np.testing.assert_array_equal(updates, [0, 0])
  assert state.clock == 1  # The clock advances all the same.


def test_bfloat16_is_rounded_once():
  """The factor is not rounded to bfloat16 before it is applied."""
  scale = jasgd.scale_by_staleness('inverse')
  gradient = jnp.asarray(0.9, jnp.bfloat16)
  updates, _ = scale.update(gradient, scale.init(gradient), staleness=3)
  expected = (gradient.astype(jnp.float32) / 3).astype(jnp.bfloat16)
  assert updates == expected


def _run(optimizer, staleness, num_steps=20):
  params = jnp.array([1.0, -2.0, 3.0])
  state = optimizer.init(params)
  for _ in range(num_steps):
    updates, state = optimizer.update(
      params, state, params, staleness=staleness
    )
    params = optax.apply_updates(params, updates)
  return params


def test_before_adam_a_constant_staleness_does_nothing():
  adam = optax.adam(0.01, eps=1e-16)
  plain = _run(optax.with_extra_args_support(adam), 8)
  np.testing.assert_allclose(
    _run(jasgd.staleness_aware(adam, where='gradients'), 8), plain, rtol=1e-5
  )


def test_behind_adam_it_is_a_rate_divided_by_the_staleness():
  slow = _run(optax.with_extra_args_support(optax.adam(0.01 / 8)), 8)
  aware = _run(jasgd.staleness_aware(optax.adam(0.01), where='updates'), 8)
  plain = _run(optax.with_extra_args_support(optax.adam(0.01)), 8)
  np.testing.assert_allclose(aware, slow, rtol=1e-6)
  assert jnp.all(jnp.abs(aware - plain) > 0.1)


def test_with_sgd_both_places_are_the_same():
  for where in ('gradients', 'updates'):
    aware = _run(jasgd.staleness_aware(optax.sgd(0.1), where=where), 4)
    slow = _run(optax.with_extra_args_support(optax.sgd(0.1 / 4)), 4)
    np.testing.assert_allclose(aware, slow, rtol=1e-6)


def test_where_must_be_one_of_two():
  with pytest.raises(ValueError, match="'gradients' or 'updates', got 'both'"):
    jasgd.staleness_aware(optax.sgd(0.1), where='both')


def test_explicit_momentum():
  assert jasgd.explicit_momentum(0.9, 1) == 0.9
  np.testing.assert_allclose(jasgd.explicit_momentum(0.9, 10), 0.0, atol=1e-12)
  np.testing.assert_allclose(jasgd.explicit_momentum(0.5, 4), -0.25)
  np.testing.assert_allclose(
    jax.vmap(lambda m: jasgd.explicit_momentum(0.9, m))(jnp.array([1, 2, 4])),
    [0.9, 0.4, 0.15],
    rtol=1e-6,
  )
  with pytest.raises(ValueError, match=r'total must be in \[0, 1\), got 1.5'):
    jasgd.explicit_momentum(1.5, 4)
  with pytest.raises(ValueError, match='num_learners must be at least 1'):
    jasgd.explicit_momentum(0.9, 0)


def test_a_policy_gives_one_number():
  for factor, message in (
    (jnp.ones(3), r'one number .* got shape \(3,\)'),
    (1j, r'a real number, got 1j'),
    (None, r'a real number, got None'),
  ):
    scale = jasgd.scale_by_staleness(lambda tau, count, factor=factor: factor)
    with pytest.raises(ValueError, match=message):
      scale.update(GRADIENT, scale.init(GRADIENT), staleness=1)
