"""Strategies against a single learner, each at its own best rate."""

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from jasgd import experiment
from jasgd import workdir

pytestmark = pytest.mark.usefixtures('compile_once', 'quick_compiler')

ROOT = pathlib.Path(__file__).parent.parent.parent
BOUND = 0.02  # Largest loss of accuracy of a strategy, on the digits.
BASE_RATE = 2.0


def _make_config(num_epochs=6.0):
  """Four nodes on the digits, with a network that learns them fast."""
  return experiment.TrainingConfig(
    task=experiment.TaskConfig(name='digits', model='mlp', batch=32),
    optimizer=experiment.OptimizerConfig(rate=BASE_RATE, momentum=0.9),
    strategy=experiment.StrategyConfig(name='pull', rate=0.2),
    num_workers=4,
    network=experiment.NetworkConfig(latency=0.1),
    # Evaluated only at the end.
    runtime=experiment.RuntimeConfig(eval_every=10_000),
    num_epochs=num_epochs,
  )


def _check_choice(row, rows, tried):
  """The rate is the best one on the samples that were held out."""
  name = 'allreduce' if row.name == 'single' else row.name
  found = {
    each['optimizer.rate']: each['test/accuracy']
    for each in rows
    if 'seed' not in each
    and each['strategy.name'] == name
    and each['num_workers'] == row.num_workers
  }
  assert [*found] == tried
  assert found[row.rate] == max(found.values()) == row.validation
  assert row.multiple * BASE_RATE == pytest.approx(row.rate)
  edges = {min(tried): 'lowest', max(tried): 'highest'}
  assert row.edge == edges.get(row.rate, '')


def test_a_strategy_is_as_good_as_a_single_learner(tmp_path):
  rows = []
  settings = {'strategies': ['pull'], 'rates': [0.1, 0.03, 0.01]}
  compared = experiment.compare(
    _make_config(), tmp_path, num_seeds=2, on_row=rows.append, **settings
  )
  assert [row.name for row in compared] == ['single', 'pull']
  assert [row.num_workers for row in compared] == [1, 4]
  assert len(rows) == 2 * 3 + 2 * 2
  for row in compared:
    assert row.accuracy > 0.9
    assert row.difference >= -BOUND
    _check_choice(row, rows, [0.2, 0.06, 0.02])
  # The rate was not chosen on the test set, which has 360 samples.
  config = workdir.read_json(tmp_path / 'rates/config.json')['config']
  assert config['task']['validation'] == 0.1
  num_right = compared[0].validation * 144
  assert num_right == pytest.approx(round(num_right), abs=1e-3)
  # Finished runs are not repeated.
  again = experiment.compare(
    _make_config(),
    tmp_path,
    num_seeds=2,
    on_row=lambda row: pytest.fail('It trained.'),
    **settings,
  )
  assert again == compared


def test_a_strategy_that_is_below_and_a_rate_at_the_edge_are_said():
  row = experiment.Compared(
    name='pull',
    num_workers=8,
    rate=0.15,
    multiple=0.3,
    validation=0.95,
    accuracies=(0.94, 0.96),
    difference=-0.021,
    edge='highest',
  )
  below, warning = experiment.format_comparison([row], BOUND).splitlines()[1:]
  assert below.split()[:5] == ['pull', '8', '0.15', '0.3', '95.00%']
  assert below.endswith(' -2.10% below')
  assert warning == (
    'Warning: 0.15, the best rate of pull, is the highest that was tried.'
  )
  row = dataclasses.replace(row, difference=-0.019, edge='')
  (within,) = experiment.format_comparison([row], BOUND).splitlines()[1:]
  assert within.endswith(' -1.90% within')


@pytest.mark.slow
def test_a_rate_at_which_all_diverge_is_said(tmp_path):
  with pytest.raises(ValueError, match=r'at any of the rates .* all diverged'):
    experiment.compare(
      _make_config(1.0), tmp_path, strategies=['pull'], rates=[1e9]
    )


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'strategies': ['gossip']}, "got \\['gossip'\\]"),
    ({'strategies': ['pull', 'pull']}, 'each once'),
    ({'strategies': []}, r'got \[\]'),
    ({'rates': []}, 'rates must be'),
    ({'rates': [0.1, -1.0]}, r'got \[0\.1, -1\.0\]'),
    ({'rates': [0.1, 0.1]}, r'different numbers .* got \[0\.1, 0\.1\]'),
    ({'num_seeds': 0}, 'num_seeds must be at least 1, got 0'),
    ({'num_jobs': 0}, 'num_jobs must be at least 1, got 0'),
    ({'validation': 1.0}, r'validation must be .* got 1\.0'),
  ],
)
def test_what_makes_no_sense_is_refused(changes, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    experiment.compare(_make_config(), tmp_path / 'work', **changes)
  assert not (tmp_path / 'work').exists()


@pytest.mark.slow
def test_all_strategies_are_within_the_bound_on_digits(tmp_path):
  """The command of the config's note, with a small network and few runs."""

  def run(bound):
    return subprocess.run(
      [
        *(sys.executable, '-m', 'launch.compare', f'--workdir={tmp_path}'),
        '--config=configs/gossip_digits.py:compare',
        *('--config.task.model=mlp', '--config.num_epochs=20'),
        *('--config.optimizer.rate=0.5', '--rates=0.2', '--seeds=1'),
        *('--validation=0.2', '--jobs=2', f'--bound={bound}'),
      ],
      cwd=ROOT,
      timeout=600,
      capture_output=True,
      text=True,
    )

  names = ['single', *experiment.STRATEGIES]
  done = run(0.02)
  assert done.returncode == 0, done.stdout + done.stderr
  assert done.stdout.count(' within') == len(experiment.STRATEGIES)
  lines = done.stdout.splitlines()
  assert lines[0] == f'{2 * len(names)} runs of 20 epochs; rates are 0.2 x 0.5'
  assert sum('validation  accuracy' in line for line in lines) == len(names)
  assert sum('seed 0      accuracy' in line for line in lines) == len(names)
  table = [line.split() for line in lines if 'Warning' not in line]
  table = table[-len(names) - 1 :]
  assert [row[0] for row in table] == ['strategy', *names]
  assert float(table[1][5].rstrip('%')) > 93  # The single worker has learned.
  again = run(-1)  # No strategy is better by that much; nothing is trained.
  assert again.returncode == 1
  below = [line for line in again.stdout.splitlines() if line.endswith('below')]
  assert len(below) == len(experiment.STRATEGIES)
  assert '  accuracy' not in again.stdout
