"""Mixing: messages between nodes, their number and their precision.

Compiled with all optimisations, none of which may undo a rounding.
"""

import collections
from typing import NamedTuple

import jax
from jax import sharding
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd.gossip import _random_rounds
from tests.gossip import mix_cases
from tests.gossip import mix_vmap

AXIS = mix_vmap.AXIS
NUM_NODES = 8
_COLLECTIVES = ('ppermute', 'all_gather', 'psum')


class Message(NamedTuple):
  """One array that a node sends, and by which collective."""

  name: str
  dtype: str
  shape: tuple[int, ...]


def _list_messages(jaxpr):
  """What one call sends: of branches, all of which must send the same, one."""
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
  """One axis, whose kind jax does not choose: newer versions say Explicit."""
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
  traced = jax.make_jaxpr(mapped)(jnp.int32(6), mix_vmap.KEY, *rows)
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


# --- How often.


@mix_vmap.every_rule
def test_independent_peers_are_gathered(rule):
  assert _count(rule(peers='independent')) == {'all_gather': 1}


@pytest.mark.parametrize(
  ('rule', 'peers'),
  [
    *((rule, 'permutation') for rule in mix_cases.RULES),
    *((rule, 'matching') for rule in (*mix_cases.RULES, gossip.Pairs)),
  ],
)
@pytest.mark.parametrize('num_nodes', [5, 100])
def test_permutations_are_one_message(rule, peers, num_nodes):
  assert _count(rule(peers=peers), num_nodes=num_nodes) == {'ppermute': 1}


def _count_peers(strategy):
  """The most that any node sends or receives in any round."""
  most = 0
  for index in range(strategy.peers.num_rounds):
    matrix = mix_cases.make_matrix(strategy, index, None, NUM_NODES)
    is_edge = (matrix > 0) & ~np.eye(NUM_NODES, dtype=bool)
    most = max(most, *is_edge.sum(axis=0), *is_edge.sum(axis=1))
  return int(most)


@pytest.mark.parametrize('kind', gossip.KINDS)
def test_topologies_cost_as_many_messages_as_peers(kind):
  """If they are at most half of all nodes."""
  for rule in mix_cases.RULES:
    _check_messages(rule(peers=mix_vmap.list_topologies()[kind]), kind)


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


def test_of_16_messages_or_64_rounds_more_are_gathered():
  for degree, expected in ((16, {'ppermute': 16}), (17, {'all_gather': 1})):
    topology = gossip.random_regular(64, degree)
    strategy = gossip.Pull(peers=topology)
    assert _count(strategy, num_nodes=64) == expected
  most = _random_rounds.MAX_ROUNDS
  for num_rounds, name in ((most, 'ppermute'), (most + 1, 'all_gather')):
    topology = gossip.random_matching(NUM_NODES, num_rounds)
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
def test_what_is_the_same_on_all_nodes_is_known_to_be(period):
  """A centre, and a distance: so says the check of `jax.shard_map`."""
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
    gossip.PushSum(period=2, peers=gossip.ring(NUM_NODES)),
    gossip.Pairs(period=2, peers='matching'),
    gossip.AllReduce(period=2),
  ],
)
def test_what_is_not_due_is_not_sent(strategy):
  assert _count(strategy, step=3) == {}
  assert _count(strategy, step=4) == _count(strategy) != {}


def test_small_arrays_go_together():
  rows = {
    'a': jnp.ones((NUM_NODES, 2, 3)),
    'b': jnp.ones((NUM_NODES, 5)),
    'half': jnp.ones((NUM_NODES, 4), jnp.bfloat16),
    'count': jnp.ones((NUM_NODES, 9), int),
  }
  found = _trace_mix(gossip.Pull(peers='permutation'), rows)
  assert found == [
    Message('ppermute', 'float32', (11,)),
    Message('ppermute', 'bfloat16', (4,)),
  ]


# --- In which precision.


def _list_narrow():
  """Every rule, by every way to send."""
  found = {'AllReduce': gossip.AllReduce()}
  found['Pairs, matching'] = gossip.Pairs(peers='matching')
  hypercube = gossip.one_peer_hypercube(NUM_NODES)
  found['Pairs, hypercube'] = gossip.Pairs(peers=hypercube)
  for rule in mix_cases.RULES:
    for peers in ('independent', 'permutation'):
      found[f'{rule.__name__}, {peers}'] = rule(peers=peers)
    for make in (gossip.ring, gossip.star, gossip.complete):
      found[f'{rule.__name__}, {make.__name__}'] = rule(peers=make(NUM_NODES))
  return found


_DTYPES = (jnp.bfloat16, jnp.float16)
_FEW = (
  ('Pull, ring', jnp.bfloat16),
  ('Push, independent', jnp.float16),
  ('PushSum, complete', jnp.bfloat16),
  ('Pairs, matching', jnp.float16),
)
every_dtype = pytest.mark.parametrize('dtype', _DTYPES)


@pytest.mark.parametrize('name', _list_narrow())
def test_messages_are_narrow(name):
  """All but masses; arrays that are narrow already are sent as they are."""
  strategy = _list_narrow()[name]
  rows = {
    'a': jnp.ones((NUM_NODES, 3)),
    'half': jnp.ones((NUM_NODES, 4), jnp.bfloat16),
  }
  found = _trace_mix(strategy, rows, dtype=jnp.float16)
  assert {(each.dtype, each.shape) for each in found} == {
    ('float16', (3,)),
    ('bfloat16', (4,)),
  }
  wide = _trace_mix(strategy, rows)
  assert {(each.dtype, each.shape) for each in wide} == {
    ('float32', (3,)),
    ('bfloat16', (4,)),
  }


@pytest.mark.parametrize(
  ('name', 'dtype'),
  [
    pytest.param(
      name,
      dtype,
      id=f'{name}, {jnp.dtype(dtype)}',
      marks=[] if (name, dtype) in _FEW else [pytest.mark.slow],
    )
    for name in _list_narrow()
    for dtype in _DTYPES
    if (name, dtype) in _FEW or dtype == jnp.bfloat16
    if name != 'AllReduce'
  ],
)
def test_messages_are_rounded_and_nothing_else(name, dtype):
  """A node's own part is exact."""
  values = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)
  sent = np.asarray(jnp.asarray(values, dtype), np.float32)
  strategy = _list_narrow()[name]
  mixed = mix_vmap.mix_all(values, strategy, dtype=dtype)
  matrix = mix_cases.make_matrix(strategy, 0, mix_vmap.KEY, NUM_NODES)
  own = np.diag(np.diag(matrix))
  expected = own @ values + (matrix - own) @ sent
  np.testing.assert_allclose(mixed, expected, atol=1e-6)
  assert mixed.dtype == values.dtype
  for other in (matrix @ values, matrix @ sent):
    assert not np.allclose(mixed, other, atol=1e-5)


@every_dtype
def test_a_narrow_mean_is_the_same_for_all(dtype):
  values = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)
  mean = mix_vmap.mix_all(values, gossip.AllReduce(), dtype=dtype)
  assert mean.dtype == values.dtype
  assert np.all(mean == mean[0])
  scale = 4 * jnp.finfo(dtype).eps
  np.testing.assert_allclose(mean[0], values.mean(axis=0), atol=float(scale))
  assert not np.allclose(mean[0], values.mean(axis=0), atol=float(scale) / 1e3)


@every_dtype
def test_a_wider_dtype_changes_nothing(dtype):
  values = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)
  half, ring = jnp.asarray(values, dtype), gossip.ring(8)
  np.testing.assert_array_equal(
    mix_vmap.mix_all(half, gossip.Pull(peers=ring), dtype=jnp.float32),
    mix_vmap.mix_all(half, gossip.Pull(peers=ring)),
  )
