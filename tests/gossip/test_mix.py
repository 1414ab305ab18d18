"""Mixing on one device: peers, values, consensus, gradients, errors.

Compiling takes most of the time, so that strategies share programs.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import topologies
from tests.gossip import mix_cases

pytestmark = [
  pytest.mark.usefixtures('quick_compiler'),
  pytest.mark.xdist_group('mix'),  # One worker compiles the programs, once.
]

AXIS = mix_cases.AXIS
KEY = jax.random.key(3)
BETA = 0.3  # Other than 1/2, so that beta and 1 - beta differ.
NUM_NODES = 7  # An odd number: one node is idle in a matching.
EYE = jnp.eye(NUM_NODES)  # Mixed, it gives the matrix of the mix.
# Every rule, and every kind of collective, is among them.
STRATEGIES = {
  'pull, independent': gossip.Pull(),
  'pull, beta': gossip.Pull(beta=BETA),
  'pull, permutation, beta': gossip.Pull(peers='permutation', beta=BETA),
  'pull, complete': gossip.Pull(peers='complete'),
  'push, independent': gossip.Push(),
  'push, matching': gossip.Push(peers='matching'),
  'push, exponential': gossip.Push(peers='one_peer_exponential'),
  'push-sum, independent': gossip.PushSum(),
  'push-sum, permutation': gossip.PushSum(peers='permutation'),
  'push-sum, star': gossip.PushSum(peers='star'),
}


class OwnPull(gossip.Pull):
  """A strategy of a user, whose rule devices do not know."""

  node_class = type('OwnNode', (gossip.Pull.node_class,), {})


def _mix(row, strategy, **arguments):
  """The params after a mix of any strategy but elastic averaging."""
  if isinstance(strategy, gossip.PushSum):
    return gossip.mix(row, AXIS, strategy, mass=1.0, **arguments)[0]
  return gossip.mix(row, AXIS, strategy, **arguments)


def _run(function, *rows):
  """A function of one node's rows, for all nodes."""
  return jax.jit(jax.vmap(function, axis_name=AXIS))(*rows)


@pytest.fixture(scope='module')
def mix_all():
  """All strategies in one program: (values, step, key) -> {name: mixed}."""

  def mix(row, step, key):
    mixed = {
      name: _mix(row, strategy, step=step, key=key)
      for name, strategy in STRATEGIES.items()
    }
    return {**mixed, 'default': gossip.mix(row, AXIS, step=step, key=key)}

  return jax.jit(jax.vmap(mix, (0, None, None), axis_name=AXIS))


# --- When nodes mix, and with which peers.


def test_every_mix_is_its_matrix(mix_all):
  """In each of many rounds. A node that drew itself stays exactly the same."""
  num_idle, seen = 0, {name: set() for name in STRATEGIES}
  for number in range(20):
    mixed = mix_all(EYE, number + 1, KEY)
    np.testing.assert_array_equal(mixed['default'], mixed['pull, independent'])
    for name, strategy in STRATEGIES.items():
      matrix = mix_cases.make_matrix(strategy, number, KEY, NUM_NODES)
      np.testing.assert_allclose(mixed[name], matrix, atol=1e-6, err_msg=name)
      idle = np.flatnonzero(np.all(matrix == np.eye(NUM_NODES), axis=1))
      np.testing.assert_array_equal(mixed[name][idle], EYE[idle])
      num_idle += len(idle)
      seen[name].add(np.asarray(mixed[name]).tobytes())
  assert num_idle > 20
  for name, matrices in seen.items():  # Random peers change.
    num_seen = {'complete': 1, 'star': 1, 'exponential': 3}
    assert len(matrices) >= num_seen.get(name.split(', ')[1], 5), name


def test_peers_are_a_function_of_key_and_step(mix_all):
  first = mix_all(EYE, 1, KEY)
  num_programs = mix_all._cache_size()
  again = mix_all(EYE, 1, KEY)
  others = [mix_all(EYE, 1, jax.random.key(seed)) for seed in range(10, 20)]
  for name, strategy in STRATEGIES.items():
    np.testing.assert_array_equal(first[name], again[name])
    num_new = sum(not np.array_equal(first[name], x[name]) for x in others)
    assert num_new > 5 if strategy.is_random else num_new == 0, name
    if strategy.peers in ('permutation', 'matching'):
      for each in (first, *others):  # All nodes have made the same draw.
        np.testing.assert_allclose(each[name].sum(axis=0), 1, atol=1e-6)
  assert mix_all._cache_size() == num_programs  # New peers: no compilation.


def test_nan_spreads_only_to_nodes_that_receive_it(mix_all):
  """A peer of weight 0 may hold anything."""
  for number in range(4):
    mixed = mix_all(EYE.at[3].set(jnp.nan), number + 1, KEY)
    for name, strategy in STRATEGIES.items():
      matrix = mix_cases.make_matrix(strategy, number, KEY, NUM_NODES)
      expected = np.tile(matrix[:, 3:4] > 0, NUM_NODES)
      np.testing.assert_array_equal(np.isnan(mixed[name]), expected, name)


@pytest.mark.parametrize('is_traced', [False, True])
def test_period(is_traced):
  """Values change only at the end of a period; steps may be traced."""
  elastic = gossip.Elastic(period=3, rate=0.1)
  strategies = (
    gossip.Pull(period=3, peers='matching'),
    gossip.PushSum(period=3),
    gossip.AllReduce(period=3),
  )
  values = jnp.arange(4.0)

  def mix(row, step):
    mixed = [_mix(row, each, step=step, key=KEY) for each in strategies]
    moved = gossip.mix_elastic(row, 0.0, AXIS, elastic, step=step)[0]
    return [*mixed, moved]

  def mix_nodes(values, step):
    return jax.vmap(mix, (0, None), axis_name=AXIS)(values, step)

  def mix_nodes_at(values, step):
    return jax.vmap(lambda row: mix(row, step), axis_name=AXIS)(values)

  mix_nodes = (
    jax.jit(mix_nodes) if is_traced else jax.jit(mix_nodes_at, static_argnums=1)
  )
  for step in range(1, 7) if is_traced else (2, 6):
    for mixed in mix_nodes(values, step):
      assert np.array_equal(mixed, values) == (step % 3 != 0)
    if step == 6:  # The second mix.
      matrix = mix_cases.make_matrix(strategies[0], 1, KEY, 4)
      mixed = mix_nodes(values, step)[0]
      np.testing.assert_allclose(mixed, matrix @ values, atol=1e-6)


def test_keys_may_be_typed_or_raw():
  def mix(row, key):
    return gossip.mix(row, AXIS, gossip.Pull(peers='matching'), key=key)

  mix_nodes = jax.jit(jax.vmap(mix, (0, None), axis_name=AXIS))
  typed, raw = mix_nodes(EYE, KEY), mix_nodes(EYE, jax.random.key_data(KEY))
  np.testing.assert_array_equal(typed, raw)


@pytest.mark.parametrize(
  ('peers', 'num_nodes'),
  [('permutation', 2), ('permutation', 13), ('matching', 8), ('matching', 13)],
)
def test_few_rounds_have_the_rate_of_all(peers, num_nodes):
  """`mix` draws from at most n rounds; over them, all peers are as frequent."""
  beta = 0.5 if peers == 'matching' else BETA
  strategy = gossip.Pull(peers=peers, beta=beta)
  drawn = _draw_matrices(strategy, num_nodes, 40 * num_nodes)
  matrices = np.unique(drawn.round(6), axis=0).astype(np.float64)
  assert len(matrices) <= num_nodes
  centred = np.eye(num_nodes) - 1 / num_nodes
  mean = np.mean([w.T @ centred @ w for w in matrices], axis=0)
  rate = topologies.consensus_rate(peers, num_nodes, beta)
  np.testing.assert_allclose(mean, rate * centred, atol=1e-6)
  # Every node meets every other node equally often; in pairs, never itself.
  others = matrices.sum(axis=0)[~np.eye(num_nodes, dtype=bool)]
  np.testing.assert_allclose(others, beta, atol=1e-5)
  idle = [np.diag(matrix) == 1 for matrix in matrices]
  if peers == 'matching':
    np.testing.assert_array_equal(np.sum(idle, axis=1), num_nodes % 2)
  elif num_nodes > 3:
    assert not np.all(idle, axis=1).any()  # No round without any mix.


def test_many_nodes_have_nearly_the_rate_of_all():
  """With more nodes than rounds that are compiled, rounds are a sample."""
  drawn = _draw_matrices(gossip.Pull(peers='matching'), 100, 400)
  matrices = np.unique(drawn, axis=0).astype(np.float64)
  assert 60 < len(matrices) <= 64
  centred = np.eye(100) - 1 / 100
  mean = np.mean([w.T @ centred @ w for w in matrices], axis=0)
  # The mean of d random permutations has about 2 / sqrt(d) where J has 0.
  assert 0.45 < np.linalg.eigvalsh(mean)[-1] < 0.5 + 1 / 8


def _draw_matrices(strategy, num_nodes, num_keys):
  """The matrices of a mix with many keys: float32 [keys, nodes, nodes]."""

  def draw(key):
    mix = jax.vmap(lambda row: _mix(row, strategy, key=key), axis_name=AXIS)
    return mix(jnp.eye(num_nodes))

  # One key after another: all branches of a switch would run under a vmap.
  keys = jax.random.split(KEY, num_keys)
  return np.asarray(jax.jit(lambda keys: lax.map(draw, keys))(keys))


# --- Which values change.


def test_only_floats_are_mixed():
  strategies = (
    gossip.Pull(),
    gossip.Push(peers='matching'),
    gossip.PushSum(peers='star'),
  )
  values = {
    'float': jnp.arange(8.0),
    'complex': jnp.arange(8) * 1j,
    'int': jnp.arange(8),
    'bool': jnp.arange(8) > 3,
    'key': jax.random.split(KEY, 8),
  }

  def mix(row):
    ints = {'int': row['int']}  # A tree without anything to mix.
    return [
      (_mix(row, each, key=KEY), _mix(ints, each, key=KEY))
      for each in strategies
    ]

  for mixed, ints in _run(mix, values):
    assert not np.array_equal(mixed['float'], values['float'])
    np.testing.assert_allclose(mixed['complex'], mixed['float'] * 1j)
    for name in ('int', 'bool', 'key'):
      assert bool(jnp.all(mixed[name] == values[name]))
    np.testing.assert_array_equal(ints['int'], values['int'])


@pytest.mark.slow
def test_structure_and_dtypes_are_kept_in_every_case():
  listed = mix_cases.list_cases(8)
  step = mix_cases.wrap(mix_cases.make_step(listed), 'vmap', 8)
  given = jax.tree.map(jnp.asarray, mix_cases.make_states(listed, 8))
  found = jax.eval_shape(step, given, 1, KEY)
  assert jax.tree.structure(found) == jax.tree.structure(given)
  for one, other in zip(*map(jax.tree.leaves, (given, found)), strict=True):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_small_and_large_arrays_are_mixed_alike():
  """Small ones are sent in one message, large ones each in its own."""
  values = jnp.arange(4.0)[:, None] * jnp.arange(2**14)
  arrays = {
    'large': values,
    'small': values[:, :9].reshape(4, 3, 3),
    'last': values[:, 5],
    'half': values[:, :4].astype(jnp.bfloat16),
    'empty': jnp.zeros((4, 0, 5)),
  }
  strategy = gossip.Pull(peers='permutation')
  mixed = _run(lambda row: _mix(row, strategy, key=KEY), arrays)
  large = np.asarray(mixed['large'])
  np.testing.assert_array_equal(mixed['small'].reshape(4, 9), large[:, :9])
  np.testing.assert_array_equal(mixed['last'], large[:, 5])
  np.testing.assert_allclose(mixed['half'], large[:, :4])
  assert {name: x.dtype for name, x in mixed.items()} == {
    name: x.dtype for name, x in arrays.items()
  }
  assert mixed['empty'].shape == (4, 0, 5)
  assert not np.array_equal(large, values)


def test_masses_may_be_any_number_and_are_not_rounded():
  values, mass = jnp.ones((8, 3)), 1 + jnp.arange(8.0) * 1e-6
  permutation = gossip.PushSum(peers='permutation')
  ring = gossip.PushSum(peers='ring')

  def mix(row, mass):
    narrow = {'key': KEY, 'mass': mass, 'dtype': jnp.bfloat16}
    masses = [gossip.mix(row, AXIS, permutation, **narrow)[1]]
    for each in (1, jnp.ones((), jnp.bfloat16)):
      masses.append(gossip.mix(row, AXIS, ring, mass=each)[1])
    return masses

  new, *others = _run(mix, values, mass)
  before, after = (np.asarray(each, np.float64).sum() for each in (mass, new))
  assert after == pytest.approx(before, abs=3e-7)
  assert len(set(np.asarray(new).tolist())) > 2
  for each in others:
    assert jnp.issubdtype(each.dtype, jnp.floating)
    assert float(each.sum()) == 8


def test_a_single_node_keeps_its_weights():
  def mix(row):
    return [_mix(row, each, key=KEY) for each in STRATEGIES.values()]

  for mixed in _run(mix, jnp.array([[3.0, 4.0]])):
    np.testing.assert_array_equal(mixed, [[3, 4]])


# --- The consensus without gradients.


def test_a_random_consensus_is_the_mean_on_average():
  """With independent draws: 500 keys, and a tolerance from their results."""
  start = jnp.asarray(np.random.default_rng(2).normal(size=8) + 3)

  def run(key):
    def step(values, number):
      mix = jax.vmap(
        lambda row: gossip.mix(row, AXIS, gossip.Push(), step=number, key=key),
        axis_name=AXIS,
      )
      return mix(values), None

    return lax.scan(step, start, jnp.arange(1, 81))[0]

  last = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(KEY, 500)))
  np.testing.assert_allclose(last, last[:, :1].repeat(8, 1), atol=1e-5)
  error = last[:, 0].std() / 500**0.5
  assert 0.001 < error < 0.05  # The consensus is random.
  assert abs(last[:, 0].mean() - start.mean()) < 4 * error


def test_push_sum_finds_the_mean_where_push_does_not():
  uneven = topologies.with_uniform_weights(topologies.star(8))
  start = jnp.arange(8.0)

  def step(values, mass, pushed):
    push_sum = gossip.PushSum(peers=uneven)
    pushed = gossip.mix(pushed, AXIS, gossip.Push(peers=uneven))
    return *gossip.mix(values, AXIS, push_sum, mass=mass), pushed

  step_nodes = jax.jit(jax.vmap(step, axis_name=AXIS))
  values, mass, pushed = start, jnp.ones(8), start
  for _ in range(200):
    values, mass, pushed = step_nodes(values, mass, pushed)
  np.testing.assert_allclose(values / mass, start.mean(), rtol=1e-5)
  np.testing.assert_allclose(pushed, pushed[0], rtol=1e-5)
  assert abs(pushed[0] - start.mean()) > 0.05


def test_elastic_with_a_centre_of_its_own_dtype():
  values = {'x': jnp.arange(4.0), 'n': jnp.arange(4)}
  centre = {'x': jnp.zeros((), jnp.bfloat16), 'n': jnp.zeros((), int)}
  mixed, moved = jax.vmap(
    lambda row, centre: gossip.mix_elastic(
      row, centre, AXIS, gossip.Elastic(rate=0.25)
    ),
    (0, None),
    (0, None),
    axis_name=AXIS,
  )(values, centre)
  np.testing.assert_allclose(mixed['x'], [0, 0.75, 1.5, 2.25])
  assert (moved['x'], moved['x'].dtype) == (1.5, jnp.bfloat16)
  np.testing.assert_array_equal(mixed['n'], values['n'])
  assert moved['n'] == 0


def test_consensus_distance():
  nodes = {
    'a': np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),
    'b': np.random.default_rng(1).normal(size=(5, 2, 2)).astype(np.float32),
    'n': np.arange(5),
  }

  def measure(row):
    return gossip.consensus_distance(row, AXIS)

  distances = _run(measure, nodes)
  total = sum(
    np.square(nodes[name] - nodes[name].mean(axis=0)).sum() for name in 'ab'
  )
  np.testing.assert_allclose(distances, (total / 5) ** 0.5, rtol=1e-6)
  half = _run(measure, jnp.array([[1.0], [5.0]], jnp.bfloat16))
  assert (half[0], half.dtype) == (2, jnp.float32)


def test_gradients_flow_through_a_mix():
  """Back to the sources of values, by the transpose of W."""
  strategies = (
    gossip.Pull(),
    gossip.Pull(peers='ring'),
    gossip.PushSum(peers='permutation'),
    gossip.AllReduce(),
  )
  weights = jnp.arange(8.0) ** 2

  @jax.jit
  def differentiate(values):
    def measure(values, strategy):
      mixed = jax.vmap(
        lambda row: _mix(row, strategy, key=KEY), axis_name=AXIS
      )(values)
      return weights @ mixed

    return [jax.grad(measure)(values, each) for each in strategies]

  for strategy, grads in zip(
    strategies, differentiate(jnp.arange(8.0)), strict=True
  ):
    matrix = mix_cases.make_matrix(strategy, 0, KEY, 8)
    np.testing.assert_allclose(grads, matrix.T @ weights, rtol=1e-5)


@pytest.mark.parametrize(
  'strategy', [gossip.Push(), gossip.PushSum(), gossip.Pull(peers='star')]
)
def test_gradients_do_not_flow_through_a_loop(strategy):
  """A variable number of messages is added: jax refuses, as documented."""

  def measure(values):
    return jax.vmap(lambda row: _mix(row, strategy, key=KEY), axis_name=AXIS)(
      values
    ).sum()

  with pytest.raises(ValueError, match='Reverse-mode differentiation'):
    jax.make_jaxpr(jax.grad(measure))(jnp.arange(8.0))


# --- Refused arguments.


@pytest.mark.parametrize(
  ('strategy', 'arguments', 'message'),
  [
    (gossip.Pull(), {}, r"Random peers \('independent'\) need a key"),
    (gossip.Push(peers='matching'), {}, r"peers \('matching'\) need a key"),
    (gossip.Pull(), {'key': KEY, 'mass': 1.0}, 'mass=1.0 for Pull'),
    (gossip.AllReduce(), {'mass': 1.0}, 'mass=1.0 for AllReduce'),
    (
      gossip.PushSum(peers='ring'),
      {'mass': None},
      'takes a mass, 1.0 on every node at first; got mass=None',
    ),
    (
      gossip.Pull(peers=topologies.ring(5)),
      {},
      'has 5 nodes, but there are 4',
    ),
    (gossip.Elastic(), {}, 'for Elastic there is mix_elastic'),
    (OwnPull(peers='ring'), {}, 'OwnPull.* with its own node_class'),
    (
      gossip.Pairs(),
      {'key': KEY},
      "Pairs need peers='matching' .* got 'independent'",
    ),
    (gossip.Pairs(peers='permutation'), {'key': KEY}, "got 'permutation'"),
    (gossip.Pairs(peers='ring'), {}, 'got ring with 2'),
    (
      gossip.Pairs(peers='one_peer_exponential'),
      {},
      "one peer per node and round, got 'one_peer_exponential'",
    ),
    (gossip.AllReduce(), {'dtype': jnp.int8}, 'dtype must be a dtype of float'),
    (gossip.AllReduce(), {'step': 0}, 'step must be a whole number of at'),
    (gossip.AllReduce(), {'step': 1.5}, 'step must be a whole .* got 1.5'),
    (gossip.Pull(), {'key': 0}, r'need a key of jax.random, .* got 0'),
  ],
)
def test_refused_arguments(strategy, arguments, message):
  with pytest.raises(ValueError, match=message):
    jax.vmap(
      lambda row: gossip.mix(row, AXIS, strategy, **arguments), axis_name=AXIS
    )(jnp.arange(4.0))


@pytest.mark.parametrize(
  ('centre', 'strategy', 'message'),
  [
    (jnp.zeros(2), gossip.Elastic(), r"shapes of params, {'': \(\)}, got {"),
    ({'a': 0.0}, gossip.Elastic(), r"shapes of params, {'': \(\)}, got {"),
    (0.0, gossip.Pull(), 'mix_elastic is for Elastic, got Pull'),
  ],
)
def test_refused_centres(centre, strategy, message):
  with pytest.raises(ValueError, match=message):
    jax.vmap(
      lambda row: gossip.mix_elastic(row, centre, AXIS, strategy),
      axis_name=AXIS,
    )(jnp.arange(4.0))
