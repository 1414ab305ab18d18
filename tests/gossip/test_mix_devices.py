"""One function on devices, on a mesh, over processes and under vmap.

What a process with 8 devices, and two with 4 each, have computed is compared
with numpy, and with each other.
"""

import jax
import numpy as np
import pytest

from jasgd import gossip
from tests.gossip import mix_cases
from tests.gossip import mix_devices
from tests.gossip import mix_measures

# Computed once; it takes minutes to compile.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('mix_devices')]

CASES = {
  f'{num_nodes}|{name}': (num_nodes, name, case)
  for num_nodes in mix_cases.SIZES
  for name, case in mix_cases.list_cases(num_nodes).items()
}
every_case = pytest.mark.parametrize(
  ('num_nodes', 'name', 'case'), CASES.values(), ids=CASES
)
every_case_of_8 = pytest.mark.parametrize('name', mix_cases.list_cases(8))
_HALF, _COUNT = "['half']", "['more'][1]"
# What is sent in a narrow dtype has a relative error of half of its epsilon.
_ROUNDING = {None: 0.0, 'bfloat16': 2**-8, 'float16': 2**-11}


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


def test_every_kind_and_rule_is_there():
  names = [name for n, name, _ in CASES.values() if n == 8]
  for rule in ('Pull', 'Push', 'PushSum'):
    for peers in (*gossip.KINDS, *gossip.PEERS):
      assert f'{rule}, {peers}' in names
  rules = {type(case.strategy) for _, _, case in CASES.values()}
  public = [getattr(gossip, name) for name in gossip.__all__]
  strategies = {
    item
    for item in public
    if isinstance(item, type) and issubclass(item, gossip.PeerStrategy)
  }
  assert strategies - {gossip.PeerStrategy, gossip.Gossip} == rules


@every_case
@pytest.mark.parametrize('runner', mix_cases.RUNNERS)
def test_states_are_those_of_numpy(found, num_nodes, name, case, runner):
  _check_states(found, f'{num_nodes}|{runner}|', name, case, num_nodes)


def _compare(one, other, case):
  """Two runs of a case: equal, but for the last bits of sums."""
  assert one.keys() == other.keys()
  assert len(one) >= 3 * mix_devices.NUM_STEPS
  for key, first in one.items():
    # What is rounded may go to either side.
    tolerance = 1e-5 + 2 * _get_rounding(case)
    if key.endswith(_HALF):
      tolerance = 2e-2
    assert other[key].dtype == first.dtype
    np.testing.assert_allclose(other[key], first, atol=tolerance, err_msg=key)


def _pick(found, prefix, name):
  """The states of a case in the first steps."""
  starts = tuple(
    f'{prefix}state|{step}|{name}|'
    for step in range(1, mix_devices.NUM_STEPS + 1)
  )
  return {
    key.removeprefix(prefix): value
    for key, value in found.items()
    if key.startswith(starts)
  }


@every_case
def test_runners_agree(found, num_nodes, name, case):
  first, *others = (
    _pick(found, f'{num_nodes}|{runner}|', name) for runner in mix_cases.RUNNERS
  )
  for other in others:
    _compare(first, other, case)


@every_case_of_8
def test_two_processes_agree_with_numpy(found_by_two, name):
  _check_states(found_by_two, '', name, mix_cases.list_cases(8)[name], 8)


@every_case_of_8
@pytest.mark.parametrize('runner', mix_cases.RUNNERS)
def test_two_processes_agree_with_one(found, found_by_two, name, runner):
  """With vmap, with pmap, and with the mesh of one process's devices."""
  _compare(
    _pick(found, f'8|{runner}|', name),
    _pick(found_by_two, '', name),
    mix_cases.list_cases(8)[name],
  )


@pytest.mark.parametrize('num_nodes', mix_cases.SIZES)
@pytest.mark.parametrize('runner', mix_cases.RUNNERS)
def test_new_peers_need_no_compilation(found, num_nodes, runner):
  assert found[f'{num_nodes}|{runner}|num_traces'] == 1


# --- What users fall into.


@pytest.mark.parametrize('name', mix_measures.EXPLICIT)
def test_a_mesh_may_be_explicit(found, name):
  """As `jax.make_mesh` makes it."""
  one, other = (found[f'mesh|{name}|{each}'] for each in ('explicit', 'usual'))
  np.testing.assert_array_equal(one, other)
  assert np.ptp(one - mix_measures.make_start(8)[0]) > 0.1


@pytest.mark.parametrize('name', mix_measures.DIFFERENTIABLE)
def test_gradients_through_a_mix(found, name):
  """Of its own loss, a node gets its part of the gradient of all losses' sum.

  So it is everywhere. Of the mean of all losses, as every node has it, the same
  comes out, n times too much, but where `jax.shard_map` checks what varies from
  node to node (its `check_vma`, which is the default): there it is right.
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
