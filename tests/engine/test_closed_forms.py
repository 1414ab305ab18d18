"""Replay against a few lines of plain optax, large batches and means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from jasgd import engine
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks
from jasgd import traces
from tests import marks
from tests import trees
from tests.engine import cases
from tests.engine import node_cases

pytestmark = pytest.mark.usefixtures('quick_compiler')

# The same objects in all tests, so that nothing is compiled twice.
OPTIMIZERS = {'momentum': optax.sgd(0.02, 0.5), 'adam': optax.adam(0.01)}


@functools.cache
def _make_task():
  return tasks.make_task('logistic', batch=16)


def _distance(first, second):
  """The largest difference of two trees, relative to the largest weight."""
  pairs = list(
    zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
  )
  difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)
  return difference / max(float(jnp.max(jnp.abs(b))) for _, b in pairs)


# --- A server.


@pytest.mark.parametrize('optimizer', marks.slow_but(OPTIMIZERS, 'momentum'))
@pytest.mark.parametrize('mode', marks.slow_but(['exact', 'fast'], 'fast'))
def test_one_learner_is_a_plain_optax_loop(optimizer, mode):
  """Exact mode has the same bits; the fast loop differs by rounding."""
  task = _make_task()
  trace = simulation.simulate(
    protocols.asynchronous(), num_workers=1, num_gradients=50
  )
  result = jasgd.replay(task, OPTIMIZERS[optimizer], trace, mode=mode, seed=3)
  optimizer = OPTIMIZERS[optimizer]
  params, stats = task.init(jax.random.key(3))
  opt_state = optimizer.init(params)

  @jax.jit
  def get_gradient(params, step, data):
    batch = task.batches(data, 3, 0, step)
    key = tasks.fold_key(3, 0, step)
    differentiate = jax.value_and_grad(task.loss, has_aux=True)
    # With the loss: further outputs of a program may change its rounding.
    (loss, _), grads = differentiate(params, stats, batch, key)
    return grads, loss

  @jax.jit
  def update(params, opt_state, grads):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  for step in range(50):
    grads, _ = get_gradient(params, step, task.data)
    params, opt_state = update(params, opt_state, grads)
  # Adam divides. A program that reads its gradient from a flat buffer is
  # compiled differently, and may round a division differently.
  if mode == 'exact' and optimizer is not OPTIMIZERS['adam']:
    trees.assert_same_bits(result.params, params)
  assert _distance(result.params, params) < 1e-5


def test_hardsync_is_sgd_with_a_large_batch():
  num_learners = 4
  task = _make_task()
  trace = cases.simulate('hardsync', 20)
  result = jasgd.replay(task, optax.sgd(0.1, 0.9), trace, mode='exact')
  optimizer = optax.sgd(0.1, 0.9)
  params, stats = task.init(jax.random.key(0))
  opt_state = optimizer.init(params)

  @jax.jit
  def step_once(params, opt_state, step):
    def measure(params):
      batches = [
        task.batches(task.data, 0, learner, step)
        for learner in range(num_learners)
      ]
      batch = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)
      return task.loss(params, stats, batch, jax.random.key(0))[0]

    updates, opt_state = optimizer.update(
      jax.grad(measure)(params), opt_state, params
    )
    return optax.apply_updates(params, updates), opt_state

  for step in range(20):
    params, opt_state = step_once(params, opt_state, step)
  assert _distance(result.params, params) < 1e-6


@pytest.mark.parametrize('delay', marks.slow_but([0, 1, 7], 7))
@pytest.mark.parametrize('optimizer', marks.slow_but(OPTIMIZERS, 'momentum'))
def test_a_constant_delay_is_the_delayed_optimizer(delay, optimizer):
  """Gradient k is of batch (learner k mod (d + 1), step k div (d + 1))."""
  task = _make_task()
  num_updates = 40
  trace = simulation.simulate(
    protocols.constant_delay(delay), num_gradients=num_updates
  )
  result = jasgd.replay(task, OPTIMIZERS[optimizer], trace)
  optimizer = jasgd.delayed(OPTIMIZERS[optimizer], delay)
  gradient = engine.make_gradient(task)
  params, stats = task.init(jax.random.key(0))
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for k in range(num_updates + delay):
    grads = gradient(
      params, stats, task.data, 0, k % (delay + 1), k // (delay + 1)
    ).gradient
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  assert _distance(result.params, params) < 1e-4


# --- Nodes.


def test_nodes_that_never_mix_are_sgd_on_their_own():
  trace = node_cases.simulate(gossip.Pull(period=100))
  result = jasgd.replay(
    node_cases.make_plain_task(), node_cases.SGD, trace, mode='exact'
  )
  for node in range(node_cases.NUM_NODES):
    params = jnp.zeros(20)
    for step in range(15):
      params = params - 0.1 * node_cases.get_gradient(params, node, step)
    np.testing.assert_allclose(
      result.replicas[node][0], params, rtol=1e-5, atol=1e-7
    )


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
  trees.assert_close(result.opt_states[2], state, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  'optimizer', marks.slow_but(node_cases.OPTIMIZERS, 'momentum', 'adam')
)
def test_full_averaging_is_all_reduce_but_for_adam(optimizer):
  """From an equal start. Adam normalises the gradient of each node alone."""
  full = node_cases.simulate(
    gossip.Pull(peers=gossip.topologies.complete(node_cases.NUM_NODES)),
    network=simulation.Network(latency=0.1),  # All nodes step before any mix.
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
  """Two steps of each node alone, then the mean of all."""
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
  expected = dict(enumerate(states))
  trees.assert_close(result.opt_states, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('mode', engine.MODES)
@pytest.mark.parametrize('period', marks.slow_but([1, 2], 2))
def test_an_all_reduce_that_goes_back_ends_as_if_nothing_had_happened(
  mode, period
):
  """A node dies, and all nodes make the same steps again."""
  results = [
    jasgd.replay(
      node_cases.make_plain_task(),
      node_cases.ADAM,
      node_cases.simulate(
        gossip.AllReduce(period=period),
        num_steps=8,
        network=simulation.Network(latency=0.1),
        failures=failures,
        checkpoint_seconds=1.5,
      ),
      mode=mode,
    )
    for failures in ([], [simulation.Failure(5.5, 1, 7.0)])
  ]
  plain, result = results
  assert result.num_updates > plain.num_updates
  trees.assert_same_bits(result.replicas, plain.replicas)
  trees.assert_same_bits(result.opt_states, plain.opt_states)


def test_an_all_reduce_that_some_members_did_not_record():
  """A broken all-reduce is left out, unless a later version needs it."""
  trace = node_cases.simulate(gossip.AllReduce(), num_steps=3)
  whole = jasgd.replay(node_cases.make_plain_task(), node_cases.SGD, trace)
  records = trace.records
  last = records['version'] == 6
  cut = traces.Trace(
    records[~last | (records['replica'] == 0)], {**trace.header}
  )
  result = jasgd.replay(node_cases.make_plain_task(), node_cases.SGD, cut)
  assert result.versions == dict.fromkeys(range(node_cases.NUM_NODES), 5)
  before = node_cases.replay_until(
    node_cases.make_plain_task(),
    node_cases.SGD,
    trace,
    until=dict.fromkeys(range(node_cases.NUM_NODES), 5),
  )
  np.testing.assert_array_equal(result.params, before.weights[0])
  assert not np.array_equal(result.params, whole.params)
  middle = (records['version'] == 4) & (records['replica'] == 2)
  broken = traces.Trace(records[~middle], trace.header)
  with pytest.raises(
    traces.TraceError, match='reads version 4 of node 2, which does not exist'
  ):
    jasgd.replay(node_cases.make_plain_task(), node_cases.SGD, broken)


@pytest.mark.parametrize('order', ['a3', 'easgd'])
@pytest.mark.parametrize('mode', engine.MODES)
def test_the_order_of_elastic_averaging(order, mode):
  """One node: e = rate (x - c), then a gradient at x before or after."""
  trace = simulation.simulate(
    gossip.Elastic(rate=0.3, order=order), num_workers=1, num_gradients=6
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
  np.testing.assert_allclose(
    result.replicas[engine.SERVER][0], centre, rtol=1e-5, atol=1e-6
  )
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
  np.testing.assert_array_equal(
    node_cases.stack_nodes(first)[0], node_cases.stack_nodes(second)[0]
  )
  np.testing.assert_array_equal(first.replicas[engine.SERVER][0], 0)


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
  np.testing.assert_allclose(
    node_cases.stack_nodes(result)[0], jnp.stack(nodes), atol=1e-6
  )
  np.testing.assert_allclose(
    result.replicas[engine.SERVER][0], centre, atol=1e-6
  )
