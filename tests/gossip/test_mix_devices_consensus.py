"""Where mixing leads without gradients, and how fast, under every runner."""

import jax.numpy as jnp
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


@every_case
@every_runner
def test_where_nodes_agree(found, num_nodes, name, case, runner):
  """On the mean, if there is nothing to lose."""
  prefix = f'{num_nodes}|{runner}|state|{mix_devices.NUM_LAST}|{name}|'
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


@every_runner
@pytest.mark.parametrize('rule', ['Pull', 'Push'])
def test_a_random_consensus_is_the_mean_on_average(found, runner, rule):
  """Of independent draws, and what they give says how exact that can be."""
  last = found[f'8|{runner}|consensus|{rule}'].astype(np.float64)
  assert last.shape == (8, mix_measures.MANY_KEYS)
  np.testing.assert_allclose(last, last[:1].repeat(8, 0), atol=1e-5)
  mean = mix_measures.make_start(8)[0][:, 0].mean()
  error = last[0].std() / mix_measures.MANY_KEYS**0.5
  assert 0.001 < error < 0.05  # Random, and yet
  assert abs(last[0].mean() - mean) < 4 * error


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


@pytest.mark.parametrize('num_nodes', mix_cases.SIZES)
@every_runner
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
