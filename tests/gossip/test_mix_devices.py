"""Mixing under pmap, shard_map and vmap, and over two processes.

Programs compute all cases on 8 devices of one process, or 4 devices each of
two. The results are compared with numpy's, and with the known rates at which
nodes agree.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from tests.gossip import mix_cases
from tests.gossip import mix_devices
from tests.gossip import mix_measures

# One worker process runs the programs, once. But for that of a few cases they
# take a minute to compile.
pytestmark = pytest.mark.xdist_group('mix_devices')
slow = pytest.mark.slow

CASES = {
  f'{num_nodes}|{name}': (num_nodes, name, case)
  for num_nodes in mix_cases.SIZES
  for name, case in mix_cases.list_cases(num_nodes).items()
}
# Those with a topology, sent as it is after every step.
FIXED = {
  label: (num_nodes, name, case)
  for label, (num_nodes, name, case) in CASES.items()
  if isinstance(getattr(case.strategy, 'peers', None), gossip.Topology)
  and case.dtype is None
  and case.strategy.period == 1
}
_NAMES = ('num_nodes', 'name', 'case')
every_case = pytest.mark.parametrize(_NAMES, CASES.values(), ids=CASES)
every_topology = pytest.mark.parametrize(_NAMES, FIXED.values(), ids=FIXED)
every_runner = pytest.mark.parametrize('runner', mix_cases.RUNNERS)
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


@every_runner
def test_a_few_states_are_those_of_numpy(found_few, runner):
  """Every rule, and every way to send, on real devices; fast."""
  num_nodes = mix_cases.FEW_NODES
  prefix = f'{num_nodes}|{runner}|'
  for name, case in mix_cases.list_few(num_nodes).items():
    _check_states(found_few, prefix, name, case, num_nodes)
  assert found_few[f'{prefix}num_traces'] == 1  # New peers: no compilation.


def test_every_kind_and_rule_is_there():
  names = [name for n, name, _ in CASES.values() if n == 8]
  for rule in ('Pull', 'Push', 'PushSum'):
    kinds = gossip.KINDS if rule == 'Pull' else mix_cases.VARIED
    for peers in (*kinds, *gossip.PEERS):
      assert f'{rule}, {peers}' in names
  rules = {type(case.strategy) for _, _, case in CASES.values()}
  few = {type(case.strategy) for case in mix_cases.list_few(8).values()}
  public = [getattr(gossip, name) for name in gossip.__all__]
  strategies = {
    item
    for item in public
    if isinstance(item, type) and issubclass(item, gossip.PeerStrategy)
  }
  assert strategies - {gossip.PeerStrategy, gossip.Gossip} == rules == few


@slow
@every_case
def test_states_are_those_of_numpy(found, num_nodes, name, case):
  for runner in mix_cases.RUNNERS:
    _check_states(found, f'{num_nodes}|{runner}|', name, case, num_nodes)


@slow
@pytest.mark.parametrize('name', mix_cases.list_few(8))
def test_two_processes_agree_with_numpy(found_by_two, name):
  _check_states(found_by_two, '', name, mix_cases.list_few(8)[name], 8)


@slow
@pytest.mark.parametrize('num_nodes', mix_cases.SIZES)
@every_runner
def test_new_peers_need_no_compilation(found, num_nodes, runner):
  assert found[f'{num_nodes}|{runner}|num_traces'] == 1


# --- Traps.


@slow
@pytest.mark.parametrize('name', mix_measures.EXPLICIT)
def test_a_mesh_may_be_explicit(found, name):
  """As `jax.make_mesh` makes it."""
  one, other = (found[f'mesh|{name}|{each}'] for each in ('explicit', 'usual'))
  np.testing.assert_array_equal(one, other)
  assert np.ptp(one - mix_measures.make_start(8)[0]) > 0.1


@slow
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


# --- Where nodes agree.


@slow
@every_case
def test_where_nodes_agree(found, num_nodes, name, case):
  """On the mean, if the rule keeps it."""
  prefix = f'{num_nodes}|vmap|state|{mix_devices.NUM_LAST}|{name}|'
  # One column for each node that something came from: shares of the mean.
  shares = found[f"{prefix}x['one']"]
  count = found[f"{prefix}x['more'][1]"]
  np.testing.assert_array_equal(count, np.arange(num_nodes))
  tolerance = 2e-5
  if case.dtype is not None:  # Of shares below 1; they are rounded each time.
    tolerance += 2 * float(jnp.finfo(case.dtype).eps)
  if case.is_elastic:
    num_mixes = mix_devices.NUM_LAST // case.strategy.period
    tolerance += (1 - case.strategy.rate) ** num_mixes
    centre = found[f"{prefix}other['one']"]
    for held in (shares, centre):
      np.testing.assert_allclose(
        held, (1 + mix_cases.CENTRE) / (num_nodes + 1), atol=tolerance
      )
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


# --- How fast: what is left of the mean squared disagreement after a round.


def _find_rate(strategy, num_nodes):
  """That of random peers, in closed form.

  Push-sum: y = x - mass (sum of x) / (sum of mass) sums to 0, and a round makes
  it P y, P = (I + C) / 2, where C has a 1 in column j for the target of j. Of
  independent draws, E C = J and E C'C = (1 - 1/n) I + J, so that
    E |P y|^2 = (1 + 1 - 1/n) / 4 |y|^2,
  the same as for pull. Permutations and pairs make P doubly stochastic, and the
  transposed of that of pull.
  """
  if isinstance(strategy, gossip.Push) and strategy.peers == 'independent':
    return gossip.push_consensus_rate(num_nodes)
  beta = getattr(strategy, 'beta', 0.5)
  return gossip.consensus_rate(strategy.peers, num_nodes, beta)


def _measure(values, masses):
  """Squared disagreement: [num_nodes, ..., size] -> [...]."""
  values, masses = values.astype(np.float64), masses.astype(np.float64)
  mean = values.sum(axis=0) / masses.sum(axis=0)[..., None]
  return np.square(values - masses[..., None] * mean).sum(axis=(0, -1))


@slow
@pytest.mark.parametrize(('num_nodes', 'runner'), mix_devices.MEASURED)
@pytest.mark.parametrize('name', mix_cases.list_drawn())
def test_random_peers_agree_at_the_known_rate(found, num_nodes, runner, name):
  strategy = mix_cases.list_drawn()[name]
  prefix = f'{num_nodes}|{runner}|drawn|{name}'
  values, masses = (found[f'{prefix}|{what}'] for what in ('x', 'mass'))
  assert values.shape == (num_nodes, mix_measures.NUM_KEYS, 3)
  first, first_masses = mix_measures.make_start(num_nodes)
  if not isinstance(strategy, gossip.PushSum):
    masses, first_masses = np.ones_like(masses), np.ones_like(first_masses)
    distances = found[f'{prefix}|distance']
    assert np.all(distances == distances[0])  # The same on all nodes.
    np.testing.assert_allclose(
      num_nodes * distances[0].astype(np.float64) ** 2,
      _measure(values, masses),
      rtol=1e-4,
    )
  factors = _measure(values, masses) / _measure(first, first_masses)
  error = factors.std() / len(factors) ** 0.5
  assert 0 < error < 0.02
  assert abs(factors.mean() - _find_rate(strategy, num_nodes)) < 4 * error


@slow
@every_topology
@every_runner
def test_topologies_agree_at_the_known_rate(
  found, num_nodes, name, case, runner
):
  """What they do to the values for which it is slowest.

  With W as nodes have applied it, in each round, and rounds in equal shares.
  """
  topology = case.strategy.peers
  applied = found[f'{num_nodes}|{runner}|rounds|{name}'].astype(np.float64)
  applied = applied[: topology.num_rounds]
  matrices = [
    mix_cases.make_matrix(case.strategy, index, None, num_nodes)
    for index in range(topology.num_rounds)
  ]
  centred = np.eye(num_nodes) - 1 / num_nodes
  mean = sum(w.T @ centred @ w for w in matrices) / len(matrices)
  rates, vectors = np.linalg.eigh(centred @ mean @ centred)
  slowest = vectors[:, -1]
  left = np.square(applied @ slowest)
  left = left.sum(axis=1) - (applied @ slowest).mean(axis=1) ** 2 * num_nodes
  assert left.mean() == pytest.approx(rates[-1], rel=1e-5, abs=1e-10)
  is_pull = isinstance(case.strategy, gossip.Pull)
  if is_pull or gossip.is_doubly_stochastic(topology):
    rate = gossip.topology_consensus_rate(topology)
    assert rates[-1] == pytest.approx(rate, rel=1e-9, abs=1e-12)


@slow
@every_runner
@pytest.mark.parametrize('name', ['Elastic', 'Elastic, period'])
def test_elastic_agrees_at_the_known_rate(found, runner, name):
  """1 - a among nodes, and 1 - (p + 1) a between their mean and the centre.

  x_i - mean loses a of itself. The mean loses a (mean - c), and c gains p times
  as much.
  """
  rate, period = mix_cases.RATE, 1 if name == 'Elastic' else 2
  start = np.eye(8)
  deviation, distance = start - start.mean(axis=0), 1 / 8 - mix_cases.CENTRE
  total = start.sum(axis=0) + mix_cases.CENTRE
  for step in range(1, mix_devices.NUM_STEPS + 1):
    prefix = f'8|{runner}|state|{step}|{name}|'
    x, centres = found[f"{prefix}x['one']"], found[f"{prefix}other['one']"]
    assert np.all(centres == centres[0])  # All nodes have the same.
    centre, mean, power = centres[0], x.mean(axis=0), step // period
    np.testing.assert_allclose(
      x - mean, (1 - rate) ** power * deviation, atol=1e-6
    )
    np.testing.assert_allclose(
      mean - centre, (1 - 9 * rate) ** power * distance, atol=1e-5
    )
    np.testing.assert_allclose(x.sum(axis=0) + centre, total, rtol=1e-6)
