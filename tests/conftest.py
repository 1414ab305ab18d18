"""What tests share."""

import os

import hypothesis
import pytest

# Whoever shares the machine must not make a test fail.
hypothesis.settings.register_profile('untimed', deadline=None)
hypothesis.settings.load_profile('untimed')


@pytest.fixture(scope='module')
def quick_compiler():
  """For tests whose time would go into compiling."""
  from tests import quickly  # Where it is needed: it imports jax.

  with quickly.compile_quickly():
    yield


@pytest.fixture(scope='session')
def compiled(tmp_path_factory):
  """A folder for what was compiled, of all workers."""
  folder = tmp_path_factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    folder = folder.parent
  folder = folder / 'compiled'
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture
def compile_once(monkeypatch, compiled):
  """Processes that are started find what others have compiled."""
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', os.fspath(compiled))
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')


@pytest.fixture
def processes(monkeypatch, compile_once):
  """The processes of this test; none is left after it."""
  from tests import live  # Where it is needed: most tests have none.

  found = live.Processes(monkeypatch)
  try:
    yield found
  finally:
    found.end()
