"""The size after a config's name, as in configs/digits_async.py:smoke."""

from jasgd import experiment


def apply_size(
  config: experiment.TrainingConfig, size: str
) -> experiment.TrainingConfig:
  """The config as it is, or `smoke`: the same for a few updates."""
  if size not in ('', 'smoke'):
    raise ValueError(f'The text after the colon must be smoke, got {size!r}.')
  if size == 'smoke':
    config.num_updates = 40
  return config
