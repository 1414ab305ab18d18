"""Fixtures of the tests of the server."""

import pytest

from tests.runtime import scripted


@pytest.fixture
def open_bench():
  """Makes a bench, which is closed after the test."""
  benches = []

  def open_bench(*args, **options):
    benches.append(scripted.Bench(*args, **options))
    return benches[-1]

  yield open_bench
  for bench in benches:
    bench.close()
