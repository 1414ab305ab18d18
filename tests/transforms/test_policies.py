"""Policies against their formulas, by name and by function."""

import math

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from jasgd import policies

# (name, arguments) -> the formula in plain Python.
FORMULAS = {
  ('constant',): lambda tau, count: 1,
  ('inverse',): lambda tau, count: 1 if tau == 0 else 1 / tau,
  ('inverse_plus_one',): lambda tau, count: 1 / (1 + tau),
  ('polynomial', 0.5): lambda tau, count: (1 + tau) ** -0.5,
  ('polynomial', 0): lambda tau, count: 1,
  ('exponential', 0.2): lambda tau, count: math.exp(-0.2 * tau),
  ('hinge', 10, 4): lambda tau, count: (
    1 if tau <= 4 else 1 / (10 * (tau - 4) + 1)
  ),
  ('adadelay', 0.5): lambda tau, count: 1 / (1 + 0.5 * math.sqrt(count + tau)),
  ('tail', 8): lambda tau, count: 1 if tau <= 8 else 8 / tau,
  ('drop_above', 8): lambda tau, count: 1 if tau <= 8 else 0,
  ('fixed_fraction', 30): lambda tau, count: 1 / 30,
}
every_policy = pytest.mark.parametrize(
  'spec', [pytest.param(spec, id=str(spec)) for spec in FORMULAS]
)


def test_every_policy_has_a_formula_here():
  assert {name for name, *_ in FORMULAS} == set(policies.NAMES)


@every_policy
@hypothesis.given(tau=st.integers(0, 10_000), count=st.integers(0, 1_000_000))
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
def test_formula(spec, tau, count):
  policy = policies.make_policy(spec)
  expected = FORMULAS[spec](tau, count)
  np.testing.assert_allclose(policy(tau, count), expected, rtol=1e-5, atol=1e-9)


@every_policy
def test_traced(spec):
  policy = policies.make_policy(spec)
  taus, counts = jnp.arange(20), jnp.arange(0, 2000, 100)
  expected = [
    FORMULAS[spec](int(tau), int(count))
    for tau, count in zip(taus, counts, strict=True)
  ]
  factors = jax.jit(jax.vmap(policy))(taus, counts)
  assert factors.dtype == jnp.float32
  np.testing.assert_allclose(factors, expected, rtol=1e-5)
  # The policies work on whole arrays too.
  np.testing.assert_allclose(policy(taus, counts), expected, rtol=1e-5)


@every_policy
def test_name_tuple_and_function_are_the_same(spec):
  name, *arguments = spec
  by_function = getattr(policies, name)(*arguments)
  for policy in (
    policies.make_policy(name, *arguments),
    policies.make_policy(spec),
    policies.make_policy(list(spec)),  # As a config file may have it.
    policies.make_policy(by_function),
  ):
    assert policy(9, 4) == by_function(9, 4)


def test_factors_have_64_bits_where_jax_has():
  with jax.enable_x64(True):
    assert policies.inverse()(3, 0) == 1 / 3


def test_parameters_may_be_traced():
  factors = jax.vmap(lambda a: policies.polynomial(a)(3, 0))(
    jnp.array([0.0, 0.5, 1.0])
  )
  np.testing.assert_allclose(factors, [1, 0.5, 0.25], rtol=1e-6)
  # Even values that a concrete check would refuse pass while traced.
  assert jax.jit(lambda n: policies.fixed_fraction(n)(0, 0))(-2.0) == -0.5


def test_any_callable_is_a_policy():
  chain = jasgd.scale_by_staleness(lambda tau, count: 10 * tau + count)
  state = chain.init(jnp.ones(()))
  for expected in (20, 21, 22):  # tau = 2, and count = 0, 1, 2.
    updates, state = chain.update(jnp.ones(()), state, staleness=2)
    assert updates == expected


@pytest.mark.parametrize(
  ('policy', 'message'),
  [
    ('inverze', "Unknown policy 'inverze'. Known: adadelay, constant"),
    (3, 'Unknown policy 3'),
    (('inverze', 1), "Unknown policy 'inverze'"),
    ('tail', r"Policy 'tail' takes \(threshold.*missing"),
    (('inverse', 2), r"Policy 'inverse' takes \(\)"),
    (('polynomial', -0.5), 'exponent must be at least 0, got -0.5'),
    (('polynomial', math.nan), 'exponent must be finite, got nan'),
    (('polynomial', 'x'), "exponent must be a number, got 'x'"),
    (('exponential', -1), 'decay must be at least 0, got -1'),
    (('hinge', -1, 4), 'a must be at least 0, got -1'),
    (('hinge', 1, -4), 'b must be at least 0, got -4'),
    (('adadelay', -1), 'scale must be at least 0, got -1'),
    (('tail', 0), 'threshold must be above 0, got 0'),
    (('tail', math.inf), 'threshold must be finite, got inf'),
    (('drop_above', -1), 'threshold must be at least 0, got -1'),
    (('fixed_fraction', 0), 'n must be above 0, got 0'),
    (policies.hinge, r'policies.hinge builds a policy: call it'),
    (lambda tau: 1 / tau, r'called as policy\(tau, count\)'),
  ],
)
def test_errors_say_what_was_given(policy, message):
  for build in (
    jasgd.scale_by_staleness,
    lambda policy: jasgd.softsync(optax.sgd(0.1), 2, policy),
    lambda policy: jasgd.staleness_aware(optax.sgd(0.1), policy),
  ):
    with pytest.raises(ValueError, match=message):
      build(policy)


def test_arguments_belong_to_a_name():
  with pytest.raises(ValueError, match='go with the name of a policy'):
    policies.make_policy(policies.inverse(), 3)
