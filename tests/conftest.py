"""What tests share."""

import os
import shutil
import tempfile

import hypothesis
import pytest

# Whoever shares the machine must not make a test fail.
hypothesis.settings.register_profile('untimed', deadline=None)
hypothesis.settings.load_profile('untimed')

_CACHE = 'JAX_COMPILATION_CACHE_DIR'
_MIN_SECONDS = 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'


def pytest_configure(config):
  """Makes a folder in which the workers of pytest share machine code.

  Workers inherit these variables, and jax reads them when it is imported. One
  worker runs the very code that another has compiled: no bit changes by it.
  """
  if _CACHE not in os.environ:
    folder = tempfile.mkdtemp(prefix='jasgd-compiled-')
    os.environ |= {_CACHE: folder, _MIN_SECONDS: '0'}
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish():
  """Keeps the folder from processes that tests start; jax is imported by now.

  Code that XLA compiles for one number of threads differs from that for
  another, but jax would take either for the other.
  """
  os.environ.pop(_CACHE, None)
  # Processes keep the bytecode of our files: to compile it takes each of them a
  # third of a second.
  os.environ.pop('PYTHONDONTWRITEBYTECODE', None)


@pytest.fixture(scope='module')
def quick_compiler():
  """For tests whose time would go into compiling."""
  from tests import quickly  # Where it is needed: it imports jax.

  with quickly.compile_quickly():
    yield


@pytest.fixture(scope='session')
def compiled(tmp_path_factory):
  """A folder for machine code of processes that tests start."""
  folder = tmp_path_factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    folder = folder.parent
  folder = folder / 'compiled'
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture(scope='session')
def commands(tmp_path_factory, compiled):
  """Runs entry points quickly: see `tests.commands`."""
  from tests import commands as module

  environment = os.environ | {
    _CACHE: os.fspath(compiled),
    _MIN_SECONDS: '0',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  }
  found = module.Commands(tmp_path_factory.mktemp('commands'), environment)
  yield found
  found.close()


@pytest.fixture
def compile_once(monkeypatch, compiled):
  """Processes that are started find what others have compiled."""
  monkeypatch.setenv(_CACHE, os.fspath(compiled))
  monkeypatch.setenv(_MIN_SECONDS, '0')


@pytest.fixture
def processes(monkeypatch, compile_once):
  """The processes of this test; none is left after it."""
  from tests import live  # Where it is needed: most tests have none.

  found = live.Processes(monkeypatch)
  try:
    yield found
  finally:
    found.end()
