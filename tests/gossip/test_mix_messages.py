"""Mixing: messages between nodes, their number and their precision.

Compiled with all optimisations, none of which may undo a rounding.
"""

import collections
import functools
from typing import NamedTuple

import jax
from jax import sharding
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import topologies
from tests.gossip import mix_cases

AXIS = mix_cases.AXIS
KEY = jax.random.key(3)
NUM_NODES = 8
_COLLECTIVES = ('ppermute', 'all_gather', 'psum')


class Message(NamedTuple):
  """One array that a node sends, and by which collective."""

  name: str
  dtype: str
  shape: tuple[int, ...]


def _list_messages(jaxpr):
  """The messages of one call; all branches must send the same messages."""
  found = []
  for equation in jaxpr.eqns:
    name = equation.primitive.name.removesuffix('_invariant')
    if name in _COLLECTIVES:
      for variable in equation.invars:
        aval = variable.aval
        found.append(Message(name, str(aval.dtype), aval.shape))
    inner = [
      each.jaxpr if isinstance(each, core.ClosedJaxpr) else each
      for each in jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda x: isinstance(x, core.ClosedJaxpr | core.Jaxpr),
      )
      if isinstance(each, core.ClosedJaxpr | core.Jaxpr)
    ]
    parts = [_list_messages(each) for each in inner]
    if equation.primitive.name == 'cond':
      sent = [part for part in parts if part]  # Not due: nothing is sent.
      assert all(part == sent[0] for part in sent)
      found += sent[0] if sent else []
    else:
      assert equation.primitive.name not in ('scan', 'while') or not any(parts)
      found += [each for part in parts for each in part]
  return found


def _make_mesh(num_nodes):
  """One axis of type Auto: newer versions of jax default to Explicit."""
  return sharding.AbstractMesh(
    (num_nodes,), (AXIS,), axis_types=(sharding.AxisType.Auto,)
  )


def _trace(function, *rows, num_nodes=NUM_NODES):
  """The messages of a function of one node's rows; no devices are needed."""
  spec = sharding.PartitionSpec

  def run(step, key, *block):
    own = jax.tree.map(lambda leaf: leaf[0], block)
    made = function(step, key, *own)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], made)

  mapped = jax.shard_map(
    run,
    mesh=_make_mesh(num_nodes),
    in_specs=(spec(), spec(), *[spec(AXIS)] * len(rows)),
    out_specs=spec(AXIS),
    check_vma=False,
  )
  traced = jax.make_jaxpr(mapped)(jnp.int32(6), KEY, *rows)
  return _list_messages(traced.jaxpr)


def _trace_mix(strategy, rows=None, num_nodes=NUM_NODES, **arguments):
  """The messages of one mix, of a single array if nothing else is given."""
  if rows is None:
    rows = jnp.ones((num_nodes, 3))
  if isinstance(strategy, gossip.PushSum):
    arguments['mass'] = 1.0

  def mix(step, key, row):
    kept = {'step': step} | arguments
    return gossip.mix(row, AXIS, strategy, key=key, **kept)

  found = _trace(mix, rows, num_nodes=num_nodes)
  if isinstance(strategy, gossip.PushSum):  # Every time, with a mass.
    masses = [each for each in found if each.shape == ()]
    found = [each for each in found if each.shape != ()]
    assert {(each.name, 'float32') for each in found} == {
      (each.name, each.dtype) for each in masses
    }
  return found


def _count(strategy, **arguments):
  """How often each collective is called in one mix."""
  found = _trace_mix(strategy, **arguments)
  return dict(collections.Counter(each.name for each in found))


# --- Number of messages.


@pytest.mark.parametrize('rule', mix_cases.RULES)
def test_random_peers(rule):
  """Independent ones are gathered; permutations are one message."""
  assert _count(rule(peers='independent')) == {'all_gather': 1}
  assert _count(rule(peers='permutation')) == {'ppermute': 1}
  matching = rule(peers='matching')
  for num_nodes in (5, 100):
    assert _count(matching, num_nodes=num_nodes) == {'ppermute': 1}
  assert _count(gossip.Pairs(peers='matching')) == {'ppermute': 1}


def _count_peers(strategy):
  """Largest number of messages of any node in any round."""
  most = 0
  for index in range(strategy.find_topology(NUM_NODES).num_rounds):
    matrix = mix_cases.make_matrix(strategy, index, None, NUM_NODES)
    is_edge = (matrix > 0) & ~np.eye(NUM_NODES, dtype=bool)
    most = max(most, *is_edge.sum(axis=0), *is_edge.sum(axis=1))
  return int(most)


@pytest.mark.parametrize('kind', topologies.KINDS)
def test_topologies_cost_as_many_messages_as_peers(kind):
  """If a node has at most half of all nodes as peers."""
  for rule in mix_cases.RULES:
    _check_messages(rule(peers=kind), kind)


def _check_messages(strategy, kind):
  num_peers = _count_peers(strategy)
  expected = (
    {'ppermute': num_peers}
    if num_peers <= NUM_NODES // 2
    else {'all_gather': 1}
  )
  if kind == 'complete':
    expected = {'psum': 1}
  assert _count(strategy) == expected
  known = {
    'ring': 2,
    'torus': 3,
    'exponential': 3,
    'hypercube': 3,
    'one_peer_exponential': 1,
    'one_peer_hypercube': 1,
    'random_matching': 1,
    'random_permutation': 1,
  }
  if kind in known:
    assert num_peers == known[kind]
  if kind == 'star':
    assert num_peers == NUM_NODES - 1


@pytest.mark.parametrize('density', [0.1, 0.4])
def test_random_graphs_cost_as_many_messages_as_peers(density):
  """Edges are coloured, and colours are swapped along paths where needed."""
  generator, num_nodes = np.random.default_rng(0), 11
  for _ in range(2):
    is_edge = generator.random((num_nodes, num_nodes)) < density
    is_edge &= np.cumsum(is_edge, axis=1) <= 4  # Few enough to be sent.
    is_edge &= np.cumsum(is_edge, axis=0) <= 4
    np.fill_diagonal(is_edge, False)
    order = np.argsort(generator.random(is_edge.shape), axis=1)
    own = np.arange(num_nodes)[:, None]
    peers = np.where(is_edge[own, order], order, own)
    weights = np.where(peers == own, 0, generator.random(peers.shape) / 11)
    strategy = gossip.Pull(peers=topologies.from_peers(peers, weights))
    num_peers = max(*is_edge.sum(axis=0), *is_edge.sum(axis=1))
    assert _count(strategy, num_nodes=num_nodes) == {'ppermute': num_peers}
    mix = functools.partial(gossip.mix, axis_name=AXIS, strategy=strategy)
    mixed = jax.vmap(mix, axis_name=AXIS)(jnp.eye(num_nodes))
    expected = np.zeros((num_nodes, num_nodes))
    np.add.at(expected, (own, peers), weights)
    np.fill_diagonal(expected, 1 - expected.sum(axis=1))
    np.testing.assert_allclose(mixed, expected, atol=1e-6)


def test_more_than_16_messages_or_64_rounds_are_gathered():
  for degree, expected in ((16, {'ppermute': 16}), (17, {'all_gather': 1})):
    topology = topologies.random_regular(64, degree)
    strategy = gossip.Pull(peers=topology)
    assert _count(strategy, num_nodes=64) == expected
  most = 64
  for num_rounds, name in ((most, 'ppermute'), (most + 1, 'all_gather')):
    topology = topologies.random_matching(NUM_NODES, num_rounds)
    assert _count(gossip.Pairs(peers=topology)) == {name: 1}


def test_a_mean_of_all_is_one_sum():
  assert _count(gossip.AllReduce()) == {'psum': 1}
  assert _count(gossip.AllReduce(period=3)) == {'psum': 1}
  elastic = gossip.Elastic(rate=0.1, period=2)
  found = _trace(
    lambda step, key, x, c: gossip.mix_elastic(x, c, AXIS, elastic, step=step),
    jnp.ones((NUM_NODES, 3)),
    jnp.ones((NUM_NODES, 3)),
  )
  assert [each.name for each in found] == ['psum']


@pytest.mark.parametrize('period', [1, 2])
def test_shard_map_knows_that_centre_and_distance_are_equal(period):
  """Otherwise the check of `jax.shard_map` would refuse the out_specs."""
  elastic = gossip.Elastic(rate=0.1, period=period)
  spec = sharding.PartitionSpec

  def mix(block, centre, step):
    x, centre = gossip.mix_elastic(block[0], centre, AXIS, elastic, step=step)
    return x[None], centre, gossip.consensus_distance(x, AXIS)

  mapped = jax.shard_map(
    mix,
    mesh=_make_mesh(NUM_NODES),
    in_specs=(spec(AXIS), spec(), spec()),
    out_specs=(spec(AXIS), spec(), spec()),
  )
  shapes = jax.eval_shape(mapped, jnp.ones((NUM_NODES, 3)), jnp.ones(3), 2)
  assert [each.shape for each in shapes] == [(NUM_NODES, 3), (3,), ()]


@pytest.mark.parametrize(
  'strategy',
  [
    gossip.Pull(period=2),
    gossip.Push(period=2, peers='permutation'),
    gossip.PushSum(period=2, peers='ring'),
    gossip.Pairs(period=2, peers='matching'),
    gossip.AllReduce(period=2),
  ],
)
def test_nothing_is_sent_between_mixes(strategy):
  assert _count(strategy, step=3) == {}
  assert _count(strategy, step=4) == _count(strategy) != {}


def test_small_arrays_go_together():
  rows = {
    'a': jnp.ones((NUM_NODES, 2, 3)),
    'b': jnp.ones((NUM_NODES, 2**14 - 1)),
    'large': jnp.ones((NUM_NODES, 2**14)),
    'half': jnp.ones((NUM_NODES, 4), jnp.bfloat16),
    'count': jnp.ones((NUM_NODES, 9), int),
  }
  found = _trace_mix(gossip.Pull(peers='permutation'), rows)
  assert found == [
    Message('ppermute', 'float32', (6 + 2**14 - 1,)),
    Message('ppermute', 'bfloat16', (4,)),
    Message('ppermute', 'float32', (2**14,)),
  ]


# --- Precision of messages.

# Every rule, with every kind of collective.
NARROW = {
  'AllReduce': gossip.AllReduce(),
  'Pairs, matching': gossip.Pairs(peers='matching'),
  'Pairs, hypercube': gossip.Pairs(peers='one_peer_hypercube'),
} | {
  f'{rule.__name__}, {peers}': rule(peers=peers)
  for rule in mix_cases.RULES
  for peers in ('independent', 'permutation', 'ring', 'star', 'complete')
}
# Every rule, with one message, with all values gathered, and with a mean.
ROUNDED = [
  'Pairs, matching',
  *(
    f'{rule.__name__}, {peers}'
    for rule in mix_cases.RULES
    for peers in ('independent', 'permutation', 'complete')
  ),
]
_VALUES = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)


def _mix_narrow(strategies, values, dtype):
  """The first mix of some strategies, in one program: {name: mixed}."""

  def mix(row):
    found = {}
    for name, strategy in strategies.items():
      mass = 1.0 if isinstance(strategy, gossip.PushSum) else None
      mixed = gossip.mix(row, AXIS, strategy, key=KEY, mass=mass, dtype=dtype)
      found[name] = mixed if mass is None else mixed[0]
    return found

  return jax.jit(jax.vmap(mix, axis_name=AXIS))(values)


@pytest.mark.parametrize('name', NARROW)
def test_messages_are_narrow(name):
  """All but masses; arrays that are narrow already are sent as they are."""
  rows = {
    'a': jnp.ones((NUM_NODES, 3)),
    'half': jnp.ones((NUM_NODES, 4), jnp.bfloat16),
  }
  for dtype, sent in ((jnp.float16, 'float16'), (None, 'float32')):
    found = _trace_mix(NARROW[name], rows, dtype=dtype)
    assert {(each.dtype, each.shape) for each in found} == {
      (sent, (3,)),
      ('bfloat16', (4,)),
    }


@pytest.mark.parametrize(
  ('names', 'dtype'),
  [
    (ROUNDED, jnp.bfloat16),
    (['Pull, ring'], jnp.float16),
  ],
  ids=['bfloat16', 'float16'],
)
def test_messages_are_rounded_and_nothing_else(names, dtype):
  """A node's own part is exact."""
  sent = np.asarray(jnp.asarray(_VALUES, dtype), np.float32)
  mixed = _mix_narrow({name: NARROW[name] for name in names}, _VALUES, dtype)
  for name in names:
    matrix = mix_cases.make_matrix(NARROW[name], 0, KEY, NUM_NODES)
    own = np.diag(np.diag(matrix))
    expected = own @ _VALUES + (matrix - own) @ sent
    np.testing.assert_allclose(mixed[name], expected, atol=1e-6)
    assert mixed[name].dtype == _VALUES.dtype
    for other in (matrix @ _VALUES, matrix @ sent):
      assert not np.allclose(mixed[name], other, atol=1e-5)


def test_a_narrow_mean_is_the_same_for_all():
  average = {'AllReduce': gossip.AllReduce()}
  mean = _mix_narrow(average, _VALUES, jnp.bfloat16)['AllReduce']
  assert mean.dtype == _VALUES.dtype
  assert np.all(mean == mean[0])
  scale = 4 * float(jnp.finfo(jnp.bfloat16).eps)
  exact = _VALUES.mean(axis=0)
  np.testing.assert_allclose(mean[0], exact, atol=scale)
  assert not np.allclose(mean[0], exact, atol=scale / 1e3)


def test_a_wider_dtype_changes_nothing():
  rows = jnp.ones((NUM_NODES, 3), jnp.bfloat16)
  ring = gossip.Pull(peers='ring')
  wide = _trace_mix(ring, rows, dtype=jnp.float32)
  assert wide == _trace_mix(ring, rows)
