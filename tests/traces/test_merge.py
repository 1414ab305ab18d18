"""Traces of real nodes: a file for each, put together by cause and effect."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import traces
from jasgd.traces import _nodes

Kind = traces.NodeKind
CENTRE, ALL = traces.CENTRE, traces.ALL
HEADER = {'is_recorded': True, 'num_nodes': 3, 'seed': 0, 'config': {'a': 1}}


def _make(rows):
  """Records of one file, from dicts of fields."""
  records = np.zeros(len(rows), traces.NODE_RECORD)
  for name in ('peer', 'mix', 'peer_version', 'peer_step'):
    records[name] = -1
  records['order'] = np.arange(len(rows))
  for record, row in zip(records, rows, strict=True):
    for name, value in row.items():
      record[name] = value
  return records


def _write(folder, files, **header):
  """Writes the rows of each node as real nodes do."""
  folder.mkdir(exist_ok=True)
  for node, rows in files.items():
    name = 'centre' if node == CENTRE else f'node-{node}'
    rows = [{'node': node, **row} for row in rows]
    with traces.NodeTraceWriter(folder / name, {**HEADER, **header}) as writer:
      writer.append(_make(rows))


def _list(trace, *names):
  """Some columns of a trace, as tuples."""
  return [tuple(row) for row in trace.records[list(names)].tolist()]


def _step(version, time, **fields):
  fields = {'peer_version': version - 1, 'step': version, **fields}
  return {'kind': Kind.STEP, 'version': version, 'end_time': time, **fields}


def _mix(version, time, peer, peer_version, mix=0, **fields):
  return {
    'kind': Kind.MIX,
    'version': version,
    'end_time': time,
    'peer': peer,
    'peer_version': peer_version,
    'mix': mix,
    **fields,
  }


# --- The order.


@st.composite
def _runs(draw):
  """What nodes and a centre did, in an order that was possible.

  A list of (node, reads), where a read is a (node, version) that was there.
  """
  nodes = [0, 1, 2, CENTRE]
  version = dict.fromkeys(nodes, 0)
  events = []
  for _ in range(draw(st.integers(0, 25))):
    node = draw(st.sampled_from(nodes))
    others = [peer for peer in nodes if peer != node]
    if node == CENTRE:  # It reads the version after that which it names.
      others = [peer for peer in others if version[peer]]
    peers = draw(
      st.lists(st.sampled_from(others), max_size=2) if others else st.just([])
    )
    if node == CENTRE and not peers:
      continue
    if node == CENTRE:
      peers = peers[:1]
    first = 1 if node == CENTRE else 0
    reads = [(peer, draw(st.integers(first, version[peer]))) for peer in peers]
    version[node] += 1
    events.append((node, version[node], reads))
  return events


def _to_files(events, times):
  """The rows that each node wrote."""
  files = {node: [] for node in (0, 1, 2, CENTRE)}
  for number, ((node, version, reads), time) in enumerate(
    zip(events, times, strict=True)
  ):
    if not reads:
      files[node].append(_step(version, time))
    for peer, read in reads:
      read -= node == CENTRE
      files[node].append(_mix(version, time, peer, read, number))
  return files


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(_runs(), st.randoms(use_true_random=False))
def test_every_record_comes_after_what_it_reads(tmp_path_factory, run, random):
  folder = tmp_path_factory.mktemp('run')
  # Any times at all: clocks of two hosts cannot be compared.
  files = _to_files(run, [random.random() for _ in run])
  _write(folder, files)
  records = traces.NodeTrace.load(folder).records
  assert len(records) == sum(map(len, files.values()))
  version = dict.fromkeys(files, 0)
  num_seen = dict.fromkeys(files, 0)
  for record in records:
    node, peer = int(record['node']), int(record['peer'])
    assert record['order'] == num_seen[node]
    num_seen[node] += 1
    if record['kind'] == Kind.MIX:
      read = record['peer_version'] + (node == CENTRE)
      assert version[peer] >= read
    version[node] = int(record['version'])


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(_runs())
def test_clocks_that_agree_give_the_order_of_time(tmp_path_factory, run):
  folder = tmp_path_factory.mktemp('run')
  _write(folder, _to_files(run, range(len(run))))
  times = traces.NodeTrace.load(folder).records['end_time']
  assert times.tolist() == sorted(times.tolist())


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(_runs(), st.data())
def test_what_is_cut_off_is_missed_where_it_is_read(
  tmp_path_factory, run, data
):
  """A file loses its end: an error if others have read it, else none."""
  folder = tmp_path_factory.mktemp('run')
  files = _to_files(run, range(len(run)))
  cut = data.draw(st.sampled_from(list(files)))
  files[cut] = files[cut][: data.draw(st.integers(0, len(files[cut])))]
  last = max((row['version'] for row in files[cut]), default=0)
  missing = {
    row['peer_version'] + (node == CENTRE)
    for node, rows in files.items()
    for row in rows
    if row['kind'] == Kind.MIX
    and row['peer'] == cut
    and row['peer_version'] + (node == CENTRE) > last
  }
  _write(folder, files)
  if not missing:
    assert len(traces.NodeTrace.load(folder)) == sum(map(len, files.values()))
    return
  name = 'the centre' if cut == CENTRE else f'node {cut}'
  with pytest.raises(
    traces.TraceError, match=rf'version \d+ of {name}, which was never written'
  ) as caught:
    traces.NodeTrace.load(folder)
  words = str(caught.value).split()
  assert int(words[words.index('version') + 1]) in missing


def test_an_all_reduce_waits_for_everybody(tmp_path):
  """The records of one follow each other, and come after all steps."""
  files = {
    node: [
      _step(1, 1.0 + 5 * node),
      _mix(2, 2.0, ALL, 0),
      _step(3, 3.0),
      _mix(4, 4.0, ALL, 1, mix=1),
    ]
    for node in range(3)
  }
  del files[2][2:]  # It died.
  _write(tmp_path, files)
  trace = traces.NodeTrace.load(tmp_path)
  first = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
  second = [(0, 0), (0, 1), (1, 0), (1, 1)]
  assert _list(trace, 'kind', 'node') == [*first, *second]


def _restart(version, peer_version, time):
  return {
    'kind': Kind.RESTART,
    'version': version,
    'peer_version': peer_version,
    'end_time': time,
  }


def test_a_mean_that_was_lost_is_no_other(tmp_path):
  """Both go back to version 2; node 1 has not written the last mean down."""
  rows = [_step(1, 1.0), _mix(2, 2.0, ALL, 0), _step(3, 3.0)]
  files = {
    0: [*rows, _mix(4, 4.0, ALL, 1, mix=1), _restart(5, 2, 5.0)],
    1: [*rows, _restart(4, 2, 5.0)],
  }
  for rows in files.values():
    version = rows[-1]['version']
    rows += [_step(version + 1, 6.0), _mix(version + 2, 7.0, ALL, 2, mix=2)]
  _write(tmp_path, files)
  trace = traces.NodeTrace.load(tmp_path)
  reduced = trace.mixes[['node', 'peer_version', 'version']].tolist()
  assert reduced == [(0, 0, 2), (1, 0, 2), (0, 1, 4), (0, 2, 7), (1, 2, 6)]


@pytest.mark.parametrize('num_restarts', [1, 2])
def test_nodes_may_have_restarted_more_often_than_others(
  num_restarts, tmp_path
):
  """Node 1 was lost before its first record, and its clock is behind."""
  first = [
    _step(1, 1.0),
    *(_restart(2 + again, 0, 2.0) for again in range(num_restarts)),
  ]
  own = [_step(1, 3.0), _mix(2, 4.0, ALL, 0), _step(3, 5.0)]
  others = [
    {**row, 'version': 1 + num_restarts + row['version']} for row in own
  ]
  own = [{**row, 'end_time': row['end_time'] + 10.0} for row in own]
  _write(tmp_path, {0: [*first, *others], 1: own})
  trace = traces.NodeTrace.load(tmp_path)
  kinds = [0, *[Kind.RESTART] * num_restarts, 0, 0, 1, 1, 0, 0]
  assert trace.records['kind'].tolist() == kinds
  version = 3 + num_restarts
  assert trace.mixes[['node', 'version']].tolist() == [(0, version), (1, 2)]


# --- Files.


def test_nodes_that_never_came_have_no_file(tmp_path):
  _write(tmp_path, {1: [_step(1, 1.0)], 2: [_mix(1, 2.0, 1, 1)]})
  trace = traces.NodeTrace.load(tmp_path)
  assert trace.num_nodes == 3
  assert _list(trace, 'node', 'version') == [(1, 1), (2, 1)]
  (tmp_path / 'node-1').unlink()
  with pytest.raises(
    traces.TraceError, match=r'reads version 1 of node 1.*: it has no file'
  ):
    traces.NodeTrace.load(tmp_path)


def test_a_first_file_may_come_while_one_looks(tmp_path, monkeypatch):
  _write(tmp_path, {0: [_step(1, 0.5)]})
  monkeypatch.setattr(_nodes, '_list_files', lambda path: set())
  assert _list(traces.NodeTrace.load(tmp_path), 'node', 'version') == [(0, 1)]


def test_what_was_written_meanwhile_may_be_left_out(tmp_path, monkeypatch):
  """A reader is at node 1 when node 0 steps, and node 1 mixes that."""
  _write(tmp_path, {0: [_step(1, 1.0)], 1: [_step(1, 1.5)]})
  read_file = traces._nodes._file.read_file

  def read_slowly(path, *arguments):
    result = read_file(path, *arguments)
    if path.name == 'node-0':
      _append(tmp_path / 'node-0', _step(2, 2.0))
      _append(tmp_path / 'node-1', _mix(2, 3.0, 0, 2, node=1))
    return result

  monkeypatch.setattr(traces._nodes._file, 'read_file', read_slowly)
  trace = traces.NodeTrace.load(tmp_path)
  assert _list(trace, 'node', 'version') == [(0, 1), (1, 1)]
  monkeypatch.undo()
  assert len(traces.NodeTrace.load(tmp_path)) == 4


def _append(path, row):
  with traces.NodeTraceWriter(path) as writer:
    records = _make([row])
    records['order'] = writer.num_records
    writer.append(records)


def test_a_writer_goes_on_after_a_crash(tmp_path):
  path = tmp_path / 'node-0'
  _write(tmp_path, {0: [_step(1, 1.0), _step(2, 2.0)]})
  with open(path, 'ab') as file:
    file.write(b'part')
  with pytest.raises(traces.TraceError, match=r'node-0.* is truncated'):
    traces.NodeTrace.load(tmp_path)
  assert len(traces.NodeTrace.load(tmp_path, allow_truncated=True)) == 2
  with traces.NodeTraceWriter(path, HEADER) as writer:
    assert (writer.num_records, writer.num_bytes_cut) == (2, 4)
    writer.append(_make([_step(3, 3.0)]))
    writer.flush(sync=True)
    assert len(traces.NodeTrace.load(tmp_path)) == 3
  with pytest.raises(ValueError, match='of dtype NODE_RECORD'):
    traces.NodeTraceWriter(path).append(traces.make_records(step=[1]))
  with pytest.raises(traces.TraceError, match='they differ in seed'):
    traces.NodeTraceWriter(path, {**HEADER, 'seed': 7})


def test_hosts_may_differ_and_runs_may_not(tmp_path):
  _write(tmp_path, {0: [_step(1, 1.0)]}, num_threads=1)
  _write(tmp_path, {1: [_step(1, 1.0)]}, num_threads=2)
  assert len(traces.NodeTrace.load(tmp_path)) == 2
  for name, value in {'config': {}, 'seed': 1, 'num_nodes': 4}.items():
    (tmp_path / 'node-2').unlink(missing_ok=True)
    _write(tmp_path, {2: [_step(1, 1.0)]}, **{name: value})
    with pytest.raises(traces.TraceError, match=r'node-2.* is of another run'):
      traces.NodeTrace.load(tmp_path)


@pytest.mark.parametrize(
  ('files', 'message'),
  [
    ({3: [_step(1, 1.0)]}, "has 'node-3', but its run had 3 nodes"),
    (
      {0: [_step(1, 1.0), _step(3, 2.0)]},
      'Record 1 of node 0 has version 3 after version 1',
    ),
    (
      {0: [_mix(1, 1.0, 1, 1)], 1: [_mix(1, 1.0, 0, 1)]},
      'Record 0 of node 0 waits for records that wait for it',
    ),
  ],
)
def test_what_cannot_be_is_said(tmp_path, files, message):
  _write(tmp_path, files)
  with pytest.raises(traces.TraceError, match=message):
    traces.NodeTrace.load(tmp_path)


def test_a_merged_trace_can_be_saved(tmp_path):
  files = {
    0: [_step(1, 1.0), _mix(2, 0.5, CENTRE, 0)],
    CENTRE: [_mix(1, 0.7, 0, 1)],
  }
  _write(tmp_path / 'first', files)
  trace = traces.NodeTrace.load(tmp_path / 'first')
  trace.save(tmp_path / 'second')
  again = traces.NodeTrace.load(tmp_path / 'second')
  np.testing.assert_array_equal(again.records, trace.records)
  assert again.records['node'].tolist() == [0, 0, CENTRE]


# --- Deaths.


def test_deaths_and_the_mass_that_is_lost(tmp_path):
  end = {'kind': Kind.END, 'version': 1, 'mass': 1.0}
  files = {
    # Ends in good order, goes on later, and ends again.
    0: [
      _step(1, 1.0, mass=1.0),
      end,
      {**end, 'kind': Kind.RESTART, 'version': 2, 'peer_version': 1},
      end,
    ],
    # Dies with 0.5, comes back with the 0.75 of its checkpoint, and dies again.
    1: [
      _step(1, 1.0, mass=0.75),
      _step(2, 2.0, mass=0.5),
      {'kind': Kind.RESTART, 'version': 3, 'peer_version': 1, 'mass': 0.75},
      _step(4, 4.0, mass=0.75),
    ],
    # Is new; then dies with 0.2 and joins anew, and is told of its end.
    2: [
      {'kind': Kind.JOIN},
      _mix(1, 1.0, 0, 1, peer_weight=1, mass=0.2),
      {'kind': Kind.LOST, 'node': 1, 'peer': 2, 'mass': 0.125},
      {'kind': Kind.JOIN, 'version': 1},
      _mix(2, 3.0, 0, 1, mix=1, peer_weight=1, mass=0.1),
      {'kind': Kind.END, 'mass': 0.1},
    ],
  }
  _write(tmp_path, files)
  summary = traces.summarize_nodes(traces.NodeTrace.load(tmp_path))
  assert (summary.num_deaths, summary.num_returns) == (3, 3)
  lost = 2 - (1.0 + 0.1)  # Two began with 1 each, and two have ended.
  assert summary.lost_mass == pytest.approx(lost)
  assert 'deaths   3, and 3 returns' in str(summary)


def test_no_records_and_no_deaths(tmp_path):
  _write(tmp_path, {0: []})
  summary = traces.summarize_nodes(traces.NodeTrace.load(tmp_path))
  assert (summary.num_deaths, summary.lost_mass) == (0, 0)


def test_a_peer_that_went_back_is_not_younger_than_its_past(tmp_path):
  restart = {'kind': Kind.RESTART, 'version': 3, 'peer_version': 1, 'step': 1}
  files = {
    0: [_step(1, 1.0), _step(2, 2.0), {**restart, 'end_time': 3.0}],
    1: [_mix(1, 4.0, 0, 1, peer_step=1), _mix(2, 5.0, 0, 2, 1, peer_step=2)],
  }
  _write(tmp_path, files)
  trace = traces.NodeTrace.load(tmp_path)
  assert traces.measure_ages(trace).tolist() == [0, 0]
