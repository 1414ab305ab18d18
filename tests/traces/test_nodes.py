"""Traces of nodes: their files, and their statistics."""

import os
import shutil
import stat

import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces
from jasgd.traces import _file

SIZE = traces.NODE_RECORD.itemsize
Kind = traces.NodeKind
STRATEGIES = {
  'pull': gossip.Pull(),
  'push': gossip.Push(),
  'pairs': gossip.Pairs(),
  'elastic': gossip.Elastic(),
  'allreduce': gossip.AllReduce(),
}
every_strategy = pytest.mark.parametrize('name', STRATEGIES)


def _simulate(name='push', num_nodes=4, **arguments):
  arguments = {
    'num_steps': 6,
    'compute': simulation.exponential(1.0),
    'network': simulation.Network(
      latency=0.1, bandwidth=10.0, bytes_per_push=5.0
    ),
    **arguments,
  }
  return simulation.simulate_nodes(
    STRATEGIES[name], num_nodes=num_nodes, **arguments
  )


def _make(*rows, **header):
  """A trace of rows that are dicts of fields."""
  records = np.zeros(len(rows), traces.NODE_RECORD)
  records['order'] = np.arange(len(rows))
  for record, row in zip(records, rows, strict=True):
    for name, value in row.items():
      record[name] = value
  return traces.NodeTrace(records, header)


# --- Files.


@every_strategy
def test_one_file_per_node(name, tmp_path):
  trace = _simulate(name, failures=[simulation.Failure(1.0, 2, 2.0)])
  trace.save(tmp_path / 'a/nodes')
  names = {path.name for path in (tmp_path / 'a/nodes').iterdir()}
  expected = {f'node-{node}' for node in range(4)}
  assert names == expected | ({'centre'} if name == 'elastic' else set())
  loaded = traces.NodeTrace.load(tmp_path / 'a/nodes')
  assert loaded.records.tobytes() == trace.records.tobytes()
  assert loaded.header == trace.header


def test_saving_over_another_run_leaves_nothing_of_it(tmp_path):
  _simulate('elastic').save(tmp_path)
  trace = _simulate('pull')
  trace.save(tmp_path)
  loaded = traces.NodeTrace.load(tmp_path)
  np.testing.assert_array_equal(loaded.records, trace.records)


def test_saving_looks_once_and_waits_once(tmp_path, monkeypatch):
  """However many nodes there are: one sort, and one wait for the disk."""
  trace = _simulate('elastic', num_nodes=30)
  calls = []

  def sync(descriptor):
    calls.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))

  monkeypatch.setattr(os, 'fsync', sync)
  monkeypatch.setattr(traces.NodeTrace, 'of_node', None)
  trace.save(tmp_path)
  assert calls == [True]
  loaded = traces.NodeTrace.load(tmp_path)
  np.testing.assert_array_equal(loaded.records, trace.records)


def test_a_node_may_have_done_nothing(tmp_path):
  trace = _make({'node': 0, 'step': 1}, num_nodes=3)
  trace.save(tmp_path)
  assert traces.NodeTrace.load(tmp_path).num_nodes == 3
  without = _make({'node': 1})
  assert without.num_nodes == 2
  without.save(tmp_path / 'other')
  assert len(traces.NodeTrace.load(tmp_path / 'other')) == 1


@pytest.mark.parametrize('num_bytes', [1, 40, SIZE - 1])
def test_a_crash_costs_part_of_a_record(tmp_path, num_bytes):
  trace = _simulate()
  trace.save(tmp_path)
  path = tmp_path / 'node-2'
  os.truncate(path, path.stat().st_size - SIZE + num_bytes)
  whole = len(trace.of_node(2)) - 1
  message = f'{whole} whole records and {num_bytes} of the {SIZE} bytes'
  with pytest.raises(traces.TraceError, match=rf'node-2.*{message}'):
    traces.NodeTrace.load(tmp_path)
  loaded = traces.NodeTrace.load(tmp_path, allow_truncated=True)
  last = trace.of_node(2)[-1]['order']
  kept = trace.records[trace.records['order'] != last]
  np.testing.assert_array_equal(loaded.records, kept)


def _break_version(path):
  data = bytearray((path / 'node-1').read_bytes())
  data[8] = 77
  (path / 'node-1').write_bytes(data)


def _cut_header(path):
  os.truncate(path / 'node-1', 50)


def _flip_header(path):
  data = bytearray((path / 'node-1').read_bytes())
  data[40] ^= 1
  (path / 'node-1').write_bytes(data)


def _forget_number(path):
  records = np.zeros(1, traces.NODE_RECORD)
  _file.write_file(path / 'node-0', {'seed': 0}, records)


def _mix_runs(path):
  _simulate(seed=8).save(path / 'other')
  shutil.copy(path / 'other/node-1', path / 'node-1')


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (lambda path: (path / 'node-1').unlink(), 'There is no trace .*node-1'),
    (lambda path: shutil.rmtree(path), 'There is no trace .*node-0'),
    (
      lambda path: (path / 'node-1').write_text('a,b\n1,2\n'),
      'node-1.* is not a trace: it begins with',
    ),
    (lambda path: (path / 'node-1').write_text(''), 'node-1.* is empty'),
    (_break_version, 'node-1.* is a trace of version 77; this is jasgd for'),
    (_cut_header, 'node-1.* is truncated in its header'),
    (_flip_header, 'header of .*node-1.* is damaged'),
    (
      lambda path: traces.Trace(traces.make_records(step=[1])).save(
        path / 'node-1'
      ),
      'are two things',
    ),
    (
      _mix_runs,
      'node-1.* is of another run than .*node-0.*: their headers differ',
    ),
    (_forget_number, 'node-0.* does not say how many nodes .* num_nodes=None'),
  ],
)
def test_one_error_says_what_is_wrong(tmp_path, damage, message):
  folder = tmp_path / 'nodes'
  _simulate().save(folder)
  damage(folder)
  for allow_truncated in (False, True):
    with pytest.raises(traces.TraceError, match=message):
      traces.NodeTrace.load(folder, allow_truncated)


def test_a_server_and_nodes_are_not_confused(tmp_path):
  _simulate().save(tmp_path)
  with pytest.raises(traces.TraceError, match='are two things'):
    traces.Trace.load(tmp_path / 'node-0')


# --- Statistics.


def test_ages_and_lags_by_hand():
  step = {'kind': Kind.STEP, 'peer': -1, 'peer_step': -1}
  trace = _make(
    {**step, 'node': 0, 'step': 1},
    {**step, 'node': 1, 'step': 1},
    {**step, 'node': 1, 'step': 2},
    {**step, 'node': 1, 'step': 3},
    # Node 0 mixes what node 1 was after its first step: two steps old.
    {'kind': Kind.MIX, 'node': 0, 'step': 1, 'peer': 1, 'peer_step': 1},
    {**step, 'node': 0, 'step': 2},
    # Node 1 mixes what node 0 is now, and node 2 that has done nothing.
    {'kind': Kind.MIX, 'node': 1, 'step': 3, 'peer': 0, 'peer_step': 2},
    {'kind': Kind.MIX, 'node': 1, 'step': 3, 'peer': 2, 'peer_step': 0},
    # Neither age nor lag.
    {
      'kind': Kind.MIX,
      'node': 1,
      'peer': traces.ALL,
      'peer_weight': 1,
      'mix': 1,
    },
    num_nodes=3,
  )
  np.testing.assert_array_equal(traces.measure_ages(trace), [2, 0, 0])
  summary = traces.summarize_nodes(trace)
  assert (summary.age.mean, summary.age.max) == (pytest.approx(2 / 3), 2)
  assert summary.age.values.tolist() == [0, 2]
  assert summary.age.counts.tolist() == [2, 1]
  assert (summary.lag.min, summary.lag.max) == (0, 3)
  assert summary.lag.values.tolist() == [0, 1, 3]
  assert summary.nodes.num_steps.tolist() == [2, 3, 0]
  assert summary.nodes.num_mixes.tolist() == [1, 2, 0]
  assert summary.nodes.num_sent.tolist() == [1, 1, 1]
  assert summary.nodes.num_received.tolist() == [1, 2, 0]
  assert summary.nodes.bytes_sent is None


def test_the_age_of_the_centre_is_in_its_moves():
  """The answer to node 1 takes long: the centre has moved by node 0 since."""
  trace = simulation.simulate_nodes(
    gossip.Elastic(),
    num_nodes=2,
    num_steps=1,
    compute=simulation.with_speeds(simulation.constant(1.0), [1, 0.5]),
    network=simulation.Network(latency=0.6),
  )
  # Answers at 2.2 and 3.2, the second from 2.6; moves at 2.8 and 3.8.
  assert traces.measure_ages(trace).tolist() == [0, 1]
  assert not len(traces.summarize_nodes(trace).lag.values)


def test_shares_of_time_in_closed_form():
  """A step of 1, then two latencies of 0.1 and a transfer of 0.5."""
  trace = _simulate(
    'allreduce', compute=simulation.constant(1.0), num_steps=5, num_nodes=2
  )
  summary = traces.summarize_nodes(trace)
  # 2 (n - 1) messages of 1/n: 2 * (0.1 + 0.25).
  assert summary.duration == pytest.approx(5 * 1.7)
  np.testing.assert_allclose(summary.nodes.computing, 5)
  np.testing.assert_allclose(summary.nodes.waiting, 5 * 0.7)
  np.testing.assert_allclose(summary.nodes.bytes_sent, 5 * 2 * 2.5)
  assert summary.steps_per_second == pytest.approx(10 / 8.5)


@every_strategy
def test_what_is_sent_is_received_or_lost(name):
  failures = simulation.draw_failures(4, 10.0, 3.0, 1.0, seed=3)
  summary = traces.summarize_nodes(
    _simulate(name, num_steps=12, failures=failures)
  )
  nodes = summary.nodes
  assert summary.num_deaths >= summary.num_returns > 0
  if name == 'elastic':  # A force for each mix, but not for a joiner's.
    num_joins = summary.num_returns
    assert nodes.num_sent.sum() == summary.num_mixes - num_joins
  else:
    lost = nodes.num_sent.sum() - nodes.num_received.sum()
    assert lost == pytest.approx(summary.num_lost)
  np.testing.assert_allclose(nodes.bytes_sent, 5.0 * nodes.num_sent)
  np.testing.assert_allclose(nodes.bytes_received, 5.0 * nodes.num_received)
  busy = nodes.computing + nodes.waiting
  assert np.all((busy > 0) & (busy <= summary.duration + 1e-9))
  # Joiners take over the steps of others; an all-reduce makes some again.
  assert 3 * 12 < summary.num_steps == nodes.num_steps.sum() < 8 * 12


def test_the_table():
  trace = simulation.simulate_nodes(
    gossip.Pull(peers=gossip.ring(2)),
    num_nodes=2,
    num_steps=4,
    network=simulation.Network(latency=0.25, bytes_per_push=1e6),
    failures=[simulation.Failure(1.1, 1, 3.0)],
  )
  summary = traces.summarize_nodes(trace)
  assert str(summary).splitlines() == [
    'steps    7 in 6.5 s: 1.077 per second',
    'mixes    4',
    'age      mean 0.25, max 1',
    'lag      mean 0.00, min -1, max 1',
    'deaths   1, and 1 returns: 1 messages lost, 1 questions refused',
    'traffic  sent 5 MB, received 4 MB',
    '   node  steps  mixes  computing  waiting   sent  received',
    '      0      4      1        62%      15%      4         1',
    '      1      3      3        46%      23%      1         3',
  ]
  short = traces.format_node_summary(summary, max_nodes=1)
  assert short.splitlines()[-1] == '    ...  and 1 more'
  assert 'node' not in traces.format_node_summary(summary, max_nodes=0)
  with pytest.raises(ValueError, match='max_nodes must be at least 0, got -1'):
    traces.format_node_summary(summary, max_nodes=-1)


def test_a_trace_without_records():
  summary = traces.summarize_nodes(_make(num_nodes=2))
  assert summary.num_steps == 0
  assert np.isnan(summary.age.mean)
  assert str(summary).splitlines()[0] == 'steps    0 in 0 s: nan per second'
