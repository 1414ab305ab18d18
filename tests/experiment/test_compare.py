"""Strategies against a single learner, each at its own best rate."""

import pathlib
import subprocess
import sys

import pytest

from jasgd import experiment
from jasgd import workdir

ROOT = pathlib.Path(__file__).parent.parent.parent


def _make_config(num_epochs=12.0):
  """Four nodes on the digits, with a network that learns them fast."""
  return experiment.NodeTrainingConfig(
    task=experiment.TaskConfig(name='digits', model='mlp', batch=32),
    optimizer=experiment.OptimizerConfig(momentum=0.9),
    strategy=experiment.StrategyConfig(num_nodes=4, rate=0.2),
    network=experiment.NetworkConfig(latency=0.1),
    num_epochs=num_epochs,
  )


def test_gossip_and_all_reduce_are_as_good_as_a_single_learner(tmp_path):
  rows = []
  settings = {'strategies': ['allreduce', 'pull'], 'rates': [0.3, 0.1, 0.01]}
  compared = experiment.compare(
    _make_config(), tmp_path, num_seeds=2, on_row=rows.append, **settings
  )
  assert [row.name for row in compared] == ['single', 'allreduce', 'pull']
  assert [row.num_nodes for row in compared] == [1, 4, 4]
  assert len(rows) == 3 * 3 + 3 * 2
  for row in compared:
    assert row.accuracy > 0.95
    assert row.difference >= -0.02
    # The rate is the best one on what was held out.
    name = 'allreduce' if row.name == 'single' else row.name
    tried = {
      each['optimizer.rate']: each['test/accuracy']
      for each in rows
      if 'seed' not in each
      and each['strategy.name'] == name
      and each['strategy.num_nodes'] == row.num_nodes
    }
    assert [*tried] == settings['rates']
    assert tried[row.rate] == max(tried.values()) == row.validation
  # Whatever was chosen by was not the test set, of 360.
  config = workdir.read_json(tmp_path / 'rates/config.json')['config']
  assert config['task']['validation'] == 0.1
  num_right = compared[0].validation * 144
  assert num_right == pytest.approx(round(num_right), abs=1e-3)
  # What is done is not done again.
  again = experiment.compare(
    _make_config(),
    tmp_path,
    num_seeds=2,
    on_row=lambda row: pytest.fail('It trained.'),
    **settings,
  )
  assert again == compared


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
def test_the_command_in_two_processes(tmp_path):
  def run(*flags):
    return subprocess.run(
      [
        *(sys.executable, '-m', 'launch.compare', f'--workdir={tmp_path}'),
        '--config=configs/gossip_digits.py:simulate,smoke',
        *('--config.task.model=mlp', '--strategies=push_sum'),
        *('--rates=0.1,0.03', '--seeds=1', '--jobs=2', *flags),
      ],
      cwd=ROOT,
      timeout=300,
      capture_output=True,
      text=True,
    )

  done = run('--bound=1')
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0] == '6 runs of 1 epochs'
  assert sum('validation  accuracy' in line for line in lines) == 4
  assert sum('seed 0      accuracy' in line for line in lines) == 2
  table = [line.split()[0] for line in lines[-3:]]
  assert table == ['strategy', 'single', 'push_sum']
  again = run('--bound=-1')  # Nobody is better by that much.
  assert again.returncode == 1
  assert again.stdout.splitlines()[-1].endswith('below')
  assert len(again.stdout.splitlines()) == 4
