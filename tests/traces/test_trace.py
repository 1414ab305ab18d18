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
  'learner',
  'step',
  'read_clock',
  'arrive_clock',
  'apply_clock',
  'fate',
  'samples',
  'start_time',
  'compute_time',
  'arrive_time',
  'release_time',
  'incarnation',
  'call',
)
GRADIENT, JOIN, LEAVE, RESTART, FETCH, _ = traces.Kind
APPLIED, PENDING, LATE, STALE, LOST, *_ = traces.Fate


def _find_standing(records):
  """The indices that are not void: each record goes on from the one before
  it, and a restart from the one that it names."""
  histories = {-1: []}
  for index, record in enumerate(records):
    before = record['step'] if record['kind'] == RESTART else index - 1
    histories[index] = [*histories[before], index]
  return histories[len(records) - 1]


def test_the_schema_is_the_files_format():
  """Whoever changes this changes the version too."""
  assert traces.RECORD.itemsize == 88
  assert traces.RECORD.descr == [
    ('kind', '|u1'),
    ('fate', '|u1'),
    ('digest', '<u2'),
    ('incarnation', '<i4'),
    ('learner', '<i4'),
    ('call', '<i4'),
    ('step', '<i8'),
    ('read_clock', '<i8'),
    ('arrive_clock', '<i8'),
    ('apply_clock', '<i8'),
    ('samples', '<i8'),
    ('start_time', '<f8'),
    ('compute_time', '<f8'),
    ('arrive_time', '<f8'),
    ('release_time', '<f8'),
  ]
  for dtype, offset in traces.RECORD.fields.values():
    assert offset % dtype.itemsize == 0
  assert list(traces.Kind) == [0, 1, 2, 3, 4, 5]
  assert list(traces.Fate) == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
  ('columns', 'message'),
  [
    ({'tau': 1}, 'no field tau; its fields are kind, fate'),
    ({'step': [1, 2], 'learner': [1, 2, 3]}, 'one length'),
    ({'step': [[1, 2]]}, 'one length'),
  ],
)
def test_make_records_refuses(columns, message):
  with pytest.raises(ValueError, match=message):
    traces.make_records(**columns)


def test_columns_leave_out_events():
  records = traces.make_records(
    kind=[JOIN, JOIN, GRADIENT, GRADIENT, LEAVE], learner=[0, 1, 0, 1, 1]
  )
  trace = traces.Trace(records)
  assert trace.learner.tolist() == [0, 1]
  assert trace.events['kind'].tolist() == [JOIN, JOIN, LEAVE]
  assert (len(trace), trace.num_gradients) == (5, 2)
  # In one piece, they are the records themselves.
  assert np.shares_memory(trace.learner, records)


def test_staleness_by_fate():
  trace = traces.Trace(
    traces.make_records(
      fate=[APPLIED, PENDING, LATE, STALE, LOST],
      read_clock=[1, 2, 3, 4, 9],
      arrive_clock=[5, 5, 5, 6, 0],
      apply_clock=[7, -1, -1, -1, -1],
    )
  )
  assert trace.staleness.tolist() == [6, 3, 2, 2, -9]


def test_updates_are_pairs_of_incarnation_and_clock():
  trace = traces.Trace(
    traces.make_records(
      incarnation=[0, 0, 0, 1, 1, 1],
      apply_clock=[0, 0, 1, 1, -1, 1],
      fate=[APPLIED] * 4 + [PENDING, APPLIED],
    )
  )
  assert trace.num_updates == 3


def test_duration_ignores_times_that_are_not_known():
  nan = float('nan')
  trace = traces.Trace(
    traces.make_records(
      start_time=[2, 1], arrive_time=[4, 6], release_time=[9, nan]
    )
  )
  assert trace.duration == 8
  np.testing.assert_array_equal(trace.wait_time, [5, nan])


@hypothesis.given(seed=cases.seeds)
def test_restarts_void_what_lies_between(seed):
  trace = cases.make_trace(seed)
  standing = _find_standing(trace.records)
  assert np.flatnonzero(~trace.is_void).tolist() == standing
  records = trace.records[standing]
  gradients = records[records['kind'] == GRADIENT]
  for name in COLUMNS:
    column = getattr(trace, name)
    assert not column.flags.writeable
    np.testing.assert_array_equal(column, gradients[name])
  np.testing.assert_array_equal(
    trace.events.tobytes(), records[records['kind'] != GRADIENT].tobytes()
  )
  is_gradient = trace.records['kind'] == GRADIENT
  assert len(trace.all_gradients) == np.count_nonzero(is_gradient)
  assert trace.num_gradients == len(gradients)
  assert 'Trace(' in repr(trace)


def test_a_restart_that_is_void_voids_nothing():
  """The second restart goes on from a record that the first had given up."""
  trace = traces.Trace(
    traces.make_records(
      kind=[GRADIENT] * 3 + [RESTART, GRADIENT, RESTART, GRADIENT],
      step=[0, 1, 2, 0, 1, 1, 2],
    )
  )
  assert trace[:5].step.tolist() == [0, 1]
  assert trace[:5].is_void.tolist() == [False, True, True, False, False]
  assert trace.step.tolist() == [0, 1, 2]
  assert trace.is_void.tolist() == [False] * 2 + [True] * 3 + [False] * 2


@pytest.mark.parametrize('resumed', [-2, 1, 5])
def test_a_restart_cannot_resume_from_the_future(resumed):
  records = traces.make_records(kind=[GRADIENT, RESTART], step=[0, resumed])
  with pytest.raises(traces.TraceError, match=f'record {resumed} is the last'):
    _ = traces.Trace(records).learner


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
    before = _find_standing(trace.records[: indices[-1] + 1])
    standing = [index - indices[0] for index in before if index in indices]
    assert np.flatnonzero(~part.is_void).tolist() == standing
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
  _ = trace.learner
  for other in (pickle.loads(pickle.dumps(trace)), copy.copy(trace)):
    assert other == trace
    assert not other.records.flags.writeable
    assert 'learner' not in vars(other)


def test_records_with_gaps_are_copied():
  records = traces.make_records(step=range(10))
  assert traces.Trace(records[::3]).step.tolist() == [0, 3, 6, 9]


def test_in_flight():
  trace = traces.Trace(
    traces.make_records(), {'in_flight': [[1, 7, 3, 0.5], [0, 8, 2, 1.5]]}
  )
  assert trace.in_flight['read_clock'].tolist() == [3, 2]
  assert trace.in_flight.dtype == traces.IN_FLIGHT
  assert not trace.in_flight.flags.writeable
  assert traces.Trace(traces.make_records()).in_flight.shape == (0,)
  bad = traces.Trace(traces.make_records(), {'in_flight': [[1, 2]]})
  with pytest.raises(traces.TraceError, match=r'list of \[learner, step'):
    _ = bad.in_flight


def test_repr_tells_what_happened():
  trace = traces.Trace(
    traces.make_records(
      fate=[APPLIED, LATE], arrive_time=2.5, apply_clock=[3, -1]
    )
  )
  assert repr(trace) == (
    'Trace(2 records, 2 gradients: 1 applied, 1 dropped_late; 1 updates in '
    '2.5 s, mean staleness 1.5)'
  )
  assert repr(trace[:0]) == 'Trace(0 records, no gradients)'
