"""Files of traces: round trips, every way to be cut off, flipped bytes."""

import errno
import os
import pathlib
import struct
import subprocess
import sys
import textwrap
import zlib

import hypothesis
import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces
from tests.traces import cases

ROOT = pathlib.Path(__file__).parent.parent.parent
SIZE = traces.RECORD.itemsize


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'trace'


def _make_small_trace():
  return traces.Trace(traces.make_records(step=[1, 2, 3]), cases.HEADER)


def _get_offset(path, num_records=3):
  """Position of the first record."""
  return path.stat().st_size - num_records * SIZE


def _run_child(path, program):
  """Starts Python with `path` and a `writer` of three records in it."""
  program = textwrap.dedent(program)
  return subprocess.Popen(
    [
      sys.executable,
      '-c',
      'import os, resource, sys\n'
      'from jasgd import traces\n'
      'path = sys.argv[1]\n'
      'writer = traces.TraceWriter(path, {"seed": 1})\n'
      'writer.append(traces.make_records(step=[0, 1, 2]))\n'
      f'writer.flush()\n{program}',
      str(path),
    ],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )


@hypothesis.settings(
  max_examples=50,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(records=cases.any_records)
def test_round_trip_is_bit_identical(path, records):
  trace = traces.Trace(records, cases.HEADER)
  trace.save(path)
  loaded = traces.Trace.load(path)
  assert loaded == trace
  assert loaded.records.tobytes() == records.tobytes()
  assert loaded.header == trace.header
  assert list(loaded.header) == list(trace.header)
  assert not loaded.records.flags.writeable
  assert [file.name for file in path.parent.iterdir()] == ['trace']


def test_reading_is_memory_mapped_and_aligned(path):
  _make_small_trace().save(str(path))
  loaded = traces.Trace.load(str(path))
  assert isinstance(loaded.records, np.memmap)
  assert type(loaded.step) is np.ndarray
  assert np.shares_memory(loaded.step, loaded.records)
  assert loaded.step.flags.aligned
  assert _get_offset(path) % 64 == 0
  loaded[1:].save(path)  # Onto the file that it is read from.
  assert traces.Trace.load(path).step.tolist() == [2, 3]
  assert loaded.step.tolist() == [1, 2, 3]


def test_a_file_is_replaced_whole_or_not_at_all(path):
  _make_small_trace().save(path)
  bad = _make_small_trace()
  bad.header['bad'] = object()
  with pytest.raises(ValueError, match='JSON'):
    bad.save(path)
  assert traces.Trace.load(path) == _make_small_trace()
  assert len(list(path.parent.iterdir())) == 1


def test_every_cut_of_a_file(path):
  trace = _make_small_trace()
  trace.save(path)
  data, offset = path.read_bytes(), _get_offset(path)
  for length in range(len(data) + 1):
    path.write_bytes(data[:length])
    whole, rest = divmod(length - offset, SIZE)
    if length < offset:
      message = 'truncated in its header' if length else 'is empty'
      for allow_truncated in (False, True):
        with pytest.raises(traces.TraceError, match=message):
          traces.Trace.load(path, allow_truncated=allow_truncated)
      continue
    assert traces.Trace.load(path, allow_truncated=True) == trace[:whole]
    if rest:
      message = (
        f'{whole} whole records and {rest} of the {SIZE} bytes.*allow_truncated'
      )
      with pytest.raises(traces.TraceError, match=message):
        traces.Trace.load(path)
    elif whole < 3:
      message = f'truncated: {whole} of its 3 records .*allow_truncated'
      with pytest.raises(traces.TraceError, match=message):
        traces.Trace.load(path)
    else:
      assert traces.Trace.load(path) == trace


def test_every_flipped_byte_of_the_header_is_noticed(path):
  _make_small_trace().save(path)
  data, offset = path.read_bytes(), _get_offset(path)
  for index in range(offset):
    if index < 8:
      message = 'is not a trace: it begins with'
    elif index < 12:
      message = r'of version \d+, and this jasgd reads version 2'
    else:
      message = 'header of .* is damaged'
    for mask in (1 << index % 8, 255):
      damaged = bytearray(data)
      damaged[index] ^= mask
      path.write_bytes(damaged)
      with pytest.raises(traces.TraceError, match=message):
        traces.Trace.load(path, allow_truncated=True)


def test_a_trace_of_version_1_is_refused(path):
  """The same prefix, and records of 88 bytes."""
  header = b'{"num_learners": 3}'
  header += b' ' * (-(32 + len(header)) % 64)
  prefix = struct.pack(
    '<8s5I', b'\x93JASGD\r\n', 1, 88, len(header), zlib.crc32(header), 2
  )
  prefix += struct.pack('<I', zlib.crc32(prefix))
  path.write_bytes(prefix + header + bytes(2 * 88))
  before = path.read_bytes()
  for open_it in (
    traces.Trace.load,
    lambda path: traces.Trace.load(path, allow_truncated=True),
    traces.TraceWriter,
  ):
    with pytest.raises(
      traces.TraceError,
      match='is a trace of version 1, and this jasgd reads version 2: run the',
    ):
      open_it(path)
  assert path.read_bytes() == before


def test_records_of_another_size_are_refused(path):
  """Only a mistake in the code could write such a file in this version."""
  _make_small_trace().save(path)
  data = bytearray(path.read_bytes())
  data[12:16] = struct.pack('<I', 88)
  data[28:32] = struct.pack('<I', zlib.crc32(data[:28]))
  path.write_bytes(data)
  message = 'has records of 88 bytes; those of version 2 have 128'
  with pytest.raises(traces.TraceError, match=message):
    traces.Trace.load(path)


def test_what_is_not_a_trace(path):
  with pytest.raises(traces.TraceError, match=r'There is no trace .*trace'):
    traces.Trace.load(path)
  with pytest.raises(traces.TraceError, match=r'There is no trace in .*'):
    traces.Trace.load(path.parent)
  with pytest.raises(traces.TraceError, match='not a trace but a folder'):
    traces.TraceWriter(path.parent)
  path.write_text('a,b\n1,2\n')
  with pytest.raises(traces.TraceError, match='part of that path is a file'):
    traces.Trace.load(path / 'trace')
  for open_it in (traces.Trace.load, traces.TraceWriter):
    with pytest.raises(traces.TraceError, match="begins with b'a,b"):
      open_it(path)
  assert path.read_text() == 'a,b\n1,2\n'


def test_the_writer_appends(path):
  parts = [traces.make_records(step=range(n)) for n in (0, 3, 1, 20_000)]
  with traces.TraceWriter(path, cases.HEADER) as writer:
    assert len(traces.Trace.load(path)) == 0
    for part in parts:
      writer.append(part)
    writer.append(parts[1][1])
    writer.append(parts[1][::2])
    writer.flush(sync=True)
    assert len(traces.Trace.load(path)) == writer.num_records == 20_007
  writer.close()
  expected = np.concatenate([*parts, parts[1][1:2], parts[1][::2]])
  assert traces.Trace.load(path) == traces.Trace(expected, cases.HEADER)
  with pytest.raises(ValueError, match='is closed'):
    writer.append(parts[1])
  with pytest.raises(ValueError, match='is closed'):
    writer.flush()


def test_the_writer_refuses_what_is_no_record(path):
  with traces.TraceWriter(path) as writer:
    for bad in (np.zeros(3), [1, 2]):
      with pytest.raises(ValueError, match='must be an array of dtype RECORD'):
        writer.append(bad)
  assert len(traces.Trace.load(path)) == 0


def test_the_writer_continues_a_file(path):
  path.touch()  # An empty file has nothing to continue, nor to lose.
  for header in ({'seed': 1, 'rate': 0.5}, {'rate': 0.5, 'seed': 1}, None):
    with traces.TraceWriter(path, header) as writer:
      assert writer.num_bytes_cut == 0
      assert writer.header == {'seed': 1, 'rate': 0.5}
      writer.append(traces.make_records(step=[writer.num_records]))
  assert traces.Trace.load(path).step.tolist() == [0, 1, 2]
  with pytest.raises(traces.TraceError, match='differ in extra, rate'):
    traces.TraceWriter(path, {'seed': 1, 'extra': None})


@pytest.mark.parametrize('num_bytes', [1, 50, SIZE - 1])
def test_the_writer_cuts_a_partial_record(path, num_bytes, caplog):
  trace = _make_small_trace()
  trace.save(path)
  os.truncate(path, path.stat().st_size - SIZE + num_bytes)
  with traces.TraceWriter(path) as writer:
    assert writer.num_bytes_cut == num_bytes
    assert writer.num_records == 2
    writer.append(trace.records[2:])
  assert f'Cut {num_bytes} bytes' in caplog.text
  assert traces.Trace.load(path) == trace


def test_a_writer_killed_within_a_write_loses_one_record(path):
  """The system writes 2 and a half records, then the process is killed."""
  child = _run_child(
    path,
    f"""
    limit = os.path.getsize(path) + 2 * {SIZE} + 44
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
    writer.append(traces.make_records(step=[3, 4, 5, 6]))
    try:
      writer.flush()
    except OSError as error:
      os._exit(error.errno)
    """,
  )
  child.communicate(timeout=60)
  assert child.returncode == errno.EFBIG
  with pytest.raises(traces.TraceError, match='5 whole records and 44 of'):
    traces.Trace.load(path)
  trace = traces.Trace.load(path, allow_truncated=True)
  assert trace.step.tolist() == [0, 1, 2, 3, 4]
  with traces.TraceWriter(path, {'seed': 1}) as writer:
    assert writer.num_bytes_cut == 44
    assert writer.num_records == 5
    writer.append(traces.make_records(kind=traces.Kind.RESTART, stands=[3]))
    writer.append(traces.make_records(step=[4]))
  assert traces.Trace.load(path).step.tolist() == [0, 1, 2, 3, 4]
  assert len(traces.Trace.load(path)) == 7


def test_a_flush_that_failed_can_be_repeated(path):
  """A disk was full for a time."""
  child = _run_child(
    path,
    """
    limit = os.path.getsize(path) + 100
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
    writer.append(traces.make_records(step=[3, 4, 5]))
    for _ in range(2):
      try:
        writer.flush()
      except OSError:
        print('full')
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    writer.append(traces.make_records(step=[6]))
    writer.close()
    """,
  )
  output, _ = child.communicate(timeout=60)
  assert (child.returncode, output) == (0, 'full\nfull\n')
  assert traces.Trace.load(path).step.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_reading_while_another_process_writes(path):
  child = _run_child(
    path,
    """
    print('flushed', flush=True)
    input()
    writer.append(traces.make_records(step=[3]))
    part = bytes(writer._buffer)
    os.write(writer._file.fileno(), part[:30])
    print('half', flush=True)
    input()
    os.write(writer._file.fileno(), part[30:])
    """,
  )
  assert child.stdout.readline() == 'flushed\n'
  before = traces.Trace.load(path)
  assert before.step.tolist() == [0, 1, 2]
  child.stdin.write('\n')
  child.stdin.flush()
  assert child.stdout.readline() == 'half\n'
  assert traces.Trace.load(path, allow_truncated=True) == before
  child.communicate('\n', timeout=60)
  assert traces.Trace.load(path).step.tolist() == [0, 1, 2, 3]
  assert before.step.tolist() == [0, 1, 2]


def test_a_saved_file_may_grow(path):
  trace = _make_small_trace()
  trace.save(path)
  with traces.TraceWriter(path) as writer:
    writer.append(trace.records[:2])
  assert traces.Trace.load(path).step.tolist() == [1, 2, 3, 1, 2]


def test_the_trace_of_nodes_is_one_file_too(path):
  trace = simulation.simulate(
    gossip.Elastic(),
    num_workers=3,
    num_gradients=12,
    network=simulation.Network(latency=0.1),
    failures=[(1.1, 2, 2.0)],
  )
  trace.save(path)
  assert traces.Trace.load(path) == trace
  assert path.is_file()


def test_of_a_writers_file_the_number_is_not_known(path):
  with traces.TraceWriter(path) as writer:
    writer.append(traces.make_records(step=[1, 2, 3]))
  os.truncate(path, path.stat().st_size - SIZE)
  assert traces.Trace.load(path).step.tolist() == [1, 2]
