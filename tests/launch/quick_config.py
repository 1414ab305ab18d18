"""A real run that is computed in no time, for `launch.train`."""

from tests import live


def get_config():
  """The config."""
  return live.make_config(num_updates=100)
