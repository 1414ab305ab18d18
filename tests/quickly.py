"""Compiles quickly: most tests run what they compile for a moment only."""

import contextlib
import os

import jax

_FLAG = 'jax_disable_most_optimizations'


@contextlib.contextmanager
def compile_quickly():
  """Compiles without optimizations, which takes half of the time.

  The last bits of results may differ from those of optimized code. `jax.jit`
  does not look at the flag when it searches its cache in memory. Hence the
  cache is emptied at both ends: neither here nor outside is a function that was
  compiled in one way compared with a function that was compiled in the other.
  Processes that are started here read the variable of the same name, and so
  compile in the same way.
  """
  if jax.config.read(_FLAG):
    yield
    return
  jax.clear_caches()
  jax.config.update(_FLAG, True)
  os.environ[_FLAG.upper()] = '1'
  try:
    yield
  finally:
    jax.config.update(_FLAG, False)
    del os.environ[_FLAG.upper()]
    jax.clear_caches()
