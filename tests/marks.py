"""Which cases of a test are run each time, and which with the slow ones."""

import pytest


def slow_but(values, *fast):
  """Parameters of a test: all values are slow, but for those named.

  A value that is a tuple is one of several parameters.
  """
  assert set(fast) <= set(values), (fast, values)
  return [
    pytest.param(
      *(value if isinstance(value, tuple) else (value,)),
      marks=() if value in fast else pytest.mark.slow,
    )
    for value in values
  ]
