"""Compiles quickly: most tests run what they compile for a moment only."""

import contextlib
import os

import jax

_FLAG = 'jax_disable_most_optimizations'


@contextlib.contextmanager
def compile_quickly():
  """Leaves machine code as it comes, which takes half of the time.

  Nothing of it is kept: its last bits may differ from those of better code, and
  other tests in this process may compare bits. Processes that are started here
  read the variable, and so have the same bits as this one.
  """
  before = jax.config.read(_FLAG)
  jax.config.update(_FLAG, True)
  os.environ[_FLAG.upper()] = '1'
  try:
    yield
  finally:
    jax.config.update(_FLAG, before)
    if not before:
      del os.environ[_FLAG.upper()]
    if not before:
      jax.clear_caches()
