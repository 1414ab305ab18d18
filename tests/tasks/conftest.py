"""Fixtures of all tests of tasks."""

import pytest


@pytest.fixture(scope='package', autouse=True)
def quick_tasks():
  """Compiles quickly: most of the time of these tests is the compiler's."""
  from tests import quickly

  with quickly.compile_quickly():
    yield
