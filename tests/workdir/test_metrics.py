"""Metrics: lines, columns, and resuming after a crash."""

import json
import logging
import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import workdir

VALUES = [0.1, -0.0, 1e-320, 1 / 3, 1e308, math.nan, math.inf, -math.inf]


def _open(folder, **options):
  return workdir.MetricsWriter(folder, use_tensorboard=False, **options)


def _refuse_constant(name):
  raise AssertionError(f'{name} is not JSON')


def test_lines_are_strict_json_in_the_given_order(tmp_path):
  with _open(tmp_path) as writer:
    writer.write(10, {'train/loss': 0.5, 'acc': jnp.float32(0.1)})
    writer.write(np.int64(20), {'b': math.nan, 'a': -math.inf, 'c': True})
  assert (tmp_path / 'metrics.jsonl').read_text() == (
    '{"clock": 10, "train/loss": 0.5, "acc": 0.10000000149011612}\n'
    '{"clock": 20, "b": "nan", "a": "-inf", "c": 1.0}\n'
  )


def test_floats_come_back_bit_for_bit(tmp_path):
  with _open(tmp_path) as writer:
    for clock, value in enumerate(VALUES):
      writer.write(clock, {'value': value})
  for line in (tmp_path / 'metrics.jsonl').read_text().splitlines():
    json.loads(line, parse_constant=_refuse_constant)
  columns = workdir.read_metrics(tmp_path)
  assert columns['value'].tobytes() == np.array(VALUES).tobytes()
  assert columns['clock'].tolist() == list(range(len(VALUES)))
  assert columns['clock'].dtype == np.int64


def test_columns_have_nan_where_a_line_lacks_a_name(tmp_path):
  with _open(tmp_path) as writer:
    writer.write(1, {'a': 1})
    writer.write(2, {'b': 2})
    writer.write(3, {})
  columns = workdir.read_metrics(tmp_path)
  assert list(columns) == ['clock', 'a', 'b']
  assert columns['clock'].tolist() == [1, 2, 3]
  np.testing.assert_array_equal(columns['a'], [1, math.nan, math.nan])
  np.testing.assert_array_equal(columns['b'], [math.nan, 2, math.nan])


def test_lines_of_one_clock_are_one_row_in_the_order_of_clocks(tmp_path):
  with _open(tmp_path) as writer:
    writer.write(10, {'train/loss': 1, 'time': 5})
    writer.write(20, {'train/loss': 2, 'time': 6})
    writer.write(10, {'test/loss': 3})  # Evaluated while the run went on.
    writer.write(30, {'train/loss': 4, 'time': 7})
    writer.write(30, {'test/loss': 5, 'time': 8})
    writer.write(20, {'test/loss': math.inf})
  columns = workdir.read_metrics(tmp_path)
  assert {name: column.tolist() for name, column in columns.items()} == {
    'clock': [10, 20, 30],
    'train/loss': [1, 2, 4],
    'time': [5, 6, 8],
    'test/loss': [3, math.inf, 5],
  }


def test_every_cut_of_a_file_can_be_read_and_continued(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  positions = [0]
  with _open(tmp_path) as writer:
    for clock in range(3):
      writer.write(clock, {'loss': clock / 3})
      positions.append(writer.position)
      assert path.stat().st_size == writer.position  # A kill cannot lose it.
  whole = path.read_bytes()
  for length in range(len(whole) + 1):
    path.write_bytes(whole[:length])
    num_lines = sum(position <= length for position in positions) - 1
    columns = workdir.read_metrics(tmp_path)
    assert columns['clock'].tolist() == list(range(num_lines))
    with _open(tmp_path, resume_at=positions[num_lines]) as writer:
      assert writer.position == positions[num_lines]
      for clock in range(num_lines, 3):
        writer.write(clock, {'loss': clock / 3})
      assert writer.position == len(whole)
    assert path.read_bytes() == whole


def test_lines_after_the_position_are_cut_off(tmp_path):
  with _open(tmp_path) as writer:
    writer.write(1, {'a': 1})
    position = writer.position
    writer.write(2, {'a': 2})
  with _open(tmp_path, resume_at=position) as writer:
    writer.flush(sync=True)
    assert workdir.read_metrics(tmp_path)['clock'].tolist() == [1]
  with _open(tmp_path) as writer:
    assert writer.position == 0
  assert (tmp_path / 'metrics.jsonl').read_bytes() == b''
  assert workdir.read_metrics(tmp_path)['clock'].tolist() == []


def test_the_position_of_a_clock_is_found(tmp_path):
  assert workdir.find_metrics_position(tmp_path, 5) == 0
  positions = [0]
  with _open(tmp_path) as writer:
    for clock in (2, 4, 4, 9):
      writer.write(clock, {'a': clock})
      positions.append(writer.position)
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    file.write(b'{"clock": 1')  # A line that a kill cut off.
  found = [
    workdir.find_metrics_position(tmp_path, clock) for clock in (1, 2, 8, 9)
  ]
  assert found == [positions[index] for index in (0, 1, 3, 4)]


@pytest.mark.parametrize(
  ('text', 'resume_at', 'message'),
  [
    (None, 5, r'must have the 5 bytes .* but it is missing'),
    ('{"clock": 1}\n', 14, r'must have the 14 bytes .* has only 13'),
    ('{"clock": 1}\n', 12, r'Byte 12 of .* must be the end of a line'),
    ('{"clock": "1"}\n', 15, r'Line 1 of .* is damaged'),
  ],
)
def test_a_file_of_another_position_is_refused(
  text, resume_at, message, tmp_path
):
  path = tmp_path / 'metrics.jsonl'
  if text is not None:
    path.write_text(text)
  with pytest.raises(workdir.WorkdirError, match=message):
    _open(tmp_path, resume_at=resume_at)
  assert (path.read_text() if path.exists() else None) == text


@pytest.mark.parametrize(
  'line', ['{"clock": 1', '[1]', '{"a": 1}', '{"clock": 1, "a": "b"}', '']
)
def test_a_damaged_line_is_named(line, tmp_path):
  text = f'{{"clock": 0}}\n{line}\n{{"clock": 2}}\n'
  (tmp_path / 'metrics.jsonl').write_text(text)
  with pytest.raises(workdir.WorkdirError, match=r'Line 2 of .* is damaged'):
    workdir.read_metrics(tmp_path)


def test_no_file(tmp_path):
  with pytest.raises(workdir.WorkdirError, match=r'no file .*metrics\.js'):
    workdir.read_metrics(tmp_path)


def test_values_that_are_no_numbers_are_refused(tmp_path):
  with _open(tmp_path) as writer:
    for value in ('text', [1, 2], None, jnp.ones(2)):
      with pytest.raises(ValueError, match="'loss' must be a number, got"):
        writer.write(1, {'acc': 1, 'loss': value})
    with pytest.raises(ValueError, match="must not be called 'clock'"):
      writer.write(1, {'clock': 1})
    assert writer.position == 0
  writer.close()
  for call in (lambda: writer.write(1, {}), writer.flush):
    with pytest.raises(ValueError, match=r'metrics\.jsonl.* is closed'):
      call()


def test_other_loggers_see_each_line(tmp_path):
  seen = []
  with _open(tmp_path, on_metrics=lambda *line: seen.append(line)) as writer:
    writer.write(np.int32(3), {'a': np.float32(0.5), 'b': 2})
  assert seen == [(3, {'a': 0.5, 'b': 2.0})]


def _read_events(folder):
  """(step, name, value) of all scalars, and the steps of session starts."""
  from tensorboardX.proto import event_pb2

  scalars, starts = [], []
  for path in sorted(folder.iterdir()):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], 'little')  # Then 4 bytes of checksum.
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      data = data[16 + size :]
      if event.HasField('session_log'):
        starts.append(event.step)
      scalars += [
        (event.step, value.tag, value.simple_value)
        for value in event.summary.value
      ]
  return scalars, starts


def test_tensorboard_has_the_same_numbers_by_clock(tmp_path):
  pytest.importorskip('tensorboardX')
  with workdir.MetricsWriter(tmp_path) as writer:
    writer.write(10, {'train/loss': 0.5, 'acc': 0.25})
    position = writer.position
    writer.write(20, {'train/loss': 4})
  first = [(10, 'train/loss', 0.5), (10, 'acc', 0.25), (20, 'train/loss', 4)]
  assert _read_events(tmp_path / 'tensorboard') == (first, [])
  # TensorBoard forgets what an earlier process wrote from this clock on.
  with workdir.MetricsWriter(tmp_path, resume_at=position) as writer:
    writer.write(20, {'train/loss': 8})
  scalars, starts = _read_events(tmp_path / 'tensorboard')
  assert sorted(scalars) == sorted([*first, (20, 'train/loss', 8)])
  assert starts == [11]


def test_without_tensorboardx_the_log_says_so_once(
  tmp_path, monkeypatch, caplog
):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  with caplog.at_level(logging.WARNING):
    with workdir.MetricsWriter(tmp_path) as writer:
      writer.write(1, {'a': 1})
      writer.write(2, {'a': 1})
    with _open(tmp_path):
      pass
  (message,) = [record.getMessage() for record in caplog.records]
  assert 'no event files' in message
  assert 'tensorboardX' in message
  assert not (tmp_path / 'tensorboard').exists()
