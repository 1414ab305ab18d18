"""Pages on real runs: predictions, faults, the end, and pictures of them."""

import numpy as np
import pytest

from jasgd import protocols
from jasgd import reports
from jasgd import simulation
from jasgd import traces
from jasgd import workdir
from tests import marks
from tests.protocols import cases as protocol_cases
from tests.reports import cases

pytestmark = pytest.mark.usefixtures('blank_pictures')

PROTOCOLS = {
  'asynchronous': protocols.asynchronous(),
  'backup': protocols.backup(1),
  'downpour': protocols.downpour(2, 4),
  'hardsync': protocols.hardsync(),
  'ramp_up': protocols.ramp_up(protocols.softsync(2), 20),
  'softsync': protocols.softsync(2),
  'ssp': protocols.ssp(1),
  'own': protocol_cases.Every(2),
}


def _write(root, trace, result=None):
  run = cases.write_run(root, cases.make_config(), trace, cases.make_lines())
  if result is not None:
    workdir.write_json(workdir.Workdir(run).result, result)
  return run


@pytest.mark.parametrize(
  'name', marks.slow_but(PROTOCOLS, 'asynchronous', 'softsync', 'own')
)
def test_measured_and_predicted_side_by_side(name, tmp_path):
  trace = cases.simulate_real(PROTOCOLS[name])
  page = cases.Page(reports.write_report(_write(tmp_path, trace)))
  predicted = [simulation.predict(trace, seed) for seed in range(16)]
  comparison = simulation.compare(trace, *predicted)
  table = page.tables['Measured and predicted']
  assert table[0][0] == 'learner'
  summary = traces.summarize(trace)
  columns = list(zip(*table[1:], strict=True))
  staleness = [float(cell) for cell in columns[1]]
  assert staleness == pytest.approx(summary.workers.mean_staleness, abs=5e-3)
  shares = [float(cell.rstrip('%')) / 100 for cell in columns[4]]
  number = summary.workers.num_applied
  assert shares == pytest.approx(number / number.sum(), abs=5.1e-4)
  shares = [float(cell.rstrip('%')) / 100 for cell in columns[5]]
  assert shares == pytest.approx(comparison.predicted_share, abs=5.1e-4)
  (words,) = [text for text in page.paragraphs if 'total variation' in text]
  variation = f'{comparison.total_variation:.4g}'
  assert f'distributions is {variation} (0:' in words
  results = page.column('Results')
  assert results['total variation from the prediction'] == variation
  assert len(page.images) == 6
  pictures = {path.name for path in (tmp_path / 'report').iterdir()}
  assert 'members.png' in pictures


def test_the_predicted_histogram_is_a_line_over_the_bars():
  trace = cases.simulate_real()
  predicted = [simulation.predict(trace, seed) for seed in range(3)]
  axes = reports.plot_staleness(trace, predicted=predicted).axes[0]
  texts = [text.get_text() for text in axes.get_legend().get_texts()]
  assert 'predicted' in texts
  (line,) = [
    patch for patch in axes.patches if patch.get_label() == 'predicted'
  ]
  heights, edges, _ = line.get_data()
  applied = [
    each.staleness[each.fate == traces.Fate.APPLIED] for each in predicted
  ]
  number = np.count_nonzero(trace.fate == traces.Fate.APPLIED)
  counts = np.bincount(np.concatenate(applied), minlength=len(heights))
  np.testing.assert_allclose(heights, counts * number / counts.sum())
  np.testing.assert_allclose(edges, np.arange(len(heights) + 1) - 0.5)
  mean = f'predicted: mean {np.concatenate(applied).mean():.2f}, '
  assert mean in axes.get_title()


def test_a_simulated_run_is_not_predicted(tmp_path):
  run = _write(tmp_path, cases.simulate())
  page = cases.Page(reports.write_report(run))
  assert 'Measured and predicted' not in page.tables
  assert not any('predict' in text for text in page.paragraphs)


def test_why_there_is_no_prediction(tmp_path):
  trace = cases.simulate_real()
  header = {**trace.header, 'strategy': {'name': 'median'}}
  run = _write(tmp_path, traces.Trace(trace.records, header))
  page = cases.Page(reports.write_report(run))
  (words,) = [text for text in page.paragraphs if 'no prediction' in text]
  assert "Unknown strategy 'median'" in words
  assert 'Measured and predicted' not in page.tables
  assert 'Softsync(2): the server updates' in page.paragraphs[0]


def test_a_real_beside_a_simulated_run(tmp_path):
  runs = [
    _write(tmp_path / 'real', cases.simulate_real()),
    _write(tmp_path / 'simulated', cases.simulate()),
  ]
  page = cases.Page(reports.write_report(runs, tmp_path / 'both.html'))
  assert 'Measured and predicted: real' in page.tables
  assert 'Measured and predicted: simulated' not in page.tables
  row = 'staleness, mean as predicted'
  assert page.column('Results', 1)[row] != '–'
  assert page.column('Results', 2)[row] == '–'
  pictures = {path.name for path in (tmp_path / 'both').iterdir()}
  assert 'members-1.png' in pictures
  assert 'members-2.png' not in pictures


def test_faults_are_counted_and_told(tmp_path):
  trace = cases.simulate_real(protocols.asynchronous())
  result = {'end_reason': 'All 200 updates were made.', 'is_diverged': False}
  page = cases.Page(reports.write_report(_write(tmp_path, trace, result)))
  fates = page.column('Fates of gradients')
  for fate, count in {
    'dropped: of weights lost with a server': 1,
    'dropped: not finite': 1,
    'dropped: the run was over': 2,
  }.items():
    assert fates[fate].startswith(f'{count} ('), fate
  assert fates['lost with a server, not counted above'] == '5'
  results = page.column('Results')
  assert results['restarts of the server'] == '1'
  assert results['incarnations of the server'] == '2'
  left = results['learners that left or were lost']
  assert left.startswith('2 (learner 1 at clock ')
  assert results['learners that joined late or came back'].startswith(
    '1 (learner 1'
  )
  text = page.paragraphs[0]
  assert 'Before the end, 2 learners left or were lost.' in text
  assert '1 learner joined late or came back.' in text
  assert 'The server was restarted 1 time, which lost 5 gradients.' in text
  assert 'It ended: All 200 updates were made.' in text
  assert 'Asynchronous: the server updates with every gradient' in text


def test_a_calm_run_tells_of_no_faults(tmp_path):
  trace = cases.simulate_real(protocols.asynchronous(), has_faults=False)
  page = cases.Page(reports.write_report(_write(tmp_path, trace)))
  words = page.paragraphs[0]
  for word in ('lost', 'restarted', 'again', 'not finished'):
    assert word not in words, word
  assert not page.column('Results').keys() & {
    'learners that left or were lost',
    'learners that joined late or came back',
  }


def test_an_interrupted_run_says_so(tmp_path):
  """Its learners left because they were asked to; they are not lost."""
  trace = cases.simulate_real(
    protocols.asynchronous(), is_over=False, has_faults=False
  )
  leaves = traces.make_records(
    kind=traces.Kind.LEAVE,
    worker=range(4),
    clock=trace.num_updates,
    end_time=1e3,
  )
  records = np.concatenate([trace.records, leaves])
  run = _write(tmp_path, traces.Trace(records, trace.header))
  page = cases.Page(reports.write_report(run))
  clock = trace.num_updates
  assert page.column('Results')['end'] == f'unfinished: clock {clock}'
  assert (
    f'(it was interrupted, or still goes on): it is at clock {clock}.'
    in (page.paragraphs[0])
  )
  assert 'learners that left or were lost' not in page.column('Results')


def test_a_lost_learner_is_one_before_the_end_of_its_incarnation():
  push, join, leave, restart, end = (
    getattr(traces.Kind, name)
    for name in ('PUSH', 'JOIN', 'LEAVE', 'RESTART', 'END')
  )
  kinds = [
    *(join, join, push, leave, push, leave),
    *(restart, join, push, push, leave, end, leave),
  ]
  records = traces.make_records(
    kind=kinds,
    worker=[0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0],
    incarnation=[0] * 6 + [1] * 7,
    stands=5,  # All records before the restart stay valid.
    updates=[kind == push for kind in kinds],
    end_time=np.arange(len(kinds)) * 1.0,
    start_time=np.arange(len(kinds)) - 1.0,
  )
  axes = reports.plot_members(traces.Trace(records)).axes[0]
  drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
  # The first push starts at 1. The leave in record 5 is of the end of the
  # first incarnation, which was interrupted.
  assert drawn['left or lost'] == [[3.0 - 1, 1], [10.0 - 1, 2]]
  assert drawn['came'] == [[7.0 - 1, 0]]


def test_members_are_drawn_with_what_happened():
  trace = cases.simulate_real(protocols.asynchronous())
  axes = reports.plot_members(trace).axes[0]
  labels = {
    artist.get_label(): artist for artist in (*axes.lines, *axes.collections)
  }
  assert set(labels) == {
    'there',
    'server restarted',
    'end',
    'gradient dropped',
    'came',
    'left or lost',
  }
  spans = {
    (int(segment[0, 1]), *segment[:, 0].round(6).tolist())
    for segment in labels['there'].get_segments()
  }
  assert {learner for learner, *_ in spans} == {0, 1, 2, 3}
  assert sum(learner == 1 for learner, *_ in spans) == 2  # It came back.
  assert (1, -0.5, 20.0) in spans
  assert labels['left or lost'].get_ydata().tolist() == [1, 2]
  assert labels['left or lost'].get_xdata() == pytest.approx([20.0, 40.0])
  # Gradients that arrive after the end are no fault.
  assert sorted(labels['gradient dropped'].get_ydata().tolist()) == [0, 3]


def test_the_timeline_marks_who_comes_and_goes():
  trace = cases.simulate_real(protocols.asynchronous())
  axes = reports.plot_timeline(trace, num_rounds=60.0).axes[0]
  labels = {line.get_label() for line in axes.lines}
  assert labels == {'came', 'left or lost'}
  texts = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels <= set(texts)
  early = reports.plot_timeline(trace, num_rounds=8.0).axes[0]
  assert not early.lines


def test_the_timeline_begins_once_all_have_compiled():
  firsts = [[50.0, 51.0, 52.0, 53.0]]
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=4,
    num_gradients=400,
    compute=simulation.resampled([[1.0]] * 4, firsts),
  )
  for header, begin in (({}, 0.0), ({'num_present': 0}, 53.0)):
    other = traces.Trace(trace.records, {**trace.header, **header})
    axes = reports.plot_timeline(other, num_rounds=8.0).axes[0]
    np.testing.assert_allclose(axes.get_xlim(), [begin, begin + 8.0])


def test_a_result_that_says_diverged_is_believed(tmp_path):
  """The loss of a real run leaves out gradients that are not finite."""
  trace = cases.simulate_real(protocols.asynchronous())
  result = {'is_diverged': True, 'clock': 77, 'end_reason': 'It diverged.'}
  page = cases.Page(reports.write_report(_write(tmp_path, trace, result)))
  assert page.column('Results')['end'] == 'diverged by clock 77'
  assert ('p', {'class': 'bad'}) in page.tags
