"""Mixing on one device: peers, values, consensus, gradients, errors."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import _packing
from tests.gossip import mix_cases
from tests.gossip import mix_vmap

pytestmark = pytest.mark.usefixtures('quick_compiler')

BETA = 0.3  # Other than 1/2, so that beta and 1 - beta differ.
EYE = jnp.eye(8)  # Mixed, it gives the matrix of the mix.

# --- When nodes mix, and with which peers.


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
  jitted = jax.jit(mix_all)
  for step in range(1, 7) if is_traced else (2, 3):
    if is_traced:
      mixed = jitted(values, step)
    else:
      mixed = jax.vmap(
        lambda row, s=step: mix(row, s), axis_name=mix_vmap.AXIS
      )(values)
    assert np.array_equal(mixed, values) == (step % 3 != 0)


@mix_vmap.with_peers(
  (gossip.Pull, 'matching'),
  (gossip.Push, 'one_peer_exponential'),
  (gossip.PushSum, 'independent'),
)
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


@mix_vmap.with_peers(
  (gossip.Pull, 'independent'),
  (gossip.Pull, 'matching'),
  (gossip.Push, 'independent'),
  (gossip.PushSum, 'permutation'),
)
def test_peers_are_a_function_of_key_and_step(rule, peers):
  values, mix = EYE, mix_vmap.make_mix(rule(peers=peers))
  first = mix(values, 1, mix_vmap.KEY)
  num_programs = mix._cache_size()
  np.testing.assert_array_equal(first, mix(values, 1, mix_vmap.KEY))
  others = [mix(values, step, mix_vmap.KEY) for step in range(2, 8)]
  others += [mix(values, 1, jax.random.key(seed)) for seed in range(6)]
  assert sum(not np.array_equal(first, other) for other in others) > 6
  assert (
    mix._cache_size() == num_programs
  )  # New peers, but nothing new to compile.
  if peers != 'independent':
    # W as a whole makes sense: all nodes had the same draw.
    for matrix in (first, *others):
      np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-6)
      if peers == 'matching':
        np.testing.assert_allclose(matrix, matrix.T)


def test_keys_of_both_kinds():
  values = EYE
  raw = jax.random.key_data(mix_vmap.KEY)
  for peers in ('independent', 'matching'):
    strategy = gossip.Pull(peers=peers)
    np.testing.assert_array_equal(
      mix_vmap.mix_all(values, strategy),
      mix_vmap.mix_all(values, strategy, key=raw),
    )


def test_default_is_pull_with_independent_peers():
  values = EYE
  default = jax.jit(
    jax.vmap(
      lambda row: gossip.mix(row, mix_vmap.AXIS, key=mix_vmap.KEY),
      axis_name=mix_vmap.AXIS,
    )
  )
  np.testing.assert_array_equal(
    default(values), mix_vmap.mix_all(values, gossip.Pull())
  )


# --- Which values change.


@pytest.mark.slow
def test_structure_and_dtypes_are_kept_in_every_case():
  listed = mix_cases.list_cases(8)
  step = mix_cases.wrap(mix_cases.make_step(listed), 'vmap', 8)
  given = jax.tree.map(jnp.asarray, mix_cases.make_states(listed, 8))
  found = jax.eval_shape(step, given, 1, mix_vmap.KEY)
  assert jax.tree.structure(found) == jax.tree.structure(given)
  for one, other in zip(*map(jax.tree.leaves, (given, found)), strict=True):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)


@mix_vmap.with_peers(
  (gossip.Pull, 'independent'),
  (gossip.Push, 'matching'),
  (gossip.PushSum, 'star'),
)
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


@pytest.mark.parametrize('rule', [gossip.Pull, gossip.PushSum])
def test_large_arrays_go_alone(rule):
  size = _packing._SMALL
  values = jnp.arange(4.0)[:, None] * jnp.arange(size)
  both = {'large': values, 'small': values[:, :9], 'last': values[:, 5]}
  mixed = mix_vmap.mix_all(both, rule(peers='permutation'))
  np.testing.assert_array_equal(mixed['small'], mixed['large'][:, :9])
  np.testing.assert_array_equal(mixed['last'], mixed['large'][:, 5])
  assert not np.array_equal(mixed['large'], values)


@mix_vmap.with_peers()
def test_nan_reaches_only_nodes_that_receive_it(rule, peers):
  """A peer that does not count may hold anything."""
  strategy = rule(peers=peers)
  mix = mix_vmap.make_mix(strategy)
  values = EYE.at[3].set(jnp.nan)
  for number in range(6):
    mixed = mix(values, number + 1, mix_vmap.KEY)
    matrix = mix_cases.make_matrix(strategy, number, mix_vmap.KEY, 8)
    is_reached = np.tile(matrix[:, 3:4] > 0, 8)
    np.testing.assert_array_equal(np.isnan(mixed), is_reached)


@pytest.mark.parametrize(
  'strategy',
  [
    *(gossip.Pull(peers=peers, beta=BETA) for peers in gossip.PEERS),
    gossip.Push(),
    gossip.Push(peers='matching'),
    gossip.PushSum(),
    gossip.PushSum(peers='permutation'),
  ],
  ids=lambda each: f'{type(each).__name__}, {each.peers}, {each!r}'[:60],
)
def test_random_peers_against_the_matrix(strategy):
  """A node that drew itself stays exactly the same."""
  values = jnp.asarray(np.random.default_rng(0).normal(size=(7, 50)))
  mix, num_idle = mix_vmap.make_mix(strategy), 0
  for number in range(20):
    matrix = mix_cases.make_matrix(strategy, number, mix_vmap.KEY, 7)
    idle = np.flatnonzero(np.all(matrix == np.eye(7), axis=1))
    mixed = mix(values, number + 1, mix_vmap.KEY)
    np.testing.assert_allclose(mixed, matrix @ values, atol=1e-6)
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


@pytest.mark.parametrize('mass', [1, jnp.ones((), jnp.bfloat16)])
def test_masses_may_be_any_number(mass):
  strategy = gossip.PushSum(peers=gossip.ring(4))
  _, new = mix_vmap.run(
    lambda row: gossip.mix(row, mix_vmap.AXIS, strategy, mass=mass),
    jnp.ones(4),
  )
  assert jnp.issubdtype(new.dtype, jnp.floating)
  assert float(new.sum()) == 4


@mix_vmap.with_peers(
  (gossip.Pull, 'independent'),
  (gossip.Pull, 'permutation'),
  (gossip.Push, 'matching'),
  (gossip.PushSum, 'independent'),
)
def test_one_node_is_on_its_own(rule, peers):
  mixed = mix_vmap.mix_all(jnp.array([[3.0, 4.0]]), rule(peers=peers))
  np.testing.assert_array_equal(mixed, [[3, 4]])


# --- Where it leads, without gradients.


@pytest.mark.parametrize('rule', [gossip.Pull, gossip.Push])
def test_a_random_consensus_is_the_mean_on_average(rule):
  """Of independent draws: 500 keys, a tolerance from what they give."""
  start = jnp.asarray(np.random.default_rng(2).normal(size=8) + 3)
  mix = mix_vmap.make_mix(rule(peers='independent'))

  def run(key):
    def step(values, number):
      return mix(values, number, key), None

    return lax.scan(step, start, jnp.arange(1, 101))[0]

  last = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(mix_vmap.KEY, 500)))
  np.testing.assert_allclose(last, last[:, :1].repeat(8, 1), atol=1e-5)
  error = last[:, 0].std() / 500**0.5
  assert 0.001 < error < 0.05  # Random, and yet
  assert abs(last[:, 0].mean() - start.mean()) < 4 * error


def test_push_sum_finds_the_mean_where_push_does_not():
  uneven = gossip.with_uniform_weights(gossip.star(8))
  start = jnp.arange(8.0)
  values, mass, pushed = start, jnp.ones(8), start

  @jax.jit
  def step(values, mass, pushed):
    mix = jax.vmap(
      lambda row, mass: gossip.mix(
        row, mix_vmap.AXIS, gossip.PushSum(peers=uneven), mass=mass
      ),
      axis_name=mix_vmap.AXIS,
    )
    pushed = mix_vmap.mix_all(pushed, gossip.Push(peers=uneven))
    return *mix(values, mass), pushed

  for _ in range(200):
    values, mass, pushed = step(values, mass, pushed)
  np.testing.assert_allclose(values / mass, start.mean(), rtol=1e-5)
  np.testing.assert_allclose(pushed, pushed[0], rtol=1e-5)
  assert abs(pushed[0] - start.mean()) > 0.05


def test_elastic_with_a_centre_of_its_own_dtype():
  values = {'x': jnp.arange(4.0), 'n': jnp.arange(4)}
  centre = {'x': jnp.zeros((), jnp.bfloat16), 'n': jnp.zeros((), int)}
  mixed, moved = jax.vmap(
    lambda row, centre: gossip.mix_elastic(
      row, centre, mix_vmap.AXIS, gossip.Elastic(rate=0.25)
    ),
    (0, None),
    (0, None),
    axis_name=mix_vmap.AXIS,
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
    return gossip.consensus_distance(row, mix_vmap.AXIS)

  distances = mix_vmap.run(measure, nodes)
  total = sum(
    np.square(nodes[name] - nodes[name].mean(axis=0)).sum() for name in 'ab'
  )
  np.testing.assert_allclose(distances, (total / 5) ** 0.5, rtol=1e-6)
  half = mix_vmap.run(measure, jnp.array([[1.0], [5.0]], jnp.bfloat16))
  assert (half[0], half.dtype) == (2, jnp.float32)


@pytest.mark.parametrize(
  'strategy',
  [
    gossip.Pull(),
    gossip.Pull(peers=gossip.ring(8)),
    gossip.Pairs(peers='matching'),
    gossip.PushSum(peers='permutation'),
    gossip.AllReduce(),
  ],
  ids=lambda each: each.describe().split(':')[0] + each.describe()[-20:],
)
def test_gradients_flow_through_a_mix(strategy):
  """Back to where values came from, by the transposed of W."""
  values, weights = jnp.arange(8.0), jnp.arange(8.0) ** 2
  mix = mix_vmap.make_mix(strategy)
  matrix = mix_cases.make_matrix(strategy, 0, mix_vmap.KEY, 8)
  grads = jax.grad(lambda x: weights @ mix(x, 1, mix_vmap.KEY))(values)
  np.testing.assert_allclose(grads, matrix.T @ weights, rtol=1e-5)


@pytest.mark.parametrize(
  'strategy',
  [gossip.Push(), gossip.PushSum(), gossip.Pull(peers=gossip.star(8))],
  ids=['push', 'push-sum', 'star'],
)
def test_gradients_do_not_flow_through_a_loop(strategy):
  """As many are added as have come: jax says so, and so does the docstring."""
  mix = mix_vmap.make_mix(strategy)
  with pytest.raises(ValueError, match='Reverse-mode differentiation'):
    jax.grad(lambda x: mix(x, 1, mix_vmap.KEY).sum())(jnp.arange(8.0))


# --- Refused arguments.


@pytest.mark.parametrize(
  ('strategy', 'arguments', 'message'),
  [
    (gossip.Pull(), {}, r"Random peers \('independent'\) need a key"),
    (gossip.Push(peers='matching'), {}, r"peers \('matching'\) need a key"),
    (gossip.Pull(), {'key': mix_vmap.KEY, 'mass': 1.0}, 'mass=1.0 for Pull'),
    (gossip.AllReduce(), {'mass': 1.0}, 'mass=1.0 for AllReduce'),
    (
      gossip.PushSum(peers=gossip.ring(4)),
      {'mass': None},
      'has a mass, 1.0 on every node at first; got mass=None',
    ),
    (gossip.Pull(peers=gossip.ring(5)), {}, 'has 5 nodes, but there are 4'),
    (gossip.Elastic(), {}, 'for Elastic there is mix_elastic'),
    (
      gossip.Pairs(),
      {'key': mix_vmap.KEY},
      "Pairs need peers='matching' .* got 'independent'",
    ),
    (
      gossip.Pairs(peers='permutation'),
      {'key': mix_vmap.KEY},
      "got 'permutation'",
    ),
    (gossip.Pairs(peers=gossip.ring(4)), {}, 'got ring with 2'),
    (
      gossip.Pairs(peers=gossip.one_peer_exponential(4)),
      {},
      'one peer per node and round, got one_peer_exponential',
    ),
    (gossip.AllReduce(), {'dtype': jnp.int8}, 'dtype must be that of floats'),
    (gossip.AllReduce(), {'step': 0}, 'step must be a whole number of at'),
    (gossip.AllReduce(), {'step': 1.5}, 'step must be a whole .* got 1.5'),
    (gossip.Pull(), {'key': 0}, r'need a key of jax.random, .* got 0'),
  ],
)
def test_errors_say_what_was_given(strategy, arguments, message):
  with pytest.raises(ValueError, match=message):
    jax.vmap(
      lambda row: gossip.mix(row, mix_vmap.AXIS, strategy, **arguments),
      axis_name=mix_vmap.AXIS,
    )(jnp.arange(4.0))


@pytest.mark.parametrize('centre', [jnp.zeros(2), {'a': jnp.zeros(())}])
def test_elastic_wants_a_centre_like_the_nodes(centre):
  with pytest.raises(ValueError, match=r"of the shapes {'': \(\)}, got {"):
    jax.vmap(
      lambda row: gossip.mix_elastic(
        row, centre, mix_vmap.AXIS, gossip.Elastic(rate=0.1)
      ),
      axis_name=mix_vmap.AXIS,
    )(jnp.arange(4.0))


def test_elastic_wants_its_own_strategy():
  with pytest.raises(ValueError, match=r'mix_elastic is for Elastic, got Pull'):
    jax.vmap(
      lambda row: gossip.mix_elastic(row, row, mix_vmap.AXIS, gossip.Pull()),
      axis_name=mix_vmap.AXIS,
    )(jnp.arange(4.0))
