"""Real nodes whose steps are computed in no time, for `launch.train`."""

from tests.experiment import test_real_nodes


def get_config(strategy='pull'):
  """The config; behind the colon may stand a strategy."""
  config = test_real_nodes.make_config('elastic', num_steps=100)
  config.strategy.name = strategy
  config.deadlines.end = 20.0
  return config
