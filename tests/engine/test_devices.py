"""Properties of every strategy in one program, under vmap."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jasgd import gossip
from jasgd import tasks
from tests import marks
from tests.engine import device_cases
from tests.engine import twins

pytestmark = pytest.mark.usefixtures('quick_compiler')


@pytest.mark.parametrize(
  'name', marks.slow_but(device_cases.STRATEGIES, 'Elastic, easgd', 'Pull')
)
def test_every_strategy_learns_and_resumes(name):
  task, num_traces = device_cases.make_quadratic(noise=0.1), 0

  def count_and_measure(*arguments):
    nonlocal num_traces
    num_traces += 1
    return task.loss(*arguments)

  program = device_cases.make_program(
    dataclasses.replace(task, loss=count_and_measure),
    optax.adam(0.05),
    device_cases.STRATEGIES[name],
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
  # Donated steps have not changed the saved arrays.
  jax.tree.map(np.testing.assert_array_equal, arrays, kept)
  assert num_traces == first_traces > 0  # Nothing is compiled twice.
  start = tasks.evaluate(task, jnp.asarray(device_cases.make_start(task)), {})[
    'loss'
  ]
  assert tasks.evaluate(task, *program.mean(held))['loss'] < start / 3


@pytest.mark.parametrize(
  'name',
  marks.slow_but(
    [name for name in device_cases.STRATEGIES if name != 'PushSum'],
    'AllReduce',
    'Elastic, easgd',
    'Pull',
  ),
)
def test_statistics_are_mixed_like_weights(name):
  """Without push-sum, which divides updates by the mass: see its own test."""
  program = device_cases.make_program(
    twins.make_task(), twins.OPTIMIZER, device_cases.STRATEGIES[name]
  )
  state, _ = device_cases.run(program, 6)
  node = program.fetch(state).node
  twins.check(node.params, node.stats)
  if state.arrays.centre is not None:
    twins.check(*program.centre(state))
  twins.check(*program.mean(state))
  # Gradients are equal only where all of them are averaged.
  is_equal = name in ('AllReduce', 'local SGD')
  assert (np.ptp(node.params, axis=0).max() < 1e-5) == is_equal


def test_statistics_of_push_sum_are_held_times_the_mass():
  topology = gossip.topologies.with_uniform_weights(
    gossip.topologies.star(device_cases.NUM_NODES)
  )
  program = device_cases.make_program(
    twins.make_task(), twins.OPTIMIZER, gossip.PushSum(peers=topology)
  )
  x, w = np.zeros((device_cases.NUM_NODES, 3)), np.ones(device_cases.NUM_NODES)
  for means in twins.list_means(device_cases.NUM_NODES, 6, device_cases.SEED):
    x = topology.push(x + w[:, None] * means, 0)
    w = topology.push(w, 0)
  state, _ = device_cases.run(program, 6)
  arrays = program.fetch(state)
  assert np.ptp(w) > 1
  np.testing.assert_allclose(arrays.mass, w, rtol=1e-5)
  np.testing.assert_allclose(arrays.node.stats['twin'], x, atol=1e-5)
  mean = program.mean(state)[1]['twin']
  np.testing.assert_allclose(mean, x.sum(axis=0) / w.sum(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['Elastic, easgd', 'Pull', 'PushSum'])
def test_batch_normalisation_learns(name):
  """Evaluation at the mean of the nodes, with the mean of the statistics."""
  task = device_cases.make_network_task()
  program = device_cases.make_program(
    task, optax.adam(0.02), device_cases.STRATEGIES[name]
  )
  state, _ = device_cases.run(program, 40)
  assert tasks.evaluate(task, *program.mean(state))['accuracy'] > 0.8


def test_rates_follow_the_epochs_of_all_nodes():
  task = device_cases.make_quadratic()
  seen = []

  def get_rate(epochs):
    seen.append(epochs)
    return 1.0 - epochs

  program = device_cases.make_program(
    task, device_cases.SGD, gossip.AllReduce(), get_rate=get_rate
  )
  state, _ = device_cases.run(program, 4)
  per_step = device_cases.NUM_NODES * task.batch / task.num_samples
  assert seen == pytest.approx([step * per_step for step in range(4)])
  params = device_cases.make_start(task)
  for step in range(4):
    grads = device_cases.get_gradients(
      task, params[None].repeat(device_cases.NUM_NODES, 0), step
    )
    params = params - 0.1 * (1 - step * per_step) * grads.mean(axis=0)
  np.testing.assert_allclose(
    device_cases.get_params(program, state)[0], params, atol=1e-6
  )


def test_init_sets_the_first_weights():
  init = (np.full(10, 3.0, np.float32), {})
  program = device_cases.make_program(
    device_cases.make_quadratic(), device_cases.SGD, gossip.Pull(), init=init
  )
  params, _ = program.mean(program.init())
  np.testing.assert_array_equal(params, init[0])


def test_a_step_uses_up_its_state():
  program = device_cases.make_program(
    device_cases.make_quadratic(), device_cases.SGD, gossip.Pull()
  )
  state = program.init()
  program.step(state)
  with pytest.raises(RuntimeError, match='deleted'):
    np.asarray(state.arrays.node.params)
