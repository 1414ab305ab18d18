"""Replay of networks: rounding, 64 bits, batch normalisation, real MNIST."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks
from tests.engine import cases
from tests.tasks import cases as task_cases

pytestmark = pytest.mark.slow


def _distance(first, second):
  pairs = list(
    zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
  )
  difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)
  return difference / max(float(jnp.max(jnp.abs(b))) for _, b in pairs)


def _replay_both(task, optimizer, trace, **arguments):
  return (
    jasgd.replay(task, optimizer, trace, mode=mode, **arguments)
    for mode in ('fast', 'exact')
  )


def test_lenet_is_the_same_for_a_few_updates():
  """With more updates, roundings grow, as between any two programs."""
  task = tasks.make_task('digits', model='lenet', batch=32)
  trace = cases.simulate('softsync', 5)
  first, second = _replay_both(task, optax.sgd(0.03, 0.9), trace)
  assert _distance(first.params, second.params) < 1e-4


def test_64_bits_agree_to_many_digits():
  with jax.enable_x64(True):
    task = tasks.make_task('digits', model='mlp', batch=32)

    def init(key):
      params, stats = task.init(key)
      return jax.tree.map(lambda leaf: leaf.astype(np.float64), params), stats

    wide = tasks.Task(
      name='wide',
      batch=task.batch,
      num_samples=task.num_samples,
      init=init,
      loss=task.loss,
      metrics=task.metrics,
      batches=task.batches,
      data=task.data,
    )
    trace = cases.simulate('softsync', 5)
    first, second = _replay_both(wide, optax.sgd(0.03, 0.9), trace)
    assert all(
      leaf.dtype == np.float64 for leaf in jax.tree.leaves(first.params)
    )
    assert _distance(first.params, second.params) < 1e-9


class _Normed(nn.Module):
  """A network with statistics that are not trained."""

  @nn.compact
  def __call__(self, inputs, train):
    hidden = nn.Dense(8)(inputs)
    hidden = nn.BatchNorm(use_running_average=not train, momentum=0.9)(hidden)
    return nn.Dense(2)(nn.relu(hidden))


@functools.cache
def _make_normed_task():
  inputs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
  examples = {'image': inputs, 'label': (inputs[:, 0] > 0).astype(np.int32)}
  return tasks.from_linen(_Normed(), examples, examples, batch=8)


@pytest.mark.parametrize('name', ['hardsync', 'softsync'])
def test_batch_normalisation_is_replayed(name):
  task, trace = _make_normed_task(), cases.simulate(name, 10)
  first, second = _replay_both(task, optax.sgd(0.1), trace, policy='inverse')
  assert _distance(first.stats, second.stats) < 1e-5
  assert _distance(first.params, second.params) < 1e-5


@pytest.mark.parametrize(('delay', 'is_trained'), [(1, True), (8, False)])
def test_delays_change_lenet_as_in_jain(delay, is_trained):
  """An epoch of figure 2, batch 64: a net trains, or collapses to a class."""
  task = _load_mnist()
  num_updates = task.num_samples // task.batch
  trace = simulation.simulate(
    protocols.constant_delay(delay), num_gradients=num_updates, batch=64
  )
  result = jasgd.replay(task, optax.sgd(1e-2, 0.9), trace)
  (accuracy,) = result.evaluations['accuracy']
  if is_trained:
    assert accuracy > 0.85
  else:
    assert result.is_diverged or accuracy < 0.12


@functools.cache
def _load_mnist():
  return tasks.make_task('mnist', batch=64, data_dir=task_cases.find_data())
