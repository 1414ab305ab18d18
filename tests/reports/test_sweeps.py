"""Which axis of a sweep goes where."""

import itertools

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


@pytest.mark.parametrize('num_axes', [1, 2, 3, 4])
def test_pictures_of_a_sweep(num_axes, tmp_path, monkeypatch):
  calls = []

  def plot(rows, path, **arguments):
    calls.append((len(rows), path.name, arguments))

  monkeypatch.setattr(reports._heat_maps, 'plot_heat_map', plot)
  names = list(AXES)[:num_axes]
  paths = reports.plot_sweep(
    _make_rows(names), tmp_path, [[name] for name in names]
  )
  assert [path.name for path in paths] == [name for _, name, _ in calls]
  if num_axes == 1:
    ((count, name, arguments),) = calls
    assert (count, name) == (2, 'heat_map.png')
    assert (arguments['x'], arguments['y']) == ('optimizer.rate', '')
  else:
    for _, _, arguments in calls:
      assert arguments['y'] == 'optimizer.rate'
      assert arguments['x'] == 'task.batch'
      has_panels = num_axes > 2
      assert arguments['panels'] == ('protocol.delay' if has_panels else None)
    counts = [count for count, _, _ in calls]
    assert counts == ([12, 12] if num_axes == 4 else [2 * 3 * (num_axes - 1)])
  if num_axes == 4:
    names = [path.name for path in paths]
    assert names == ['heat_map_0.png', 'heat_map_1.png']


def test_one_axis_can_be_drawn(tmp_path):
  (path,) = reports.plot_sweep(
    _make_rows(['optimizer.rate']), tmp_path, [['optimizer.rate']]
  )
  assert path.read_bytes().startswith(b'\x89PNG')


def test_without_the_value_there_is_no_picture(tmp_path):
  rows = _make_rows(['seed'])
  assert reports.plot_sweep(rows, tmp_path, [['seed']], value='speed') == []


def test_fields_that_change_together_are_one_axis(tmp_path, monkeypatch):
  seen = []
  monkeypatch.setattr(
    reports._heat_maps,
    'plot_heat_map',
    lambda rows, path, **arguments: seen.append((rows, arguments)),
  )
  names = ['optimizer.rate', 'task.batch', 'seed']
  reports.plot_sweep(_make_rows(names), tmp_path, [names[:2], names[2:]])
  ((rows, arguments),) = seen
  joined = 'rate, batch'
  assert (arguments['y'], arguments['x']) == (joined, 'seed')
  assert rows[0][joined] == '0.1 16'
