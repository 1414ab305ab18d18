"""What may stand behind a config's name: configs/digits_async.py:smoke."""

from typing import TypeVar

from jasgd import experiment

_Config = TypeVar(
  '_Config',
  experiment.NodeSimulationConfig,
  experiment.NodeTrainingConfig,
  experiment.SimulationConfig,
  experiment.TrainingConfig,
)


def apply_size(config: _Config, size: str) -> _Config:
  """The config as it is, or `smoke`: the same for a few steps."""
  if size not in ('', 'smoke'):
    raise ValueError(f'Behind the colon may stand smoke, got {size!r}.')
  if size == 'smoke':
    if isinstance(config, experiment.TrainingConfig):
      config.num_updates = 20
    elif isinstance(config, experiment.NodeTrainingConfig):
      config.num_epochs /= 20
    elif isinstance(config, experiment.SimulationConfig):
      config.num_gradients = 200
    else:
      config.num_steps = 20
  return config
