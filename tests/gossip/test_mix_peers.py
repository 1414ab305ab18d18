"""Mixing: when, and with whom."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from tests.gossip import mix_cases
from tests.gossip import mix_vmap

pytestmark = pytest.mark.usefixtures('quick_compiler')


@pytest.mark.parametrize('name', ['Pull', 'AllReduce', 'PushSum', 'Elastic'])
@pytest.mark.parametrize('is_traced', [False, True])
def test_period(name, is_traced):
  arguments = {'rate': 0.1} if name == 'Elastic' else {}
  strategy = getattr(gossip, name)(period=3, **arguments)
  values = jnp.arange(4.0)

  def mix(row, step):
    if name == 'Elastic':
      return gossip.mix_elastic(row, 0.0, mix_vmap.AXIS, strategy, step=step)[0]
    mass = 1.0 if name == 'PushSum' else None
    mixed = gossip.mix(
      row, mix_vmap.AXIS, strategy, step=step, key=mix_vmap.KEY, mass=mass
    )
    return mixed[0] if name == 'PushSum' else mixed

  mix_all = jax.vmap(mix, (0, None), axis_name=mix_vmap.AXIS)
  for step in range(1, 7):
    if is_traced:
      mixed = jax.jit(mix_all)(values, step)
    else:
      mixed = jax.vmap(
        lambda row, s=step: mix(row, s), axis_name=mix_vmap.AXIS
      )(values)
    assert np.array_equal(mixed, values) == (step % 3 != 0)


@mix_vmap.with_peers('independent', 'matching', 'one_peer_exponential')
def test_step_may_be_known_or_traced(rule, peers):
  """The rounds of a topology, and random ones, one after another."""
  values = jnp.asarray(np.random.default_rng(1).normal(size=(8, 3)))
  strategy = rule(peers=peers, period=2)
  traced, seen = mix_vmap.make_mix(strategy), set()
  for step in (2, 4, 6):
    mixed = traced(values, step, mix_vmap.KEY)
    matrix = mix_cases.make_matrix(strategy, step // 2 - 1, mix_vmap.KEY, 8)
    np.testing.assert_allclose(mixed, matrix @ values, atol=1e-6)
    seen.add(np.asarray(mixed).tobytes())
  assert len(seen) == 3  # Peers change.
  mass = 1.0 if rule is gossip.PushSum else None

  def mix(row):
    return gossip.mix(
      row, mix_vmap.AXIS, strategy, step=step, key=mix_vmap.KEY, mass=mass
    )

  known = jax.jit(jax.vmap(mix, axis_name=mix_vmap.AXIS))(values)
  known = known if mass is None else known[0]
  np.testing.assert_allclose(known, mixed, atol=1e-6)


@mix_vmap.with_peers(*gossip.PEERS)
def test_peers_are_a_function_of_key_and_step(rule, peers):
  values, mix = jnp.eye(8), mix_vmap.make_mix(rule(peers=peers))
  first = mix(values, 1, mix_vmap.KEY)
  np.testing.assert_array_equal(first, mix(values, 1, mix_vmap.KEY))
  others = [mix(values, step, mix_vmap.KEY) for step in range(2, 8)]
  others += [mix(values, 1, jax.random.key(seed)) for seed in range(6)]
  assert sum(not np.array_equal(first, other) for other in others) > 6
  assert mix._cache_size() == 1  # New peers, but nothing new to compile.
  if peers != 'independent':
    # W as a whole makes sense: all nodes had the same draw.
    for matrix in (first, *others):
      np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-6)
      if peers == 'matching':
        np.testing.assert_allclose(matrix, matrix.T)


def test_keys_of_both_kinds():
  values = jnp.eye(8)
  raw = jax.random.key_data(mix_vmap.KEY)
  for peers in ('independent', 'matching'):
    strategy = gossip.Pull(peers=peers)
    np.testing.assert_array_equal(
      mix_vmap.mix_all(values, strategy),
      mix_vmap.mix_all(values, strategy, key=raw),
    )


def test_default_is_pull_with_independent_peers():
  values = jnp.eye(8)
  default = jax.jit(
    jax.vmap(
      lambda row: gossip.mix(row, mix_vmap.AXIS, key=mix_vmap.KEY),
      axis_name=mix_vmap.AXIS,
    )
  )
  np.testing.assert_array_equal(
    default(values), mix_vmap.mix_all(values, gossip.Pull())
  )
