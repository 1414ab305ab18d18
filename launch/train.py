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

_CONFIG = config_flags.DEFINE_config_file('config', None, 'What to train.')
_PLOT = flags.DEFINE_string(
  'plot', None, 'Also draw the result into this file.'
)


def main() -> None:
  """Validates the config, and trains."""
  config = _CONFIG.value
  entry.check_config(config, digits.Config)
  if _PLOT.value:
    _check_plot(pathlib.Path(_PLOT.value))
  table = dict(digits.train_table(config))
  if _PLOT.value:
    digits.plot_table(table, config, _PLOT.value)


def _check_plot(path: pathlib.Path) -> None:
  """Refuses a file that could not be written, before the training."""
  if not path.parent.is_dir():
    raise app.UsageError(f"--plot: there is no folder for '{path}'.")
  if path.suffix not in ('.pdf', '.png', '.svg'):
    raise app.UsageError(
      f"--plot must end in .pdf, .png or .svg, got '{path}'."
    )


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main)
