"""Runs of nodes that take no time."""

from jasgd import experiment

STRATEGIES = ('allreduce', 'elastic', 'pairs', 'pull', 'push', 'push_sum')


def make_config(name='pull', **changes):
  """Four nodes on a convex task, for 60 steps of all of them together."""
  config = experiment.NodeTrainingConfig(
    task=experiment.TaskConfig(name='logistic', batch=8),
    optimizer=experiment.OptimizerConfig(rate=0.1, momentum=0.5),
    strategy=experiment.StrategyConfig(name=name, num_nodes=4, rate=0.2),
    network=experiment.NetworkConfig(latency=0.2),
    runtime=experiment.RuntimeConfig(eval_every=10, checkpoint_seconds=0.0),
    num_epochs=0.48,
  )
  for name, value in changes.items():
    setattr(config, name, value)
  return config
