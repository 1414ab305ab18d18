"""Real runs that are computed quickly, for `launch.train`."""

from tests import live
from tests.experiment import test_real_nodes

NUM_NODES = 2


def get_config(strategy='asynchronous'):
  """The config; a strategy may follow after the colon."""
  if strategy == 'asynchronous':
    return live.make_config(num_updates=100)
  config = test_real_nodes.make_config('elastic', 60, NUM_NODES)
  config.strategy.name = strategy
  config.deadlines.end = 20.0
  return config
