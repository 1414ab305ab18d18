"""Compares peer strategies with a single worker, at equal epochs.

  python -m launch.compare --config=configs/mnist_strategies.py:compare \
    --config.task.data_dir=DATA --workdir=/tmp/c --bound=0.005 --jobs=2

  python -m launch.compare --config=configs/gossip_digits.py:compare \
    --workdir=/tmp/d --bound=0.02 --validation=0.2

The rate is chosen for each strategy, and for the single worker: the best one on
a part of the training set that is held out, among --rates times the config's
own. At that rate each trains on the whole training set, with several seeds. The
table shows by how much a strategy is worse than the single worker on the test
set, and whether that is within --bound; if not, the exit code is 1. If the best
rate is the lowest or the highest that was tried, there may be a better one
beyond: a line warns of it, and --config.optimizer.rate scales all of them.

One line is printed for each finished run. Killed and started again, the command
skips finished runs.
"""

import sys
from typing import Any

from absl import app
from absl import flags
from ml_collections import config_flags

from jasgd import experiment
from launch import entry

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The training run.')
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'Folder of the results; it is made if it does not exist.',
  required=True,
)
_STRATEGIES = flags.DEFINE_list(
  'strategies', list(experiment.STRATEGIES), 'Names of the strategies.'
)
_RATES = flags.DEFINE_list(
  'rates',
  ['0.3', '0.1', '0.03', '0.01'],
  "Rates to choose from, as multiples of the config's optimizer.rate.",
)
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Number of seeds.')
_VALIDATION = flags.DEFINE_float(
  'validation', 0.1, 'Share of the training set that the rate is chosen on.'
)
_BOUND = flags.DEFINE_float(
  'bound', 0.005, 'Largest loss of accuracy that is allowed.'
)
_JOBS = flags.DEFINE_integer('jobs', 1, 'Number of processes.')


def main() -> None:
  """Validates the config, trains all, and prints a table."""
  config = _CONFIG.value
  entry.check_config(config)
  try:
    rates = [float(rate) for rate in _RATES.value]
    num_runs = (1 + len(_STRATEGIES.value)) * (len(rates) + _SEEDS.value)
    print(
      f'{num_runs} runs of {config.num_epochs:g} epochs; rates are '
      f'{", ".join(_RATES.value)} x {config.optimizer.rate:g}',
      flush=True,
    )
    compared = experiment.compare(
      config,
      _WORKDIR.value,
      strategies=_STRATEGIES.value,
      rates=rates,
      num_seeds=_SEEDS.value,
      validation=_VALIDATION.value,
      num_jobs=_JOBS.value,
      on_row=print_row,
    )
  except (FileNotFoundError, ValueError) as error:
    raise app.UsageError(str(error)) from None
  print(experiment.format_comparison(compared, _BOUND.value))
  below = [row.name for row in compared if row.difference < -_BOUND.value]
  if below:
    print(f'More than {_BOUND.value:.1%} below: {", ".join(below)}.')
    sys.exit(1)


def print_row(row: dict[str, Any]) -> None:
  """Prints one line for a finished run."""
  is_single = row['num_workers'] == 1
  name = 'single' if is_single else row['strategy.name']
  what = f'seed {row["seed"]}' if 'seed' in row else 'validation'
  accuracy = row.get('test/accuracy', float('nan'))
  end = '  diverged' if row['is_diverged'] else ''
  print(
    f'{name:<9}  rate {row["optimizer.rate"]:<5.3g}  {what:<10}  '
    f'accuracy {accuracy:.4f}{end}',
    flush=True,
  )


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main)
