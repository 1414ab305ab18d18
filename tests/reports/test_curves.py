"""Pictures of metrics and of staleness: their lines and panels."""

import dataclasses

from matplotlib import figure as mpl_figure
import numpy as np
import pytest

from jasgd import reports
from jasgd import traces
from jasgd.reports import _curves
from jasgd.reports import _figures
from jasgd.reports import _formats
from jasgd.reports import _runs
from jasgd.reports import _staleness
from jasgd.reports import _workers
from tests.reports import cases


def _read(root, lines):
  return _runs.read_run(cases.write_run(root, {}, lines=lines))


def _get_lines(axes, style):
  return [
    line
    for line in axes.lines
    if line.get_linestyle() == style and len(line.get_xdata())
  ]


def test_each_quantity_against_epoch_and_time(tmp_path):
  run = _read(tmp_path, cases.make_lines())
  figure = _curves.draw_curves([run])
  grid = np.reshape(figure.axes, (-1, 2))
  assert [row[0].get_ylabel() for row in grid] == [
    'loss',
    'test accuracy',
    'staleness',
    "policy's factor",
    'gap |w - w_read|',
  ]
  labels = [axes.get_xlabel() for axes in grid[-1]]
  assert labels == ['epoch', 'time (s)']
  for column, xs in ((0, [0.5, 1, 1.5, 2]), (1, [5, 10, 15, 20])):
    (train,) = _get_lines(grid[0, column], '-')
    assert train.get_xdata().tolist() == xs
    assert train.get_ydata().tolist() == pytest.approx([2, 1, 2 / 3, 0.5])
    (test,) = _get_lines(grid[0, column], '--')
    assert test.get_xdata().tolist() == xs[1::2]
    (largest,) = _get_lines(grid[2, column], ':')
    assert largest.get_ydata().tolist() == [4] * 4


def test_without_epochs_and_time_the_clock(tmp_path):
  run = _read(tmp_path, [(10, {'train/loss': 1.0}), (20, {'train/loss': 0.5})])
  (axes,) = _curves.draw_curves([run]).axes
  assert axes.get_xlabel() == 'clock'
  assert axes.lines[0].get_xdata().tolist() == [10, 20]


@pytest.mark.parametrize(
  'lines', [[], [(1, {'other/metric': 1.0})], [(1, {'train/loss': np.nan})]]
)
def test_nothing_to_draw(lines, tmp_path):
  assert _curves.draw_curves([_read(tmp_path, lines)]) is None


def test_several_runs_share_axes_and_the_one_that_diverged_is_marked(tmp_path):
  lines = list(cases.make_lines())
  bad = [*lines[:2], (30, {'epoch': 1.5, 'train/loss': float('nan')})]
  for name, rows in (('good', lines), ('bad', bad)):
    cases.write_run(tmp_path / name, {}, lines=rows)
  runs = _runs.read_runs([tmp_path / 'good', tmp_path / 'bad'])
  figure = _curves.draw_curves(runs)
  texts = [text.get_text() for text in figure.legends[0].get_texts()]
  assert texts == ['good', 'bad', 'diverged']
  lines = _get_lines(figure.axes[0], '-')
  assert [len(line.get_xdata()) for line in lines] == [4, 2]
  colors = [line.get_color() for line in lines]
  assert len({*colors}) == 2
  (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == 'x']
  assert cross.get_xydata().tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
  ('losses', 'scale'),
  [
    ((1.0, 0.5), 'linear'),
    ((1.0, 0.001), 'log'),
    ((1.0, 0.001, 0.0), 'symlog'),
    ((0.0, 0.0), 'linear'),
    ((1e30, 1.0), 'log'),
  ],
)
def test_scales(losses, scale, tmp_path):
  rows = [(clock, {'train/loss': loss}) for clock, loss in enumerate(losses, 1)]
  (axes,) = _curves.draw_curves([_read(tmp_path, rows)]).axes
  assert axes.get_yscale() == scale


@pytest.mark.parametrize('number', [1, 8, 9, 40])
def test_every_run_has_a_colour_of_its_own(number):
  assert len({*_figures.pick_colors(number)}) == number


def test_staleness_of_several_runs():
  labelled = [
    (cases.simulate(name), name) for name in ('hardsync', 'softsync', 'backup')
  ]
  figure = _staleness.draw_several(labelled)
  outlines = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
  for outline, (trace, name) in zip(outlines, labelled, strict=True):
    histogram = traces.summarize(trace).staleness.histogram
    shares = outline.get_data().values
    assert shares.sum() == pytest.approx(1)
    assert shares[: len(histogram)] == pytest.approx(
      histogram / histogram.sum()
    )
    mean = traces.summarize(trace).staleness.mean
    assert outline.get_label() == f'{name} (mean {mean:.2f})'


@pytest.mark.parametrize('name', cases.PROTOCOLS)
def test_staleness_of_one_run_applied_and_dropped(name):
  trace = cases.simulate(name)
  summary = traces.summarize(trace)
  axes = reports.plot_staleness(trace).axes[0]
  heights = sum(patch.get_height() for patch in axes.patches)
  assert heights == summary.num_gradients
  assert f'mean {summary.staleness.mean:.2f}, ' in axes.get_title()
  texts = {text.get_text() for text in axes.get_legend().get_texts()}
  has_drops = any(
    count for fate, count in summary.fates.items() if fate.name[:4] == 'DROP'
  )
  expected = {'applied'} | ({'dropped'} if has_drops else set())
  if summary.fates[traces.Fate.PENDING]:
    expected.add('pending')
  assert texts == expected


@pytest.mark.parametrize(
  'plot', [reports.plot_staleness, reports.plot_timeline]
)
def test_a_trace_without_gradients(plot, tmp_path):
  trace = traces.Trace(traces.make_records(kind=[traces.Kind.JOIN]))
  plot(trace, tmp_path / 'picture.png')
  assert (tmp_path / 'picture.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize('num_learners', [6, 100])
def test_shares_of_learners(num_learners, tmp_path):
  clocks = np.arange(3 * num_learners)
  records = traces.make_records(
    worker=clocks * clocks % num_learners,
    clock=clocks,
    compute_time=1.0,
    end_time=2.0,
  )
  trace = traces.Trace(records, {'num_workers': num_learners})
  run = _runs.read_run(cases.write_run(tmp_path, {}, trace))
  workers = traces.summarize(trace).workers
  left, right = _workers.draw_workers([run]).axes
  for axes, expected in (
    (left, workers.num_applied / len(clocks)),
    (right, workers.times.busy / 2),
  ):
    if num_learners <= 64:
      heights = [bar.get_height() for bar in axes.patches[:num_learners]]
    else:
      heights = axes.patches[0].get_data().values
    assert heights == pytest.approx(expected)


def test_shares_without_a_trace(tmp_path):
  run = _read(tmp_path, cases.make_lines())
  assert _workers.draw_workers([run]) is None


def test_a_long_label_does_not_squeeze_the_axes(tmp_path):
  runs = [
    _runs.read_run(cases.write_run(tmp_path / name, {}, cases.simulate()))
    for name in ('a', 'b')
  ]
  figures = [
    _workers.draw_workers(
      [dataclasses.replace(run, label=label) for run in runs]
    )
    for label in ('a', 'a' * 150)
  ]
  widths = [_measure_width(figure) for figure in figures]
  assert widths[0] == pytest.approx(widths[1], rel=0.01)


def _measure_width(figure: mpl_figure.Figure) -> float:
  figure.draw_without_rendering()
  return figure.axes[0].get_position().width


def test_curves_of_elastic_averaging_have_centre_and_nodes(tmp_path):
  losses = {
    f'{name}/loss': 1.0 for name in ('train', 'test', 'centre', 'local')
  }
  names = ('consensus_error', 'age_mean', 'age_max', 'lag_mean')
  others = {f'gossip/{name}': 0.5 for name in names}
  lines = [(n, {'epoch': n, **losses, **others}) for n in (1, 2, 4)]
  figure = _curves.draw_curves([_read(tmp_path, lines)])
  labels = [axes.get_ylabel() for axes in figure.axes]
  assert labels == ['loss', 'consensus error', 'age of mixes', 'lag of mixes']
  assert len(figure.axes[0].lines) == 4


def test_lines_of_one_clock_are_one_point(tmp_path):
  """The evaluator's lines come later than the server's."""
  lines = [
    (10, {'epoch': 1, 'time': 1, 'train/loss': 3}),
    (20, {'epoch': 2, 'time': 2, 'train/loss': 2}),
    (10, {'test/loss': 5, 'test/accuracy': 0.5}),
    (30, {'epoch': 3, 'time': 3, 'train/loss': 1}),
    (30, {'test/loss': 3, 'test/accuracy': 0.75}),
    (20, {'test/loss': 4, 'test/accuracy': 0.875}),
  ]
  run = _read(tmp_path, lines)
  xs, ys = run.get_series('test/loss', 'epoch')
  assert (xs.tolist(), ys.tolist()) == ([1, 2, 3], [5, 4, 3])
  assert run.find_last('test/accuracy') == (0.75, 30, 3)
  assert run.find_best('test/accuracy') == (0.875, 20, 2)
  assert run.find_last('time') == (3, 30, 3)
  assert run.diverged_at is None


def test_the_first_bad_loss_is_that_of_the_smallest_clock(tmp_path):
  lines = [
    (10, {'train/loss': 1}),
    (30, {'train/loss': float('inf')}),
    (20, {'test/loss': float('nan')}),
  ]
  run = _read(tmp_path, lines)
  assert run.diverged_at == 20
  assert np.isnan(run.find_last('test/loss').value)


@pytest.mark.parametrize(
  ('number', 'text'),
  [
    (None, '–'),
    (3, '3'),
    (12345, '12,345'),
    (12345.6, '12,346'),
    (0.123456, '0.1235'),
    (float('nan'), 'nan'),
    (float('inf'), 'inf'),
    (1e30, '1e+30'),
  ],
)
def test_numbers_in_tables(number, text):
  assert _formats.format_number(number) == text
