"""Functions compiled quickly and others do not meet."""

import jax

from tests import quickly


def test_nothing_is_shared_with_what_is_compiled_outside():
  compiled = []

  @jax.jit
  def double(x):
    compiled.append(jax.config.read('jax_disable_most_optimizations'))
    return 2 * x

  double(1.0)
  with quickly.compile_quickly():
    double(1.0)
    with quickly.compile_quickly():
      double(1.0)
  double(1.0)
  double(1.0)
  assert compiled == [False, True, False]
