"""Heat maps and tables of sweeps."""

import pytest

from jasgd import reports

X, Y, PANEL = 'task.batch', 'optimizer.rate', 'protocol.delay'
VALUE = 'test/accuracy'


def _make_rows(delays=(0, 8), rates=(0.1, 0.01), batches=(128, 64)):
  return [
    {PANEL: delay, Y: rate, X: batch, VALUE: rate * batch / 100}
    for delay in delays
    for rate in rates
    for batch in batches
  ]


def _read_panel(axes):
  """The text of each cell by (row, column)."""
  return {
    (round(text.get_position()[1]), round(text.get_position()[0])): (
      text.get_text()
    )
    for text in axes.texts
  }


def test_cells_panels_and_order():
  rows = _make_rows()
  figure = reports.plot_heat_map(rows, x=X, y=Y, panels=PANEL)
  panels = figure.axes[:2]
  assert [axes.get_title() for axes in panels] == [
    f'{PANEL} = 0',
    f'{PANEL} = 8',
  ]
  for axes in panels:
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ['64', '128']
    assert _read_panel(axes) == {
      (0, 0): '.006',
      (0, 1): '.013',
      (1, 0): '.064',
      (1, 1): '.128',
    }
  ticks = [label.get_text() for label in panels[0].get_yticklabels()]
  assert ticks == ['0.01', '0.1']  # The other panel shares them.
  assert figure.axes[-1].get_ylabel() == VALUE


def test_one_panel_without_a_setting_for_it():
  figure = reports.plot_heat_map(_make_rows((0,)), x=X, y=Y)
  assert not figure.axes[0].get_title()
  assert len(figure.axes) == 2  # The other is the bar of colours.


@pytest.mark.parametrize('num_panels', [1, 2, 3, 4, 7])
def test_panels_that_are_left_over_are_empty(num_panels):
  rows = _make_rows(range(num_panels))
  figure = reports.plot_heat_map(rows, x=X, y=Y, panels=PANEL)
  drawn = [axes for axes in figure.axes[:-1] if axes.axison]
  assert len(drawn) == num_panels


def test_missing_cells_are_hatched():
  rows = _make_rows((0,))
  rows[0][VALUE] = None  # Batch 128 at rate 0.1: not finished.
  del rows[3][VALUE]  # Batch 64 at rate 0.01.
  axes = reports.plot_heat_map(rows, x=X, y=Y).axes[0]
  hatched = {
    (round(patch.get_y() + 0.5), round(patch.get_x() + 0.5))
    for patch in axes.patches
    if patch.get_hatch()
  }
  assert hatched == {(1, 1), (0, 0)}
  assert set(_read_panel(axes)) == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
  ('change', 'text'),
  [
    ({VALUE: float('nan')}, ''),
    ({VALUE: 'inf'}, ''),
    ({VALUE: '-inf'}, ''),
    ({VALUE: 0.1, 'is_diverged': True}, '.100'),
    ({VALUE: None, 'is_diverged': True}, ''),
  ],
)
def test_diverged_cells_are_crossed(change, text):
  rows = _make_rows((0,))
  rows[0] |= change
  axes = reports.plot_heat_map(rows, x=X, y=Y).axes[0]
  (cross,) = axes.lines
  assert cross.get_marker() == 'x'
  (x,), (y,) = cross.get_data()
  assert (round(y), round(x)) == (1, 1)
  assert _read_panel(axes)[1, 1] == text


def test_repeats_are_averaged_and_one_that_diverged_is_told():
  row = {X: 1, Y: 2}
  rows = [{**row, VALUE: value} for value in (0.2, 0.4, float('nan'))]
  for num_rows, is_diverged in ((3, True), (2, False)):
    axes = reports.plot_heat_map(rows[:num_rows], x=X, y=Y).axes[0]
    assert _read_panel(axes) == {(0, 0): '.300'}
    assert bool(axes.lines) == is_diverged


def test_only_runs_that_diverged():
  rows = [{X: 1, Y: 2, VALUE: 'nan'}]
  figure = reports.plot_heat_map(rows, x=X, y=Y)
  assert len(figure.axes[0].lines) == 1


@pytest.mark.parametrize('value', ['test/accuracy', 'test/loss'])
def test_brighter_is_better(value):
  rows = [{X: 1, Y: rate, value: rate} for rate in (0.1, 0.9)]
  axes = reports.plot_heat_map(rows, x=X, y=Y, value=value).axes[0]
  light = [sum(patch.get_facecolor()[:3]) for patch in axes.patches]
  assert (light[0] < light[1]) == (value == 'test/accuracy')
  inks = [text.get_color() for text in axes.texts]
  assert inks == (
    ['white', 'black'] if light[0] < light[1] else ['black', 'white']
  )


def test_settings_that_are_no_numbers():
  rows = [
    {X: batch, Y: name, VALUE: 1.0}
    for batch in ([1, 2], [0])
    for name in ('sgd', 'adam')
  ]
  axes = reports.plot_heat_map(rows, x=X, y=Y).axes[0]
  ticks = [label.get_text() for label in axes.get_yticklabels()]
  assert ticks == ['sgd', 'adam']
  assert len(axes.texts) == 4


def test_it_is_a_file(tmp_path):
  path = tmp_path / 'sweep.png'
  reports.plot_heat_map(_make_rows(), path, x=X, y=Y, panels=PANEL)
  assert path.read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
  ('rows', 'problem'),
  [
    ([], 'rows must be one or more runs, got none'),
    ([{X: 1}], f"Row 0 has no '{Y}'; it has {X}"),
    ([{X: 1, Y: 1, PANEL: 0}, {Y: 1, PANEL: 0}], f"Row 1 has no '{X}'"),
    ([{X: 1, Y: 1}], f"Row 0 has no '{PANEL}'"),
  ],
)
def test_bad_rows(rows, problem, tmp_path):
  with pytest.raises(ValueError, match=problem):
    reports.plot_heat_map(rows, tmp_path / 'a.png', x=X, y=Y, panels=PANEL)


@pytest.mark.parametrize(
  ('number', 'text'),
  [
    (0.97649, '.976'),
    (0.9999, '1.000'),
    (0.0, '.000'),
    (-0.5, '-.500'),
    (1.0, '1'),
    (2.3456, '2.35'),
    (123.4, '123'),
    (12345.0, '1.23e+04'),
  ],
)
def test_numbers_in_cells(number, text):
  axes = reports.plot_heat_map([{X: 1, Y: 2, VALUE: number}], x=X, y=Y).axes[0]
  assert _read_panel(axes) == {(0, 0): text}


def test_table():
  rows = [
    {'name': 'sgd', 'rate': 0.123456, 'steps': 1000, 'list': [1, 2]},
    {'name': 'momentum', 'steps': 7, 'rate': float('nan')},
  ]
  assert reports.format_table(
    rows, ['name', 'rate', 'steps', 'list']
  ).splitlines() == [
    'name        rate  steps    list',
    'sgd       0.1235   1000  [1, 2]',
    'momentum     nan      7       –',
  ]
  assert reports.format_table([], ['name']) == 'name'


@pytest.mark.parametrize(
  ('columns', 'problem'),
  [
    ([], 'columns must be one or more names, got none'),
    (['b'], "No row has the column 'b'; they have a"),
  ],
)
def test_bad_columns(columns, problem):
  with pytest.raises(ValueError, match=problem):
    reports.format_table([{'a': 1}], columns)
