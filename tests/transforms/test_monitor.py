"""`monitor_staleness` against numpy."""

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd

MONITOR = jasgd.monitor_staleness(8)
UPDATE = jax.jit(MONITOR.update)


@hypothesis.given(taus=st.lists(st.integers(0, 20), min_size=1, max_size=30))
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
def test_statistics(taus):
  gradient = jnp.array(3.0)
  state = MONITOR.init(gradient)
  for tau in taus:
    updates, state = UPDATE(gradient, state, staleness=tau)
    assert updates == gradient
  expected = np.bincount(np.minimum(taus, 7), minlength=8)
  np.testing.assert_array_equal(state.staleness_histogram, expected)
  np.testing.assert_allclose(state.staleness_mean, np.mean(taus), rtol=1e-5)
  assert state.staleness_max == max(taus)
  assert state.staleness_last == taus[-1]
  assert state.staleness_count == len(taus)


def test_read_clock():
  state = MONITOR.init(jnp.array(0.0))
  for read_clock in (0, 0, 1, 0):  # The clock is 0, 1, 2, 3.
    _, state = UPDATE(jnp.array(0.0), state, read_clock=read_clock)
  np.testing.assert_array_equal(
    state.staleness_histogram, [1, 2, 0, 1, 0, 0, 0, 0]
  )


def test_a_mean_of_a_group_is_rounded():
  state = MONITOR.init(jnp.array(0.0))
  _, state = UPDATE(jnp.array(0.0), state, staleness=2.6)
  np.testing.assert_array_equal(
    state.staleness_histogram, [0, 0, 0, 1, 0, 0, 0, 0]
  )
  np.testing.assert_allclose(state.staleness_mean, 2.6)


def test_gap():
  monitor = jasgd.monitor_staleness(measure_gap=True)
  now = {'w': jnp.array([1.0, 2.0]), 'b': jnp.array(3.0, jnp.bfloat16)}
  state = monitor.init(now)
  for size in (1.0, 3.0):
    read = {
      'w': now['w'] - size * jnp.array([2.0, 1.0]),
      'b': now['b'] + size * 2,
    }
    _, state = monitor.update(now, state, now, staleness=1, stale_params=read)
    np.testing.assert_allclose(state.gap_last, 3 * size, rtol=1e-6)
  np.testing.assert_allclose(state.gap_mean, 6, rtol=1e-6)


def test_the_gap_can_be_differentiated_where_nothing_moved():
  monitor = jasgd.monitor_staleness(measure_gap=True)
  w = jnp.ones(3)

  def gap(now):
    _, state = monitor.update(
      now, monitor.init(now), now, staleness=1, stale_params=w
    )
    return state.gap_last

  np.testing.assert_array_equal(jax.grad(gap)(w), 0)


def test_names_do_not_clash_with_other_links():
  chain = optax.chain(
    jasgd.monitor_staleness(4),
    jasgd.delay_compensation(adaptive=True),
    jasgd.gap_aware(0.1),
    jasgd.scale_by_staleness('inverse'),
    jasgd.delayed(jasgd.softsync(optax.adam(0.1), 2), 3),
  )
  state = chain.init(jnp.array(1.0))
  for name in (
    'clock',
    'mean_staleness',
    'staleness_count',
    'staleness_last',
    'staleness_mean',
    'staleness_max',
    'staleness_histogram',
    'compensation_mean_square',
    'gap_mean_square',
    'ring',
    'num_received',
    'num_applied',
    'optimizer_state',
    'server_clock',
    'group_size',
    'last_group_staleness',
    'per_update_state',
    'count',
  ):
    assert optax.tree.get(state, name) is not None, name


@pytest.mark.parametrize('num_bins', [0, -1, 2.0, True, '3'])
def test_impossible_bins(num_bins):
  with pytest.raises(ValueError, match=f'num_bins must be .*{num_bins}'):
    jasgd.monitor_staleness(num_bins)


def test_it_does_not_touch_the_weights():
  """Left on, it adds no pass over the weights to a compiled step."""
  size = 100_000

  def compile_step(monitor):
    chain = optax.chain(monitor, optax.sgd(0.1))
    params = jnp.ones(size)

    def step(params, state, staleness):
      updates, state = chain.update(params, state, params, staleness=staleness)
      return optax.apply_updates(params, updates), state

    return (
      jax.jit(step, donate_argnums=(0, 1))
      .lower(params, chain.init(params), 3)
      .compile()
    )

  def num_passes(compiled):
    entry = compiled.as_text().split('ENTRY')[1]
    return sum(
      f'f32[{size}]' in line and ' parameter(' not in line
      for line in entry.splitlines()[1:]
      if ' = f32' in line
    )

  on = compile_step(jasgd.monitor_staleness(64))
  off = compile_step(optax.identity())
  assert num_passes(on) == num_passes(off) == 1
  assert on.memory_analysis().temp_size_in_bytes < 4096
