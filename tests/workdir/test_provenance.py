"""Provenance: its fields, and no secrets in them."""

import getpass
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import types

import jax
import optax
import pytest

from jasgd import traces
from jasgd import workdir


@pytest.fixture
def script(tmp_path, monkeypatch):
  """A folder with a script that takes the place of the running one."""
  path = tmp_path / 'script.py'
  path.write_text('pass\n')
  module = types.SimpleNamespace(__file__=str(path))
  monkeypatch.setitem(sys.modules, '__main__', module)
  monkeypatch.setattr(sys, 'argv', ['script.py'])
  return path


def _git(folder, *arguments):
  result = subprocess.run(
    ['git', '-c', 'user.name=a', '-c', 'user.email=a@b.c', *arguments],
    cwd=folder,
    check=True,
    capture_output=True,
    text=True,
    timeout=60,
  )
  return result.stdout.strip()


def test_all_fields(script, monkeypatch):
  monkeypatch.setenv('NPROC', '3')
  run = workdir.describe_run({'a': (1, 2)}, seed=7)
  versions = run.pop('versions')
  assert run == {
    'config': {'a': [1, 2]},
    'seed': 7,
    'platform': jax.default_backend(),
    'device_kind': jax.devices()[0].device_kind,
    'num_devices': jax.device_count(),
    'num_threads': 3,
    'command': ['script.py'],
    'git_revision': None,
  }
  assert set(versions) == {
    *('python', 'jasgd', 'jax', 'jaxlib', 'optax', 'numpy', 'flax')
  }
  assert versions['jax'] == jax.__version__
  assert versions['optax'] == optax.__version__
  assert versions['python'] == platform.python_version()


def test_it_is_the_header_of_a_trace(tmp_path):
  run = workdir.describe_run({'limit': float('inf')}, seed=0)
  paths = workdir.Workdir(tmp_path)
  workdir.write_json(paths.provenance, run)
  traces.TraceWriter(paths.trace, run).close()
  header = traces.Trace.load(paths.trace).header
  assert header == run == json.loads(paths.provenance.read_text())


def test_threads(monkeypatch):
  monkeypatch.delenv('NPROC', raising=False)
  assert workdir.describe_run({}, 0)['num_threads'] == os.cpu_count()
  for text in ('0', 'many', '-1', ''):
    monkeypatch.setenv('NPROC', text)
    with pytest.raises(ValueError, match=f"above 0, got '{text}'"):
      workdir.describe_run({}, 0)


@pytest.mark.skipif(not shutil.which('git'), reason='needs git')
def test_the_revision_of_a_checkout(script):
  folder = script.parent
  assert workdir.describe_run({}, 0)['git_revision'] is None
  _git(folder, 'init')
  assert workdir.describe_run({}, 0)['git_revision'] is None  # No commit.
  _git(folder, 'add', '.')
  _git(folder, 'commit', '-m', 'first')
  revision = _git(folder, 'rev-parse', 'HEAD')
  (folder / 'untracked').write_text('')
  assert workdir.describe_run({}, 0)['git_revision'] == revision
  script.write_text('changed\n')
  assert workdir.describe_run({}, 0)['git_revision'] == f'{revision}+'


def test_without_git_or_a_script_there_is_no_revision(script, monkeypatch):
  _ = script
  monkeypatch.setenv('PATH', '')
  assert workdir.describe_run({}, 0)['git_revision'] is None
  monkeypatch.setitem(sys.modules, '__main__', types.SimpleNamespace())
  assert workdir.describe_run({}, 0)['git_revision'] is None


def test_secrets_and_the_home_folder_are_hidden(script, monkeypatch):
  _ = script
  home = '/home/alice'
  monkeypatch.setenv('HOME', home)
  monkeypatch.setattr(
    sys,
    'argv',
    [
      f'{home}/jasgd/train.py',
      f'--workdir={home}/runs',
      f'--paths={home},/home/alice2/b,/mnt{home}',
      *('--token=hush', '--auth_token', 'hush', '--wire.Secret', 'hush'),
      *('--num_tokens=5', '--token', '--other=1'),
    ],
  )
  config = {
    'task': {'data_dir': f'{home}/data', 'tokens': 7, 'files': [home]},
    'runtime': {'token': 'hush', 'password': None},
  }
  run = workdir.describe_run(config, 0)
  assert run['command'] == [
    '~/jasgd/train.py',
    '--workdir=~/runs',
    '--paths=~,/home/alice2/b,/mnt/home/alice',
    *('--token=...', '--auth_token', '...', '--wire.Secret', '...'),
    *('--num_tokens=5', '--token', '--other=1'),
  ]
  assert run['config'] == {
    'task': {'data_dir': '~/data', 'tokens': 7, 'files': ['~']},
    'runtime': {'token': '...', 'password': None},
  }
  assert config['runtime']['token'] == 'hush'  # The argument is unchanged.
  monkeypatch.setattr(sys, 'argv', ['train.py'])
  text = json.dumps(workdir.describe_run({}, 0))
  for name in (socket.gethostname(), getpass.getuser()):
    assert name not in text
