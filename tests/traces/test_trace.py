"""`Trace`: columns, restarts, slices."""

import copy
import dataclasses
import json
import pickle

import hypothesis
import numpy as np
import pytest

from jasgd import traces
from tests.traces import cases

COLUMNS = (
  'worker',
  'step',
  'read_version',
  'start_time',
  'compute_time',
  'end_time',
  'release_time',
  'incarnation',
)
PUSH, STEP, FETCH, MIX, MOVE, MEAN, _, JOIN, LEAVE, RESTART, END = traces.Kind
APPLIED, PENDING, LATE, STALE, LOST, *_ = traces.Fate


def _find_valid(records):
  """The indices that are not void: each record goes on from the one before
  it, and a restart from the one that it names."""
  histories = {-1: []}
  for index, record in enumerate(records):
    before = record['stands'] if record['kind'] == RESTART else index - 1
    histories[index] = [*histories[before], index]
  return histories[len(records) - 1]


def test_the_schema_is_the_files_format():
  """A change of the layout needs a new version of the format."""
  assert traces.RECORD.itemsize == 128
  assert traces.RECORD.descr == [
    ('kind', '|u1'),
    ('fate', '|u1'),
    ('updates', '|u1'),
    ('reserved', '|u1'),
    ('digest', '<u2'),
    ('num_devices', '<u2'),
    ('replica', '<i4'),
    ('worker', '<i4'),
    ('source', '<i4'),
    ('group', '<i4'),
    ('incarnation', '<i4'),
    ('samples', '<i4'),
    ('step', '<i8'),
    ('version', '<i8'),
    ('read_version', '<i8'),
    ('source_version', '<i8'),
    ('source_step', '<i4'),
    ('stands', '<i4'),
    ('own_weight', '<f8'),
    ('weight', '<f8'),
    ('mass', '<f8'),
    ('start_time', '<f8'),
    ('compute_time', '<f8'),
    ('end_time', '<f8'),
    ('release_time', '<f8'),
  ]
  for dtype, offset in traces.RECORD.fields.values():
    assert offset % dtype.itemsize == 0
  assert list(traces.Kind) == list(range(11))
  assert list(traces.Fate) == list(range(8))


def test_make_records_fills_in_what_a_kind_implies():
  records = traces.make_records(
    kind=[PUSH, PUSH, STEP, MIX, MEAN, MOVE, JOIN, RESTART],
    fate=[APPLIED, STALE, 0, 0, 0, 0, 0, 0],
    worker=4,
    clock=7,
  )
  assert records['replica'].tolist() == [-1, -1, 4, 4, 4, -1, -1, -1]
  assert records['updates'].tolist() == [1, 0, 1, 1, 1, 1, 0, 0]
  assert records['version'].tolist() == [8, 7, 8, 8, 8, 8, 7, 7]
  given = traces.make_records(kind=STEP, replica=2, updates=0, version=[5])
  assert given[['replica', 'updates', 'version']].tolist() == [(2, 0, 5)]


@pytest.mark.parametrize(
  ('columns', 'message'),
  [
    ({'tau': 1}, 'no field tau; its fields are kind, fate'),
    ({'step': [1, 2], 'worker': [1, 2, 3]}, 'one length'),
    ({'step': [[1, 2]]}, 'one length'),
  ],
)
def test_make_records_refuses(columns, message):
  with pytest.raises(ValueError, match=message):
    traces.make_records(**columns)


def test_columns_are_of_gradients():
  records = traces.make_records(
    kind=[JOIN, JOIN, PUSH, PUSH, LEAVE], worker=[0, 1, 0, 1, 1]
  )
  trace = traces.Trace(records)
  assert trace.worker.tolist() == [0, 1]
  assert trace.of_kind(JOIN, LEAVE)['kind'].tolist() == [JOIN, JOIN, LEAVE]
  assert (len(trace), trace.num_gradients) == (5, 2)
  # In one piece, they are the records themselves.
  assert np.shares_memory(trace.worker, records)


def test_steps_of_nodes_are_gradients_too():
  trace = traces.Trace(
    traces.make_records(
      kind=[STEP, STEP, MIX, MIX, MEAN, MOVE],
      worker=[0, 1, 0, 0, 1, 1],
      clock=[0, 0, 1, 1, 1, 0],
      group=[0, 0, 1, 1, 2, 0],
    )
  )
  assert trace.worker.tolist() == [0, 1]
  assert trace.fate.tolist() == [APPLIED, APPLIED]
  assert trace.staleness.tolist() == [0, 0]
  assert trace.num_updates == 2  # A mix is no update by an optimizer.
  assert trace.steps['kind'].tolist() == [STEP, STEP]
  assert trace.mixes['kind'].tolist() == [MIX, MIX, MEAN]
  assert trace.of_replica(1)['kind'].tolist() == [STEP, MEAN]
  assert trace.of_replica(traces.SERVER)['kind'].tolist() == [MOVE]
  assert not trace.steps.flags.writeable


@pytest.mark.parametrize(
  ('columns', 'has_server'),
  [
    ({'kind': [PUSH]}, True),
    ({'kind': [JOIN, LEAVE]}, True),
    ({'kind': [STEP]}, False),
    ({'kind': [MEAN, MOVE]}, False),
    ({'kind': [JOIN], 'replica': 2, 'worker': 2}, False),
    # Learners that step on their own replicas between pushes.
    ({'kind': [STEP, PUSH]}, True),
    ({'kind': np.zeros(0, int)}, True),
  ],
)
def test_has_server(columns, has_server):
  assert traces.Trace(traces.make_records(**columns)).has_server == has_server


def test_staleness_is_measured_at_the_clock_of_arrival():
  trace = traces.Trace(
    traces.make_records(
      fate=[APPLIED, PENDING, LATE, STALE, LOST, APPLIED],
      read_version=[1, 2, 3, 4, 9, 5],
      clock=[5, 5, 5, 6, 0, 6],
    )
  )
  assert trace.clock.tolist() == [5, 5, 5, 6, 0, 6]
  assert trace.staleness.tolist() == [4, 3, 2, 2, -9, 1]
  assert trace.num_updates == 2


def test_gradients_of_an_update_that_was_never_made_are_pending():
  """Three gradients per update; the run ends after the fifth."""
  trace = traces.Trace(
    traces.make_records(updates=[0, 0, 1, 0, 0], clock=[0, 0, 0, 1, 1])
  )
  assert trace.fate.tolist() == [APPLIED] * 3 + [PENDING] * 2
  assert trace.num_updates == 1
  assert trace[:2].fate.tolist() == [PENDING] * 2
  # A learner that leaves may complete an update.
  leave = traces.make_records(kind=LEAVE, updates=1, clock=[1])
  longer = traces.Trace(np.concatenate([trace.records, leave]))
  assert longer.fate.tolist() == [APPLIED] * 5
  assert longer.num_updates == 2


def test_samples_are_those_of_applied_gradients():
  trace = traces.Trace(
    traces.make_records(
      fate=[APPLIED, STALE, APPLIED], clock=[0, 1, 1], samples=[4, 8, 2]
    )
  )
  assert trace.samples.tolist() == [4, 4, 6]


def test_duration_ignores_times_that_are_not_known():
  nan = float('nan')
  trace = traces.Trace(
    traces.make_records(
      start_time=[2, 1], end_time=[4, 6], release_time=[9, nan]
    )
  )
  assert trace.duration == 8
  np.testing.assert_array_equal(trace.wait_time, [5, nan])
  # Nodes work until the last mix; their ends are no work.
  trace = traces.Trace(
    traces.make_records(
      kind=[STEP, MIX, END],
      start_time=[1, 3, 9],
      end_time=[3, 5, 9],
      release_time=[nan, 20, 0],
    )
  )
  assert trace.duration == 4


@hypothesis.given(seed=cases.seeds)
def test_restarts_void_what_lies_between(seed):
  trace = cases.make_trace(seed)
  valid = _find_valid(trace.records)
  assert np.flatnonzero(~trace.is_void).tolist() == valid
  records = trace.records[valid]
  gradients = records[records['kind'] == PUSH]
  for name in COLUMNS:
    column = getattr(trace, name)
    assert not column.flags.writeable
    np.testing.assert_array_equal(column, gradients[name])
  for kind in traces.Kind:
    of_kind = records[records['kind'] == kind]
    assert trace.of_kind(kind).tobytes() == of_kind.tobytes()
  assert trace.of_replica(traces.SERVER).tobytes() == records.tobytes()
  assert trace.num_gradients == len(gradients)
  assert 'Trace(' in repr(trace)


def test_a_restart_that_is_void_voids_nothing():
  """The second restart goes on from a record that the first had given up."""
  trace = traces.Trace(
    traces.make_records(
      kind=[PUSH] * 3 + [RESTART, PUSH, RESTART, PUSH],
      step=[0, 1, 2, 0, 1, 0, 2],
      stands=[0, 0, 0, 0, 0, 1, 0],
    )
  )
  assert trace[:5].step.tolist() == [0, 1]
  assert trace[:5].is_void.tolist() == [False, True, True, False, False]
  assert trace.step.tolist() == [0, 1, 2]
  assert trace.is_void.tolist() == [False] * 2 + [True] * 3 + [False] * 2


@pytest.mark.parametrize('resumed', [-2, 1, 5])
def test_a_restart_cannot_resume_from_the_future(resumed):
  records = traces.make_records(kind=[PUSH, RESTART], stands=[0, resumed])
  with pytest.raises(
    traces.TraceError, match=f'restart in record 1 .* record {resumed} is the'
  ):
    _ = traces.Trace(records).worker


@pytest.mark.parametrize('replica', [0, traces.SERVER])
def test_the_restart_of_a_node_or_centre_voids_nothing(replica):
  """Others may have read the versions that it made since its checkpoint."""
  rows = [
    cases.step(1, 1.0),
    cases.step(2, 2.0),
    cases.restart(3, 1, 3.0, replica=replica, stands=0),
  ]
  trace = traces.Trace(cases.make_rows(rows))
  assert not trace.is_void.any()
  assert len(trace.steps) == 2
  # This holds even if the restart's record does not count as a version.
  rows[2] |= {'replica': 0, 'updates': 0}
  assert not traces.Trace(cases.make_rows(rows)).is_void.any()


@hypothesis.given(
  seed=cases.seeds,
  start=hypothesis.strategies.integers(-70, 70),
  stop=hypothesis.strategies.integers(-70, 70) | hypothesis.strategies.none(),
)
def test_slices(seed, start, stop):
  trace = cases.make_trace(seed)
  part = trace[start:stop]
  indices = range(len(trace))[start:stop]
  assert len(part) == len(indices)
  assert part.header == trace.header
  if len(part):
    before = _find_valid(trace.records[: indices[-1] + 1])
    valid = [index - indices[0] for index in before if index in indices]
    assert np.flatnonzero(~part.is_void).tolist() == valid
  assert part[:] == part
  assert (part == trace) == (part.records.tobytes() == trace.records.tobytes())


def test_slices_are_views():
  trace = traces.Trace(traces.make_records(step=range(10)))
  assert np.shares_memory(trace[2:5].records, trace.records)
  assert trace[2:5].step.tolist() == [2, 3, 4]
  with pytest.raises(ValueError, match='no gaps, got a step of 2'):
    _ = trace[::2]
  with pytest.raises(TypeError, match=r'trace\[a:b\], got 3'):
    _ = trace[3]


def test_a_trace_cannot_be_changed():
  header = {'config': {'rate': 0.1}}
  trace = traces.Trace(traces.make_records(step=[1, 2]), header)
  header['config']['rate'] = 7
  assert trace.header == {'config': {'rate': 0.1}}
  for array in (trace.records, trace.step, trace.staleness, trace.is_void):
    with pytest.raises(ValueError, match='read-only'):
      array[0] = 0
  with pytest.raises(dataclasses.FrozenInstanceError):
    trace.step = 0
  with pytest.raises(dataclasses.FrozenInstanceError):
    trace.records = trace.records


def test_a_header_is_json():
  header = {
    'seed': np.int64(3),
    'rate': np.float32(0.5),
    'sizes': np.arange(2),
    'pair': (1, 2),
    4: float('inf'),
    'deep': [{'nan': float('nan')}, np.array([-np.inf, 1])],
  }
  trace = traces.Trace(traces.make_records(), header)
  assert trace.header == {
    'seed': 3,
    'rate': 0.5,
    'sizes': [0, 1],
    'pair': [1, 2],
    '4': 'inf',
    'deep': [{'nan': 'nan'}, ['-inf', 1.0]],
  }
  # Strictly: other readers of JSON know no Infinity.
  text = json.dumps(trace.header, allow_nan=False)
  assert json.loads(text) == trace.header
  with pytest.raises(ValueError, match='of type set is not JSON'):
    traces.Trace(traces.make_records(), {'bad': {'a'}})
  with pytest.raises(ValueError, match='must be a dict, got 3'):
    traces.Trace(traces.make_records(), 3)


@pytest.mark.parametrize(
  ('records', 'message'),
  [
    (np.zeros(3), 'dtype RECORD, got float64'),
    ([1], 'dtype RECORD, got list'),
    (np.zeros((2, 2), traces.RECORD), r'flat, got shape \(2, 2\)'),
  ],
)
def test_records_are_checked(records, message):
  with pytest.raises(ValueError, match=message):
    traces.Trace(records)


def test_equality_is_of_bits_and_of_headers():
  nan = traces.make_records(start_time=[float('nan')])
  trace = traces.Trace(nan, {'a': float('nan'), 'b': 1})
  assert trace == traces.Trace(nan.copy(), {'b': 1, 'a': float('nan')})
  assert trace != traces.Trace(nan, {'a': float('nan'), 'b': 2})
  assert trace != traces.Trace(np.repeat(nan, 2), trace.header)
  zeros = traces.make_records(start_time=[0.0, -0.0])
  assert traces.Trace(zeros[:1]) != traces.Trace(zeros[1:])
  assert trace != 'trace'
  with pytest.raises(TypeError, match='unhashable'):
    hash(trace)


def test_copies_are_read_only_too():
  trace = cases.make_trace(3)
  _ = trace.worker
  for other in (pickle.loads(pickle.dumps(trace)), copy.copy(trace)):
    assert other == trace
    assert not other.records.flags.writeable
    assert 'worker' not in vars(other)


def test_records_with_gaps_are_copied():
  records = traces.make_records(step=range(10))
  assert traces.Trace(records[::3]).step.tolist() == [0, 3, 6, 9]


def test_in_flight():
  trace = traces.Trace(
    traces.make_records(), {'in_flight': [[1, 7, 3, 0.5], [0, 8, 2, 1.5]]}
  )
  assert trace.in_flight['read_version'].tolist() == [3, 2]
  names = ('worker', 'step', 'read_version', 'start_time')
  assert trace.in_flight.dtype.names == names
  assert not trace.in_flight.flags.writeable
  assert traces.Trace(traces.make_records()).in_flight.shape == (0,)


@pytest.mark.parametrize(
  'entries', [[[1, 2]], [3], 3, [['a'] * 4], [[2**70] * 4]]
)
def test_in_flight_of_nonsense(entries):
  bad = traces.Trace(traces.make_records(), {'in_flight': entries})
  with pytest.raises(traces.TraceError, match=r'list of \[worker, step'):
    _ = bad.in_flight


def test_is_ended():
  records = traces.make_records(kind=[PUSH, END])
  assert traces.Trace(records).is_ended
  assert not traces.Trace(records[:1]).is_ended


def test_repr_tells_what_happened():
  trace = traces.Trace(
    traces.make_records(
      fate=[APPLIED, LATE], end_time=2.5, clock=[3, 4], read_version=[0, 4]
    )
  )
  assert repr(trace) == (
    'Trace(2 records, 2 gradients: 1 applied, 1 dropped_late; 1 updates in '
    '2.5 s, mean staleness 1.5)'
  )
  assert repr(trace[:0]) == 'Trace(0 records, no gradients)'
