"""The entry points, run as people run them."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jasgd import traces

pytestmark = pytest.mark.usefixtures('compile_once', 'quick_compiler')

ROOT = pathlib.Path(__file__).parent.parent.parent


def _run(*arguments, cwd=ROOT, timeout=300, **environment):
  """Runs a program in a process of its own."""
  return subprocess.run(
    arguments,
    cwd=cwd,
    timeout=timeout,
    capture_output=True,
    text=True,
    env={**os.environ, **environment},
  )


@pytest.mark.parametrize(
  'module',
  ['benchmark', 'compare', 'replay', 'report', 'simulate', 'sweep', 'train'],
)
def test_help_helps(module, commands):
  done = commands.run(f'launch.{module}', '--help')
  assert f'python -m launch.{module} --' in done.stdout  # An example.
  assert '--workdir' in done.stdout or '--suite' in done.stdout


def test_simulate_writes_a_trace_and_pictures(commands, tmp_path):
  done = commands.run(
    'launch.simulate',
    '--config=configs/simulate_jain.py',
    f'--workdir={tmp_path}/work',
    '--config.num_updates=500',
    '--config.strategy.name=softsync',
    '--config.strategy.n=4',
  )
  assert done.returncode == 0, done.stderr
  assert 'softsync(4)' in done.stdout
  trace = traces.Trace.load(tmp_path / 'work/trace')
  assert trace.num_updates == 500
  assert trace.header['config']['strategy']['name'] == 'softsync'
  assert f'mean {trace.staleness[: 4 * trace.num_updates].mean():.2f}' in (
    done.stdout
  )
  for name in ('staleness.png', 'timeline.png'):
    assert (tmp_path / 'work' / name).read_bytes().startswith(b'\x89PNG')


def test_simulate_refuses_a_bad_config(commands, tmp_path):
  done = commands.run(
    'launch.simulate',
    '--config=configs/simulate_jain.py',
    f'--workdir={tmp_path}',
    '--config.strategy.name=hardsink',
    '--config.time.arguments=(-1.0, 0.2)',
    '--config.num_updates=-1',
  )
  assert done.returncode == 1
  for problem in (
    "Unknown strategy 'hardsink'. Known: asynchronous",
    'mean must be finite and above 0, got -1.0',
    'num_updates must be at least 0, got -1',
  ):
    assert problem in done.stdout + done.stderr


def test_simulate_nodes_writes_traces_and_pictures(commands, tmp_path):
  done = commands.run(
    'launch.simulate',
    '--config=configs/simulate_gossip.py',
    f'--workdir={tmp_path}/work',
    '--config.num_updates=800',
    '--config.strategy.name=pairs',
    '--config.strategy.peers=random_matching',
    '--config.failures.mean_time_between=40',
  )
  assert done.returncode == 0, done.stderr
  assert 'pairs(1)' in done.stdout
  trace = traces.Trace.load(tmp_path / 'work/trace')
  ends = trace.records[trace.records['kind'] == traces.Kind.END]
  assert set(ends['step'].tolist()) == {50}  # Some are dead by then.
  assert trace.header['config']['strategy']['peers'] == 'random_matching'
  for name in ('ages.png', 'timeline.png'):
    assert (tmp_path / 'work' / name).read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
def test_local_sh_on_a_fresh_checkout(tmp_path):
  """Clones the last commit, and runs the first command of the README."""
  checkout = tmp_path / 'jasgd'
  done = _run('git', 'clone', '--quiet', str(ROOT), str(checkout))
  assert done.returncode == 0, done.stderr
  for attempt in ('first', 'again'):
    done = _run(
      './launch/local.sh',
      f'--workdir={tmp_path}/{attempt}',
      *(['--config.num_epochs=1'] if attempt == 'again' else []),
      cwd=checkout,
      timeout=900,
      JASGD_VENV='.venv',
      PYTHON=sys.executable,
      PIP_NO_COMPILE='no',  # Do not compile; pip reads it as `compile=no`.
    )
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r'^test/accuracy +(\S+)$', done.stdout, re.M)
    assert attempt == 'again' or float(accuracy[1]) > 0.9
    assert (tmp_path / attempt / 'report.html').exists()
    # The second time everything is installed already.
    assert ('pip install' in done.stdout) == (attempt == 'first')
  assert (checkout / '.venv/bin/python').exists()
  shutil.rmtree(checkout)
