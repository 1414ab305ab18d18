"""The place of each axis of a sweep in the heat maps."""

import itertools

from matplotlib import figure as mpl_figure
import pytest

from jasgd import reports

AXES = {
  'optimizer.rate': (0.1, 0.2),
  'task.batch': (16, 32, 64),
  'protocol.delay': (0, 8),
  'seed': (0, 1),
}


def _make_rows(names):
  points = itertools.product(*(AXES[name] for name in names))
  return [
    {**dict(zip(names, point, strict=True)), 'test/accuracy': 0.5}
    for point in points
  ]


@pytest.fixture
def figures(monkeypatch):
  """The pictures that are drawn, by the names of their files."""
  found = {}

  def save(figure, path, **options):
    del options
    found[path.name] = figure

  monkeypatch.setattr(mpl_figure.Figure, 'savefig', save)
  return found


def _read_labels(figure):
  """The fields across, down, and of the panels; '' if there is none."""
  titles = {axes.get_title().partition(' = ')[0] for axes in figure.axes}
  return figure.get_supxlabel(), figure.get_supylabel(), max(titles)


def _count_cells(figure):
  return sum(len(axes.texts) for axes in figure.axes)


@pytest.mark.parametrize('num_axes', [1, 2, 3, 4])
def test_pictures_of_a_sweep(num_axes, tmp_path, figures):
  names = list(AXES)[:num_axes]
  paths = reports.plot_sweep(
    _make_rows(names), tmp_path, [[name] for name in names]
  )
  assert [path.name for path in paths] == list(figures)
  rate, batch, delay, _ = AXES
  for figure in figures.values():
    assert _read_labels(figure) == (
      (rate, '', '')
      if num_axes == 1
      else (batch, rate, delay if num_axes > 2 else '')
    )
  counts = {1: [2], 2: [6], 3: [12], 4: [12, 12]}
  assert [*map(_count_cells, figures.values())] == counts[num_axes]
  assert list(figures) == (
    ['heat_map_0.png', 'heat_map_1.png'] if num_axes == 4 else ['heat_map.png']
  )


def test_one_axis_can_be_drawn(tmp_path):
  (path,) = reports.plot_sweep(
    _make_rows(['optimizer.rate']), tmp_path, [['optimizer.rate']]
  )
  assert path.read_bytes().startswith(b'\x89PNG')


def test_without_the_value_there_is_no_picture(tmp_path):
  rows = _make_rows(['seed'])
  assert reports.plot_sweep(rows, tmp_path, [['seed']], value='speed') == []


def test_fields_that_change_together_are_one_axis(tmp_path, figures):
  names = ['optimizer.rate', 'task.batch', 'seed']
  reports.plot_sweep(_make_rows(names), tmp_path, [names[:2], names[2:]])
  (figure,) = figures.values()
  assert _read_labels(figure) == ('seed', 'rate, batch', '')
  assert figure.axes[0].get_yticklabels()[0].get_text() == '0.1 16'
