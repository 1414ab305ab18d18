"""Mixing under pmap, shard_map and vmap, and over two processes.

Programs compute all cases on 8 devices of one process, or 4 devices each of
two. The results of each step are compared with numpy's.
"""

import jax
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import topologies
from tests.gossip import many_devices
from tests.gossip import mix_cases
from tests.gossip import mix_devices

# One worker process runs the programs, once. All but the one of a few cases
# take a minute to compile.
pytestmark = pytest.mark.xdist_group('mix_devices')
slow = pytest.mark.slow

CASES = {n: mix_cases.list_cases(n) for n in mix_cases.SIZES}
_HALF, _COUNT = "['half']", "['more'][1]"
# Relative error of a narrow message: half of the epsilon of its dtype.
_ROUNDING = {None: 0.0, 'bfloat16': 2**-8, 'float16': 2**-11}


@pytest.fixture(scope='module')
def found_few(tmp_path_factory):
  """Results of a few cases under pmap and shard_map, by name."""
  folder = tmp_path_factory.mktemp('mix')
  return many_devices.run('tests.gossip.mix_devices', folder, 'few')


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """Results of all cases under all runners on 8 devices, by name."""
  folder = tmp_path_factory.mktemp('mix')
  return many_devices.run('tests.gossip.mix_devices', folder)


@pytest.fixture(scope='module')
def found_by_two(tmp_path_factory):
  """Results of two processes with 4 devices each, joined, by name."""
  folder = tmp_path_factory.mktemp('mix')
  first, second = many_devices.run_two('tests.gossip.mix_devices', folder)
  assert first.keys() == second.keys()
  return {name: np.concatenate([first[name], second[name]]) for name in first}


def _compute(num_nodes, case):
  """The states after each step by numpy: (params, mass or centre)."""
  start = mix_cases.make_start(num_nodes, case.has_half)
  start = mix_devices.flatten('', {'': (start, None)})
  values = {
    name.split('|x')[1]: leaf.astype(np.float64) for name, leaf in start.items()
  }
  counts = values.pop(_COUNT)
  other = {
    name: np.full(leaf.shape[1:], mix_cases.CENTRE)
    for name, leaf in values.items()
  }
  other = other if case.is_elastic else np.ones(num_nodes)
  key = jax.random.key(mix_devices.SEED)
  strategy, states = case.strategy, []
  for step in range(1, mix_devices.NUM_STEPS + 1):
    if step % strategy.period:
      pass
    elif case.is_elastic:
      for name, leaf in values.items():
        force = strategy.rate * (leaf - other[name])
        values[name] = leaf - force
        other = other | {name: other[name] + force.sum(axis=0)}
    else:
      matrix = mix_cases.make_matrix(
        strategy, step // strategy.period - 1, key, num_nodes
      )
      for name, leaf in values.items():
        values[name] = np.einsum('ij,j...->i...', matrix, leaf)
      other = matrix @ other
    states.append((values | {_COUNT: counts}, other))
    values = dict(values)
  return states


def _get_rounding(case):
  return _ROUNDING[case.dtype and str(np.dtype(case.dtype))]


def _check_states(found, prefix, name, case, num_nodes):
  """Compares all saved states of one case with numpy's."""
  states = _compute(num_nodes, case)
  for step in range(1, mix_devices.NUM_STEPS + 1):
    params, other = states[step - 1]
    for path, expected in params.items():
      given = found[f'{prefix}state|{step}|{name}|x{path}']
      assert given.dtype == (np.int32 if path == _COUNT else np.float32)
      # Weights of one leaf are rounded after each mix.
      own = 2**-8 if path == _HALF else 1e-6
      error = step * (own + _get_rounding(case))
      scale = np.abs(expected).max() + 1
      np.testing.assert_allclose(given, expected, rtol=0, atol=error * scale)
    if case.is_push_sum:
      given = found[f'{prefix}state|{step}|{name}|other']
      np.testing.assert_allclose(given, other, rtol=1e-6)
    if case.is_elastic:
      for path, expected in other.items():
        given = found[f'{prefix}state|{step}|{name}|other{path}']
        own = 3e-2 if path == _HALF else 1e-5
        np.testing.assert_allclose(
          given, np.broadcast_to(expected, given.shape), atol=step * own
        )


@pytest.mark.parametrize('runner', ['pmap', 'shard_map'])
def test_a_few_states_are_those_of_numpy(found_few, runner):
  """Every rule, and every kind of collective, on real devices; fast."""
  num_nodes = mix_cases.FEW_NODES
  prefix = f'{num_nodes}|{runner}|'
  for name, case in mix_cases.list_few(num_nodes).items():
    _check_states(found_few, prefix, name, case, num_nodes)
  assert found_few[f'{prefix}num_traces'] == 1  # New peers: no compilation.


def test_every_kind_and_strategy_is_there():
  listed = CASES[8]
  for rule in ('Pull', 'Push', 'PushSum'):
    kinds = topologies.KINDS if rule == 'Pull' else mix_cases.VARIED
    for peers in (*kinds, *gossip.PEERS):
      assert f'{rule}, {peers}' in listed
  for found in (listed, mix_cases.list_few(8)):
    strategies = {type(case.strategy) for case in found.values()}
    assert strategies == set(gossip.STRATEGIES.values())


@slow
@pytest.mark.parametrize(('num_nodes', 'runner'), mix_cases.PROGRAMS)
def test_states_are_those_of_numpy(found, num_nodes, runner):
  prefix = f'{num_nodes}|{runner}|'
  for name, case in CASES[num_nodes].items():
    _check_states(found, prefix, name, case, num_nodes)
  assert found[f'{prefix}num_traces'] == 1  # New peers: no compilation.


@slow
def test_two_processes_agree_with_numpy(found_by_two):
  for name, case in mix_cases.list_few(8).items():
    _check_states(found_by_two, '', name, case, 8)


# --- Traps.


@slow
def test_a_mesh_may_be_explicit(found):
  """As `jax.make_mesh` makes it."""
  for name in mix_devices.EXPLICIT:
    explicit, usual = (found[f'mesh|{name}|{x}'] for x in ('explicit', 'usual'))
    np.testing.assert_array_equal(explicit, usual)
    assert np.ptp(explicit - mix_devices.make_values(8)) > 0.1


@slow
@pytest.mark.parametrize('name', mix_devices.DIFFERENTIABLE)
def test_gradients_through_a_mix(found, name):
  """A node's gradient of its own loss is its part of that of the sum of losses.

  This holds under every runner. The gradient of the mean of all losses is the
  same number, hence n times too large, except under `jax.shard_map` with
  `check_vma` (the default), where it is right.
  """

  def get(runner, what):
    return found[f'gradient|{name}|{runner}|{what}']

  total = get('vmap', 'own')
  assert np.abs(total).max() > 0.1
  for runner in ('pmap', 'checked', 'unchecked'):
    np.testing.assert_allclose(get(runner, 'own'), total, atol=1e-5)
  for runner in ('vmap', 'pmap', 'unchecked'):
    np.testing.assert_allclose(get(runner, 'mean'), total, atol=1e-5)
  np.testing.assert_allclose(get('checked', 'mean'), total / 8, atol=1e-5)
