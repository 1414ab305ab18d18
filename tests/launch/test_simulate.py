"""`launch.simulate`: what it refuses, and what it leaves behind."""

import os
import pathlib
import subprocess
import sys

import pytest

import jasgd
from jasgd import experiment
from jasgd import reports
from jasgd import traces
from launch import simulate

pytestmark = pytest.mark.usefixtures('compile_once')

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIGS = {'a server': 'simulate_jain', 'nodes': 'simulate_gossip'}


def _run(config, workdir, *flags):
  return subprocess.run(
    [
      sys.executable,
      '-m',
      'launch.simulate',
      f'--config=configs/{config}.py',
      f'--workdir={workdir}',
      *flags,
    ],
    cwd=ROOT,
    timeout=300,
    capture_output=True,
    text=True,
    env=dict(os.environ),
  )


def _make(kind, path):
  """What `trace` is in a workdir."""
  if kind == 'nodes':
    path.mkdir()
    (path / 'node-0').write_text('kept')
    return path / 'node-0'
  path.write_text('kept')
  return path


@pytest.mark.slow
@pytest.mark.parametrize(
  ('found', 'wanted'), [('a server', 'nodes'), ('nodes', 'a server')]
)
def test_a_workdir_with_the_other_kind_of_trace(found, wanted, tmp_path):
  kept = _make(found, tmp_path / 'trace')
  done = _run(CONFIGS[wanted], tmp_path)
  assert done.returncode == 1
  message = f'holds a trace of {found}, and this one would be of {wanted}'
  assert message in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr
  assert 'wait' not in done.stdout  # It had not begun.
  assert kept.read_text() == 'kept'


@pytest.mark.slow
@pytest.mark.parametrize('below', ['', '/below'])
def test_a_workdir_that_cannot_be_made(below, tmp_path):
  (tmp_path / 'file').write_text('kept')
  done = _run('simulate_jain', f'{tmp_path}/file{below}')
  assert done.returncode == 1
  assert f'file{below} cannot be made' in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr
  assert 'wait' not in done.stdout


def test_nobody_lives_to_see_a_gradient(tmp_path):
  done = _run(
    'simulate_jain',
    tmp_path,
    '--config.protocol.num_learners=1',
    '--config.failures.given=((0.1, 0),)',
  )
  assert done.returncode == 0, done.stderr
  assert '10000 more gradients were asked for' in done.stdout
  trace = traces.Trace.load(tmp_path / 'trace')
  assert trace.num_gradients == 0
  assert len(trace) == 1
  assert trace.header['jasgd'] == jasgd.__version__
  for name in ('staleness.png', 'timeline.png'):
    assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
  ('config', 'plot', 'load'),
  [
    (
      experiment.SimulationConfig(num_gradients=20),
      'plot_staleness',
      traces.Trace.load,
    ),
    (
      experiment.NodeSimulationConfig(num_steps=2),
      'plot_ages',
      traces.NodeTrace.load,
    ),
  ],
)
def test_the_trace_is_saved_before_anything_is_drawn(
  config, plot, load, tmp_path, monkeypatch
):
  class Flag:
    def __init__(self, value):
      self.value = value

  def fail(*arguments):
    raise MemoryError(arguments)

  monkeypatch.setattr(simulate, '_CONFIG', Flag(config))
  monkeypatch.setattr(simulate, '_WORKDIR', Flag(tmp_path))
  monkeypatch.setattr(reports, plot, fail)
  with pytest.raises(MemoryError):
    simulate.main()
  assert len(load(tmp_path / 'trace'))
