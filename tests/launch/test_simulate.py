"""`launch.simulate`: what it refuses, and what it leaves behind."""

import pytest

import jasgd
from jasgd import reports
from jasgd import traces
from launch import simulate
from tests.experiment import cases


def _run(commands, workdir, *flags):
  return commands.run(
    'launch.simulate',
    '--config=configs/simulate_jain.py',
    f'--workdir={workdir}',
    *flags,
  )


def test_the_trace_of_real_nodes_is_not_replaced(commands, tmp_path):
  kept = tmp_path / 'trace' / 'node-0'
  kept.parent.mkdir()
  kept.write_text('kept')
  done = _run(commands, tmp_path)
  assert done.returncode == 1
  message = 'holds the trace of a real run of nodes: give another workdir'
  assert message in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr
  assert 'wait' not in done.stdout  # The simulation had not begun.
  assert kept.read_text() == 'kept'


@pytest.mark.parametrize('below', ['', '/below'])
def test_a_workdir_that_cannot_be_made(below, commands, tmp_path):
  (tmp_path / 'file').write_text('kept')
  done = _run(commands, f'{tmp_path}/file{below}')
  assert done.returncode == 1
  assert f'file{below} cannot be made' in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr
  assert 'wait' not in done.stdout


def test_a_run_whose_workers_all_die_is_refused(commands, tmp_path):
  done = _run(
    commands,
    tmp_path,
    '--config.num_workers=1',
    '--config.failures.given=((5.5, 0),)',
  )
  assert done.returncode == 1
  said = done.stdout + done.stderr
  assert 'All learners were gone after 5 gradients' in said
  assert 'Traceback' not in said


@pytest.mark.parametrize(
  ('name', 'plot', 'load'),
  [
    ('asynchronous', 'plot_staleness', traces.Trace.load),
    ('pull', 'plot_ages', traces.Trace.load),
  ],
)
def test_the_trace_is_saved_before_anything_is_drawn(
  name, plot, load, tmp_path, monkeypatch
):
  class Flag:
    def __init__(self, value):
      self.value = value

  def fail(*arguments):
    raise MemoryError(arguments)

  config = cases.make_config(name)
  monkeypatch.setattr(simulate, '_CONFIG', Flag(config))
  monkeypatch.setattr(simulate, '_WORKDIR', Flag(tmp_path))
  monkeypatch.setattr(reports, plot, fail)
  with pytest.raises(MemoryError):
    simulate.main()
  trace = load(tmp_path / 'trace')
  assert len(trace)
  assert trace.header['jasgd'] == jasgd.__version__
  assert trace.header['config']['strategy']['name'] == name
