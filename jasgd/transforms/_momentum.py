"""Asynchrony begets momentum: how much is left to add by hand."""

import jax

from jasgd.transforms import _checks


def explicit_momentum(
  total: jax.typing.ArrayLike, num_learners: jax.typing.ArrayLike
) -> jax.typing.ArrayLike:
  r"""The momentum to set, so that asynchrony makes up the rest.

  M asynchronous learners whose work times are exponential behave on average as
  if there were momentum:

  .. math::
    E[w_{t+1} - w_t] = (1 - 1/M)\, E[w_t - w_{t-1}]
                       - (\eta / M)\, E\nabla f(w_t)

  so what is left of a wanted total is

  .. math:: \mu_\text{explicit} = \mu_\text{total} - (1 - 1/M)

  It is negative once the learners bring more than was wanted, and a negative
  momentum is then the right setting (`optax.sgd` takes it).

  Args:
    total: The momentum that a synchronous run would use, in [0, 1).
    num_learners: M, at least 1.

  Returns:
    The momentum to give to the optimizer.

  Examples:
    >>> import jasgd
    >>> print(f'{jasgd.explicit_momentum(0.9, 4):.2f}')
    0.15
    >>> print(f'{jasgd.explicit_momentum(0.9, 20):.2f}')
    -0.05

  References:
    Mitliagkas et al., `Asynchrony begets Momentum, with an Application to Deep
    Learning <https://arxiv.org/abs/1605.09774>`_, 2016
  """
  _checks.check_fraction('total', total)
  _checks.check_at_least('num_learners', num_learners, 1)
  return total - (1 - 1 / num_learners)
