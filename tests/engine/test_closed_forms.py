"""Replay of nodes that take the mean of all, or meet at a centre."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jasgd
from jasgd import engine
from jasgd import gossip
from jasgd import simulation
from jasgd import traces
from tests import marks
from tests.engine import node_cases

pytestmark = pytest.mark.usefixtures('quick_compiler')


@pytest.mark.parametrize('mode', engine.MODES)
@pytest.mark.parametrize(
  'optimizer', marks.slow_but(node_cases.OPTIMIZERS, 'adam')
)
def test_all_reduce_is_one_large_batch(optimizer, mode):
  optimizer = node_cases.OPTIMIZERS[optimizer]
  result = jasgd.replay(
    node_cases.make_plain_task(),
    optimizer,
    node_cases.simulate(gossip.AllReduce()),
    mode=mode,
  )
  params, state = jnp.zeros(20), optimizer.init(jnp.zeros(20))
  for step in range(15):
    grads = [
      node_cases.get_gradient(params, node, step)
      for node in range(node_cases.NUM_NODES)
    ]
    updates, state = optimizer.update(
      sum(grads) / node_cases.NUM_NODES, state, params
    )
    params = params + updates
  np.testing.assert_allclose(result.params, params, rtol=1e-5, atol=1e-6)
  assert result.evaluations['consensus'][-1] == 0
  for one, other in zip(
    jax.tree.leaves(result.opt_states), jax.tree.leaves(state), strict=True
  ):
    np.testing.assert_allclose(one[2], other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('optimizer', node_cases.OPTIMIZERS)
def test_full_averaging_is_all_reduce_but_for_adam(optimizer):
  """From an equal start; Adam divides each node's gradient by its own size."""
  full = node_cases.simulate(
    gossip.Pull(peers=gossip.complete(node_cases.NUM_NODES)),
    network=simulation.Network(latency=0.1),  # All step before anybody mixes.
  )
  first, second = (
    jasgd.replay(
      node_cases.make_plain_task(), node_cases.OPTIMIZERS[optimizer], trace
    )
    for trace in (full, node_cases.simulate(gossip.AllReduce()))
  )
  distance = np.abs(first.params - second.params).max()
  assert (distance < 1e-5) == (optimizer != 'adam')
  assert distance < 1


def test_local_sgd_averages_weights():
  """A step on their own, one more, and the mean: by hand."""
  result = jasgd.replay(
    node_cases.make_plain_task(),
    node_cases.MOMENTUM,
    node_cases.simulate(gossip.AllReduce(period=2), num_steps=4),
  )
  nodes = [jnp.zeros(20)] * node_cases.NUM_NODES
  states = [node_cases.MOMENTUM.init(nodes[0])] * node_cases.NUM_NODES
  for step in range(4):
    for node, params in enumerate(nodes):
      gradient = node_cases.get_gradient(params, node, step)
      updates, states[node] = node_cases.MOMENTUM.update(
        gradient, states[node], params
      )
      nodes[node] = params + updates
    if step % 2:
      nodes = [sum(nodes) / node_cases.NUM_NODES] * node_cases.NUM_NODES
  np.testing.assert_allclose(result.params, nodes[0], rtol=1e-5, atol=1e-7)
  traces_of_states = result.opt_states[0].trace
  expected = jnp.stack([state[0].trace for state in states])
  np.testing.assert_allclose(traces_of_states, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('mode', engine.MODES)
@pytest.mark.parametrize('period', marks.slow_but([1, 2], 2))
def test_a_joiner_of_an_all_reduce_is_like_the_others(mode, period):
  trace = node_cases.simulate(
    gossip.AllReduce(period=period),
    num_steps=8,
    network=simulation.Network(latency=0.1),
    failures=[simulation.Failure(2.5, 1, 4.0)],
  )
  join = trace.of_node(1)[trace.of_node(1)['own_weight'] == 0][0]
  until = {
    1: int(join['version']),
    int(join['peer']): int(join['peer_version']),
  }
  result = engine.replay_nodes(
    node_cases.make_plain_task(), node_cases.ADAM, trace, mode=mode, until=until
  )
  peer = int(join['peer'])
  for leaf in jax.tree.leaves((result.nodes, result.opt_states)):
    np.testing.assert_array_equal(leaf[1], leaf[peer])
  assert result.opt_states[0].count[1] > 0


def test_an_all_reduce_that_some_did_not_write_down():
  """They were killed: it is left out, unless somebody went on from it."""
  trace = node_cases.simulate(gossip.AllReduce(), num_steps=3)
  whole = jasgd.replay(node_cases.make_plain_task(), node_cases.SGD, trace)
  records = trace.records
  last = records['version'] == 6
  cut = traces.NodeTrace(
    records[~last | (records['node'] == 0)], {**trace.header}
  )
  result = jasgd.replay(node_cases.make_plain_task(), node_cases.SGD, cut)
  assert result.versions == dict.fromkeys(range(node_cases.NUM_NODES), 5)
  before = engine.replay_nodes(
    node_cases.make_plain_task(),
    node_cases.SGD,
    trace,
    until=dict.fromkeys(range(node_cases.NUM_NODES), 5),
  )
  np.testing.assert_array_equal(result.params, before.params)
  assert not np.array_equal(result.params, whole.params)
  middle = (records['version'] == 4) & (records['node'] == 2)
  broken = traces.NodeTrace(records[~middle], trace.header)
  with pytest.raises(
    traces.TraceError, match='Version 5 of node 0 comes from an all-reduce'
  ):
    jasgd.replay(node_cases.make_plain_task(), node_cases.SGD, broken)


@pytest.mark.parametrize('order', ['a3', 'easgd'])
@pytest.mark.parametrize('mode', engine.MODES)
def test_the_order_of_elastic_averaging(order, mode):
  """One node: e = rate (x - c), then a gradient at x before or after."""
  trace = simulation.simulate_nodes(
    gossip.Elastic(rate=0.3, order=order), num_nodes=1, num_steps=6
  )
  result = jasgd.replay(
    node_cases.make_plain_task(), node_cases.SGD, trace, mode=mode
  )
  params = before = centre = jnp.zeros(20)
  for step in range(6):
    at = before if order == 'easgd' else params
    params = params - 0.1 * node_cases.get_gradient(at, 0, step)
    before = params
    force = 0.3 * (params - centre)
    params, centre = params - force, centre + force
  np.testing.assert_allclose(result.params, params, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(result.centre[0], centre, rtol=1e-5, atol=1e-6)
  assert result.evaluations['centre_loss'] != result.evaluations['loss']


def test_elastic_of_rate_0_is_sgd_on_their_own():
  first, second = (
    jasgd.replay(
      node_cases.make_plain_task(),
      node_cases.MOMENTUM,
      node_cases.simulate(strategy),
      mode='exact',
    )
    for strategy in (gossip.Elastic(rate=0.0), gossip.Pull(period=100))
  )
  np.testing.assert_array_equal(first.nodes[0], second.nodes[0])
  np.testing.assert_array_equal(first.centre[0], 0)


def test_elastic_is_two_lines():
  """e = rate (x - c); x -= e; c += e, node after node, on a free network."""
  trace = node_cases.simulate(gossip.Elastic(rate=0.3), num_steps=5)
  result = jasgd.replay(node_cases.make_plain_task(), node_cases.SGD, trace)
  nodes, centre = [jnp.zeros(20)] * node_cases.NUM_NODES, jnp.zeros(20)
  for step in range(5):
    stepped = [
      params - 0.1 * node_cases.get_gradient(params, node, step)
      for node, params in enumerate(nodes)
    ]
    for node, params in enumerate(stepped):
      pull = 0.3 * (params - centre)
      nodes[node], centre = params - pull, centre + pull
  np.testing.assert_allclose(result.nodes[0], jnp.stack(nodes), atol=1e-6)
  np.testing.assert_allclose(result.centre[0], centre, atol=1e-6)
