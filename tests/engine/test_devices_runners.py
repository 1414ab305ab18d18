"""Training on devices, on a mesh and over processes: the same as under vmap."""

import numpy as np
import pytest

from jasgd import engine
from jasgd.engine import _mean
from tests.engine import device_cases
from tests.engine import device_program
from tests.gossip import many_devices

# Computed once; it takes a minute to compile.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('devices_runners')]

every_case = pytest.mark.parametrize('name', device_program.CASES)
on_devices = pytest.mark.parametrize('runner', device_program.RUNNERS[1:])


def _split(found):
  """By strategy: whose it is, what it is called, and what was found."""
  split = {}
  for key, value in found.items():
    if key.startswith(('hand|', 'refused|', 'in force', 'mean|')):
      continue
    name, label, rest = key.rsplit('|', 2)
    split.setdefault(name, []).append((label, rest, value))
  return split


@pytest.fixture(scope='module')
def everything(tmp_path_factory):
  """What all runners came to in one process with 8 devices, by name."""
  folder = tmp_path_factory.mktemp('devices')
  return many_devices.run(device_program.__name__, folder)


@pytest.fixture(scope='module')
def found(everything):
  """The same, by runner and strategy."""
  return _split(everything)


@pytest.fixture(scope='module')
def everything_of_two(tmp_path_factory):
  """What each of two processes with 4 devices came to."""
  folder = tmp_path_factory.mktemp('devices')
  return many_devices.run_two(device_program.__name__, folder)


@pytest.fixture(scope='module')
def found_by_two(everything_of_two):
  """The same, by strategy."""
  return [_split(each) for each in everything_of_two]


def _compare(given, expected, name):
  """Compares, up to rounding: of what is narrow, to either side."""
  rtol, atol = 1e-3, 1e-4
  if name.endswith('bfloat16'):
    # A sum of all has the error of a number so large, at every step.
    rtol = atol = 0.06 if name.startswith('AllReduce') else 0.01
  assert given.dtype == expected.dtype
  np.testing.assert_allclose(given, expected, rtol=rtol, atol=atol)


@every_case
@on_devices
def test_runners_agree(found, name, runner):
  expected, given = found[f'vmap|{name}'], found[f'{runner}|{name}']
  assert len(given) == len(expected) > 10
  for (label, what, one), (_, also, other) in zip(expected, given, strict=True):
    assert what == also
    if label != 'own':
      _compare(other, one, name)


@every_case
@pytest.mark.parametrize('runner', device_program.RUNNERS)
def test_two_processes_agree(found, found_by_two, name, runner):
  """With every runner on the devices of one."""
  expected = found[f'{runner}|{name}']
  first, second = (each[name] for each in found_by_two)
  assert len(first) == len(second) == len(expected)
  for one, other, (label, _, value) in zip(
    first, second, expected, strict=True
  ):
    if label == 'local':  # Each has its own part.
      _compare(np.concatenate([one[2], other[2]]), value, name)
    elif label == 'all':
      np.testing.assert_array_equal(one[2], other[2])
      _compare(one[2], value, name)


@pytest.mark.parametrize('name', device_program.NARROW)
@pytest.mark.parametrize('runner', device_program.RUNNERS)
def test_what_is_sent_is_rounded(found, name, runner):
  exact, narrow = (
    {(label, what): value for label, what, value in found[key]}
    for key in (f'{runner}|{name}', f'{runner}|{name}, bfloat16')
  )
  assert exact.keys() == narrow.keys()
  assert all(exact[key].dtype == narrow[key].dtype for key in exact)
  weights = [key for key in exact if key[0] == 'local' and '[0]' in key[1]]
  assert weights
  distances = [np.abs(exact[key] - narrow[key]).max() for key in weights]
  assert 1e-6 < max(distances) < 0.1


@every_case
@pytest.mark.parametrize('runner', device_program.RUNNERS)
def test_a_step_is_compiled_once_and_uses_up_its_state(found, name, runner):
  """Peers are random, and a state that was restored is like any other."""
  own = {what: value for label, what, value in found[f'{runner}|{name}']}
  assert own['num_compiled'].tolist() == [1, 0, 0, 0, 0, 0]
  assert own['are_gone'].all()


@every_case
def test_so_it_is_over_processes(found_by_two, name):
  for each in found_by_two:
    own = {what: value for _, what, value in each[name]}
    assert own['num_compiled'].tolist() == [1, 0, 0, 0, 0, 0]
    assert own['are_gone'].all()


@pytest.mark.parametrize('name', device_program.EXPLICIT)
def test_a_mesh_may_be_explicit(found, name):
  """What `jax.make_mesh` makes, unless it is told otherwise."""
  expected, given = found[f'shard_map|{name}'], found[f'explicit|{name}']
  for one, other in zip(expected, given, strict=True):
    assert one[:2] == other[:2]
    np.testing.assert_array_equal(one[2], other[2])


def test_a_mesh_may_be_in_force(everything):
  """`jax.set_mesh`, while the program is used."""
  assert everything['in force'] == ''


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
def test_what_several_processes_refuse(everything_of_two, name, message):
  assert set(device_program.REFUSED) == {'pmap', 'few nodes'}
  for each in everything_of_two:
    assert each[f'refused|{name}'] == message


# --- By hand.


def _make_get(everything, runner):
  """From an experiment's name to its outcome under a runner."""
  fields = device_cases.Outcome._fields

  def get(name):
    return device_cases.Outcome(
      *(everything.get(f'hand|{runner}|{name}|{field}') for field in fields)
    )

  return get


@on_devices
@pytest.mark.parametrize('optimizer', ['sgd', 'momentum', 'adam'])
def test_complete_gossip_is_all_reduce_but_for_adam(
  everything, runner, optimizer
):
  device_cases.check_full_averaging(_make_get(everything, runner), optimizer)


@on_devices
@pytest.mark.parametrize('order', ['a3', 'easgd'])
def test_elastic_is_two_lines(everything, runner, order):
  device_cases.check_elastic(_make_get(everything, runner), order, 1)


@on_devices
@pytest.mark.parametrize(('order', 'period'), device_cases.RATE_0)
def test_elastic_with_rate_0_is_independent_sgd(
  everything, runner, order, period
):
  device_cases.check_rate_0(_make_get(everything, runner), order, period)


def test_a_mean_of_processes_in_shares_is_that_of_one(everything_of_two):
  """Real messages do not change a bit, if each adds up a part and sends it."""
  trees = [device_program.make_large_tree(process) for process in range(2)]
  num_messages = engine.count_mean_messages(4 * len(trees[0]['wide']), 2)
  assert num_messages == 1.0
  for name, mean in _mean.average(trees).items():
    for own in everything_of_two:
      found = own[f'mean|{name}'].view(np.asarray(mean).dtype)
      np.testing.assert_array_equal(found, mean)
