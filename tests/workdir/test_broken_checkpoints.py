"""Checkpoints that were damaged after they were written."""

import json
import pathlib
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import workdir


def _flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


DAMAGES = {
  'a flipped byte': _flip,
  'truncated': lambda path: path.write_bytes(path.read_bytes()[:-2]),
  'empty': lambda path: path.write_bytes(b''),
  'missing': lambda path: path.unlink(),
  'a folder': lambda path: (path.unlink(), path.mkdir()),
}
LARGE_DAMAGES = {
  'an empty folder': lambda path: (shutil.rmtree(path), path.mkdir()),
  'a file': lambda path: (shutil.rmtree(path), path.write_bytes(b'x')),
  'no arrays': lambda path: shutil.rmtree(path / 'state'),
}


def _make_state(clock):
  rng = np.random.default_rng(clock)
  return {
    'weights': jnp.asarray(rng.normal(size=(40, 30)), jnp.float32),
    'count': jnp.asarray(clock, jnp.int32),
  }


def _save(folder, clock):
  state = _make_state(clock)
  return workdir.save_checkpoint(
    folder, clock, state, position={'samples': clock}, params=state['weights']
  )


@pytest.fixture(scope='module')
def template(tmp_path_factory):
  """A folder with two checkpoints, to be copied."""
  folder = tmp_path_factory.mktemp('template')
  for clock in (10, 20):
    _save(folder, clock)
  return folder


@pytest.fixture
def copy(template, tmp_path):
  """Makes copies of the folder, each with its own name."""

  def copy(name='run'):
    return pathlib.Path(shutil.copytree(template, tmp_path / str(name)))

  return copy


def _list_files(folder):
  return sorted(
    path.relative_to(folder)
    for path in folder.rglob('*')
    if path.is_file() and path.stat().st_size
  )


def _assert_holds(folder, clock):
  """Checks that the last checkpoint is that of a clock, and intact."""
  state = _make_state(clock)
  found = workdir.restore_checkpoint(folder, jax.eval_shape(lambda: state))
  assert (found[0], found[2]) == (clock, {'samples': clock})
  for name, leaf in state.items():
    np.testing.assert_array_equal(found[1][name], leaf)
  np.testing.assert_array_equal(workdir.load_params(folder), state['weights'])


@pytest.mark.parametrize('damage', DAMAGES)
def test_damage_of_any_file_is_found(damage, copy, template, caplog):
  names = _list_files(template / 'checkpoints/20')
  assert len(names) > 5
  for number, name in enumerate(names):
    folder = copy(number)
    newest = folder / 'checkpoints/20'
    DAMAGES[damage](newest / name)
    others = sorted(newest.rglob('*'))
    caplog.clear()
    (aside,) = workdir.set_aside_broken(folder)
    assert aside == folder / 'checkpoints/20.broken'
    assert len(sorted(aside.rglob('*'))) == len(others)  # None is removed.
    (record,) = caplog.records
    assert record.levelname == 'WARNING'
    assert str(aside) in record.getMessage()
    assert str(newest / name) in record.getMessage()
    assert workdir.list_checkpoints(folder) == [10]
  _assert_holds(folder, 10)


@pytest.mark.parametrize('damage', LARGE_DAMAGES)
def test_damage_of_a_folder_is_found(damage, copy):
  folder = copy()
  LARGE_DAMAGES[damage](folder / 'checkpoints/20')
  assert len(workdir.set_aside_broken(folder)) == 1
  _assert_holds(folder, 10)


def test_readers_refuse_damaged_files(copy):
  """Only the reader that needs the damaged file refuses."""
  like = jax.eval_shape(lambda: _make_state(20))
  for item in ('state', 'params'):
    folder = copy(item)
    (path, *_) = (folder / 'checkpoints/20' / item).glob('**/d/*')
    _flip(path)
    readers = {
      'state': lambda folder=folder: workdir.restore_checkpoint(folder, like),
      'params': lambda folder=folder: workdir.load_params(folder),
    }
    with pytest.raises(workdir.WorkdirError, match=f"'{path}' is damaged"):
      readers.pop(item)()
    (other,) = readers.values()
    other()
    assert workdir.list_checkpoints(folder) == [10, 20]  # Nothing is renamed.


def test_intact_checkpoints_keep_their_names(copy, tmp_path):
  folder = copy()
  assert workdir.set_aside_broken(folder) == []
  _assert_holds(folder, 20)
  assert workdir.set_aside_broken(tmp_path / 'not there') == []


def test_an_older_checkpoint_is_set_aside_too(copy):
  folder = copy()
  (folder / 'checkpoints/10/manifest.json').unlink()
  (aside,) = workdir.set_aside_broken(folder)
  assert aside.name == '10.broken'
  _assert_holds(folder, 20)


def test_all_checkpoints_are_damaged(copy):
  folder = copy()
  for clock in (10, 20):
    (folder / f'checkpoints/{clock}/manifest.json').write_text('{')
  message = r'None of the checkpoints in .*20/manifest.*from a backup, or'
  for _ in range(2):  # A second attempt gives the same error.
    with pytest.raises(workdir.WorkdirError, match=message) as caught:
      workdir.set_aside_broken(folder)
    assert '\n' not in str(caught.value)
    assert workdir.list_checkpoints(folder) == [10, 20]


def test_checkpoints_of_version_1_are_refused(copy):
  folder = copy()
  for clock in (10, 20):
    path = folder / f'checkpoints/{clock}/manifest.json'
    manifest = json.loads(path.read_text())
    del manifest['version'], manifest['checksum']
    text = json.dumps(manifest, sort_keys=True)
    manifest['checksum'] = zlib.crc32(text.encode())
    path.write_text(json.dumps(manifest))
  message = '20.* is a checkpoint of version 1, and this jasgd reads version 2'
  for read in (workdir.set_aside_broken, workdir.read_position):
    with pytest.raises(workdir.WorkdirError, match=message):
      read(folder)
  assert workdir.list_checkpoints(folder) == [10, 20]


def test_damaged_checkpoints_are_never_removed(copy):
  """Not even if another checkpoint of the same clock is damaged later."""
  folder = copy()
  for expected in ('20.broken', '20.broken-2'):
    (folder / 'checkpoints/20/manifest.json').unlink()
    (aside,) = workdir.set_aside_broken(folder)
    assert aside.name == expected
    _save(folder, 20)
    _assert_holds(folder, 20)
  for clock in (30, 40):
    _save(folder, clock)
  names = {path.name for path in (folder / 'checkpoints').iterdir()}
  assert names == {'20.broken', '20.broken-2', '30', '40'}
