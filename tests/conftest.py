"""What tests of real processes share."""

import pytest


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
