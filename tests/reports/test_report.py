"""Pages on one run and on several: their numbers, against the trace."""

import base64

import numpy as np
import pytest

from jasgd import reports
from jasgd import traces
from jasgd import workdir
from tests.reports import cases

pytestmark = pytest.mark.usefixtures('blank_pictures')


def _number(text):
  return float(text.split(' ')[0].replace(',', ''))


def _write_whole(root):
  return cases.write_run(
    root, cases.make_config(), cases.simulate(), cases.make_lines()
  )


@pytest.fixture(name='run')
def _make_run(tmp_path):
  return _write_whole(tmp_path / 'run')


@pytest.fixture(name='whole', scope='module')
def _make_whole(tmp_path_factory):
  """A complete run and its page: made once, and never changed."""
  run = _write_whole(tmp_path_factory.mktemp('whole'))
  return run, cases.Page(reports.write_report(run))


def test_where_it_is_written(run, tmp_path):
  assert reports.write_report(run) == run / 'report.html'
  names = {'curves', 'staleness', 'timeline', 'workers', 'rates'}
  assert {path.stem for path in (run / 'report').iterdir()} == names
  other = tmp_path / 'new' / 'other.html'
  assert reports.write_report([run], other, title='<Mine>') == other
  assert (tmp_path / 'new' / 'other').is_dir()
  assert '<h1>&lt;Mine&gt;</h1>' in other.read_text()


def test_the_page_needs_nothing_else(whole):
  run, page = whole
  assert 'http' not in page.source
  assert not {'script', 'link', 'iframe'} & {tag for tag, _ in page.tags}
  assert len(page.images) == 5
  files = [path.read_bytes() for path in (run / 'report').iterdir()]
  for image in page.images:
    head, data = image['src'].split(',')
    assert head == 'data:image/png;base64'
    assert base64.b64decode(data) in files
    assert image['alt']


def test_readable_on_a_phone_and_in_the_dark(whole):
  _, page = whole
  metas = [attributes for tag, attributes in page.tags if tag == 'meta']
  assert any('width=device-width' in meta.get('content', '') for meta in metas)
  assert 'prefers-color-scheme: dark' in page.source
  num_tables = sum(tag == 'table' for tag, _ in page.tags)
  wide = [1 for tag, attrs in page.tags if attrs.get('class') == 'wide']
  assert len(wide) == num_tables >= 4


# The first protocol drops gradients; a push of Downpour is a sum of gradients.
@pytest.mark.parametrize(
  'name', ['backup', 'constant_delay', 'downpour', 'softsync']
)
def test_numbers_are_those_of_the_trace(name, tmp_path):
  trace = cases.simulate(name)
  run = cases.write_run(tmp_path / name, cases.make_config(), trace)
  page = cases.Page(reports.write_report(run))
  summary = traces.summarize(trace)
  results = page.column('Results')
  for row, value in {
    'learners': summary.num_workers,
    'updates': summary.clock,
    'updates in the trace': summary.num_updates,
    'gradients per second': summary.gradients_per_second,
    'speed-up': summary.speedup,
    'staleness, mean': summary.staleness.mean,
    'staleness, max': summary.staleness.max,
  }.items():
    assert _number(results[row]) == pytest.approx(value, rel=1e-3), row
  fates = page.column('Fates of gradients')
  counts = [_number(cell) for fate, cell in fates.items() if fate != 'all']
  assert counts == [
    count
    for fate, count in summary.fates.items()
    if count or fate == traces.Fate.APPLIED
  ]
  assert _number(fates['all']) == summary.num_gradients
  (text,) = page.paragraphs[:1]
  words = trace.header['description'].rstrip('.')
  assert words[1:] in text
  assert f'{summary.num_gradients} gradients' in text
  shares = summary.shares.items()
  dropped = sum(share for fate, share in shares if fate.name[:4] == 'DROP')
  assert bool(dropped) == (name == 'backup')
  expected = f'{dropped:.1%} were' if dropped else 'No gradient was dropped'
  assert expected in text


def test_learners_are_those_of_the_trace(tmp_path):
  trace = cases.simulate('backup')
  run = cases.write_run(tmp_path, cases.make_config(), trace)
  summary = traces.summarize(trace)
  table = cases.Page(reports.write_report(run)).tables['Table of learners']
  assert table[0] == [
    *('learner', 'gradients', 'applied', 'share of applied', 'mean staleness'),
    *('busy', 'waiting', 'communication', 'sent', 'received'),
  ]
  columns = list(zip(*table[1:], strict=True))
  learners = summary.workers
  assert [int(cell) for cell in columns[1]] == learners.num_gradients.tolist()
  assert [int(cell) for cell in columns[2]] == learners.num_applied.tolist()
  shares = [float(cell.rstrip('%')) / 100 for cell in columns[3]]
  assert shares == pytest.approx(
    learners.num_applied / learners.num_applied.sum(), abs=5.1e-4
  )
  assert sum(shares) == pytest.approx(1, abs=5e-3)
  staleness = [float(cell) for cell in columns[4]]
  assert staleness == pytest.approx(learners.mean_staleness, abs=5e-3)
  for column, times in zip(
    columns[5:8],
    (
      learners.times.busy,
      learners.times.waiting,
      learners.times.communication,
    ),
    strict=True,
  ):
    percent = [float(cell.rstrip('%')) for cell in column]
    assert percent == pytest.approx(100 * times / summary.duration, abs=0.051)
  sent = [int(cell) for cell in columns[8]]
  assert sent == learners.traffic.num_sent.tolist()


def test_no_more_than_32_learners(tmp_path):
  records = traces.make_records(worker=np.arange(40), clock=range(40))
  run = cases.write_run(tmp_path, {}, traces.Trace(records))
  page = cases.Page(reports.write_report(run))
  assert len(page.tables['Table of learners']) == 1 + 32
  assert any(text.startswith('... and 8 more. ') for text in page.paragraphs)


def test_results_are_those_of_the_metrics(whole):
  _, page = whole
  results = page.column('Results')
  assert results['test/accuracy, final'] == '0.875 (clock 40, epoch 2)'
  assert results['test/loss, best'] == '0.75 (clock 40, epoch 2)'
  assert results['train/loss, final'] == '0.5 (clock 40, epoch 2)'
  assert results['epochs'] == '2'
  assert results['time (s), virtual if simulated'] == '20'
  assert 'epoch 2 of 3' in page.paragraphs[0]
  assert 'test accuracy is 0.875 at the end' in page.paragraphs[0]


def test_the_best_is_not_the_last(tmp_path):
  lines = [
    (clock, {'test/accuracy': accuracy, 'test/loss': loss})
    for clock, accuracy, loss in [(1, 0.5, 2.0), (2, 0.75, 1.0), (3, 0.25, 4.0)]
  ]
  run = cases.write_run(tmp_path, {}, lines=lines)
  results = cases.Page(reports.write_report(run)).column('Results')
  assert results['test/accuracy, best'] == '0.75 (clock 2)'
  assert results['test/loss, best'] == '1 (clock 2)'
  assert results['test/accuracy, final'] == '0.25 (clock 3)'


@pytest.mark.parametrize(
  ('name', 'loss'), [('test/loss', 'inf'), ('train/loss', '-inf')]
)
def test_a_loss_that_is_not_finite_is_a_divergence(name, loss, tmp_path):
  lines = [*cases.make_lines(), (50, {name: float(loss)}), (60, {name: np.inf})]
  run = cases.write_run(tmp_path, {}, lines=lines)
  results = cases.Page(reports.write_report(run)).column('Results')
  assert results['end'] == 'diverged by clock 50'


def test_a_run_that_diverged_says_so(tmp_path):
  lines = [*cases.make_lines(), (50, {'train/loss': float('nan')})]
  trace = cases.simulate(num_gradients=600)
  run = cases.write_run(tmp_path, cases.make_config(), trace, lines)
  page = cases.Page(reports.write_report(run))
  assert 'The run diverged: by clock 50' in page.paragraphs[0]
  assert ('p', {'class': 'bad'}) in page.tags
  results = page.column('Results')
  assert results['end'] == 'diverged by clock 50'
  assert results['train/loss, final'] == 'nan (clock 50)'
  assert results['updates'] == '50'
  assert f'whole trace, to clock {trace.num_updates}' in page.paragraphs[0]


def test_a_metric_that_a_line_lacks_is_no_divergence(whole):
  _, page = whole
  assert 'diverged' not in page.source
  assert page.column('Results')['end'] == 'at clock 40'


def test_an_unfinished_run_says_so(tmp_path):
  trace = cases.simulate(num_gradients=600)
  lines = cases.make_lines()
  run = cases.write_run(tmp_path, cases.make_config(), trace, lines)
  page = cases.Page(reports.write_report(run))
  end = f'clock 40 of {trace.num_updates}'
  assert page.column('Results')['end'] == f'unfinished: {end}'
  assert f'not finished: it is at {end}' in page.paragraphs[0]


@pytest.mark.parametrize(
  ('num_updates', 'end', 'epochs'),
  [(0, 'at clock 40', '2 of 3,'), (90, 'unfinished: clock 40 of 90', '2,')],
)
def test_a_number_of_updates_goes_first(num_updates, end, epochs, tmp_path):
  config = {**cases.make_config(), 'num_updates': num_updates}
  root = cases.write_run(tmp_path, config, lines=cases.make_lines())
  page = cases.Page(reports.write_report(root))
  assert page.column('Results')['end'] == end
  assert f'epoch {epochs}' in page.paragraphs[0]


def test_settings_have_full_paths_and_are_escaped(whole):
  _, page = whole
  assert page.column('Settings') == {
    'optimizer.name': 'sgd',
    'optimizer.rate': '0.1',
    'protocol.name': 'softsync',
    'protocol.arguments': '[1, 2]',
    'num_epochs': '3',
    'note': 'a <b> & "c"',
  }
  assert '&lt;b&gt; &amp; &quot;c&quot;' in page.source
  assert not any(tag == 'b' for tag, _ in page.tags)


def test_several_runs_side_by_side(tmp_path):
  rates = (0.1, 0.2, 0.4)
  runs = [
    cases.write_run(
      tmp_path / f'run{index}',
      cases.make_config(rate),
      cases.simulate(name),
      cases.make_lines(3 + index),
    )
    for index, (rate, name) in enumerate(
      zip(rates, ('softsync', 'hardsync', 'backup'), strict=True)
    )
  ]
  page = cases.Page(reports.write_report(runs, tmp_path / 'compare.html'))
  labels = [f'optimizer.rate={rate}' for rate in rates]
  for heading in ('Settings', 'Results', 'Fates of gradients', 'Provenance'):
    assert page.tables[heading][0][1:] == labels
  settings = {row[0]: row[1:] for row in page.tables['Settings'][1:]}
  assert settings['≠ optimizer.rate'] == ['0.1', '0.2', '0.4']
  assert settings['num_epochs'] == ['3', '3', '3']
  assert sum(name.startswith('≠') for name in settings) == 1
  for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
    results = page.column('Results', 1 + index)
    summary = traces.summarize(traces.Trace.load(run / 'trace'))
    assert results['workdir'] == run.name
    assert results['updates in the trace'] == str(summary.num_updates)
    table = page.tables[f'Table of learners: {label}']
    assert [int(row[1]) for row in table[1:]] == (
      summary.workers.num_gradients.tolist()
    )
  pictures = {path.name for path in (tmp_path / 'compare').iterdir()}
  timelines = {f'timeline-{number}.png' for number in (1, 2, 3)}
  others = {
    f'{name}.png' for name in ('curves', 'staleness', 'workers', 'rates')
  }
  assert pictures == timelines | others
  assert len(page.images) == len(pictures)


def test_equal_configs_are_told_apart_by_their_folders(tmp_path):
  runs = [
    cases.write_run(tmp_path / name, cases.make_config(), cases.simulate())
    for name in ('first', 'deep/second')
  ]
  page = cases.Page(reports.write_report(runs, tmp_path / 'compare.html'))
  assert page.tables['Settings'][0][1:] == ['first', 'deep/second']


def test_nodes(tmp_path):
  trace = cases.simulate_nodes()
  run = cases.write_run(tmp_path, {'strategy': {'name': 'pull'}}, trace)
  page = cases.Page(reports.write_report(run))
  summary = traces.summarize(trace)
  results = page.column('Results')
  assert results['steps'] == str(summary.num_gradients)
  assert results['mixes'] == str(summary.num_mixes)
  age = _number(results['age of mixes, mean'])
  assert age == pytest.approx(summary.age.mean, rel=1e-3)
  table = page.tables['Table of nodes']
  steps = summary.workers.num_gradients.tolist()
  assert [int(row[1]) for row in table[1:]] == steps
  assert 'Fates of gradients' not in page.tables
  pictures = {path.name for path in (run / 'report').iterdir()}
  assert pictures == {'ages.png', 'timeline.png', 'workers.png', 'rates.png'}
  assert 'pull(1)' in page.paragraphs[0].lower()


def test_nodes_beside_a_server(tmp_path):
  runs = [
    cases.write_run(tmp_path / 'nodes', {'a': 1}, cases.simulate_nodes()),
    cases.write_run(tmp_path / 'server', {'a': 2}, cases.simulate()),
  ]
  page = cases.Page(reports.write_report(runs, tmp_path / 'both.html'))
  pictures = {path.name for path in (tmp_path / 'both').iterdir()}
  assert pictures == {
    'ages-1.png',
    'staleness.png',
    'timeline-1.png',
    'timeline-2.png',
    'workers.png',
    'rates.png',
  }
  assert page.column('Results', 1)['learners'] == '–'
  assert page.column('Results', 2)['steps'] == '–'


PARTS = ('config', 'trace', 'lines')


@pytest.mark.parametrize('missing', PARTS)
@pytest.mark.parametrize('is_alone', [False, True])
def test_what_is_missing_is_said(missing, is_alone, tmp_path):
  parts = {
    'config': cases.make_config(),
    'trace': cases.simulate(),
    'lines': list(cases.make_lines()),
  }
  said = {
    'config': 'There are no settings',
    'trace': 'There is no trace yet.',
    'lines': 'There are no metrics yet.',
  }
  kept = {missing} if is_alone else {*PARTS} - {missing}
  run = cases.write_run(
    tmp_path, **{part: parts[part] for part in PARTS if part in kept}
  )
  text = cases.Page(reports.write_report(run)).paragraphs[0]
  for part in PARTS:
    assert (said[part] in text) == (part not in kept), part


@pytest.mark.parametrize('make', [cases.simulate, cases.simulate_nodes])
def test_a_truncated_trace(make, tmp_path):
  run = cases.write_run(tmp_path, cases.make_config(), make())
  path = run / 'trace'
  path.write_bytes(path.read_bytes()[:-10])
  page = cases.Page(reports.write_report(run))
  assert 'The trace ends within a record' in page.paragraphs[0]
  assert len(page.images) == 4
  if make is cases.simulate:
    assert page.column('Fates of gradients')['all'] == '119'


def test_a_trace_without_gradients(tmp_path):
  records = traces.make_records(kind=[traces.Kind.JOIN])
  trace = traces.Trace(records, {'num_workers': 2})
  run = cases.write_run(tmp_path, cases.make_config(), trace)
  page = cases.Page(reports.write_report(run))
  assert 'The trace has no gradients yet.' in page.paragraphs[0]


@pytest.mark.parametrize(
  ('make', 'field', 'value', 'rule'),
  [
    (cases.simulate, 'kind', 99, 'from 0 to 10'),
    (cases.simulate, 'fate', 99, 'from 0 to 7'),
    (cases.simulate, 'worker', 2**31 - 1, 'from 0 to '),
    (cases.simulate, 'worker', -1, 'from 0 to '),
    (cases.simulate, 'replica', 3, 'to -1'),
    (cases.simulate, 'read_version', 2**40, 'from 0 to '),
    (cases.simulate_nodes, 'replica', 2**30, 'from 0 to 3'),
    (cases.simulate_nodes, 'replica', -1, 'from 0 to 3'),
    (cases.simulate_nodes, 'source', 4, 'to 3'),
  ],
)
def test_a_record_that_makes_no_sense_is_named(
  make, field, value, rule, tmp_path
):
  trace = make()
  records = np.array(trace.records)
  kind = traces.Kind.MIX if field == 'source' else trace.records['kind'][-5]
  index = int(np.flatnonzero(records['kind'] == kind)[7])
  records[field][index] = value
  run = cases.write_run(
    tmp_path, cases.make_config(), traces.Trace(records, trace.header)
  )
  (text,) = cases.Page(reports.write_report(run)).paragraphs
  name = 'a staleness of ' if field == 'read_version' else f'{field}='
  assert f'The trace cannot be read: Record {index} has {name}' in text
  assert ' must be from ' in text
  assert f'{rule}' in text


def test_texts_from_elsewhere_are_escaped_and_cut(tmp_path):
  trace = cases.simulate(num_gradients=12)
  header = {
    **trace.header,
    'description': '<b>fast</b> \x1b[31m&' + 'x' * 10_000,
  }
  run = cases.write_run(tmp_path, {}, traces.Trace(trace.records, header))
  reason = '<script>alert(1)</script>\x00\x1b[2J' + 'y' * 65_000
  workdir.write_json(workdir.Workdir(run).result, {'end_reason': reason})
  page = cases.Page(reports.write_report(run, title='a\x07<i>'))
  assert not {'b', 'i', 'script'} & {tag for tag, _ in page.tags}
  assert '<script>alert(1)</script>  [2Jyyy' in page.paragraphs[0]
  assert len(page.paragraphs[0]) < 2_000
  assert all(letter.isprintable() or letter == '\n' for letter in page.source)


def test_labels_are_no_formulas(tmp_path):
  """Matplotlib takes a text between dollars for a formula."""
  runs = [
    cases.write_run(
      tmp_path / name, {'note': note}, cases.simulate(), cases.make_lines()
    )
    for name, note in (('a', '$_{'), ('b', r'$\frac$'))
  ]
  page = cases.Page(reports.write_report(runs, tmp_path / 'both.html'))
  assert page.tables['Results'][0][1:] == ['note=$_{', r'note=$\frac$']


@pytest.mark.parametrize(
  ('name', 'text', 'problem'),
  [
    ('trace', 'no trace', "The trace cannot be read: 'trace' is not a trace"),
    ('metrics.jsonl', '{"a"\n', 'The metrics cannot be read: Line 1 of'),
    ('config.json', '{', 'config.json is not a file of JSON'),
    ('config.json', '[1]', 'config.json must hold a dict, got [1].'),
    ('provenance.json', '{', 'provenance.json is not a file of JSON'),
  ],
)
def test_damaged_files_are_named(name, text, problem, run):
  (run / name).write_text(text)
  words = cases.Page(reports.write_report(run)).paragraphs[0]
  assert problem in words
  assert str(run) not in words


def test_part_of_a_last_line_is_left_out(run):
  with open(run / 'metrics.jsonl', 'a') as file:
    file.write('{"clock": 50, "train/lo')
  results = cases.Page(reports.write_report(run)).column('Results')
  assert results['train/loss, final'] == '0.5 (clock 40, epoch 2)'


def test_provenance_is_shown_without_the_config(run):
  workdir.write_json(
    run / 'provenance.json',
    {'seed': 7, 'config': {'secret': 1}, 'versions': {'jax': '0.10.2'}},
  )
  page = cases.Page(reports.write_report(run))
  assert page.column('Provenance') == {'seed': '7', 'versions.jax': '0.10.2'}


def test_a_trace_brings_its_config(tmp_path):
  trace = cases.simulate()
  header = {**trace.header, 'config': {'time': {'name': 'normal'}}}
  run = cases.write_run(tmp_path, trace=traces.Trace(trace.records, header))
  page = cases.Page(reports.write_report(run))
  assert page.column('Settings') == {'time.name': 'normal'}
  assert 'in_flight' not in page.column('Provenance')


@pytest.mark.parametrize(
  ('make', 'problem'),
  [
    (lambda root: root / 'nothing', r"There is no workdir '.*nothing'"),
    (lambda root: root, r"'.*' is not the workdir of a run: it has none of"),
    (lambda root: root / 'file', r"The workdir '.*file' must be a folder"),
  ],
)
def test_no_workdir(make, problem, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(workdir.WorkdirError, match=problem):
    reports.write_report(make(tmp_path))
  assert {path.name for path in tmp_path.iterdir()} == {'file'}


@pytest.mark.parametrize(
  ('names', 'path', 'problem'),
  [
    ((), None, 'must be one or more folders, got none'),
    (('run', 'other'), None, 'A report on 2 workdirs needs a path'),
    (('run', 'run'), 'a.html', "must be different, got '.*run' twice"),
    (('run',), 'a.txt', "path must end in '.html', got 'a.txt'"),
  ],
)
def test_bad_arguments(names, path, problem, run):
  cases.write_run(run.parent / 'other', cases.make_config())
  with pytest.raises(ValueError, match=problem):
    reports.write_report([run.parent / name for name in names], path)
