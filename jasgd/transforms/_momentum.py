"""Momentum in asynchronous runs: asynchrony itself acts like momentum."""

import jax

from jasgd.transforms import _checks


def explicit_momentum(
  total: jax.typing.ArrayLike, num_learners: jax.typing.ArrayLike
) -> jax.typing.ArrayLike:
  r"""Momentum to set, so that asynchrony adds what is missing of the total.

  M asynchronous learners with exponential compute times act, on average, like
  momentum:

  .. math::
    E[w_{t+1} - w_t] = (1 - 1/M)\, E[w_t - w_{t-1}]
                       - (\eta / M)\, E\nabla f(w_t)

  so the momentum to set, for a given total, is

  .. math:: \mu_\text{explicit} = \mu_\text{total} - (1 - 1/M)

  It is negative if asynchrony adds more than the total. A negative momentum is
  the right setting then, and `optax.sgd` accepts it.

  Args:
    total: Momentum of a synchronous run, in [0, 1).
    num_learners: Number of learners M, at least 1.

  Returns:
    The momentum to set in the optimizer.

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
