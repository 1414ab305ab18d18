"""The line of progress, with a fake clock."""

import contextlib
import io

import pytest

from jasgd import workdir


class Time:
  """A fake clock that the test sets."""

  def __init__(self):
    self.seconds = 1000.0

  def __call__(self):
    return self.seconds


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def now():
  return Time()


def test_nodes_have_steps_and_ages(now):
  stream = io.StringIO()
  progress = workdir.Progress(10000, stream=stream, now=now, unit='steps')
  now.seconds += 2500 / 410
  progress.update(2500, age=1.26, max_age=4, loss=0.41)
  assert stream.getvalue() == (
    'steps 2500/10000 25%  410/s  ETA 18s  age 1.3 (max 4)  loss 0.41\n'
  )


def test_the_line_of_the_style_guide(now):
  stream = io.StringIO()
  progress = workdir.Progress(10000, stream=stream, now=now)
  now.seconds += 2500 / 410
  progress.update(2500, staleness=3.24, max_staleness=9, loss=0.41, acc=0.88)
  assert stream.getvalue() == (
    'clock 2500/10000 25%  410/s  ETA 18s  staleness 3.2 (max 9)  loss 0.41  '
    'acc 0.88\n'
  )


def test_a_log_has_a_line_every_few_seconds_and_one_at_the_end(now):
  stream = io.StringIO()
  with workdir.Progress(100, stream=stream, now=now) as progress:
    for clock in range(1, 101):
      now.seconds += 0.25
      progress.update(clock, loss=clock)
  assert stream.getvalue().splitlines() == [
    'clock 1/100 1%  4/s  ETA 25s  loss 1',
    *(
      f'clock {clock}/100 {clock}%  4/s  ETA {round(25 - clock / 4)}s'
      f'  loss {clock}'
      for clock in (21, 41, 61, 81)
    ),
    'clock 100/100 100%  4/s  took 25s  loss 100',
  ]
  assert stream.getvalue().endswith('\n')


def test_a_terminal_has_one_line_that_is_rewritten(now, monkeypatch):
  monkeypatch.setenv('COLUMNS', '60')
  stream = Terminal()
  progress = workdir.Progress(10, stream=stream, now=now)
  now.seconds += 1
  progress.update(1, name=1.0, long=123.0)
  now.seconds += 0.1
  progress.update(2)  # Too soon.
  now.seconds += 1
  progress.update(3)
  now.seconds += 1
  progress.update(4, staleness=1, **{'a' * 50: 1})
  progress.close()
  progress.close()
  empty, *lines = stream.getvalue().split('\r')
  assert empty == ''
  first, second, third, last = lines
  assert first == 'clock 1/10 10%  1/s  ETA 9s  name 1  long 123'
  assert second.rstrip() == 'clock 3/10 30%  1.43/s  ETA 5s'
  assert len(second) == len(first)  # It covers the whole first line.
  assert third.startswith('clock 4/10 40%  1.29/s  ETA 5s  staleness 1.0  aaa')
  assert len(third) == 59  # It does not wrap.
  assert last.startswith('clock 4/10 40%  1.29/s  took 3s  staleness 1.0  aaa')
  assert stream.getvalue().count('\n') == 1
  assert last.endswith('\n')


def test_pauses_are_not_in_the_rate_but_in_the_total(now):
  stream = io.StringIO()
  progress = workdir.Progress(100, stream=stream, now=now, interval=0)
  with progress.paused():
    now.seconds += 30
    with progress.paused():
      now.seconds += 30
    progress.update(0)
  now.seconds += 5
  with contextlib.suppress(KeyError), progress.paused():
    now.seconds += 10
    progress.update(50)
    raise KeyError
  now.seconds += 5
  progress.update(50)
  progress.close()
  assert stream.getvalue().splitlines() == [
    'clock 0/100 0%  ?/s  ETA ?',
    'clock 50/100 50%  10/s  ETA 5s',
    'clock 50/100 50%  5/s  ETA 10s',
    'clock 50/100 50%  5/s  took 1m20s',
  ]


def test_a_resumed_run_counts_its_own_updates(now):
  stream = io.StringIO()
  progress = workdir.Progress(1000, start=900, stream=stream, now=now)
  now.seconds += 10
  progress.update(950)
  assert stream.getvalue() == 'clock 950/1000 95%  5/s  ETA 10s\n'


def test_an_empty_run_and_numbers_that_are_none(now):
  stream = io.StringIO()
  with workdir.Progress(0, stream=stream, now=now) as progress:
    progress.update(0, loss=float('nan'))
  assert stream.getvalue().splitlines()[-1] == (
    'clock 0/0 100%  ?/s  took 0s  loss nan'
  )


def test_standard_error_is_the_default(now, capsys):
  with workdir.Progress(1, now=now):
    pass
  assert capsys.readouterr() == ('', 'clock 0/1 0%  ?/s  took 0s\n')


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [
    (0, '0s'),
    (59.4, '59s'),
    (59.6, '1m00s'),
    (200, '3m20s'),
    (3599.9, '1h00m'),
    (7500, '2h05m'),
    (86400 + 3 * 3600, '1d03h'),
  ],
)
def test_durations(seconds, text, now):
  stream = io.StringIO()
  with workdir.Progress(1, stream=stream, now=now):
    now.seconds += seconds
  assert stream.getvalue() == f'clock 0/1 0%  ?/s  took {text}\n'


@pytest.mark.parametrize(('start', 'total'), [(-1, 3), (4, 3)])
def test_a_wrong_start_is_refused(start, total):
  with pytest.raises(ValueError, match=f'got {start} and {total}'):
    workdir.Progress(total, start=start)
