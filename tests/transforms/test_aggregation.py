"""`softsync`, `accumulate` and `update`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from tests import trees

TAUS = (1, 4, 10)
RATE = 0.1


class NumpyMomentum:
  """Heavy-ball momentum, as in optax.sgd."""

  def __init__(self, size):
    self.trace = np.zeros(size)

  def step(self, gradient):
    self.trace = gradient + 0.9 * self.trace
    return -RATE * self.trace


class NumpyAdam:
  """Adam with the defaults of optax.adam."""

  def __init__(self, size):
    self.mu, self.nu, self.count = np.zeros(size), np.zeros(size), 0

  def step(self, gradient):
    self.count += 1
    self.mu = 0.9 * self.mu + 0.1 * gradient
    self.nu = 0.999 * self.nu + 0.001 * gradient**2
    mu = self.mu / (1 - 0.9**self.count)
    nu = self.nu / (1 - 0.999**self.count)
    return -RATE * mu / (np.sqrt(nu) + 1e-8)


@pytest.mark.parametrize(
  ('optimizer', 'reference'),
  [
    (optax.sgd(RATE, momentum=0.9), NumpyMomentum),
    (optax.adam(RATE), NumpyAdam),
  ],
  ids=['momentum', 'adam'],
)
def test_softsync_against_numpy(optimizer, reference):
  """(1/c) sum_l alpha(tau_l) g_l, c = 3, 20 updates."""
  gradients = np.random.default_rng(0).normal(size=(20, len(TAUS), 5))
  reference = reference(5)
  expected = np.ones(5)
  softsync = jasgd.softsync(optimizer, len(TAUS), 'inverse')
  params = jnp.ones(5)
  state = softsync.init(params)
  update = jax.jit(softsync.update)
  for i, group in enumerate(gradients):
    for gradient, tau in zip(group[:-1], TAUS[:-1], strict=True):
      updates, new_state = update(
        jnp.asarray(gradient, jnp.float32), state, params, staleness=tau
      )
      np.testing.assert_array_equal(updates, np.zeros(5))
      trees.assert_same_bits(new_state.per_update_state, state.per_update_state)
      state = new_state
    updates, state = update(
      jnp.asarray(group[-1], jnp.float32), state, params, staleness=TAUS[-1]
    )
    params = optax.apply_updates(params, updates)
    factors = 1 / np.array(TAUS)
    expected = expected + reference.step(
      (factors[:, None] * group).mean(axis=0)
    )
    np.testing.assert_allclose(params, expected, rtol=1e-4, atol=1e-5)
    assert optax.tree.get(state, 'server_clock') == i + 1
    assert optax.tree.get(state, 'last_group_staleness') == np.mean(TAUS)
    assert optax.tree.get(state, 'group_size') == 0


@pytest.mark.parametrize(
  ('optimizer', 'dtype'),
  [
    (optax.sgd(0.1, momentum=0.9), jnp.float32),
    (optax.adam(0.1), jnp.bfloat16),
    (optax.adamw(0.1), jnp.float32),
  ],
  ids=['momentum', 'adam', 'adamw'],
)
def test_a_group_of_one_is_the_optimizer_bit_for_bit(optimizer, dtype):
  softsync = jasgd.softsync(optimizer, 1, 'constant')
  params = {'w': jnp.array([1.0, -2.0, 0.0], dtype), 'b': jnp.array(3.0, dtype)}
  update, plain = jax.jit(softsync.update), jax.jit(optimizer.update)
  state, plain_state = softsync.init(params), optimizer.init(params)
  gradients = jax.tree.map(jnp.zeros_like, params)
  for i in range(10):
    updates, state = update(gradients, state, params, staleness=i)
    expected, plain_state = plain(gradients, plain_state, params)
    trees.assert_same_bits(updates, expected)
    trees.assert_same_bits(state.per_update_state, plain_state)
    # -0.0 among them: a sum that starts at +0.0 would lose its sign.
    gradients = jax.tree.map(
      lambda p, i=i: (-p * jnp.sin(i + 1.0)).astype(dtype), params
    )


def test_read_clock_counts_updates_not_gradients():
  softsync = jasgd.softsync(optax.sgd(1.0), 2, 'inverse')
  x = jnp.array(1.0)
  state = softsync.init(x)
  for clock in range(3):
    for _ in range(2):
      assert state.server_clock == clock
      updates, state = softsync.update(x, state, x, read_clock=0)
    factor = 1 / max(clock, 1)
    np.testing.assert_allclose(updates, -factor, rtol=1e-6)
    assert state.last_group_staleness == clock


def test_the_count_of_a_policy_is_the_clock():
  softsync = jasgd.softsync(
    optax.sgd(1.0), 2, lambda tau, count: 1.0 + 10.0 * count
  )
  x = jnp.array(1.0)
  state = softsync.init(x)
  seen = []
  for _ in range(6):
    updates, state = softsync.update(x, state, x, staleness=0)
    seen.append(float(updates))
  assert seen == [0, -1, 0, -11, 0, -21]


def test_gradients_are_summed_in_float32():
  """256 + 1 is 256 in bfloat16."""
  softsync = jasgd.softsync(optax.sgd(1.0), 4, 'constant')
  params = jnp.zeros((), jnp.bfloat16)
  state = softsync.init(params)
  for gradient in (256.0, 1.0, 1.0, 2.0):
    updates, state = softsync.update(
      jnp.asarray(gradient, jnp.bfloat16), state, params, staleness=0
    )
  assert updates == -65
  assert updates.dtype == jnp.bfloat16


def test_a_nan_does_not_outlive_its_group():
  softsync = jasgd.softsync(optax.sgd(1.0), 2, 'constant')
  x = jnp.array(0.0)
  state = softsync.init(x)
  seen = []
  for gradient in (jnp.nan, 1.0, 1.0, 3.0):
    updates, state = softsync.update(
      jnp.asarray(gradient), state, x, staleness=0
    )
    seen.append(float(updates))
  assert np.isnan(seen[1])
  assert seen[3] == -2


def test_the_optimizer_sees_the_mean_staleness():
  softsync = jasgd.softsync(
    jasgd.staleness_aware(optax.sgd(1.0), 'inverse', where='updates'),
    2,
    'constant',
  )
  x = jnp.array(1.0)
  state = softsync.init(x)
  for staleness in (2, 6):
    updates, state = softsync.update(x, state, x, staleness=staleness)
  np.testing.assert_allclose(updates, -1 / 4)


def test_per_gradient_comes_before_the_sum():
  """Each gradient is compensated with its own stale weights."""
  softsync = jasgd.softsync(
    optax.sgd(1.0),
    2,
    'inverse',
    per_gradient=jasgd.delay_compensation(1.0),
  )
  x = jnp.array(1.0)
  state = softsync.init(x)
  expected = 0.0
  for gradient, tau, read in ((2.0, 2, 0.5), (3.0, 4, 0.75)):
    updates, state = softsync.update(
      jnp.asarray(gradient), state, x, staleness=tau, stale_params=read
    )
    expected -= 0.5 / tau * (gradient + gradient**2 * (1.0 - read))
  np.testing.assert_allclose(updates, expected, rtol=1e-6)


def test_stale_params_of_one_gradient_are_not_those_of_a_group():
  chain = optax.chain(jasgd.delay_compensation(1.0), optax.sgd(1.0))
  x = jnp.array(1.0)
  single = jasgd.softsync(chain, 1, 'constant')
  updates, _ = single.update(
    x, single.init(x), x, staleness=0, stale_params=x - 0.5
  )
  np.testing.assert_allclose(updates, -1.5)
  group = jasgd.softsync(chain, 2, 'constant')
  with pytest.raises(ValueError, match='In softsync it goes before the sum'):
    group.update(x, group.init(x), x, staleness=0, stale_params=x - 0.5)


def test_two_functions_are_the_wrapper():
  """The separate calls of a server have the results of the wrapper."""
  optimizer = optax.adam(0.1)
  server = jasgd.make_aggregation(optimizer, 'inverse')
  softsync = jasgd.softsync(optimizer, 3, 'inverse')
  accumulate, update = jax.jit(server.accumulate), jax.jit(server.update)
  wrapped = jax.jit(softsync.update)
  params = {'w': jnp.array([1.0, -2.0]), 'b': jnp.array(0.5)}
  state, wrapped_state = server.init(params), softsync.init(params)
  for i in range(9):
    gradient = jax.tree.map(lambda leaf, i=i: jnp.cos(leaf + i), params)
    state = accumulate(state, gradient, params, staleness=i)
    expected, wrapped_state = wrapped(
      gradient, wrapped_state, params, staleness=i
    )
    if (i + 1) % 3 == 0:
      updates, state = update(state, params)
      trees.assert_close(updates, expected)
    trees.assert_close(state, wrapped_state)


def test_a_group_may_have_any_size():
  """A protocol decides when to update with the gradients so far."""
  server = jasgd.make_aggregation(optax.sgd(1.0), 'constant')
  x = jnp.array(0.0)
  state = server.init(x)
  for group in ([3.0], [1.0, 2.0, 6.0], [5.0, 1.0]):
    for gradient in group:
      state = server.accumulate(state, jnp.asarray(gradient), x, staleness=0)
    updates, state = server.update(state, x)
    np.testing.assert_allclose(updates, -np.mean(group))


@pytest.mark.parametrize(
  ('num_gradients', 'message'),
  [
    (0, 'num_gradients must be at least 1, got 0'),
    (-3, 'num_gradients must be at least 1, got -3'),
    (2.5, 'num_gradients must be whole, got 2.5'),
  ],
)
def test_impossible_groups(num_gradients, message):
  with pytest.raises(ValueError, match=message):
    jasgd.softsync(optax.sgd(0.1), num_gradients)


def test_staleness_is_required():
  softsync = jasgd.softsync(optax.sgd(0.1), 2)
  x = jnp.array(1.0)
  with pytest.raises(ValueError, match=r'`staleness`.*`read_clock`'):
    softsync.update(x, softsync.init(x), x)
