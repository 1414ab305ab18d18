"""The entry points, run as people run them."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jasgd import traces
from launch import digits
from launch.benchmarks import timing

ROOT = pathlib.Path(__file__).parent.parent.parent


def _run(*arguments, cwd=ROOT, timeout=300, **environment):
  return subprocess.run(
    arguments,
    cwd=cwd,
    timeout=timeout,
    capture_output=True,
    text=True,
    env={**os.environ, **environment},
  )


def _train(*arguments):
  return _run(
    sys.executable,
    '-m',
    'launch.train',
    '--config=configs/digits_delay.py',
    *arguments,
  )


def test_train_prints_a_table_and_draws_it(tmp_path):
  picture = tmp_path / 'delay.png'
  done = _train(
    '--config.delays=0,32', '--config.num_epochs=8', f'--plot={picture}'
  )
  assert done.returncode == 0, done.stderr
  assert not done.stderr
  assert picture.read_bytes().startswith(b'\x89PNG')
  lines = done.stdout.splitlines()
  assert lines[1].split() == ['delay', '0', '32']
  rows = {
    match[1]: (float(match[2]), float(match[3]))
    for line in lines
    if (match := re.match(r'(.*?) +(0\.\d{3}|1\.000) (\S+) +\S+ s$', line))
  }
  assert set(rows) == set(digits.ROWS)
  assert all(without_delay > 0.9 for without_delay, _ in rows.values())
  assert rows['sgd'][1] < 0.5 < 0.6 < rows['sgd / staleness'][1]
  # Another process gets the same numbers.
  config = digits.Config(delays=(0, 32), num_epochs=8)
  accuracies = digits.train_row(config, 'sgd')
  np.testing.assert_allclose(accuracies, rows['sgd'], atol=5.1e-4)


def test_train_refuses_a_bad_config():
  done = _train('--config.rate=-1', '--config.batch=0', '--config.momentum=2')
  assert done.returncode == 1
  for problem in (
    'rate must be finite and above 0, got -1.0',
    'batch must be from 1 to 1437, got 0',
    'momentum must be in [0, 1), got 2.0',
  ):
    assert problem in done.stderr + done.stdout


@pytest.mark.parametrize(
  ('changes', 'problem'),
  [
    ({'delays': ()}, 'delays must be one or more whole numbers'),
    ({'delays': ('abc',)}, 'delays must be one or more whole numbers'),
    ({'delays': (0.5,)}, 'delays must be one or more whole numbers'),
    ({'rate': float('inf')}, 'rate must be finite'),
    ({'num_epochs': 0}, 'num_epochs must be at least 1, got 0'),
    ({'seed': -1}, 'seed must be at least 0, got -1'),
  ],
)
def test_bad_configs_are_named(changes, problem):
  with pytest.raises(ValueError, match=problem):
    digits.Config(**changes).validate()


@pytest.mark.parametrize(
  ('flag', 'problem'),
  [
    ('--plot=no_such_folder/x.png', "no folder for 'no_such_folder/x.png'"),
    ('--plot=x.foo', "must end in .pdf, .png or .svg, got 'x.foo'"),
    ('--config=configs/simulate_jain.py', 'must be a Config, got a Simulation'),
    ('--config=configs/nothing.py', 'nothing.py'),
    ('--config.nothing=1', 'Field nothing not found'),
  ],
)
def test_bad_flags_are_named_in_a_line(flag, problem):
  done = _train(flag)
  assert done.returncode == 1
  assert problem in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr


@pytest.mark.parametrize('suite', ['delay', 'import', 'simulator'])
def test_benchmark(suite):
  done = _run(
    sys.executable, '-m', 'launch.benchmark', f'--suite={suite}', '--quick'
  )
  assert done.returncode == 0, done.stderr
  table = done.stdout.splitlines()
  if suite == 'delay':
    rows = [line for line in table if re.search(r' (step|scan) +\d', line)]
    assert len(rows) == 2 * 2 * 3
  else:
    last = {'import': 'all of jasgd', 'simulator': 'asynchronous, shared link'}[
      suite
    ]
    assert table[-1].startswith(last)


def test_benchmark_wants_a_suite():
  done = _run(sys.executable, '-m', 'launch.benchmark')
  assert done.returncode != 0
  assert '--suite' in done.stderr


def test_help_helps():
  done = _run(sys.executable, '-m', 'launch.train', '--help')
  assert '--config.delays=0,8,64' in done.stdout
  assert '--plot' in done.stdout


def test_timing_takes_the_best_turn():
  calls = []

  def step(value):
    calls.append(value)
    return (value + 1,)

  program = timing.Program(step, (0,), num_steps=4, num_warm_up=10)
  program.warm_up(seconds_per_turn=0)
  assert len(calls) == 3 + 5  # 10 steps are 3 calls; then 5 of one call.
  times = timing.measure_in_turns(
    {'a': program, 'b': timing.Program(step, (0,), 1)}, 2, 0.0
  )
  assert set(times) == {'a', 'b'}
  assert 0 < times['a'] < 1


def test_simulate_writes_a_trace_and_pictures(tmp_path):
  done = _run(
    sys.executable,
    '-m',
    'launch.simulate',
    '--config=configs/simulate_jain.py',
    f'--workdir={tmp_path}/work',
    '--config.num_gradients=2000',
    '--config.protocol.name=softsync',
    '--config.protocol.n=4',
  )
  assert done.returncode == 0, done.stderr
  assert 'softsync(4)' in done.stdout
  trace = traces.Trace.load(tmp_path / 'work/trace')
  assert trace.num_gradients == 2000
  assert trace.header['config']['protocol']['name'] == 'softsync'
  assert f'mean {trace.staleness[: 4 * trace.num_updates].mean():.2f}' in (
    done.stdout
  )
  for name in ('staleness.png', 'timeline.png'):
    assert (tmp_path / 'work' / name).read_bytes().startswith(b'\x89PNG')


def test_simulate_refuses_a_bad_config(tmp_path):
  done = _run(
    sys.executable,
    '-m',
    'launch.simulate',
    '--config=configs/simulate_jain.py',
    f'--workdir={tmp_path}',
    '--config.protocol.name=hardsink',
    '--config.time.arguments=(-1.0, 0.2)',
    '--config.num_gradients=0',
  )
  assert done.returncode == 1
  for problem in (
    "Unknown protocol 'hardsink'. Known: asynchronous",
    'mean must be finite and above 0, got -1.0',
    'num_gradients must be at least 1, got 0',
  ):
    assert problem in done.stdout + done.stderr


def test_simulate_nodes_writes_traces_and_pictures(tmp_path):
  done = _run(
    sys.executable,
    '-m',
    'launch.simulate',
    '--config=configs/simulate_gossip.py',
    f'--workdir={tmp_path}/work',
    '--config.num_steps=50',
    '--config.strategy.name=pairs',
    '--config.strategy.peers=random_matching',
    '--config.failures.mean_time_between=40',
  )
  assert done.returncode == 0, done.stderr
  assert 'pairs(1)' in done.stdout
  trace = traces.NodeTrace.load(tmp_path / 'work/trace')
  assert len(trace.steps) == 16 * 50
  assert trace.header['config']['strategy']['peers'] == 'random_matching'
  for name in ('ages.png', 'timeline.png'):
    assert (tmp_path / 'work' / name).read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
def test_local_sh_on_a_fresh_checkout(tmp_path):
  """Clones what is committed, and runs the first command of the README."""
  checkout = tmp_path / 'jasgd'
  done = _run('git', 'clone', '--quiet', str(ROOT), str(checkout))
  assert done.returncode == 0, done.stderr
  for attempt in ('first', 'again'):
    done = _run(
      './launch/local.sh',
      '--config.num_epochs=1',
      cwd=checkout,
      timeout=900,
      JASGD_VENV='.venv',
      PYTHON=sys.executable,
    )
    assert done.returncode == 0, done.stderr
    assert 'Test accuracy on digits after 1 epochs' in done.stdout
    # The second time everything is there already.
    assert ('pip install' in done.stdout) == (attempt == 'first')
  assert (checkout / '.venv/bin/python').exists()
  shutil.rmtree(checkout)


@pytest.mark.slow
def test_the_table_in_the_readme_is_what_is_printed():
  """Where a network learns, that is: collapsed ones differ by machine."""
  readme = (ROOT / 'README.md').read_text()
  for name in digits.ROWS:
    cells = re.search(rf'^\| {re.escape(name)} \|(.*)\|$', readme, re.M).group(
      1
    )
    expected = np.array([float(cell) for cell in cells.split('|')])
    actual = digits.train_row(digits.Config(), name)
    learns = expected > 0.9
    assert learns[:3].all()
    np.testing.assert_allclose(actual[learns], expected[learns], atol=0.03)
