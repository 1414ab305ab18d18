"""Replay of nodes: against itself, and against two lines by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from jasgd import engine
from jasgd import gossip
from jasgd import simulation
from jasgd import tasks
from jasgd import traces

NUM_NODES = 4
# Every strategy; a new one is tested by being listed.
STRATEGIES = {
  'allreduce': gossip.AllReduce(),
  'local sgd': gossip.AllReduce(period=3),
  'elastic': gossip.Elastic(rate=0.2, period=2),
  'pull': gossip.Pull(),
  'pull, ring': gossip.Pull(peers=gossip.ring(NUM_NODES)),
  'push': gossip.Push(),
  'push-sum': gossip.PushSum(),
  'pairs': gossip.Pairs(peers='permutation'),
}
SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.1, 0.5)


@functools.cache
def _make_task():
  return tasks.make_task('logistic', batch=8)


def _simulate(strategy, num_steps=15, **arguments):
  return simulation.simulate_nodes(
    strategy, num_nodes=NUM_NODES, num_steps=num_steps, **arguments
  )


def _gradient(params, node, step):
  task = _make_task()
  gradient = engine.make_gradient(task)
  return gradient(params, {}, task.data, 0, node, step).gradient


@pytest.mark.parametrize('name', STRATEGIES)
@pytest.mark.parametrize('has_failures', [False, True])
def test_exact_and_fast_agree(name, has_failures):
  failures = ()
  if has_failures:
    failures = simulation.draw_failures(NUM_NODES, 15.0, 6.0, 3.0, seed=2)
    assert len(failures) > 3
  trace = _simulate(
    STRATEGIES[name],
    compute=simulation.exponential(1.0),
    network=simulation.Network(latency=0.3),
    failures=failures,
  )
  first, second = (
    jasgd.replay(_make_task(), MOMENTUM, trace, mode=mode, eval_every=40)
    for mode in ('fast', 'exact')
  )
  np.testing.assert_allclose(
    first.nodes[0], second.nodes[0], rtol=1e-5, atol=1e-6
  )
  assert first.num_steps == second.num_steps == NUM_NODES * 15
  for column in first.history:
    np.testing.assert_allclose(
      first.history[column], second.history[column], rtol=1e-4
    )
  for column in first.evaluations:
    np.testing.assert_allclose(
      first.evaluations[column],
      second.evaluations[column],
      rtol=1e-3,
      atol=1e-6,
    )
  assert first.evaluations['loss'][-1] < first.evaluations['loss'][0]


def test_nodes_that_never_mix_are_sgd_on_their_own():
  trace = _simulate(gossip.Pull(period=100))
  result = jasgd.replay(_make_task(), SGD, trace, mode='exact')
  for node in range(NUM_NODES):
    params = jnp.zeros(20)
    for step in range(15):
      params = params - 0.1 * _gradient(params, node, step)
    np.testing.assert_allclose(
      result.nodes[0][node], params, rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize('optimizer', [SGD, MOMENTUM])
def test_all_reduce_is_one_large_batch(optimizer):
  result = jasgd.replay(_make_task(), optimizer, _simulate(gossip.AllReduce()))
  params, state = jnp.zeros(20), optimizer.init(jnp.zeros(20))
  for step in range(15):
    grads = [_gradient(params, node, step) for node in range(NUM_NODES)]
    updates, state = optimizer.update(sum(grads) / NUM_NODES, state, params)
    params = params + updates
  np.testing.assert_allclose(result.params, params, rtol=1e-5, atol=1e-7)
  assert result.evaluations['consensus'][-1] < 1e-6


def test_elastic_is_two_lines():
  """e = rate (x - c); x -= e; c += e, node after node, on a free network."""
  trace = _simulate(gossip.Elastic(rate=0.3), num_steps=5)
  result = jasgd.replay(_make_task(), SGD, trace)
  nodes, centre = [jnp.zeros(20)] * NUM_NODES, jnp.zeros(20)
  for step in range(5):
    stepped = [
      params - 0.1 * _gradient(params, node, step)
      for node, params in enumerate(nodes)
    ]
    for node, params in enumerate(stepped):
      pull = 0.3 * (params - centre)
      nodes[node], centre = params - pull, centre + pull
  np.testing.assert_allclose(result.nodes[0], jnp.stack(nodes), atol=1e-6)
  np.testing.assert_allclose(result.centre[0], centre, atol=1e-6)


def test_a_gradient_is_of_the_weights_that_were_read():
  """Averaged while it computes, a node's gradient is of the old weights."""
  trace = _simulate(
    gossip.Pairs(peers='permutation'),
    compute=simulation.exponential(1.0),
    network=simulation.Network(latency=0.2),
  )
  steps = trace.steps
  assert np.any(steps['peer_version'] < steps['version'] - 1)
  records = np.array(trace.records)
  is_step = records['kind'] == traces.NodeKind.STEP
  records['peer_version'][is_step] = records['version'][is_step] - 1
  fresh = traces.NodeTrace(records, trace.header)
  first, second = (
    jasgd.replay(_make_task(), SGD, each) for each in (trace, fresh)
  )
  assert not np.allclose(first.params, second.params, atol=1e-6)


def test_a_version_that_does_not_exist_is_named():
  trace = _simulate(gossip.Pull(), num_steps=3)
  records = np.array(trace.records)
  records['peer_version'][5] = 77
  with pytest.raises(traces.TraceError, match='Version 77 of node'):
    jasgd.replay(_make_task(), SGD, traces.NodeTrace(records, trace.header))


def test_rates_and_divergence():
  trace = _simulate(gossip.Pull())
  still = jasgd.replay(_make_task(), SGD, trace, get_rate=lambda epoch: 0.0)
  np.testing.assert_array_equal(still.nodes[0], 0)
  wild = jasgd.replay(
    tasks.make_task('quadratic', batch=1),
    optax.sgd(1e6),
    _simulate(gossip.Pull(), num_steps=200),
    eval_every=50,
  )
  assert wild.is_diverged
  assert wild.num_steps < 200 * NUM_NODES


def test_a_servers_arguments_are_refused():
  with pytest.raises(ValueError, match='Nodes have no server'):
    jasgd.replay(_make_task(), SGD, _simulate(gossip.Pull()), policy='inverse')


def test_statistics_are_mixed_like_weights():
  """Two nodes average: so are the statistics of batch normalisation."""
  task = _make_task()

  def loss(params, stats, batch, key):
    value, _ = task.loss(params, {}, batch, key)
    return value, {'count': stats['count'] + 1}

  counting = tasks.Task(
    name='counting',
    batch=task.batch,
    num_samples=task.num_samples,
    init=lambda key: (task.init(key)[0], {'count': jnp.zeros(())}),
    loss=loss,
    metrics=lambda params, stats, batch: task.metrics(params, {}, batch),
    batches=task.batches,
    data=task.data,
    test_data=task.test_data,
  )
  speeds = simulation.with_speeds(simulation.constant(1.0), [1, 1, 2, 2])
  trace = _simulate(gossip.Pull(period=100), num_steps=6, compute=speeds)
  result = jasgd.replay(counting, SGD, trace)
  np.testing.assert_array_equal(result.nodes[1]['count'], 6)
  mixed = jasgd.replay(
    counting, SGD, _simulate(gossip.AllReduce(period=2), num_steps=6)
  )
  np.testing.assert_array_equal(mixed.nodes[1]['count'], 6)
  assert float(mixed.stats['count']) == 6
  assert jax.tree.leaves(mixed.params)[0].shape == (20,)
