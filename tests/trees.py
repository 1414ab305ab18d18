"""Assertions about trees of arrays."""

import jax
import numpy as np


def assert_same_bits(actual, expected):
  """Equal structure, shapes, dtypes and bits (so -0.0 is not 0.0)."""
  assert_same_types(actual, expected)
  for path, (a, b) in _pairs(actual, expected):
    assert a.tobytes() == b.tobytes(), f'{path}: {a} is not {b}'


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
  """Equal structure, shapes and dtypes; values equal up to rounding."""
  assert_same_types(actual, expected)
  for path, (a, b) in _pairs(actual, expected):
    np.testing.assert_allclose(
      a.astype(np.float64),
      b.astype(np.float64),
      rtol=rtol,
      atol=atol,
      err_msg=path,
    )


def assert_same_types(actual, expected):
  """Equal structure, shapes and dtypes."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  leaves = jax.tree.leaves_with_path(actual)
  for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype), (
      f'{jax.tree_util.keystr(path)}: {a} is not like {b}'
    )


def _pairs(actual, expected):
  leaves = jax.tree.leaves_with_path(actual)
  for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
    yield jax.tree_util.keystr(path), (np.asarray(a), np.asarray(b))
