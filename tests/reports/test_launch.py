"""`python -m launch.report`, run as people run it."""

import pytest

from tests.reports import cases


def test_several_workdirs(commands, tmp_path):
  runs = [
    cases.write_run(
      tmp_path / f'run{rate}', cases.make_config(rate), cases.simulate()
    )
    for rate in (1, 2)
  ]
  page = tmp_path / 'compare.html'
  done = commands.run(
    'launch.report', f'--workdir={runs[0]},{runs[1]}', f'--output={page}'
  )
  assert done.returncode == 0, done.stderr
  assert not done.stderr
  assert f'Wrote {page}' in done.stdout
  labels = cases.Page(page).tables['Settings'][0][1:]
  assert labels == ['optimizer.rate=1', 'optimizer.rate=2']


@pytest.mark.parametrize(
  ('arguments', 'problem'),
  [
    ((), '--workdir'),
    (('--workdir=no/such/run',), "There is no workdir 'no/such/run'"),
    (('--workdir=a,b',), '--output is needed for 2 workdirs'),
  ],
)
def test_bad_flags_are_named_in_a_line(arguments, problem, commands):
  done = commands.run('launch.report', *arguments)
  assert done.returncode == 1
  assert problem in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr


def test_help_helps(commands):
  done = commands.run('launch.report', '--help')
  assert '--workdir=/tmp/a,/tmp/b,/tmp/c --output=compare.html' in done.stdout
  assert '--output' in done.stdout
