"""What is said of nodes from outside."""

import dataclasses

import numpy as np

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
