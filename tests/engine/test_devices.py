"""Nodes that train in one program, against the same by hand; under vmap."""

import dataclasses

from flax import linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jasgd import engine
from jasgd import gossip
from jasgd import tasks

NUM_NODES = 6
SEED = 4
SGD = optax.sgd(0.1)
OPTIMIZERS = {
  'sgd': SGD,
  'momentum': optax.sgd(0.05, momentum=0.9),
  'nesterov': optax.sgd(0.05, momentum=0.9, nesterov=True),
}
STRATEGIES = {
  'AllReduce': gossip.AllReduce(),
  'local SGD': gossip.AllReduce(period=2),
  'Elastic, a3': gossip.Elastic(rate=0.1),
  'Elastic, easgd': gossip.Elastic(rate=0.1, order='easgd', period=2),
  'Pull': gossip.Pull(),
  'Push': gossip.Push(peers='permutation'),
  'Pairs': gossip.Pairs(peers='matching'),
  'PushSum': gossip.PushSum(period=2),
}


def make_quadratic(noise=0.5):
  return tasks.make_task('quadratic', batch=2, noise=noise)


def make_program(task, optimizer, strategy, **arguments):
  arguments = {
    'num_nodes': NUM_NODES,
    'runner': 'vmap',
    'seed': SEED,
  } | arguments
  return engine.make_device_program(task, optimizer, strategy, **arguments)


def run(program, num_steps):
  """Some steps: the state, and the losses of each, [num_steps, num_nodes]."""
  state, found = program.init(), []
  for _ in range(num_steps):
    state, losses = program.step(state)
    found.append(np.asarray(losses))
  return state, np.stack(found)


def get_params(program, state):
  """The weights of all nodes, of push-sum times their masses."""
  return program.fetch(state).node.params


def make_start(task):
  """The first weights, of every node."""
  return np.asarray(task.init(jax.random.key(SEED))[0])


def get_gradients(task, params, step):
  """The gradients of all nodes at their own weights."""
  gradient = engine.make_gradient(task)
  return np.stack(
    [
      gradient(row, {}, task.data, SEED, node, step).gradient
      for node, row in enumerate(params)
    ]
  )


# --- All-reduce, and gossip that is the same.


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_complete_gossip_is_all_reduce(name):
  """From an equal start, for optimizers that are linear in gradients."""
  complete = gossip.Pull(peers=gossip.complete(NUM_NODES))
  programs = [
    make_program(make_quadratic(), OPTIMIZERS[name], strategy)
    for strategy in (gossip.AllReduce(), complete)
  ]
  (first, one), (second, other) = (run(program, 20) for program in programs)
  np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
  a, b = (
    get_params(program, state)
    for program, state in zip(programs, (first, second), strict=True)
  )
  np.testing.assert_allclose(a, b, atol=1e-5)
  assert np.abs(a - make_start(make_quadratic())).max() > 0.1


def test_with_adam_complete_gossip_is_something_else():
  """The mean of updates is not the update of the mean."""
  complete = gossip.Pull(peers=gossip.complete(NUM_NODES))
  a, b = (
    get_params(program, run(program, 20)[0])
    for program in (
      make_program(make_quadratic(), optax.adam(0.05), strategy)
      for strategy in (gossip.AllReduce(), complete)
    )
  )
  for params in (a, b):  # All nodes agree, and yet
    np.testing.assert_allclose(params, params[:1].repeat(NUM_NODES, 0), 1e-4)
  assert np.abs(a - b).max() > 0.01


def test_all_reduce_is_one_learner_with_a_large_batch():
  task = tasks.make_task('logistic', batch=8)
  program = make_program(task, SGD, gossip.AllReduce())
  state, _ = run(program, 8)
  params, stats = task.init(jax.random.key(SEED))
  differentiate = jax.jit(jax.grad(task.loss, has_aux=True))
  for step in range(8):
    batches = [
      task.batches(task.data, SEED, node, step) for node in range(NUM_NODES)
    ]
    large = jax.tree.map(lambda *rows: jnp.concatenate(rows), *batches)
    assert all(len(leaf) == 48 for leaf in jax.tree.leaves(large))
    grads, _ = differentiate(params, stats, large, jax.random.key(0))
    params = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
  rows = get_params(program, state)
  for one, all_of in zip(*map(jax.tree.leaves, (params, rows)), strict=True):
    np.testing.assert_allclose(all_of[3], one, atol=1e-6)
  # And to the bit the same on all nodes: nobody drifts away.
  for leaf in jax.tree.leaves(rows):
    np.testing.assert_array_equal(leaf, leaf[:1].repeat(NUM_NODES, 0))
  assert program.consensus(state) < 1e-6


@pytest.mark.parametrize('num_steps', [2, 3, 7])
def test_local_sgd(num_steps):
  """Everybody on its own, and the mean after every third step."""
  task = make_quadratic()
  program = make_program(task, SGD, gossip.AllReduce(period=3))
  params = make_start(task)[None].repeat(NUM_NODES, 0)
  for step in range(num_steps):
    params = params - 0.1 * get_gradients(task, params, step)
    if step % 3 == 2:
      params = params.mean(axis=0, keepdims=True).repeat(NUM_NODES, 0)
  state, _ = run(program, num_steps)
  np.testing.assert_allclose(get_params(program, state), params, atol=1e-6)
  assert (program.consensus(state) < 1e-6) == (num_steps == 3)


# --- Elastic averaging.


@pytest.mark.parametrize('order', ['a3', 'easgd'])
@pytest.mark.parametrize('period', [1, 2])
def test_elastic_with_rate_0_is_independent_sgd(order, period):
  task = make_quadratic()
  strategy = gossip.Elastic(rate=0.0, order=order, period=period)
  program = make_program(task, SGD, strategy)
  state, _ = run(program, 10)
  params = make_start(task)[None].repeat(NUM_NODES, 0)
  for step in range(10):
    params = params - 0.1 * get_gradients(task, params, step)
  np.testing.assert_allclose(get_params(program, state), params, atol=1e-6)
  np.testing.assert_array_equal(program.centre(state)[0], make_start(task))


@pytest.mark.parametrize('order', ['a3', 'easgd'])
@pytest.mark.parametrize('period', [1, 3])
def test_elastic_is_two_lines(order, period):
  """With the rate of Jin et al., 0.8 / p."""
  task, rate = make_quadratic(), 0.8 / NUM_NODES
  strategy = gossip.Elastic(rate=rate, order=order, period=period)
  program = make_program(task, SGD, strategy)
  x, c = make_start(task)[None].repeat(NUM_NODES, 0), make_start(task)
  for step in range(9):
    grads = get_gradients(task, x, step)
    if order == 'a3':
      x = x - 0.1 * grads
    if (step + (order == 'a3')) % period == 0:
      e = rate * (x - c)
      x, c = x - e, c + e.sum(axis=0)
    if order == 'easgd':
      x = x - 0.1 * grads
  state, _ = run(program, 9)
  np.testing.assert_allclose(get_params(program, state), x, atol=1e-5)
  np.testing.assert_allclose(program.centre(state)[0], c, atol=1e-5)
  assert np.abs(c - make_start(task)).max() > 0.05
  mean, _ = program.mean(state)  # Of the nodes alone.
  np.testing.assert_allclose(mean, x.mean(axis=0), atol=1e-5)


def test_only_elastic_has_a_centre():
  program = make_program(make_quadratic(), SGD, gossip.Pull())
  with pytest.raises(ValueError, match='Only elastic averaging has a centre'):
    program.centre(program.init())


# --- Gossip.


def test_gossip_steps_and_then_mixes():
  task, topology = make_quadratic(), gossip.one_peer_exponential(NUM_NODES)
  program = make_program(task, SGD, gossip.Pull(peers=topology, period=2))
  x = make_start(task)[None].repeat(NUM_NODES, 0)
  for step in range(8):
    x = x - 0.1 * get_gradients(task, x, step)
    if step % 2:
      x = topology.pull(x, step // 2).astype(np.float32)
  state, _ = run(program, 8)
  np.testing.assert_allclose(get_params(program, state), x, atol=1e-6)
  distance = np.sqrt(np.square(x - x.mean(axis=0)).sum() / NUM_NODES)
  assert program.consensus(state) == pytest.approx(distance, rel=1e-4)


def test_push_sum_takes_gradients_at_the_quotient():
  task = make_quadratic()
  topology = gossip.with_uniform_weights(gossip.star(NUM_NODES))
  program = make_program(task, SGD, gossip.PushSum(peers=topology))
  x, w = make_start(task)[None].repeat(NUM_NODES, 0), np.ones(NUM_NODES)
  for step in range(8):
    z = (x / w[:, None]).astype(np.float32)
    x = x - 0.1 * get_gradients(task, z, step)
    x, w = topology.push(x, 0), topology.push(w, 0)
  state, _ = run(program, 8)
  arrays = program.fetch(state)
  np.testing.assert_allclose(arrays.node.params, x, atol=1e-5)
  np.testing.assert_allclose(arrays.mass, w, atol=1e-6)
  assert np.ptp(w) > 1
  mean, _ = program.mean(state)
  np.testing.assert_allclose(mean, x.sum(axis=0) / NUM_NODES, atol=1e-5)
  z = x / w[:, None]
  distance = np.sqrt(np.square(z - z.mean(axis=0)).sum() / NUM_NODES)
  assert program.consensus(state) == pytest.approx(distance, rel=1e-4)


def test_random_peers_depend_on_the_seed_alone():
  task = make_quadratic(noise=0.0)
  program = make_program(task, SGD, gossip.Pull())
  again = make_program(task, SGD, gossip.Pull())
  state, _ = run(program, 5)
  np.testing.assert_array_equal(
    get_params(program, state), get_params(again, run(again, 5)[0])
  )


# --- What is common to all strategies.


@pytest.mark.parametrize('name', STRATEGIES)
def test_it_learns_and_goes_on_from_what_was_saved(name):
  task, num_traces = make_quadratic(noise=0.1), 0

  def count_and_measure(*arguments):
    nonlocal num_traces
    num_traces += 1
    return task.loss(*arguments)

  program = make_program(
    dataclasses.replace(task, loss=count_and_measure),
    optax.adam(0.05),
    STRATEGIES[name],
    get_rate=lambda epochs: 1 / (1 + epochs),
  )
  state, _ = program.step(program.init())
  first_traces = num_traces
  for _ in range(19):
    state, _ = program.step(state)
  arrays = program.fetch(state)
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(arrays))
  kept = jax.tree.map(np.copy, arrays)
  ends = []
  for begun in (state, program.place(arrays, 20)):
    held = begun
    for _ in range(20):
      held, losses = program.step(held)
    assert held.step == 40
    ends.append((program.fetch(held), np.asarray(losses)))
  jax.tree.map(np.testing.assert_array_equal, *ends)
  # What was saved is still what it was, whatever was donated.
  jax.tree.map(np.testing.assert_array_equal, arrays, kept)
  assert num_traces == first_traces > 0  # Nothing is compiled twice.
  start = tasks.evaluate(task, jnp.asarray(make_start(task)), {})['loss']
  assert tasks.evaluate(task, *program.mean(held))['loss'] < start / 3


class _Network(linen.Module):
  """With batch normalisation."""

  @linen.compact
  def __call__(self, images, train):
    # A bias here would have no gradient but rounding, which Adam makes large.
    hidden = linen.Dense(16, use_bias=False)(images)
    hidden = linen.BatchNorm(use_running_average=not train)(hidden)
    return linen.Dense(3)(linen.relu(hidden))


def make_network_task(batch=16):
  generator = np.random.default_rng(0)
  labels = generator.integers(0, 3, 240)
  images = generator.normal(size=(240, 5)) + 2 * np.eye(5)[labels]
  examples = {'image': images.astype(np.float32), 'label': labels}
  return tasks.from_linen(
    _Network(), examples, examples, batch=batch, prepare=lambda images: images
  )


@pytest.mark.parametrize('name', STRATEGIES)
def test_statistics_are_mixed_like_weights(name):
  task = make_network_task()
  program = make_program(task, optax.adam(0.02), STRATEGIES[name])
  state = program.init()
  for _ in range(40):
    state, _ = program.step(state)
  arrays, mean = program.fetch(state), program.mean(state)
  metrics = tasks.evaluate(task, *mean)
  assert metrics['accuracy'] > 0.8
  masses = 1.0 if arrays.mass is None else arrays.mass.sum() / NUM_NODES
  rows = (arrays.node.params, arrays.node.stats)
  for one, all_of in zip(*map(jax.tree.leaves, (mean, rows)), strict=True):
    np.testing.assert_allclose(one, all_of.mean(axis=0) / masses, atol=1e-5)
  # They have moved, and what differs does so by little.
  start = task.init(jax.random.key(SEED))[1]
  for first, stats in zip(
    jax.tree.leaves(start), jax.tree.leaves(arrays.node.stats), strict=True
  ):
    if arrays.mass is not None:
      stats = stats / arrays.mass[:, None]
    assert np.abs(stats - first).max() > 0.1
    if name == 'AllReduce':
      np.testing.assert_allclose(stats, stats[:1].repeat(NUM_NODES, 0), 1e-5)
    else:
      assert stats.std(axis=0).max() < 0.2


def test_rates_follow_the_epochs_of_all_nodes():
  task = make_quadratic()
  seen = []

  def get_rate(epochs):
    seen.append(epochs)
    return 1.0 - epochs

  program = make_program(task, SGD, gossip.AllReduce(), get_rate=get_rate)
  state, _ = run(program, 4)
  per_step = NUM_NODES * task.batch / task.num_samples
  assert seen == pytest.approx([step * per_step for step in range(4)])
  params = make_start(task)
  for step in range(4):
    grads = get_gradients(task, params[None].repeat(NUM_NODES, 0), step)
    params = params - 0.1 * (1 - step * per_step) * grads.mean(axis=0)
  np.testing.assert_allclose(get_params(program, state)[0], params, atol=1e-6)


def test_it_begins_where_it_is_told():
  init = (np.full(10, 3.0, np.float32), {})
  program = make_program(make_quadratic(), SGD, gossip.Pull(), init=init)
  params, _ = program.mean(program.init())
  np.testing.assert_array_equal(params, init[0])


def test_what_is_sent_may_be_rounded():
  ring = gossip.Pull(peers=gossip.ring(NUM_NODES))
  exact, rounded = (
    make_program(make_quadratic(), SGD, ring, dtype=dtype)
    for dtype in (None, jnp.bfloat16)
  )
  a, b = (
    get_params(program, run(program, 5)[0]) for program in (exact, rounded)
  )
  assert 1e-5 < np.abs(a - b).max() < 0.05
  assert a.dtype == b.dtype == np.float32


def test_a_step_uses_up_its_state():
  program = make_program(make_quadratic(), SGD, gossip.Pull())
  state = program.init()
  program.step(state)
  with pytest.raises(RuntimeError, match='deleted'):
    np.asarray(state.arrays.node.params)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'runner': 'map'}, "Unknown runner 'map'. Known: pmap, shard_map, vmap"),
    ({'num_nodes': 0}, 'num_nodes must be a whole number of at least 1'),
    (
      {'runner': 'pmap', 'num_nodes': 1000},
      '1000 nodes need a device each, and there are .*device_count=1000',
    ),
    ({'runner': 'shard_map', 'num_nodes': 1000}, '1000 nodes need a device'),
    (
      {'strategy': gossip.Pull(peers=gossip.ring(4))},
      'The topology has 4 nodes, but there are 6',
    ),
    (
      {'strategy': gossip.Elastic(), 'dtype': 'bfloat16'},
      'sends weights as they are, got dtype=bfloat16',
    ),
  ],
)
def test_errors_say_what_was_given(arguments, message):
  arguments = {
    'task': make_quadratic(),
    'optimizer': SGD,
    'strategy': gossip.Pull(),
  } | arguments
  with pytest.raises(ValueError, match=message):
    make_program(**arguments)


def test_a_mesh_must_fit():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('x',))
  arguments = (make_quadratic(), SGD, gossip.Pull())
  with pytest.raises(ValueError, match="A mesh is for runner='shard_map', got"):
    make_program(*arguments, mesh=mesh)
  message = r"one axis, of num_nodes=6 devices, got \{'x': 1\}"
  with pytest.raises(ValueError, match=message):
    make_program(*arguments, mesh=mesh, runner='shard_map')
  program = make_program(*arguments, mesh=mesh, runner='shard_map', num_nodes=1)
  _, losses = run(program, 2)
  assert losses.shape == (2, 1)


def test_streamed_tasks_have_no_data_for_devices():
  streamed = dataclasses.replace(make_quadratic(), is_streamed=True, data=None)
  with pytest.raises(ValueError, match="The task 'quadratic' is streamed"):
    make_program(streamed, SGD, gossip.Pull())
