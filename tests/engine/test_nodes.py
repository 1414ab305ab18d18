"""Replay of nodes: against itself, and against two lines by hand."""

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
from tests import marks
from tests.engine import node_cases
from tests.engine import twins

pytestmark = pytest.mark.usefixtures('quick_compiler')


QUICK = ('allreduce', 'elastic, easgd', 'pairs', 'pull', 'push-sum')


@pytest.mark.parametrize(
  ('name', 'optimizer'),
  [
    *((name, 'momentum') for name in QUICK),
    *(
      pytest.param(name, optimizer, marks=pytest.mark.slow)
      for name, optimizer in (
        ('local sgd', 'adam'),
        ('elastic', 'sgd'),
        ('elastic', 'adam'),
        ('pull, ring', 'adam'),
        ('push', 'adam'),
        ('push-sum', 'adam'),
      )
    ),
  ],
)
def test_exact_and_fast_agree(name, optimizer):
  """Nodes die and come back, whatever they are computing."""
  failures = simulation.draw_failures(
    node_cases.NUM_NODES, 15.0, 6.0, 3.0, seed=2
  )
  assert len(failures) > 3
  trace = node_cases.simulate(
    node_cases.STRATEGIES[name],
    compute=simulation.exponential(1.0),
    network=simulation.Network(latency=0.3),
    failures=failures,
  )
  first, second = (
    jasgd.replay(
      node_cases.make_plain_task(),
      node_cases.OPTIMIZERS[optimizer],
      trace,
      mode=mode,
      eval_every=25,
    )
    for mode in ('fast', 'exact')
  )
  for one, other in zip(
    jax.tree.leaves((first.nodes, first.opt_states, first.centre)),
    jax.tree.leaves((second.nodes, second.opt_states, second.centre)),
    strict=True,
  ):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
  assert first.num_steps == second.num_steps == node_cases.NUM_NODES * 15
  assert first.versions == second.versions
  for column in first.history:
    np.testing.assert_allclose(
      first.history[column], second.history[column], rtol=1e-3, atol=1e-5
    )
  for column in first.evaluations:
    np.testing.assert_allclose(
      first.evaluations[column],
      second.evaluations[column],
      rtol=1e-3,
      atol=1e-4,
    )
  assert first.evaluations['loss'][-1] < first.evaluations['loss'][0]


def test_versions_are_those_of_the_records():
  for strategy in node_cases.STRATEGIES.values():
    trace = node_cases.simulate(strategy, num_steps=6)
    plan = node_cases.make_plan(trace)
    held = plan.locate(plan.num_steps)
    for node in range(node_cases.NUM_NODES):
      assert held.version[node] == trace.of_node(node)['version'].max()


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
      result.nodes[0][node], params, rtol=1e-5, atol=1e-7
    )


def test_a_gradient_is_of_the_weights_that_were_read():
  """Averaged while it computes, a node's gradient is of the old weights."""
  trace = node_cases.simulate(
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
    jasgd.replay(node_cases.make_plain_task(), node_cases.SGD, each)
    for each in (trace, fresh)
  )
  assert not np.allclose(first.params, second.params, atol=1e-6)


def test_a_version_that_does_not_exist_is_named():
  trace = node_cases.simulate(gossip.Pull(), num_steps=3)
  records = np.array(trace.records)
  records['peer_version'][5] = 77
  with pytest.raises(traces.TraceError, match='Version 77 of node'):
    jasgd.replay(
      node_cases.make_plain_task(),
      node_cases.SGD,
      traces.NodeTrace(records, trace.header),
    )


def test_rates_and_divergence():
  trace = node_cases.simulate(gossip.Pull())
  still = jasgd.replay(
    node_cases.make_plain_task(),
    node_cases.SGD,
    trace,
    get_rate=lambda epoch: 0.0,
  )
  np.testing.assert_array_equal(still.nodes[0], 0)
  wild = jasgd.replay(
    tasks.make_task('quadratic', batch=1),
    optax.sgd(1e6),
    node_cases.simulate(gossip.Pull(), num_steps=200),
    eval_every=50,
  )
  assert wild.is_diverged
  assert wild.num_steps < 200 * node_cases.NUM_NODES


def test_a_servers_arguments_are_refused():
  with pytest.raises(ValueError, match='Nodes have no server'):
    jasgd.replay(
      node_cases.make_plain_task(),
      node_cases.SGD,
      node_cases.simulate(gossip.Pull()),
      policy='inverse',
    )


@pytest.mark.parametrize('mode', engine.MODES)
def test_rates_go_by_a_nodes_own_steps(mode):
  """As if all had made as many: it cannot know of others."""
  task = node_cases.make_plain_task()
  speeds = simulation.with_speeds(simulation.constant(1.0), [1, 1, 3, 9])
  trace = node_cases.simulate(
    gossip.Pull(period=100), num_steps=5, compute=speeds
  )
  result = jasgd.replay(
    task,
    node_cases.SGD,
    trace,
    mode=mode,
    get_rate=lambda epoch: 1 / (1 + 50 * epoch),
  )
  params = jnp.zeros(20)
  for step in range(5):
    epoch = step * node_cases.NUM_NODES * task.batch / task.num_samples
    rate = 0.1 / (1 + 50 * epoch)
    params = params - rate * node_cases.get_gradient(params, 3, step)
  np.testing.assert_allclose(result.nodes[0][3], params, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('mode', engine.MODES)
@pytest.mark.parametrize('name', ['allreduce', 'elastic', 'pairs'])
def test_a_replay_can_be_resumed(name, mode):
  trace = node_cases.simulate(
    node_cases.STRATEGIES[name],
    num_steps=10,
    compute=simulation.exponential(1.0),
    network=simulation.Network(latency=0.2),
  )
  plan = node_cases.make_plan(trace)

  def make():
    return engine.NodeReplay(
      node_cases.make_plain_task(),
      node_cases.MOMENTUM,
      plan,
      seed=1,
      mode=mode,
      chunk=11,
    )

  whole, half, rest = make(), make(), make()
  losses = []
  while not whole.is_done:
    losses.append(whole.advance()['loss'])
  half.advance()
  half.advance()
  # On the disk, and back.
  saved = jax.tree.map(np.array, half.carry)
  like = jax.eval_shape(lambda: rest.carry)
  assert jax.tree.structure(like) == jax.tree.structure(saved)
  rest.restore(half.clock, saved)
  assert rest.evaluate() == half.evaluate()
  resumed = []
  while not rest.is_done:
    history = rest.advance()
    resumed.append(history['loss'])
  assert history['clock'][-1] == rest.clock == 40
  assert [len(each) for each in losses] == [11, 11, 11, 7]
  np.testing.assert_array_equal(
    np.concatenate(resumed), np.concatenate(losses[2:])
  )
  for one, other in zip(
    jax.tree.leaves((whole.nodes, whole.opt_states, whole.centre)),
    jax.tree.leaves((rest.nodes, rest.opt_states, rest.centre)),
    strict=True,
  ):
    np.testing.assert_array_equal(one, other)
  assert whole.versions == rest.versions
  assert whole.evaluate() == rest.evaluate()


def test_an_unknown_mode_is_refused():
  plan = node_cases.make_plan(node_cases.simulate(gossip.Pull(), num_steps=1))
  with pytest.raises(ValueError, match=r"mode must be one of .*, got 'slow'"):
    engine.NodeReplay(
      node_cases.make_plain_task(), node_cases.SGD, plan, mode='slow'
    )


def test_slots_are_few():
  """As many as nodes, and a few that are still to be read."""
  for name, most in (('pull', 1), ('allreduce', 1), ('push-sum', 8)):
    plan = node_cases.make_plan(
      node_cases.simulate(node_cases.STRATEGIES[name], num_steps=50)
    )
    assert plan.num_slots <= node_cases.NUM_NODES + most
    assert plan.num_states <= node_cases.NUM_NODES


@pytest.mark.parametrize('mode', engine.MODES)
@pytest.mark.parametrize(
  'name',
  marks.slow_but(
    [name for name in node_cases.STRATEGIES if name != 'pull, ring'],
    *('elastic, easgd', 'pairs', 'pull'),
  ),
)
def test_statistics_are_mixed_like_weights(mode, name):
  """Such as those of batch normalisation; what is no float stays as it is."""
  trace = node_cases.simulate(node_cases.STRATEGIES[name], num_steps=6)
  result = jasgd.replay(twins.make_task(), twins.OPTIMIZER, trace, mode=mode)
  twins.check(*result.nodes)
  twins.check(result.params, result.stats)
  if result.centre is not None:
    twins.check(*result.centre)
