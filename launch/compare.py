"""Compares ways to average with a single learner, at equal epochs.

  python -m launch.compare --config=configs/mnist_strategies.py:compare \
    --config.task.data_dir=DATA --workdir=/tmp/c --bound=0.005 --jobs=2

Each strategy, and the single learner, gets the rate that is best for it on a
part of the training set that is held out, of those that are --rates times the
config's own. At that rate each trains on all of the training set, with several
seeds. The table says by how much a strategy is worse than the single learner on
the test set, and whether that is within --bound; if not, the command fails. If
the best rate is the lowest or the highest of all, there may be a better one
beyond: a line says so, and --config.optimizer.rate moves all of them.

A line is printed as each run is done. Killed and started again, the command
goes on with what is not done.
"""

import sys
from typing import Any

from absl import app
from absl import flags
from ml_collections import config_flags

from jasgd import experiment
from launch import entry

_CONFIG = config_flags.DEFINE_config_file('config', None, 'What to train.')
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Where to write; made if it is not there.', required=True
)
_STRATEGIES = flags.DEFINE_list(
  'strategies', list(experiment.STRATEGIES), 'Which strategies.'
)
_RATES = flags.DEFINE_list(
  'rates',
  ['0.3', '0.1', '0.03', '0.01'],
  "Which rates to choose from, as multiples of the config's optimizer.rate.",
)
_SEEDS = flags.DEFINE_integer('seeds', 3, 'How many seeds.')
_VALIDATION = flags.DEFINE_float(
  'validation', 0.1, 'Which share of the training set to choose the rate on.'
)
_BOUND = flags.DEFINE_float(
  'bound', 0.005, 'By how much accuracy a strategy may be worse.'
)
_JOBS = flags.DEFINE_integer('jobs', 1, 'How many processes.')


def main() -> None:
  """Validates the config, trains all, and prints a table."""
  config = _CONFIG.value
  entry.check_config(config, experiment.NodeTrainingConfig)
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
  except ValueError as error:
    raise app.UsageError(str(error)) from None
  print(experiment.format_comparison(compared, _BOUND.value))
  below = [row.name for row in compared if row.difference < -_BOUND.value]
  if below:
    print(f'More than {_BOUND.value:.1%} below: {", ".join(below)}.')
    sys.exit(1)


def print_row(row: dict[str, Any]) -> None:
  """One line per run as it is done."""
  is_single = row['strategy.num_nodes'] == 1
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
