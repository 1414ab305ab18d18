"""Trains from a config.

  python -m launch.train --config=configs/digits_delay.py
  python -m launch.train --config=configs/digits_delay.py --config.rate=0.1
  python -m launch.train --config=configs/digits_delay.py --plot=delay.png

Each field of the config is a flag, --config.FIELD=VALUE; tuples take a comma:
--config.delays=0,8,64.
"""

import pathlib

from absl import app
from absl import flags
from ml_collections import config_flags

from launch import digits
from launch import entry

_CONFIG = config_flags.DEFINE_config_file(
  'config', 'configs/digits_delay.py', 'What to train.'
)
_PLOT = flags.DEFINE_string(
  'plot', None, 'Also draw the result into this file.'
)


def main() -> None:
  """Validates the config, and trains."""
  config = _CONFIG.value
  try:
    config.validate()
  except ValueError as error:
    raise app.UsageError(str(error)) from None
  if _PLOT.value and not pathlib.Path(_PLOT.value).parent.is_dir():
    raise app.UsageError(f'--plot: there is no folder for {_PLOT.value!r}.')
  table = dict(digits.train_table(config))
  if _PLOT.value:
    digits.plot_table(table, config, _PLOT.value)


if __name__ == '__main__':
  entry.run(main)
