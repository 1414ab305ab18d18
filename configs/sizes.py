"""What may stand behind a config's name: configs/digits_async.py:smoke."""

from jasgd import experiment


def apply_size(
  config: experiment.TrainingConfig, size: str
) -> experiment.TrainingConfig:
  """The config as it is, or `smoke`: the same for a few updates."""
  if size not in ('', 'smoke'):
    raise ValueError(f'Behind the colon may stand smoke, got {size!r}.')
  if size == 'smoke':
    config.num_updates = 40
  return config
