"""All-reduce and elastic averaging on devices, under vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd import tasks
from tests import marks
from tests.engine import device_cases

pytestmark = pytest.mark.usefixtures('quick_compiler')


@pytest.mark.parametrize(
  'optimizer',
  marks.slow_but(device_cases.OPTIMIZERS, 'momentum', 'adam'),
)
def test_complete_gossip_is_all_reduce_but_for_adam(optimizer):
  device_cases.check_full_averaging(device_cases.run_experiment, optimizer)


@pytest.mark.parametrize(('order', 'period'), device_cases.RATE_0)
def test_elastic_with_rate_0_is_independent_sgd(order, period):
  device_cases.check_rate_0(device_cases.run_experiment, order, period)


@pytest.mark.parametrize(
  ('order', 'period'),
  marks.slow_but(device_cases.ELASTIC, ('a3', 3), ('easgd', 1)),
)
def test_elastic_is_two_lines(order, period):
  device_cases.check_elastic(device_cases.run_experiment, order, period)


def test_only_elastic_has_a_centre():
  program = device_cases.make_program(
    device_cases.make_quadratic(), device_cases.SGD, gossip.Pull()
  )
  with pytest.raises(ValueError, match='Only elastic averaging has a centre'):
    program.centre(program.init())


def test_all_reduce_is_one_learner_with_a_large_batch():
  task = tasks.make_task('logistic', batch=8)
  program = device_cases.make_program(
    task, device_cases.SGD, gossip.AllReduce()
  )
  state, _ = device_cases.run(program, 8)
  params, stats = task.init(jax.random.key(device_cases.SEED))

  @jax.jit
  def differentiate(params, step):
    batches = [
      task.batches(task.data, device_cases.SEED, node, step)
      for node in range(device_cases.NUM_NODES)
    ]
    large = jax.tree.map(lambda *rows: jnp.concatenate(rows), *batches)
    assert all(len(leaf) == 48 for leaf in jax.tree.leaves(large))
    return jax.grad(task.loss, has_aux=True)(
      params, stats, large, jax.random.key(0)
    )[0]

  for step in range(8):
    grads = differentiate(params, step)
    params = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
  rows = device_cases.get_params(program, state)
  for one, all_of in zip(*map(jax.tree.leaves, (params, rows)), strict=True):
    np.testing.assert_allclose(all_of[3], one, atol=1e-6)
  # All nodes have equal bits, so that they cannot drift apart.
  for leaf in jax.tree.leaves(rows):
    np.testing.assert_array_equal(
      leaf, leaf[:1].repeat(device_cases.NUM_NODES, 0)
    )
  assert program.consensus(state) < 1e-6


def test_local_sgd():
  """Nodes train alone; every third step is followed by the mean."""
  task = device_cases.make_quadratic()
  program = device_cases.make_program(
    task, device_cases.SGD, gossip.AllReduce(period=3)
  )
  state, params = program.init(), device_cases.make_starts(task)
  for step in range(7):
    params = params - 0.1 * device_cases.get_gradients(task, params, step)
    if step % 3 == 2:
      mean = params.mean(axis=0, keepdims=True)
      params = mean.repeat(device_cases.NUM_NODES, 0)
    state, _ = program.step(state)
    found = device_cases.get_params(program, state)
    np.testing.assert_allclose(found, params, atol=1e-6)
    assert (program.consensus(state) < 1e-6) == (step % 3 == 2)
