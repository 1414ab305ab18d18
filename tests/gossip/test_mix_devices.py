"""One function on devices, on a mesh, over processes and under vmap.

What a process with 8 devices, and two with 4 each, have computed is compared
with numpy, and with each other.
"""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from jasgd import gossip
from tests.gossip import mix_cases
from tests.gossip import mix_devices

# Computed once; it takes minutes to compile.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('mix_devices')]

ROOT = pathlib.Path(__file__).parent.parent.parent
PATIENCE = 360.0  # Seconds: never reached, unless something is broken.
CASES = {
  f'{num_nodes}|{name}': (num_nodes, name, case)
  for num_nodes in mix_cases.SIZES
  for name, case in mix_cases.list_cases(num_nodes).items()
}
every_case = pytest.mark.parametrize(
  ('num_nodes', 'name', 'case'), CASES.values(), ids=CASES
)
every_run = pytest.mark.parametrize(
  ('num_nodes', 'runner'),
  [(n, runner) for n in mix_cases.SIZES for runner in mix_cases.RUNNERS],
)
_HALF, _COUNT = "['half']", "['more'][1]"
# What is sent in a narrow dtype has a relative error of half of its epsilon.
_ROUNDING = {None: 0.0, 'bfloat16': 2**-8, 'float16': 2**-11}


def _run(*arguments):
  """Runs the module with each of the lists of arguments, all at once."""
  programs = [
    subprocess.Popen(
      [sys.executable, '-m', 'tests.gossip.mix_devices', *each],
      cwd=ROOT,
      env={**os.environ, 'NPROC': '1'},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for each in arguments
  ]
  try:
    for program in programs:
      output, _ = program.communicate(timeout=PATIENCE)
      assert program.returncode == 0, output[-3000:]
  finally:
    for program in programs:
      program.kill()
      program.wait()


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """What all runners have computed on 8 devices, by name."""
  path = tmp_path_factory.mktemp('mix') / 'found.npz'
  _run([path])
  with np.load(path) as file:
    return dict(file)


@pytest.fixture(scope='module')
def found_by_two(tmp_path_factory):
  """What two processes with 4 devices each have computed together, by name."""
  folder = tmp_path_factory.mktemp('mix')
  with socket.socket() as listener:  # A port that is free.
    listener.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{listener.getsockname()[1]}'
  paths = [folder / f'{process}.npz' for process in range(2)]
  _run(*([path, address, str(process)] for process, path in enumerate(paths)))
  first, second = (dict(np.load(path)) for path in paths)
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
  other = {name: np.zeros(leaf.shape[1:]) for name, leaf in values.items()}
  other = other if case.is_elastic else np.ones(num_nodes)
  key = jax.random.key(mix_devices.SEED)
  strategy, states = case.strategy, []
  for step in range(1, mix_devices.NUM_LAST + 1):
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
    if isinstance(item, type) and issubclass(item, gossip.Strategy)
  }
  assert strategies - {gossip.Strategy, gossip.Gossip} == rules


@every_case
@pytest.mark.parametrize('runner', mix_cases.RUNNERS)
def test_states_are_those_of_numpy(found, num_nodes, name, case, runner):
  _check_states(found, f'{num_nodes}|{runner}|', name, case, num_nodes)


@every_case
def test_runners_agree(found, num_nodes, name, case):
  """But for the last bits, of which runners add up some in another order."""
  prefixes = [f'{num_nodes}|{runner}|state' for runner in mix_cases.RUNNERS]
  keys = [
    key[len(prefixes[0]) :]
    for key in found
    if key.startswith(prefixes[0]) and f'|{name}|' in key
  ]
  assert keys
  for key in keys:
    # What is rounded may go to either side.
    tolerance = 1e-5 + 2 * _get_rounding(case)
    if key.endswith(_HALF):
      tolerance = 2e-2
    first, *others = (found[prefix + key] for prefix in prefixes)
    for other in others:
      assert other.dtype == first.dtype
      np.testing.assert_allclose(other, first, atol=tolerance)


@pytest.mark.parametrize('name', mix_cases.list_cases(8))
def test_two_processes_agree_with_numpy(found_by_two, name):
  case = mix_cases.list_cases(8)[name]
  _check_states(found_by_two, '', name, case, 8)


@every_run
def test_new_peers_need_no_compilation(found, num_nodes, runner):
  assert found[f'{num_nodes}|{runner}|num_traces'] == 1


@every_case
@pytest.mark.parametrize('runner', mix_cases.RUNNERS)
def test_where_nodes_agree(found, num_nodes, name, case, runner):
  """Without gradients: on the mean, if there is nothing to lose."""
  prefix = f'{num_nodes}|{runner}|state|{mix_devices.NUM_LAST}|{name}|'
  # One column for each node that something came from: shares of the mean.
  shares = found[f"{prefix}x['one']"]
  is_narrow = case.dtype is not None
  tolerance = 0.1 if is_narrow else 2e-5
  if case.is_elastic:
    num_mixes = mix_devices.NUM_LAST // case.strategy.period
    tolerance += (1 - case.strategy.rate) ** num_mixes
    centre = found[f"{prefix}other['one']"]
    for held in (shares, centre):
      np.testing.assert_allclose(held, 1 / (num_nodes + 1), atol=tolerance)
    return
  if case.is_push_sum:
    shares = shares / found[f'{prefix}other'][:, None]
    np.testing.assert_allclose(shares, 1 / num_nodes, atol=tolerance)
    return
  # All agree.
  np.testing.assert_allclose(
    shares, shares[:1].repeat(num_nodes, 0), atol=tolerance
  )
  if case.keeps_mean:
    np.testing.assert_allclose(shares, 1 / num_nodes, atol=tolerance)
  else:
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=tolerance)
  count = found[f'{prefix}x{_COUNT}']
  np.testing.assert_array_equal(count, np.arange(num_nodes))


@every_run
@pytest.mark.parametrize(
  'name', [*(f'Pull|{peers}' for peers in gossip.PEERS), 'Push|independent']
)
def test_random_peers_agree_at_the_known_rate(found, num_nodes, runner, name):
  prefix = f'{num_nodes}|{runner}|distance'
  distances = found[f'{prefix}|{name}'].astype(np.float64)
  assert np.all(distances == distances[0])  # The same on all nodes.
  start = found[f'{prefix}|start'][0]
  factors = (distances[0] / start) ** 2
  assert len(factors) == mix_devices.NUM_KEYS
  rule, peers = name.split('|')
  rate = (
    gossip.consensus_rate(peers, num_nodes)
    if rule == 'Pull'
    else gossip.push_consensus_rate(num_nodes)
  )
  error = factors.std() / len(factors) ** 0.5
  assert 0 < error < 0.02
  assert abs(factors.mean() - rate) < 4 * error


@every_run
def test_topologies_agree_at_the_known_rate(found, num_nodes, runner):
  """From the values for which it is slowest, rounds in equal shares."""
  for kind, topology in mix_cases.list_topologies(num_nodes).items():
    distances = [
      found[f'{num_nodes}|{runner}|round|{step}|{kind}'][0]
      for step in range(1, topology.num_rounds + 1)
    ]
    start = mix_devices.find_slowest(topology)
    factor = np.mean(np.square(distances)) / start.var()
    rate = gossip.topology_consensus_rate(topology)
    assert factor == pytest.approx(rate, rel=1e-5, abs=1e-10), kind
