"""Trains from a config, and leaves everything in a folder.

  python -m launch.train --config=configs/digits_async.py --workdir=/tmp/a
  python -m launch.train --config=configs/mnist_delay.py --workdir=/tmp/b \
    --config.task.data_dir=DATA --config.protocol.delay=32
  python -m launch.train --config=configs/mnist_delay.py:smoke --workdir=/tmp/c

Each field of the config is a flag, --config.FIELD=VALUE; `:smoke` behind a
config's name is the same for a few seconds. Killed at any time and started
again, a run goes on from its last checkpoint and ends as if nothing had been.

The workdir gets `config.json`, `provenance.json`, `trace`, `metrics.jsonl`,
`tensorboard/`, `checkpoints/`, `result.json` and `report.html`. The weights:
`jasgd.load_params(workdir)`.
"""

import sys
from typing import Any

from absl import app
from absl import flags
from ml_collections import config_flags

from jasgd import experiment
from jasgd import reports
from launch import entry

_CONFIG = config_flags.DEFINE_config_file('config', None, 'What to train.')
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Where to write; made if it is not there.', required=True
)


def main() -> None:
  """Validates the config, trains, and writes a report."""
  config, workdir = _CONFIG.value, _WORKDIR.value
  entry.check_config(config, experiment.TrainingConfig)
  print(config.protocol.make().describe(), flush=True)
  try:
    result = experiment.train_and_evaluate(config, workdir)
  except ValueError as error:
    raise app.UsageError(str(error)) from None
  except KeyboardInterrupt:
    print(
      f'\nStopped. The same command goes on from the last checkpoint in '
      f'{workdir}.'
    )
    sys.exit(130)
  _print_result(result)
  print(f'Wrote {reports.write_report([workdir])}')


def _print_result(result: dict[str, Any]) -> None:
  """Prints how the run ended."""
  for name, value in result.items():
    is_number = isinstance(value, float)
    print(f'{name:24} {f"{value:.6g}" if is_number else value}')
  if result['is_diverged']:
    print(
      f'The loss was not finite before clock {result["clock"]}: at a staleness '
      f'of {result["server/staleness_mean"]:.1f} a rate of '
      f'{result["server/rate"]:g} is too large. A rule of thumb: divide the '
      'rate by the staleness, or set optimizer.policy=inverse.'
    )


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main)
