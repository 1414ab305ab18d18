"""Strategies to mix with on devices, and their matrices by numpy."""

import dataclasses
import functools
from typing import Any

import jax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from jasgd import gossip
from jasgd.gossip import topologies
from tests.gossip import cases

AXIS = 'nodes'
SIZES = (8, 5)  # One of 5 nodes is idle in a matching.
# Programs of all cases: (number of nodes, runner). Each takes long to compile.
# pmap and shard_map send the same messages, so that one of them has all kinds.
PROGRAMS = ((8, 'vmap'), (8, 'shard_map'), (5, 'pmap'))
FEW_NODES = 4  # Nodes of the few cases that fast tests run.
RULES = (gossip.Pull, gossip.Push, gossip.PushSum)
RATE = 0.15  # Of elastic averaging.
CENTRE = 2.0  # First value of the centre.
BETA = 0.3  # Other than the default.


@dataclasses.dataclass(frozen=True)
class Case:
  """A strategy, the dtype of its messages, and further arrays to mix."""

  strategy: gossip.PeerStrategy
  dtype: Any = None
  has_half: bool = False  # Whether one array is in bfloat16.

  @property
  def is_push_sum(self):
    return isinstance(self.strategy, gossip.PushSum)

  @property
  def is_elastic(self):
    return isinstance(self.strategy, gossip.Elastic)


def list_topologies(num_nodes):
  """One topology of every kind that is possible with this number of nodes."""
  found = {}
  for case in cases.CASES:
    try:
      found[case.kind] = case.make(num_nodes)
    except ValueError:
      assert num_nodes != 8  # With 8 nodes every kind is possible.
  return found


# Topologies for which rules differ: directed, uneven, gathered, summed, pairs.
# With other topologies all rules have the same rounds.
VARIED = (
  'complete',
  'exponential',
  'one_peer_exponential',
  'random_independent',
  'random_matching',
  'star',
)


def list_few(num_nodes):
  """One case of each rule and of each kind of collective."""
  return {
    'Pull, independent, beta': Case(gossip.Pull(beta=BETA)),
    'Pull, permutation, beta': Case(
      gossip.Pull(peers='permutation', beta=BETA)
    ),
    'Push, independent': Case(gossip.Push()),
    'Push, ring': Case(gossip.Push(peers=topologies.ring(num_nodes))),
    'PushSum, star': Case(gossip.PushSum(peers=topologies.star(num_nodes))),
    'Pairs, matching': Case(gossip.Pairs(peers='matching')),
    'AllReduce, period': Case(gossip.AllReduce(period=2)),
    'Elastic': Case(gossip.Elastic(rate=RATE)),
  }


def list_cases(num_nodes):
  """All cases, by name."""
  made = list_topologies(num_nodes)
  found = {}
  for rule in RULES:
    for peers in gossip.PEERS:
      found[f'{rule.__name__}, {peers}'] = Case(rule(peers=peers))
    for kind, topology in made.items():
      if num_nodes == SIZES[0] and (kind in VARIED or rule is gossip.Pull):
        found[f'{rule.__name__}, {kind}'] = Case(rule(peers=topology))
  found['Pairs, matching'] = Case(gossip.Pairs(peers='matching'))
  for peers in gossip.PEERS:
    found[f'Pull, {peers}, beta'] = Case(gossip.Pull(peers=peers, beta=BETA))
  if num_nodes != SIZES[0]:
    return found
  for kind, topology in made.items():
    if topologies.is_symmetric(topology) and topology.max_degree == 1:
      found[f'Pairs, {kind}'] = Case(gossip.Pairs(peers=topology))
  # Weights that differ from node to node, so that all values are gathered.
  uneven = topologies.with_uniform_weights(topologies.star(num_nodes))
  for name, strategy in {
    'AllReduce': gossip.AllReduce(),
    'AllReduce, period': gossip.AllReduce(period=3),
    'Elastic': gossip.Elastic(rate=RATE),
    'Elastic, period': gossip.Elastic(rate=RATE, period=2),
  }.items():
    found[name] = Case(strategy, has_half=True)
  for rule in RULES:
    name = rule.__name__
    found[f'{name}, uneven'] = Case(rule(peers=uneven), has_half=True)
    found[f'{name}, period'] = Case(
      rule(period=2, peers='permutation'), has_half=True
    )
  return found | _list_narrow(num_nodes)


def _list_narrow(num_nodes):
  """Every rule, and every kind of collective, with narrow messages."""
  hypercube = topologies.one_peer_hypercube(num_nodes)
  found = {
    'AllReduce, bfloat16': Case(gossip.AllReduce(), jnp.bfloat16),
    'AllReduce, float16': Case(gossip.AllReduce(period=2), jnp.float16),
    'Pairs, bfloat16': Case(gossip.Pairs(peers='matching'), jnp.bfloat16),
    'Pairs, float16': Case(gossip.Pairs(peers=hypercube), jnp.float16),
  }
  # An exact mean is a psum; with narrow messages all values are gathered.
  complete = topologies.complete(num_nodes)
  for name, strategy, dtype in (
    ('Pull, bfloat16', gossip.Pull(peers='matching'), jnp.bfloat16),
    ('Pull, gathered', gossip.Pull(peers=complete), jnp.bfloat16),
    ('Push, float16', gossip.Push(), jnp.float16),
    ('Push, gathered', gossip.Push(peers=complete), jnp.bfloat16),
    ('PushSum, bfloat16', gossip.PushSum(peers='matching'), jnp.bfloat16),
    (
      'PushSum, sent',
      gossip.PushSum(peers=topologies.ring(num_nodes)),
      'float16',
    ),
  ):
    found[name] = Case(strategy, dtype)
  return found


def make_start(num_nodes, has_half):
  """Trees that differ from node to node; `one` gives the rows of W."""
  normal = np.random.default_rng(num_nodes).normal(size=(num_nodes, 7))
  start = {
    'one': np.eye(num_nodes, dtype=np.float32),
    'more': (normal[:, 0].astype(np.float32), np.arange(num_nodes)),
  }
  if has_half:
    half = jnp.asarray(normal[:, 1:].reshape(-1, 2, 3), jnp.bfloat16)
    start['half'] = np.asarray(half)
  return start


def make_states(listed, num_nodes):
  """The states at the start, of all cases: (params, mass or centre)."""
  states = {}
  for name, case in listed.items():
    start, other = make_start(num_nodes, case.has_half), None
    if case.is_push_sum:
      other = np.ones(num_nodes, np.float32)
    if case.is_elastic:
      other = jax.tree.map(lambda leaf: np.full_like(leaf, CENTRE), start)
    states[name] = (start, other)
  return states


def make_step(listed):
  """All cases in one function: (states, step, key) -> states, for one node."""

  def mix(case, params, other, step, key):
    if case.is_elastic:
      return gossip.mix_elastic(params, other, AXIS, case.strategy, step=step)
    result = gossip.mix(
      params,
      AXIS,
      case.strategy,
      step=step,
      key=key,
      mass=other,
      dtype=case.dtype,
    )
    return result if case.is_push_sum else (result, None)

  def step_all(states, step, key):
    return {
      name: mix(case, *states[name], step, key) for name, case in listed.items()
    }

  return step_all


def wrap(function, runner, num_nodes, mesh=None, check_vma=True):
  """A function of (row, step, key) for all nodes, under one of the runners."""
  devices = jax.devices()[:num_nodes]
  if runner == 'vmap':
    return jax.jit(jax.vmap(function, (0, None, None), axis_name=AXIS))
  if runner == 'pmap':
    return jax.pmap(function, AXIS, in_axes=(0, None, None), devices=devices)
  spec = sharding.PartitionSpec

  def on_block(block, step, key):
    row = jax.tree.map(lambda leaf: leaf[0], block)
    return jax.tree.map(lambda leaf: leaf[None], function(row, step, key))

  return jax.jit(
    jax.shard_map(
      on_block,
      mesh=mesh or make_mesh(devices),
      in_specs=(spec(AXIS), spec(), spec()),
      out_specs=spec(AXIS),
      check_vma=check_vma,
    )
  )


def make_mesh(devices):
  """All devices along one axis."""
  return sharding.Mesh(
    np.array(devices), (AXIS,), axis_types=(sharding.AxisType.Auto,)
  )


def make_matrix(strategy, number, key, num_nodes):
  """The matrix of a mix of all nodes, from the definition of the strategy."""
  eye = np.eye(num_nodes)
  if isinstance(strategy, gossip.AllReduce):
    return np.full((num_nodes, num_nodes), 1 / num_nodes)
  if strategy.is_random:
    targets = _draw(strategy.peers, number, key, num_nodes)
    chosen = eye[targets]
    if isinstance(strategy, gossip.Push):
      weights = eye + chosen.T  # A node that drew itself counts twice.
      return weights / weights.sum(axis=1, keepdims=True)
    if isinstance(strategy, gossip.PushSum):
      return (eye + chosen.T) / 2
    beta = getattr(strategy, 'beta', 0.5)
    return (1 - beta) * eye + beta * chosen
  matrix = strategy.find_topology(num_nodes).matrix(number)
  if isinstance(strategy, gossip.Push):
    return matrix.T / matrix.sum(axis=0)[:, None]
  return matrix.T if isinstance(strategy, gossip.PushSum) else matrix


def _draw(peers, number, key, num_nodes):
  """The peers that nodes draw with a key."""
  if peers == 'independent':
    key = jax.random.fold_in(key, number)
    return np.asarray(jax.random.randint(key, (num_nodes,), 0, num_nodes))
  # With half of the weight at the peer, row i is (e_i + e_peer) / 2.
  eye = np.eye(num_nodes, dtype=np.float32)
  chosen = 2 * np.asarray(_make_pull(peers)(eye, number + 1, key)) - eye
  targets = chosen.argmax(axis=1)
  np.testing.assert_array_equal(chosen, eye[targets])
  np.testing.assert_array_equal(np.sort(targets), np.arange(num_nodes))
  if peers == 'matching':
    np.testing.assert_array_equal(targets[targets], np.arange(num_nodes))
  return targets


@functools.cache
def _make_pull(peers):
  """A pull from random peers by all nodes on one device.

  It is the reference for every other rule, runner and dtype: `mix` draws from
  fewer permutations than there are, and which ones is its own affair.
  """
  strategy = gossip.Pull(peers=peers)
  return wrap(
    lambda row, step, key: gossip.mix(row, AXIS, strategy, step=step, key=key),
    'vmap',
    None,
  )
