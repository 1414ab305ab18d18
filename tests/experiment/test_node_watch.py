"""What is said of nodes from outside."""

import dataclasses

import jax
import numpy as np
import pytest

from jasgd import tasks
from jasgd.experiment import _node_watch


def test_nodes_that_have_diverged_are_described_without_a_warning():
  """They may have weights that are not finite: these have no distance."""
  task = dataclasses.replace(
    tasks.make_task('logistic', batch=4), test_data=None
  )
  nodes = [({'w': np.float32([np.inf, 1])}, {})] * 2
  mean, metrics = _node_watch.describe_nodes(task, nodes, [], None)
  np.testing.assert_array_equal(mean[0]['w'], nodes[0][0]['w'])
  assert not metrics


def test_the_centre_the_nodes_and_their_mean_are_evaluated_apart():
  """`local` is the mean of the nodes' own losses, and no loss of a mean."""
  task = tasks.make_task('logistic', batch=4)
  nodes = [
    jax.tree.map(
      lambda leaf, at=seed: leaf + at, task.init(jax.random.key(seed))
    )
    for seed in range(3)
  ]
  centre = jax.tree.map(lambda leaf: 0.3 * leaf, nodes[1])
  mean, metrics = _node_watch.describe_nodes(task, nodes, [], centre)
  losses = [float(tasks.evaluate(task, *node)['loss']) for node in nodes]
  assert metrics['local/loss'] == pytest.approx(np.mean(losses))
  for group, weights in (('test', mean), ('centre', centre)):
    found = tasks.evaluate(task, *weights)
    for name, value in found.items():
      assert metrics[f'{group}/{name}'] == pytest.approx(float(value))
  found = [metrics[f'{group}/loss'] for group in ('test', 'local', 'centre')]
  assert len(set(np.round(found, 4))) == 3
  # Without a centre it is not asked for.
  _, metrics = _node_watch.describe_nodes(task, nodes, [], None)
  assert not [name for name in metrics if name.startswith(('local', 'centre'))]
