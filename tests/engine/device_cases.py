"""Experiments with nodes in one program, and their checks by hand."""

import functools
from typing import Any, NamedTuple

from flax import linen
import jax
import numpy as np
import optax

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
  'adam': optax.adam(0.05),
}
# Orders and periods of elastic averaging.
ELASTIC = (('a3', 1), ('easgd', 1), ('a3', 3), ('easgd', 3))
RATE_0 = (('a3', 1), ('easgd', 2))
# Every strategy; a new one is tested by being listed.
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


@functools.cache
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
  """Makes steps; returns the state and losses [num_steps, num_nodes]."""
  state, found = program.init(), []
  for _ in range(num_steps):
    state, losses = program.step(state)
    found.append(np.asarray(losses))
  return state, np.stack(found)


def get_params(program, state):
  """The weights of all nodes; with push-sum, times their masses."""
  return program.fetch(state).node.params


def make_start(task):
  """The first weights, of every node."""
  return np.asarray(task.init(jax.random.key(SEED))[0])


def make_starts(task):
  """The first weights of all nodes, [num_nodes, ...]."""
  return make_start(task)[None].repeat(NUM_NODES, 0)


def get_gradients(task, params, step):
  """The gradients of all nodes at their own weights."""
  gradient = engine.make_gradient(task)
  return np.stack(
    [
      gradient(row, {}, task.data, SEED, node, step).gradient
      for node, row in enumerate(params)
    ]
  )


class _Network(linen.Module):
  """A network with batch normalisation."""

  @linen.compact
  def __call__(self, images, train):
    # No bias: its gradient would be rounding alone, which Adam would amplify.
    hidden = linen.Dense(16, use_bias=False)(images)
    hidden = linen.BatchNorm(use_running_average=not train)(hidden)
    return linen.Dense(3)(linen.relu(hidden))


@functools.cache
def make_network_task(batch=16):
  generator = np.random.default_rng(0)
  labels = generator.integers(0, 3, 240)
  images = generator.normal(size=(240, 5)) + 2 * np.eye(5)[labels]
  examples = {'image': images.astype(np.float32), 'label': labels}
  return tasks.from_linen(
    _Network(), examples, examples, batch=batch, prepare=lambda images: images
  )


# --- Experiments, and checks that must hold under every runner.


class Experiment(NamedTuple):
  """Options of a training on the quadratic."""

  strategy: gossip.PeerStrategy
  optimizer: str = 'sgd'
  num_steps: int = 9


class Outcome(NamedTuple):
  """Result of an experiment."""

  params: Any  # Params of all nodes.
  losses: Any  # [num_steps, num_nodes]
  centre: Any  # None if there is no centre.
  mean: Any  # Mean of the nodes' params.


def list_experiments():
  """All experiments by name."""
  complete = gossip.Pull(peers=gossip.topologies.complete(NUM_NODES))
  rate = 0.8 / NUM_NODES  # The rate of Jin et al.
  found = {}
  for name in OPTIMIZERS:
    found[f'all-reduce, {name}'] = Experiment(gossip.AllReduce(), name, 20)
    found[f'complete, {name}'] = Experiment(complete, name, 20)
  for order, period in ELASTIC:
    strategy = gossip.Elastic(rate=rate, order=order, period=period)
    found[f'elastic, {order}, {period}'] = Experiment(strategy)
  for order, period in RATE_0:
    strategy = gossip.Elastic(rate=0, order=order, period=period)
    found[f'rate 0, {order}, {period}'] = Experiment(strategy)
  return found


@functools.cache
def run_experiment(name, runner='vmap'):
  experiment = list_experiments()[name]
  optimizer = OPTIMIZERS[experiment.optimizer]
  program = make_program(
    make_quadratic(), optimizer, experiment.strategy, runner=runner
  )
  state, losses = run(program, experiment.num_steps)
  has_centre = state.arrays.centre is not None
  return Outcome(
    params=get_params(program, state),
    losses=losses,
    centre=np.asarray(program.centre(state)[0]) if has_centre else None,
    mean=np.asarray(program.mean(state)[0]),
  )


def check_full_averaging(get, optimizer):
  """Gossip on a complete graph is all-reduce, if updates are linear.

  Args:
    get: Function from the name of an experiment to its outcome.
    optimizer: Name of the optimizer.
  """
  one, other = get(f'all-reduce, {optimizer}'), get(f'complete, {optimizer}')
  start = make_start(make_quadratic())
  for outcome in (one, other):
    np.testing.assert_allclose(
      outcome.params, outcome.params[:1].repeat(NUM_NODES, 0), rtol=1e-4
    )
    assert np.abs(outcome.params - start).max() > 0.1
  if optimizer == 'adam':  # Not linear in gradients: the two differ.
    assert np.abs(one.params - other.params).max() > 0.01
    return
  np.testing.assert_allclose(one.losses, other.losses, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(one.params, other.params, atol=1e-5)


def check_elastic(get, order, period):
  """Elastic averaging is e = rate (x - c); x -= e, c += the sum of e."""
  task, name = make_quadratic(), f'elastic, {order}, {period}'
  experiment, outcome = list_experiments()[name], get(name)
  rate = experiment.strategy.rate
  x, c = make_starts(task), make_start(task)
  for step in range(experiment.num_steps):
    grads = get_gradients(task, x, step)
    if order == 'a3':
      x = x - 0.1 * grads
    if (step + (order == 'a3')) % period == 0:
      e = rate * (x - c)
      x, c = x - e, c + e.sum(axis=0)
    if order == 'easgd':
      x = x - 0.1 * grads
  np.testing.assert_allclose(outcome.params, x, atol=1e-5)
  np.testing.assert_allclose(outcome.centre, c, atol=1e-5)
  assert np.abs(c - make_start(task)).max() > 0.05
  # The mean is over the nodes, without the centre.
  np.testing.assert_allclose(outcome.mean, x.mean(axis=0), atol=1e-5)


def check_rate_0(get, order, period):
  """With rate 0 nodes train alone, and the centre does not move."""
  task, name = make_quadratic(), f'rate 0, {order}, {period}'
  outcome, params = get(name), make_starts(task)
  for step in range(list_experiments()[name].num_steps):
    params = params - 0.1 * get_gradients(task, params, step)
  np.testing.assert_allclose(outcome.params, params, atol=1e-6)
  np.testing.assert_array_equal(outcome.centre, make_start(task))
