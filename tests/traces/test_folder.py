"""Folders of real nodes: a file for each, merged by cause and effect."""

import os
import shutil

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import traces
from jasgd.traces import _file
from tests.traces import cases

Kind = traces.Kind
SERVER = traces.SERVER
SIZE = traces.RECORD.itemsize


def _list(trace, *names):
  """Some columns of a trace, as tuples."""
  return [tuple(row) for row in trace.records[list(names)].tolist()]


# --- The order.


@st.composite
def _runs(draw):
  """Random actions of nodes and a centre, in a possible order.

  A list of (replica, version, reads), where a read is a (replica, version)
  that existed.
  """
  replicas = [0, 1, 2, SERVER]
  version = dict.fromkeys(replicas, 0)
  events = []
  for _ in range(draw(st.integers(0, 25))):
    replica = draw(st.sampled_from(replicas))
    others = [other for other in replicas if other != replica]
    if replica == SERVER:  # It reads the version after the one that it names.
      others = [other for other in others if version[other]]
    sources = draw(
      st.lists(st.sampled_from(others), max_size=2) if others else st.just([])
    )
    if replica == SERVER and not sources:
      continue
    if replica == SERVER:
      sources = sources[:1]
    first = 1 if replica == SERVER else 0
    reads = [
      (source, draw(st.integers(first, version[source]))) for source in sources
    ]
    version[replica] += 1
    events.append((replica, version[replica], reads))
  return events


def _to_files(events, times):
  """The rows that each owner wrote; `samples` is the place in its file."""
  files = {replica: [] for replica in (0, 1, 2, SERVER)}
  for number, ((replica, version, reads), time) in enumerate(
    zip(events, times, strict=True), start=1
  ):
    own = files[replica]
    if not reads:
      own.append(cases.step(version, time, samples=len(own)))
    for source, read in reads:
      fields = {'samples': len(own)}
      if replica == SERVER:
        fields |= {'kind': Kind.MOVE, 'group': 0}
        read -= 1
      own.append({**cases.mix(version, time, source, read, number), **fields})
  return files


def _get_read(replica, row):
  """The version of its source that must exist before a row."""
  return int(row['source_version']) + (replica == SERVER)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(_runs(), st.randoms(use_true_random=False))
def test_every_record_comes_after_what_it_reads(tmp_path_factory, run, random):
  folder = tmp_path_factory.mktemp('run')
  # Random times, because clocks of two hosts cannot be compared.
  files = _to_files(run, [random.random() for _ in run])
  cases.write_files(folder, files)
  records = traces.Trace.load(folder).records
  assert len(records) == sum(map(len, files.values()))
  version = dict.fromkeys(files, 0)
  num_seen = dict.fromkeys(files, 0)
  for record in records:
    replica, source = int(record['replica']), int(record['source'])
    assert record['samples'] == num_seen[replica]
    num_seen[replica] += 1
    if record['kind'] != Kind.STEP:
      assert version[source] >= _get_read(replica, record)
    version[replica] = int(record['version'])


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(_runs())
def test_clocks_that_agree_give_the_order_of_time(tmp_path_factory, run):
  folder = tmp_path_factory.mktemp('run')
  cases.write_files(folder, _to_files(run, range(len(run))))
  times = traces.Trace.load(folder).records['end_time']
  assert times.tolist() == sorted(times.tolist())


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(_runs(), st.data())
def test_what_is_cut_off_is_missed_where_it_is_read(
  tmp_path_factory, run, data
):
  """A file loses its end: an error only if other files have read it."""
  folder = tmp_path_factory.mktemp('run')
  files = _to_files(run, range(len(run)))
  cut = data.draw(st.sampled_from(list(files)))
  files[cut] = files[cut][: data.draw(st.integers(0, len(files[cut])))]
  last = max((row['version'] for row in files[cut]), default=0)
  missing = {
    _get_read(replica, row)
    for replica, rows in files.items()
    for row in rows
    if row.get('source') == cut and _get_read(replica, row) > last
  }
  cases.write_files(folder, files)
  if not missing:
    assert len(traces.Trace.load(folder)) == sum(map(len, files.values()))
    return
  name = 'the centre' if cut == SERVER else f'node {cut}'
  with pytest.raises(
    traces.TraceError, match=rf'version \d+ of {name}, which was never written'
  ) as caught:
    traces.Trace.load(folder)
  words = str(caught.value).split()
  assert int(words[words.index('version') + 1]) in missing


def test_an_all_reduce_waits_for_all_members(tmp_path):
  """The records of one mean follow each other, and come after all steps."""
  files = {
    node: [
      cases.step(1, 1.0 + 5 * node),
      cases.mean(2, 2.0, group=1),
      cases.step(3, 3.0),
      cases.mean(4, 4.0, group=2),
    ]
    for node in range(3)
  }
  del files[2][2:]  # It died.
  cases.write_files(tmp_path, files)
  trace = traces.Trace.load(tmp_path)
  step, mean = Kind.STEP, Kind.MEAN
  first = [(step, 0), (step, 1), (step, 2), (mean, 0), (mean, 1), (mean, 2)]
  second = [(step, 0), (step, 1), (mean, 0), (mean, 1)]
  assert _list(trace, 'kind', 'replica') == [*first, *second]


def test_a_mean_that_was_lost_is_no_other(tmp_path):
  """Both nodes go back to version 2; node 1 has not recorded the last mean."""
  rows = [cases.step(1, 1.0), cases.mean(2, 2.0, 1), cases.step(3, 3.0)]
  files = {
    0: [*rows, cases.mean(4, 4.0, 2), cases.restart(5, 2, 5.0)],
    1: [*rows, cases.restart(4, 2, 5.0)],
  }
  for rows in files.values():
    version = rows[-1]['version']
    rows += [cases.step(version + 1, 6.0), cases.mean(version + 2, 7.0, 3)]
  cases.write_files(tmp_path, files)
  trace = traces.Trace.load(tmp_path)
  reduced = trace.mixes[['replica', 'group', 'version']].tolist()
  assert reduced == [(0, 1, 2), (1, 1, 2), (0, 2, 4), (0, 3, 7), (1, 3, 6)]


@pytest.mark.parametrize('num_restarts', [1, 2])
def test_nodes_may_have_restarted_more_often_than_others(
  num_restarts, tmp_path
):
  """Node 1 was lost before its first record, and its clock is behind."""
  first = [
    cases.step(1, 1.0),
    *(cases.restart(2 + again, 0, 2.0) for again in range(num_restarts)),
  ]
  own = [cases.step(1, 3.0), cases.mean(2, 4.0, 1), cases.step(3, 5.0)]
  others = [
    {**row, 'version': 1 + num_restarts + row['version']} for row in own
  ]
  own = [{**row, 'end_time': row['end_time'] + 10.0} for row in own]
  cases.write_files(tmp_path, {0: [*first, *others], 1: own})
  trace = traces.Trace.load(tmp_path)
  step, mean = Kind.STEP, Kind.MEAN
  restarts = [Kind.RESTART] * num_restarts
  kinds = [step, *restarts, step, step, mean, mean, step, step]
  assert trace.records['kind'].tolist() == kinds
  version = 3 + num_restarts
  assert trace.mixes[['replica', 'version']].tolist() == [(0, version), (1, 2)]


def test_a_restart_may_skip_versions_and_nothing_else_may(tmp_path):
  """Records that were not synced are lost with the machine; others read them
  before, so their numbers are not used again."""
  rows = [cases.step(1, 1.0), cases.restart(5, 1, 2.0), cases.step(6, 3.0)]
  cases.write_files(tmp_path, {0: rows})
  assert _list(traces.Trace.load(tmp_path), 'version') == [(1,), (5,), (6,)]
  cases.write_files(tmp_path / 'back', {0: [*rows, cases.restart(2, 1, 4.0)]})
  with pytest.raises(
    traces.TraceError, match='Record 3 of node 0 has version 2 after version 6'
  ):
    traces.Trace.load(tmp_path / 'back')


# --- Files.


def test_get_file_name():
  assert traces.get_file_name(12) == 'node-12'
  assert traces.get_file_name(SERVER) == 'centre'


def test_nodes_that_never_came_have_no_file(tmp_path):
  files = {1: [cases.step(1, 1.0)], 2: [cases.mix(1, 2.0, 1, 1)]}
  cases.write_files(tmp_path, files)
  trace = traces.Trace.load(tmp_path)
  assert trace.num_workers == 3
  assert _list(trace, 'replica', 'version') == [(1, 1), (2, 1)]
  (tmp_path / 'node-1').unlink()
  with pytest.raises(
    traces.TraceError, match=r'reads version 1 of node 1.*: it has no file'
  ):
    traces.Trace.load(tmp_path)


def test_other_files_do_not_matter(tmp_path):
  cases.write_files(tmp_path, {0: [cases.step(1, 1.0)]})
  for name in ('node-01', 'node-x', 'node-1.2f.part', 'log', 'centre.part'):
    (tmp_path / name).write_text('no trace')
  assert len(traces.Trace.load(tmp_path)) == 1


def test_what_was_written_meanwhile_may_be_left_out(tmp_path, monkeypatch):
  """While node 1's file is read, node 0 steps and node 1 mixes its weights."""
  files = {0: [cases.step(1, 1.0)], 1: [cases.step(1, 1.5)]}
  cases.write_files(tmp_path, files)
  read_file = _file.read_file

  def read_slowly(path, *arguments):
    result = read_file(path, *arguments)
    if path.name == 'node-0':
      cases.write_files(tmp_path, {0: [cases.step(2, 2.0)]})
      cases.write_files(tmp_path, {1: [cases.mix(2, 3.0, 0, 2)]})
    return result

  monkeypatch.setattr(_file, 'read_file', read_slowly)
  trace = traces.Trace.load(tmp_path)
  assert _list(trace, 'replica', 'version') == [(0, 1), (1, 1)]
  monkeypatch.undo()
  assert len(traces.Trace.load(tmp_path)) == 4


def test_a_writer_goes_on_after_a_crash(tmp_path):
  path = tmp_path / 'node-0'
  cases.write_files(tmp_path, {0: [cases.step(1, 1.0), cases.step(2, 2.0)]})
  with open(path, 'ab') as file:
    file.write(b'part')
  with pytest.raises(traces.TraceError, match=r'node-0.* is truncated'):
    traces.Trace.load(tmp_path)
  assert len(traces.Trace.load(tmp_path, allow_truncated=True)) == 2
  with traces.TraceWriter(path) as writer:
    assert (writer.num_records, writer.num_bytes_cut) == (2, 4)
    writer.append(cases.make_rows([cases.step(3, 3.0)]))
    writer.flush(sync=True)
    assert len(traces.Trace.load(tmp_path)) == 3


def test_hosts_may_differ_and_runs_may_not(tmp_path):
  cases.write_files(tmp_path, {0: [cases.step(1, 1.0)]}, num_threads=1)
  cases.write_files(tmp_path, {1: [cases.step(1, 1.0)]}, num_threads=2)
  assert len(traces.Trace.load(tmp_path)) == 2
  for name, value in {
    'config': {},
    'seed': 1,
    'num_workers': 4,
    'strategy': {'name': 'pull'},
  }.items():
    (tmp_path / 'node-2').unlink(missing_ok=True)
    cases.write_files(tmp_path, {2: [cases.step(1, 1.0)]}, **{name: value})
    message = r'node-2.* is of another run than .*node-0.*: their headers diff'
    with pytest.raises(traces.TraceError, match=message):
      traces.Trace.load(tmp_path)


def test_a_merged_trace_is_saved_as_one_file(tmp_path):
  move = {**cases.mix(1, 0.7, 0, 1, 0), 'kind': Kind.MOVE}
  files = {
    0: [cases.step(1, 1.0), cases.mix(2, 0.5, SERVER, 0)],
    SERVER: [move],
  }
  cases.write_files(tmp_path / 'first', files)
  trace = traces.Trace.load(tmp_path / 'first')
  assert trace.records['replica'].tolist() == [0, 0, SERVER]
  trace.save(tmp_path / 'second')
  assert traces.Trace.load(tmp_path / 'second') == trace


# --- Damage.

_STEPS = {
  node: [cases.step(1, 1.0), cases.step(2, 2.0), cases.step(3, 3.0)]
  for node in range(3)
}


@pytest.mark.parametrize('num_bytes', [1, 40, SIZE - 1])
def test_a_crash_costs_part_of_a_record(tmp_path, num_bytes):
  cases.write_files(tmp_path, _STEPS)
  path = tmp_path / 'node-2'
  os.truncate(path, path.stat().st_size - SIZE + num_bytes)
  message = f'2 whole records and {num_bytes} of the {SIZE} bytes'
  with pytest.raises(traces.TraceError, match=rf'node-2.*{message}'):
    traces.Trace.load(tmp_path)
  loaded = traces.Trace.load(tmp_path, allow_truncated=True)
  assert [len(loaded.of_replica(node)) for node in range(3)] == [3, 3, 2]


def _edit(index, mask):
  """Flips bits of a byte of node 1's file."""

  def edit(folder):
    data = bytearray((folder / 'node-1').read_bytes())
    data[index] ^= mask
    (folder / 'node-1').write_bytes(data)

  return edit


def _write_server(folder):
  """Instead of node 0's file, one without a number of nodes."""
  trace = traces.Trace(traces.make_records(step=[1]), {'seed': 0})
  trace.save(folder / 'node-0')


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (shutil.rmtree, 'There is no trace .*nodes'),
    (
      lambda folder: [path.unlink() for path in folder.iterdir()],
      'There is no trace in .*nodes',
    ),
    (
      lambda folder: (folder / 'node-1').write_text('a,b\n1,2\n'),
      'node-1.* is not a trace: it begins with',
    ),
    (lambda folder: (folder / 'node-1').write_text(''), 'node-1.* is empty'),
    (_edit(8, 3), 'node-1.* is a trace of version 1, and this jasgd reads ve'),
    (_edit(8, 64), 'node-1.* is a trace of version 66'),
    (_edit(40, 1), 'header of .*node-1.* is damaged'),
    (
      lambda folder: os.truncate(folder / 'node-1', 50),
      'node-1.* is truncated in its header',
    ),
    (
      lambda folder: os.replace(folder / 'node-2', folder / 'node-1'),
      'Record 0 of node 1 has replica=2: the file is of another node',
    ),
    (_write_server, 'node-0.* does not say how many nodes .*num_workers=None'),
  ],
)
def test_one_sentence_says_what_is_damaged(tmp_path, damage, message):
  folder = tmp_path / 'nodes'
  cases.write_files(folder, _STEPS)
  damage(folder)
  for allow_truncated in (False, True):
    with pytest.raises(traces.TraceError, match=message):
      traces.Trace.load(folder, allow_truncated)


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    ({3: [cases.step(1, 1.0)]}, "has 'node-3', but its run had 3 nodes"),
    (
      {0: [cases.step(1, 1.0), cases.step(3, 2.0)]},
      'Record 1 of node 0 has version 3 after version 1',
    ),
    (
      {0: [cases.mix(1, 1.0, 1, 1)], 1: [cases.mix(1, 1.0, 0, 1)]},
      'Record 0 of node 0 waits for records that wait for it',
    ),
  ],
)
def test_records_of_nonsense(tmp_path, files, message):
  cases.write_files(tmp_path, files)
  with pytest.raises(traces.TraceError, match=message):
    traces.Trace.load(tmp_path)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
  parts=st.lists(cases.any_records, min_size=2, max_size=2),
  is_own=st.booleans(),
)
def test_any_bytes_are_merged_or_refused(tmp_path_factory, parts, is_own):
  folder = tmp_path_factory.mktemp('run')
  for replica, records in enumerate(parts):
    if is_own:
      records = records.copy()
      records['replica'] = replica
      records['kind'] %= len(Kind)
      records['source'] %= 2
    path = folder / traces.get_file_name(replica)
    with traces.TraceWriter(path, {'num_workers': 3}) as writer:
      writer.append(records)
  message = ''
  try:
    assert len(traces.Trace.load(folder)) == sum(map(len, parts))
  except traces.TraceError as error:
    message = str(error)
  assert '\n' not in message


# --- The tail.


def test_a_tail_reads_what_is_new(tmp_path):
  tail = traces.TraceTail(tmp_path)
  assert not len(tail.read())
  files = {0: [cases.step(1, 1.0), cases.step(2, 4.0)], SERVER: []}
  cases.write_files(tmp_path, files)
  assert tail.read()['end_time'].tolist() == [1, 4]
  assert not len(tail.read())
  cases.write_files(tmp_path, {0: [cases.step(3, 7.0)]})
  cases.write_files(tmp_path, {1: [cases.step(1, 6.0), cases.step(2, 8.0)]})
  found = tail.read()
  assert found['end_time'].tolist() == [6, 7, 8]
  assert found['replica'].tolist() == [1, 0, 1]
  assert found.dtype == traces.RECORD


def test_a_tail_waits_for_whole_records(tmp_path):
  cases.write_files(tmp_path, {0: [cases.step(1, 1.0)]})
  row = cases.make_rows([cases.step(2, 2.0)]).tobytes()
  tail = traces.TraceTail(tmp_path)
  with open(tmp_path / 'node-0', 'ab') as file:
    file.write(row[:50])
    file.flush()
    assert tail.read()['version'].tolist() == [1]
    file.write(row[50:])
  assert tail.read()['version'].tolist() == [2]
  assert np.array_equal(tail.read(), np.zeros(0, traces.RECORD))
