"""Training on devices, on a mesh and over processes agrees with vmap."""

import numpy as np
import pytest

from jasgd import engine
from tests import marks
from tests.engine import device_program
from tests.gossip import many_devices

# Computed once; it takes a minute to compile.
pytestmark = pytest.mark.xdist_group('devices_runners')

every_case = pytest.mark.parametrize(
  'name', marks.slow_but(device_program.CASES, *device_program.QUICK)
)
on_devices = pytest.mark.parametrize('runner', device_program.RUNNERS[1:])


def _split(found):
  """Name of a case -> (label, key, array) of each saved array."""
  split = {}
  for key, value in found.items():
    if key.startswith(('refused|', 'in force', 'mean|')):
      continue
    name, label, rest = key.rsplit('|', 2)
    split.setdefault(name, []).append((label, rest, value))
  return split


class Outcomes:
  """Results of all runners and processes, each computed on first use."""

  def __init__(self, tmp_path_factory):
    self._factory, self._found = tmp_path_factory, {}

  def _run(self, function, is_quick):
    if (function, is_quick) not in self._found:
      with pytest.MonkeyPatch.context() as patch:
        if is_quick:
          patch.setenv(device_program.IS_QUICK, '1')
        self._found[function, is_quick] = function(
          device_program.__name__, self._factory.mktemp('devices')
        )
    return self._found[function, is_quick]

  def of_one(self, is_quick=False):
    """Results of one process with 8 devices."""
    return self._run(many_devices.run, is_quick)

  def of_two(self, is_quick=True):
    """Results of each of two processes with 4 devices."""
    return self._run(many_devices.run_two, is_quick)

  def get(self, name, runner):
    """Results of a runner with a case."""
    is_quick = name in device_program.QUICK
    return _split(self.of_one(is_quick))[f'{runner}|{name}']

  def get_of_two(self, name):
    """Results of each of two processes with a case."""
    is_quick = name in device_program.QUICK
    return [_split(each)[name] for each in self.of_two(is_quick)]


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
  """Results of all runners and processes."""
  return Outcomes(tmp_path_factory)


def _compare(given, expected, name):
  """Compares arrays up to rounding, which is coarse in narrow dtypes."""
  rtol, atol = 1e-3, 1e-4
  if name.endswith('bfloat16'):
    # A sum over all nodes is larger, and so is its rounding at every step.
    rtol = atol = 0.06 if name.startswith('AllReduce') else 0.01
  assert given.dtype == expected.dtype
  np.testing.assert_allclose(given, expected, rtol=rtol, atol=atol)


@every_case
@on_devices
def test_runners_agree(outcomes, name, runner):
  expected, given = (outcomes.get(name, each) for each in ('vmap', runner))
  assert len(given) == len(expected) > 10
  for (label, what, one), (_, also, other) in zip(expected, given, strict=True):
    assert what == also
    if label != 'own':
      _compare(other, one, name)


@every_case
@pytest.mark.parametrize('runner', device_program.RUNNERS)
def test_two_processes_agree(outcomes, name, runner):
  """With every runner on the devices of one."""
  expected = outcomes.get(name, runner)
  first, second = outcomes.get_of_two(name)
  assert len(first) == len(second) == len(expected)
  for one, other, (label, _, value) in zip(
    first, second, expected, strict=True
  ):
    if label == 'local':  # Each process has its own rows.
      _compare(np.concatenate([one[2], other[2]]), value, name)
    elif label == 'all':
      np.testing.assert_array_equal(one[2], other[2])
      _compare(one[2], value, name)


@pytest.mark.slow
@pytest.mark.parametrize('name', device_program.NARROW)
@pytest.mark.parametrize('runner', device_program.RUNNERS)
def test_messages_are_rounded(outcomes, name, runner):
  exact, narrow = (
    {(label, what): value for label, what, value in outcomes.get(each, runner)}
    for each in (name, f'{name}, bfloat16')
  )
  assert exact.keys() == narrow.keys()
  assert all(exact[key].dtype == narrow[key].dtype for key in exact)
  weights = [key for key in exact if key[0] == 'local' and '[0]' in key[1]]
  assert weights
  distances = [np.abs(exact[key] - narrow[key]).max() for key in weights]
  assert 1e-6 < max(distances) < 0.1


@every_case
@pytest.mark.parametrize('runner', device_program.RUNNERS)
def test_a_step_is_compiled_once_and_uses_up_its_state(outcomes, name, runner):
  """Random peers and restored states need no new compilation."""
  own = {what: value for _, what, value in outcomes.get(name, runner)}
  assert own['num_compiled'].tolist() == [1, 0, 0, 0, 0, 0]
  assert own['are_gone'].all()


@every_case
def test_a_step_over_processes_is_compiled_once(outcomes, name):
  for each in outcomes.get_of_two(name):
    own = {what: value for _, what, value in each}
    assert own['num_compiled'].tolist() == [1, 0, 0, 0, 0, 0]
    assert own['are_gone'].all()


@pytest.mark.slow
@pytest.mark.parametrize('name', device_program.EXPLICIT)
def test_a_mesh_may_be_explicit(outcomes, name):
  """Meshes with explicit axes are the default of `jax.make_mesh`."""
  expected, given = (
    outcomes.get(name, each) for each in ('shard_map', 'explicit')
  )
  for one, other in zip(expected, given, strict=True):
    assert one[:2] == other[:2]
    np.testing.assert_array_equal(one[2], other[2])


@pytest.mark.slow
def test_a_mesh_may_be_active(outcomes):
  """The program also works while `jax.set_mesh` is active."""
  assert outcomes.of_one()['in force'] == ''


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    (
      'pmap',
      "runner='pmap' is for the devices of one process; over 2 processes use "
      "runner='shard_map'.",
    ),
    (
      'few nodes',
      'Over several processes every device is a node: num_nodes must be 8, got '
      '6; or give a mesh.',
    ),
  ],
)
def test_what_several_processes_refuse(outcomes, name, message):
  assert set(device_program.REFUSED) == {'pmap', 'few nodes'}
  for each in outcomes.of_two():
    assert each[f'refused|{name}'] == message


def test_a_mean_of_processes_in_shares_is_that_of_one(outcomes):
  """A mean over real processes, in shares, has the bits of the plain mean."""
  trees = [device_program.make_large_tree(process) for process in range(2)]
  num_messages = engine.count_mean_messages(4 * len(trees[0]['wide']), 2)
  assert num_messages == 1.0
  for name in trees[0]:
    first, second = (np.asarray(tree[name]) for tree in trees)
    mean = (first.astype(np.float32) + second.astype(np.float32)) / 2
    for own in outcomes.of_two():
      found = own[f'mean|{name}'].view(first.dtype)
      np.testing.assert_array_equal(found, mean.astype(first.dtype))
