"""A training run that takes no time."""

from jasgd import experiment


def make_config(**changes):
  """Eight asynchronous learners on a convex task, for 60 updates."""
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='logistic', batch=8),
    optimizer=experiment.OptimizerConfig(rate=0.1, momentum=0.5),
    protocol=experiment.ProtocolConfig(num_learners=8),
    runtime=experiment.RuntimeConfig(eval_every=10, checkpoint_seconds=0.0),
    num_updates=60,
  )
  for name, value in changes.items():
    setattr(config, name, value)
  return config
