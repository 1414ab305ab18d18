"""Training runs that are computed quickly."""

from jasgd import experiment

PEERS = ('allreduce', 'elastic', 'pairs', 'pull', 'push', 'push_sum')


def make_config(name='asynchronous', **changes):
  """Workers on a convex task, for 60 updates or steps of all nodes.

  There are eight learners of a server, or four nodes.
  """
  is_peer = name in PEERS
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='logistic', batch=8),
    optimizer=experiment.OptimizerConfig(rate=0.1, momentum=0.5),
    strategy=experiment.StrategyConfig(name=name, rate=0.2),
    num_workers=4 if is_peer else 8,
    network=experiment.NetworkConfig(latency=0.2 if is_peer else 0.0),
    runtime=experiment.RuntimeConfig(eval_every=10, checkpoint_seconds=0.0),
    num_updates=60,
  )
  for field, value in changes.items():
    setattr(config, field, value)
  return config


def make_device_config(name):
  """Nodes on devices."""
  config = make_config(name)
  config.runtime.mode = 'devices'
  config.runtime.eval_every = 20
  if name == 'pairs':
    config.strategy.peers = 'matching'
  return config


class StopError(Exception):
  """Ends a run in a test."""


def stop_at(clock):
  """A function for `on_metrics` that stops the run at a clock."""

  def stop(now, metrics):
    del metrics
    if now == clock:
      raise StopError

  return stop
