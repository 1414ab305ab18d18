"""The folder of a run: its paths, its config, and atomic files of JSON."""

import json
import os

import numpy as np
import pytest

from jasgd import workdir

CONFIG = {
  'task': {'name': 'digits', 'batch': 32},
  'optimizer': {'rate': 0.1, 'policy': ('polynomial', 0.5)},
  'seed': 0,
}


def test_a_folder_is_made_once_and_found_again(tmp_path):
  paths = workdir.open_workdir(tmp_path / 'a' / 'b', CONFIG)
  written = paths.config.read_bytes()
  assert json.loads(written)['optimizer']['policy'] == ['polynomial', 0.5]
  again = workdir.open_workdir(
    str(tmp_path / 'a' / 'b'), dict(reversed(CONFIG.items()))
  )
  assert again == paths
  assert paths.config.read_bytes() == written
  assert os.listdir(paths) == ['config.json']


def test_paths():
  paths = workdir.Workdir('run')
  names = {
    name: getattr(paths, name).as_posix()
    for name, value in vars(workdir.Workdir).items()
    if isinstance(value, property)
  }
  assert names == {
    'checkpoints': 'run/checkpoints',
    'config': 'run/config.json',
    'logs': 'run/logs',
    'metrics': 'run/metrics.jsonl',
    'provenance': 'run/provenance.json',
    'report': 'run/report.html',
    'result': 'run/result.json',
    'server': 'run/server.json',
    'tensorboard': 'run/tensorboard',
    'token': 'run/token',
    'trace': 'run/trace',
  }
  assert os.fspath(paths) == 'run'
  assert workdir.Workdir(paths) == paths


@pytest.mark.parametrize(
  ('changes', 'messages'),
  [
    ({'seed': 1}, ['seed is 0 there and 1 here']),
    (
      {'optimizer': {'rate': 0.2, 'policy': ['polynomial', 0.25]}},
      [
        "optimizer.policy is ['polynomial', 0.5] there and "
        "['polynomial', 0.25] here",
        'optimizer.rate is 0.1 there and 0.2 here',
      ],
    ),
    (
      {'task': {'name': 'digits', 'new': None}},
      [
        'task.batch is 32 there and missing here',
        'task.new is missing there and None here',
      ],
    ),
    (
      {'task': 'digits'},
      ["task is {'name': 'digits', 'batch': 32} there and 'digits' here"],
    ),
  ],
)
def test_another_config_is_refused(changes, messages, tmp_path):
  workdir.open_workdir(tmp_path, CONFIG)
  with pytest.raises(workdir.WorkdirError) as error:
    workdir.open_workdir(tmp_path, CONFIG | changes)
  assert str(error.value) == (
    f"The workdir '{tmp_path}' holds a run with another config: "
    f'{"; ".join(messages)}. Give another workdir, or the same config.'
  )


@pytest.mark.parametrize(
  ('removed', 'added', 'clause'),
  [
    ('seed', {}, 'has seed'),
    ('', {'a': 1, 'b': {'c': 2}}, 'lacks a, b'),
    ('optimizer', {'new': 1}, 'has optimizer and lacks new'),
  ],
)
def test_a_config_of_another_version_is_refused(
  removed, added, clause, tmp_path
):
  workdir.open_workdir(tmp_path, CONFIG)
  given = {key: value for key, value in CONFIG.items() if key != removed}
  with pytest.raises(workdir.WorkdirError) as error:
    # The values that differ too are not listed.
    workdir.open_workdir(tmp_path, {**given, 'task': 'digits'} | added)
  assert str(error.value) == (
    f"The workdir '{tmp_path}' holds a run of another kind, or of another "
    f'version of jasgd: its config {clause}. Give another workdir, or use the '
    'program that wrote it.'
  )


def test_a_file_as_workdir_is_refused(tmp_path):
  path = tmp_path / 'file'
  path.write_text('text')
  for each in (path, path / 'below'):
    with pytest.raises(workdir.WorkdirError, match=r'file.*is a file\. Give'):
      workdir.open_workdir(each, CONFIG)
  assert path.read_text() == 'text'


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
  # A folder in which not even the superuser may write.
  with pytest.raises(workdir.WorkdirError, match=r'/proc/run.*be writable: '):
    workdir.open_workdir('/proc/run', CONFIG)
  workdir.open_workdir(tmp_path, CONFIG)
  monkeypatch.setattr(os, 'access', lambda path, mode: False)
  with pytest.raises(
    workdir.WorkdirError, match='must be writable, but it is not'
  ):
    workdir.open_workdir(tmp_path, CONFIG)


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    ([1], r'config must be a dict, got \[1\]'),
    ({'a': object()}, 'config must be writable as JSON'),
  ],
)
def test_a_config_that_json_cannot_hold_is_refused(config, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    workdir.open_workdir(tmp_path / 'run', config)
  with pytest.raises(ValueError, match=message):
    workdir.describe_run(config, 0)
  assert not (tmp_path / 'run').exists()


def test_json_is_strict_and_plain(tmp_path):
  path = tmp_path / 'a.json'
  value = {
    'a': (np.float32(0.5), np.arange(2)),
    'b': [float('nan'), float('-inf'), np.inf],
    'ü': True,
  }
  workdir.write_json(path, value)
  assert path.read_text().endswith('}\n')
  assert json.loads(path.read_text()) == {
    'a': [0.5, [0, 1]],
    'b': ['nan', '-inf', 'inf'],
    'ü': True,
  }


def test_json_is_replaced_atomically(tmp_path, monkeypatch):
  path = tmp_path / 'a.json'
  workdir.write_json(path, 1)
  with pytest.raises(ValueError, match=r'a\.json must be writable as'):
    workdir.write_json(path, {'a': {1, 2}})

  def fail(descriptor):
    raise OSError('The disk is full.')

  monkeypatch.setattr(os, 'fsync', fail)
  with pytest.raises(OSError, match='full'):
    workdir.write_json(path, 2)
  assert path.read_text() == '1\n'
  assert os.listdir(tmp_path) == ['a.json']


def test_a_damaged_config_is_named(tmp_path):
  (tmp_path / 'config.json').write_text('{"a":')
  with pytest.raises(workdir.WorkdirError, match=r'config\.json.* not a file'):
    workdir.open_workdir(tmp_path, CONFIG)
