"""What tests share."""

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
  """A folder for what was compiled."""
  return tmp_path_factory.mktemp('compiled')


@pytest.fixture
def processes(monkeypatch, compiled):
  """The processes of this test; none is left after it."""
  from tests import live  # Where it is needed: most tests have none.

  found = live.Processes(monkeypatch, compiled)
  try:
    yield found
  finally:
    found.end()
