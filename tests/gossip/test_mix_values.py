"""Mixing: which values change, and which are left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import _packing
from tests.gossip import mix_cases
from tests.gossip import mix_vmap

pytestmark = pytest.mark.usefixtures('quick_compiler')


@pytest.mark.slow
def test_structure_and_dtypes_are_kept():
  """In every case."""
  step = mix_cases.wrap(mix_cases.make_step(8), 'vmap', 8)
  given = jax.tree.map(jnp.asarray, mix_cases.make_states(8))
  found = jax.eval_shape(step, given, 1, mix_vmap.KEY)
  assert jax.tree.structure(found) == jax.tree.structure(given)
  for one, other in zip(*map(jax.tree.leaves, (given, found)), strict=True):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)


@mix_vmap.with_peers(*gossip.PEERS, 'star')
def test_only_floats_are_mixed(rule, peers):
  values = {
    'float': jnp.arange(8.0),
    'complex': jnp.arange(8) * 1j,
    'int': jnp.arange(8),
    'bool': jnp.arange(8) > 3,
    'key': jax.random.split(mix_vmap.KEY, 8),
  }
  mixed = mix_vmap.mix_all(values, rule(peers=peers))
  assert not np.array_equal(mixed['float'], values['float'])
  np.testing.assert_allclose(mixed['complex'], mixed['float'] * 1j)
  for name in ('int', 'bool', 'key'):
    assert bool(jnp.all(mixed[name] == values[name]))
  rest = {'int': values['int']}  # Nothing to mix.
  np.testing.assert_array_equal(
    mix_vmap.mix_all(rest, rule(peers=peers))['int'], values['int']
  )


@mix_vmap.every_rule
def test_large_arrays_go_alone(rule):
  size = _packing._SMALL
  values = jnp.arange(4.0)[:, None] * jnp.arange(size)
  both = {'large': values, 'small': values[:, :9], 'last': values[:, 5]}
  mixed = mix_vmap.mix_all(both, rule(peers='permutation'))
  np.testing.assert_array_equal(mixed['small'], mixed['large'][:, :9])
  np.testing.assert_array_equal(mixed['last'], mixed['large'][:, 5])
  assert not np.array_equal(mixed['large'], values)


@mix_vmap.with_peers(*gossip.PEERS, *gossip.KINDS)
def test_nan_reaches_only_those_who_get_it(rule, peers):
  """A peer that does not count may hold anything."""
  strategy = rule(peers=peers)
  mix = mix_vmap.make_mix(strategy)
  values = jnp.arange(8.0).at[3].set(jnp.nan)
  for number in range(6):
    mixed = mix(values, number + 1, mix_vmap.KEY)
    matrix = mix_cases.make_matrix(strategy, number, mix_vmap.KEY, 8)
    np.testing.assert_array_equal(np.isnan(mixed), matrix[:, 3] > 0)


@mix_vmap.with_peers(*gossip.PEERS)
def test_who_draws_itself_stays_exactly_as_it_is(rule, peers):
  _check_idle(rule(peers=peers))


@pytest.mark.parametrize('peers', gossip.PEERS)
def test_so_it_does_whatever_the_weight_of_peers_is(peers):
  _check_idle(gossip.Pull(peers=peers, beta=0.3))


def _check_idle(strategy):
  """In 20 mixes, those who have no other peer do not change at all."""
  values = jnp.asarray(np.random.default_rng(0).normal(size=(7, 50)))
  mix, num_idle = mix_vmap.make_mix(strategy), 0
  for number in range(20):
    matrix = mix_cases.make_matrix(strategy, number, mix_vmap.KEY, 7)
    idle = np.flatnonzero(np.all(matrix == np.eye(7), axis=1))
    mixed = mix(values, number + 1, mix_vmap.KEY)
    np.testing.assert_array_equal(mixed[idle], values[idle])
    num_idle += len(idle)
  assert num_idle > 5


def test_masses_are_not_rounded():
  values, mass = jnp.ones((8, 3)), 1 + jnp.arange(8.0) * 1e-6
  strategy = gossip.PushSum(peers='permutation')

  def mix(row, mass):
    return gossip.mix(
      row,
      mix_vmap.AXIS,
      strategy,
      key=mix_vmap.KEY,
      mass=mass,
      dtype=jnp.bfloat16,
    )

  _, new = mix_vmap.run(mix, values, mass)
  before, after = (np.asarray(each, np.float64).sum() for each in (mass, new))
  assert after == pytest.approx(before, abs=3e-7)
  assert len(set(np.asarray(new).tolist())) > 2


@pytest.mark.parametrize('mass', [1, 1.0, jnp.ones((), jnp.bfloat16)])
def test_masses_may_be_any_number(mass):
  strategy = gossip.PushSum(peers=gossip.ring(4))
  _, new = mix_vmap.run(
    lambda row: gossip.mix(row, mix_vmap.AXIS, strategy, mass=mass),
    jnp.ones(4),
  )
  assert jnp.issubdtype(new.dtype, jnp.floating)
  assert float(new.sum()) == 4


@mix_vmap.with_peers(*gossip.PEERS)
def test_one_node_is_on_its_own(rule, peers):
  mixed = mix_vmap.mix_all(jnp.array([[3.0, 4.0]]), rule(peers=peers))
  np.testing.assert_array_equal(mixed, [[3, 4]])
