"""Mixing over a named axis: what it leaves alone, draws, refuses, and keeps."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import _edges
from jasgd.gossip import _packing
from jasgd.gossip import _random_rounds
from tests.gossip import cases
from tests.gossip import mix_cases

AXIS = mix_cases.AXIS
KEY = jax.random.key(3)
RULES = (gossip.Pull, gossip.Push, gossip.PushSum)
every_rule = pytest.mark.parametrize('rule', RULES)


def _make_mix(strategy, **arguments):
  """A mix of all nodes, `(values, step, key) -> params`, compiled once."""
  if isinstance(strategy, gossip.PushSum):
    arguments.setdefault('mass', 1.0)

  def mix(row, step, key):
    mixed = gossip.mix(row, AXIS, strategy, step=step, key=key, **arguments)
    return mixed[0] if isinstance(strategy, gossip.PushSum) else mixed

  return jax.jit(jax.vmap(mix, (0, None, None), axis_name=AXIS))


def _mix(values, strategy, key=KEY, **arguments):
  """The first mix of all nodes."""
  return _make_mix(strategy, **arguments)(values, 1, key)


# --- Edges, permutations, packing: what is known before anything is sent.


@pytest.mark.parametrize('rule', [*RULES, gossip.Pairs])
@pytest.mark.parametrize('name', cases.EVERY)
def test_rounds_are_split_into_permutations(name, rule):
  case, num_nodes = cases.EVERY[name]
  topology = case.make(num_nodes)
  rounds = _edges.list_rounds(rule(peers=topology), topology)
  own, sources, weights = _edges.split_rounds(rounds)
  most = 0
  for index, each in enumerate(rounds):
    expected = mix_cases.make_matrix(
      rule(peers=topology), index, None, num_nodes
    )
    matrix = np.diag(own[index])
    for row, weight in zip(sources[index], weights[index], strict=True):
      np.testing.assert_array_equal(np.sort(row), np.arange(num_nodes))
      np.add.at(matrix, (np.arange(num_nodes), row), weight)
    np.testing.assert_allclose(matrix, expected, atol=1e-12)
    is_edge = (expected > 0) & ~np.eye(num_nodes, dtype=bool)
    most = max(most, *is_edge.sum(axis=0), *is_edge.sum(axis=1))
    assert each.is_mean == np.allclose(expected, 1 / num_nodes, atol=1e-15)
  assert sources.shape[1] == most  # As few as can be.


def test_colours_of_random_graphs():
  """Where edges are in each other's way."""
  generator = np.random.default_rng(0)
  for num_nodes in (3, 6, 11, 20):
    for density in (0.2, 0.5, 0.9):
      is_edge = generator.random((num_nodes, num_nodes)) < density
      np.fill_diagonal(is_edge, False)
      targets, picked = np.nonzero(is_edge)
      order = generator.permutation(len(targets))
      given = generator.random(len(targets)) + 0.1
      each = _edges.Round(
        np.ones(num_nodes), targets[order], picked[order], given
      )
      _, sources, weights = _edges.split_rounds([each])
      matrix = np.zeros((num_nodes, num_nodes))
      for row, weight in zip(sources[0], weights[0], strict=True):
        np.testing.assert_array_equal(np.sort(row), np.arange(num_nodes))
        np.add.at(matrix, (np.arange(num_nodes), row), weight)
      expected = np.zeros((num_nodes, num_nodes))
      expected[targets[order], picked[order]] = given
      np.testing.assert_allclose(matrix, expected)
      degrees = is_edge.sum(axis=0), is_edge.sum(axis=1)
      assert sources.shape[1] == np.max(degrees)


@pytest.mark.parametrize('peers', ['permutation', 'matching'])
@pytest.mark.parametrize('weight', [0.5, 0.3])
@pytest.mark.parametrize('num_nodes', [1, 2, 3, 4, 5, 8, 13, 64])
def test_few_rounds_have_the_rate_of_all(peers, weight, num_nodes):
  rounds = _random_rounds.make_random_rounds(peers, num_nodes, weight)
  assert rounds.num_rounds <= num_nodes
  assert gossip.is_doubly_stochastic(rounds)
  assert gossip.is_symmetric(rounds) >= (peers == 'matching')
  rate = gossip.consensus_rate(peers, num_nodes, weight)
  assert gossip.topology_consensus_rate(rounds) == pytest.approx(
    rate, abs=1e-12
  )
  # Everybody meets everybody equally often, and for pairs, nobody itself.
  total = sum(rounds.matrix(index) for index in range(rounds.num_rounds))
  others = total[~np.eye(num_nodes, dtype=bool)]
  np.testing.assert_allclose(others, weight, atol=1e-12)
  idle = [np.diag(rounds.matrix(r)) == 1 for r in range(rounds.num_rounds)]
  if peers == 'matching' and num_nodes > 1:
    np.testing.assert_array_equal(np.sum(idle, axis=1), num_nodes % 2)
  if peers == 'permutation' and num_nodes > 3:
    assert not np.all(idle, axis=1).any()  # No round is for nothing.


@pytest.mark.parametrize('peers', ['permutation', 'matching'])
def test_many_nodes_have_a_rate_near_that(peers):
  rounds = _random_rounds.make_random_rounds(peers, 100)
  assert rounds.num_rounds == _random_rounds.MAX_ROUNDS
  rate = gossip.topology_consensus_rate(rounds)
  # The mean of d random permutations has about 2 / sqrt(d) where J has 0.
  assert 0.45 < rate < 0.5 + 1 / rounds.num_rounds**0.5
  mixed = _mix(jnp.eye(100), gossip.Pull(peers=peers))
  matrices = [rounds.matrix(index) for index in range(rounds.num_rounds)]
  assert any(np.allclose(mixed, matrix) for matrix in matrices)


def test_packing():
  small, large = _packing._SMALL - 1, _packing._SMALL
  arrays = [
    jnp.arange(6.0).reshape(2, 3),
    jnp.arange(large * 1.0),
    jnp.ones((), jnp.float32) * 7,
    jnp.arange(4, dtype=jnp.bfloat16),
    jnp.arange(small * 1.0).reshape(1, -1),
    jnp.zeros((0, 5)),
  ]
  packed, unpack = _packing.pack(arrays)
  assert [each.shape for each in packed] == [(small + 7,), (large,), (4,)]
  again = unpack([each + 1 for each in packed])
  for array, other in zip(arrays, again, strict=True):
    assert array.dtype == other.dtype
    np.testing.assert_array_equal(array + 1, other)
  packed, unpack = _packing.pack([])
  assert packed == unpack(packed) == []


# --- What is mixed, and what is not.


def test_structure_and_dtypes_are_kept():
  """In every case."""
  step = mix_cases.wrap(mix_cases.make_step(8), 'vmap', 8)
  given = jax.tree.map(jnp.asarray, mix_cases.make_states(8))
  found = jax.eval_shape(step, given, 1, KEY)
  assert jax.tree.structure(found) == jax.tree.structure(given)
  for one, other in zip(*map(jax.tree.leaves, (given, found)), strict=True):
    assert (one.shape, one.dtype) == (other.shape, other.dtype)


@every_rule
@pytest.mark.parametrize('peers', [*gossip.PEERS, gossip.ring(8)])
def test_only_floats_are_mixed(rule, peers):
  values = {
    'float': jnp.arange(8.0),
    'complex': jnp.arange(8) * 1j,
    'int': jnp.arange(8),
    'bool': jnp.arange(8) > 3,
    'key': jax.random.split(KEY, 8),
  }
  mixed = _mix(values, rule(peers=peers))
  assert not np.array_equal(mixed['float'], values['float'])
  np.testing.assert_allclose(mixed['complex'], mixed['float'] * 1j)
  for name in ('int', 'bool', 'key'):
    assert bool(jnp.all(mixed[name] == values[name]))
  rest = {'int': values['int']}  # Nothing to mix.
  np.testing.assert_array_equal(
    _mix(rest, rule(peers=peers))['int'], values['int']
  )


@every_rule
def test_large_arrays_go_alone(rule):
  size = _packing._SMALL
  values = jnp.arange(4.0)[:, None] * jnp.arange(size)
  both = {'large': values, 'small': values[:, :9], 'last': values[:, 5]}
  mixed = _mix(both, rule(peers='permutation'))
  np.testing.assert_array_equal(mixed['small'], mixed['large'][:, :9])
  np.testing.assert_array_equal(mixed['last'], mixed['large'][:, 5])
  assert not np.array_equal(mixed['large'], values)


@every_rule
@pytest.mark.parametrize('peers', [*gossip.PEERS, *gossip.KINDS])
def test_nan_reaches_only_those_who_get_it(rule, peers):
  """A peer that does not count may hold anything."""
  if peers in gossip.KINDS:
    peers = mix_cases.list_topologies(8)[peers]
  strategy = rule(peers=peers)
  mix, values = _make_mix(strategy), jnp.arange(8.0).at[3].set(jnp.nan)
  for number in range(6):
    mixed = mix(values, number + 1, KEY)
    matrix = mix_cases.make_matrix(strategy, number, KEY, 8)
    np.testing.assert_array_equal(np.isnan(mixed), matrix[:, 3] > 0)


@every_rule
@pytest.mark.parametrize('peers', gossip.PEERS)
def test_who_draws_itself_stays_exactly_as_it_is(rule, peers):
  strategies = [rule(peers=peers)]
  if rule is gossip.Pull:
    strategies.append(gossip.Pull(peers=peers, beta=0.3))
  values = jnp.asarray(np.random.default_rng(0).normal(size=(7, 50)))
  num_idle = 0
  for strategy in strategies:
    mix = _make_mix(strategy)
    for number in range(20):
      matrix = mix_cases.make_matrix(strategy, number, KEY, 7)
      idle = np.flatnonzero(np.all(matrix == np.eye(7), axis=1))
      mixed = mix(values, number + 1, KEY)
      np.testing.assert_array_equal(mixed[idle], values[idle])
      num_idle += len(idle)
  assert num_idle > 5


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_what_is_sent_is_rounded_and_nothing_else(dtype):
  values = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)
  sent = np.asarray(jnp.asarray(values, dtype), np.float32)
  ring = gossip.ring(8)
  # Own weights only on the diagonal.
  matrix = ring.matrix()
  own = np.diag(np.diag(matrix))
  expected = own @ values + (matrix - own) @ sent
  mixed = _mix(values, gossip.Pull(peers=ring), dtype=dtype)
  np.testing.assert_allclose(mixed, expected, atol=1e-6)
  assert not np.allclose(sent, values, atol=1e-5)
  # The mean of all, in that precision: the same for all.
  mean = _mix(values, gossip.AllReduce(), dtype=dtype)
  assert mean.dtype == values.dtype
  assert np.all(mean == mean[0])
  scale = 4 * jnp.finfo(dtype).eps
  np.testing.assert_allclose(mean[0], values.mean(axis=0), atol=float(scale))
  # A wider dtype changes nothing.
  half = jnp.asarray(values, dtype)
  np.testing.assert_array_equal(
    _mix(half, gossip.Pull(peers=ring), dtype=jnp.float32),
    _mix(half, gossip.Pull(peers=ring)),
  )


def test_masses_are_not_rounded():
  values, mass = jnp.ones((8, 3)), 1 + jnp.arange(8.0) * 1e-6
  strategy = gossip.PushSum(peers='permutation')

  def mix(row, mass):
    return gossip.mix(
      row, AXIS, strategy, key=KEY, mass=mass, dtype=jnp.bfloat16
    )

  _, new = jax.vmap(mix, axis_name=AXIS)(values, mass)
  before, after = (np.asarray(each, np.float64).sum() for each in (mass, new))
  assert after == pytest.approx(before, abs=3e-7)
  assert len(set(np.asarray(new).tolist())) > 2


@pytest.mark.parametrize('mass', [1, 1.0, jnp.ones((), jnp.bfloat16)])
def test_masses_may_be_any_number(mass):
  _, new = jax.vmap(
    lambda row: gossip.mix(row, AXIS, gossip.PushSum(), key=KEY, mass=mass),
    axis_name=AXIS,
  )(jnp.ones(4))
  assert jnp.issubdtype(new.dtype, jnp.floating)
  assert float(new.sum()) == 4


@every_rule
@pytest.mark.parametrize('peers', gossip.PEERS)
def test_one_node_is_on_its_own(rule, peers):
  mixed = _mix(jnp.array([[3.0, 4.0]]), rule(peers=peers))
  np.testing.assert_array_equal(mixed, [[3, 4]])


# --- When, and with whom.


@pytest.mark.parametrize('name', ['Pull', 'AllReduce', 'PushSum', 'Elastic'])
@pytest.mark.parametrize('is_traced', [False, True])
def test_period(name, is_traced):
  arguments = {'rate': 0.1} if name == 'Elastic' else {}
  strategy = getattr(gossip, name)(period=3, **arguments)
  values = jnp.arange(4.0)

  def mix(row, step):
    if name == 'Elastic':
      return gossip.mix_elastic(row, 0.0, AXIS, strategy, step=step)[0]
    mass = 1.0 if name == 'PushSum' else None
    mixed = gossip.mix(row, AXIS, strategy, step=step, key=KEY, mass=mass)
    return mixed[0] if name == 'PushSum' else mixed

  mix_all = jax.vmap(mix, (0, None), axis_name=AXIS)
  for step in range(1, 13):
    if is_traced:
      mixed = jax.jit(mix_all)(values, step)
    else:
      mixed = jax.vmap(lambda row, s=step: mix(row, s), axis_name=AXIS)(values)
    assert np.array_equal(mixed, values) == (step % 3 != 0)


@every_rule
@pytest.mark.parametrize(
  'peers', ['independent', 'matching', gossip.one_peer_exponential(8)], ids=str
)
def test_step_may_be_known_or_traced(rule, peers):
  """The rounds of a topology, and random ones, one after another."""
  values = jnp.asarray(np.random.default_rng(1).normal(size=(8, 3)))
  strategy = rule(peers=peers, period=2)
  traced, seen = _make_mix(strategy), set()
  for step in (2, 4, 6):
    mixed = traced(values, step, KEY)
    matrix = mix_cases.make_matrix(strategy, step // 2 - 1, KEY, 8)
    np.testing.assert_allclose(mixed, matrix @ values, atol=1e-6)
    seen.add(np.asarray(mixed).tobytes())
  assert len(seen) == 3  # Peers change.
  mass = 1.0 if rule is gossip.PushSum else None

  def mix(row):
    return gossip.mix(row, AXIS, strategy, step=step, key=KEY, mass=mass)

  known = jax.jit(jax.vmap(mix, axis_name=AXIS))(values)
  known = known if mass is None else known[0]
  np.testing.assert_allclose(known, mixed, atol=1e-6)


@every_rule
@pytest.mark.parametrize('peers', gossip.PEERS)
def test_peers_are_a_function_of_key_and_step(rule, peers):
  values, mix = jnp.eye(8), _make_mix(rule(peers=peers))
  first = mix(values, 1, KEY)
  np.testing.assert_array_equal(first, mix(values, 1, KEY))
  others = [mix(values, step, KEY) for step in range(2, 8)]
  others += [mix(values, 1, jax.random.key(seed)) for seed in range(6)]
  assert sum(not np.array_equal(first, other) for other in others) > 6
  assert mix._cache_size() == 1  # New peers, but nothing new to compile.
  if peers != 'independent':
    # W as a whole makes sense: all nodes had the same draw.
    for matrix in (first, *others):
      np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-6)
      if peers == 'matching':
        np.testing.assert_allclose(matrix, matrix.T)


def test_keys_of_both_kinds():
  values = jnp.eye(8)
  raw = jax.random.key_data(KEY)
  for peers in gossip.PEERS:
    strategy = gossip.Pull(peers=peers)
    np.testing.assert_array_equal(
      _mix(values, strategy), _mix(values, strategy, key=raw)
    )


def test_default_is_pull_with_independent_peers():
  values = jnp.eye(8)
  default = jax.vmap(lambda row: gossip.mix(row, AXIS, key=KEY), axis_name=AXIS)
  np.testing.assert_array_equal(default(values), _mix(values, gossip.Pull()))


# --- Where it leads.


@pytest.mark.parametrize('rule', [gossip.Pull, gossip.Push])
def test_a_random_consensus_is_the_mean_on_average(rule):
  """Of independent draws: 500 keys, a tolerance from what they give."""
  start = jnp.asarray(np.random.default_rng(2).normal(size=8) + 3)
  mix = _make_mix(rule(peers='independent'))

  def run(key):
    def step(values, number):
      return mix(values, number, key), None

    return lax.scan(step, start, jnp.arange(1, 101))[0]

  last = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(KEY, 500)))
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
        row, AXIS, gossip.PushSum(peers=uneven), mass=mass
      ),
      axis_name=AXIS,
    )
    pushed = _mix(pushed, gossip.Push(peers=uneven))
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


def test_consensus_distance_is_that_of_replay():
  nodes = {
    'a': np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),
    'b': np.random.default_rng(1).normal(size=(5, 2, 2)).astype(np.float32),
    'n': np.arange(5),
  }
  distances = jax.vmap(
    lambda row: gossip.consensus_distance(row, AXIS), axis_name=AXIS
  )(nodes)
  total = sum(
    np.square(nodes[name] - nodes[name].mean(axis=0)).sum() for name in 'ab'
  )
  np.testing.assert_allclose(distances, (total / 5) ** 0.5, rtol=1e-6)
  half = jax.vmap(
    lambda row: gossip.consensus_distance(row, AXIS), axis_name=AXIS
  )(jnp.array([[1.0], [5.0]], jnp.bfloat16))
  assert (half[0], half.dtype) == (2, jnp.float32)


def test_gradients_flow_through_a_mix():
  strategy = gossip.Pull(peers=gossip.ring(8))
  values, weights = jnp.arange(8.0), jnp.arange(8.0) ** 2
  grads = jax.grad(lambda x: weights @ _mix(x, strategy))(values)
  np.testing.assert_allclose(
    grads, gossip.ring(8).push(np.asarray(weights)), rtol=1e-6
  )


# --- What is refused.


@pytest.mark.parametrize(
  ('strategy', 'arguments', 'message'),
  [
    (gossip.Pull(), {}, r"Random peers \('independent'\) need a key"),
    (gossip.Push(peers='matching'), {}, r"peers \('matching'\) need a key"),
    (gossip.Pull(), {'key': KEY, 'mass': 1.0}, 'mass=1.0 for Pull'),
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
      {'key': KEY},
      "Pairs need peers='matching' .* got 'independent'",
    ),
    (gossip.Pairs(peers='permutation'), {'key': KEY}, "got 'permutation'"),
    (gossip.Pairs(peers=gossip.ring(4)), {}, 'got ring with 2'),
    (
      gossip.Pairs(peers=gossip.one_peer_exponential(4)),
      {},
      'one peer per node and round, got one_peer_exponential',
    ),
    (gossip.AllReduce(), {'dtype': jnp.int8}, 'dtype must be that of floats'),
    (gossip.AllReduce(), {'step': 0}, 'step must be a whole number of at'),
  ],
)
def test_errors_say_what_was_given(strategy, arguments, message):
  with pytest.raises(ValueError, match=message):
    jax.vmap(
      lambda row: gossip.mix(row, AXIS, strategy, **arguments), axis_name=AXIS
    )(jnp.arange(4.0))


def test_elastic_wants_its_own_strategy():
  with pytest.raises(ValueError, match=r'mix_elastic is for Elastic, got Pull'):
    jax.vmap(
      lambda row: gossip.mix_elastic(row, row, AXIS, gossip.Pull()),
      axis_name=AXIS,
    )(jnp.arange(4.0))
