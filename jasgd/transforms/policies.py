r"""Policies: the factor of a gradient of staleness tau.

A policy is a function `(tau, count) -> factor`, where `count` is the number of
updates made. It is pure and works on traced arrays. The factor of a fresh
gradient is 1, except for `fixed_fraction` and, after the first update, for
`adadelay`. Each function below builds a policy (`from jasgd import policies`):

=====================  ==========================================  ===========
name                   factor                                      from
=====================  ==========================================  ===========
`constant`             1                                           Downpour
`inverse`              1 / max(tau, 1)                             Zhang
`inverse_plus_one`     1 / (1 + tau)                               DynSGD
`polynomial`           (1 + tau)^-exponent                         FedAsync
`exponential`          exp(-decay * tau)                           Chan, Kardam
`hinge`                1 up to b, then 1 / (1 + a (tau - b))       FedAsync
`adadelay`             1 / (1 + scale * sqrt(count + tau))         AdaDelay
`tail`                 1 up to a threshold, then threshold / tau   Koloskova
`drop_above`           1 up to a threshold, then 0
`fixed_fraction`       1 / n                                       a control
=====================  ==========================================  ===========

A transformation that takes a policy accepts a name (`'inverse'`), a name with
arguments (`('polynomial', 0.5)`), the result of a function below
(`policies.polynomial(0.5)`), or any function `(tau, count) -> factor`.
"""

from collections.abc import Callable
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from jasgd.transforms import _checks

__all__ = [
  'NAMES',
  'Policy',
  'PolicyLike',
  'adadelay',
  'constant',
  'drop_above',
  'exponential',
  'fixed_fraction',
  'hinge',
  'inverse',
  'inverse_plus_one',
  'make_policy',
  'polynomial',
  'tail',
]

ArrayLike = jax.typing.ArrayLike
Policy = Callable[[Any, Any], ArrayLike]
PolicyLike = str | tuple[Any, ...] | Policy


def constant() -> Policy:
  """Factor 1 for every gradient: Downpour SGD.

  Examples:
    >>> from jasgd import policies
    >>> print(policies.constant()(tau=7, count=0))
    1.0

  References:
    Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012
  """
  return lambda tau, count: jnp.ones_like(_real(tau))


def inverse() -> Policy:
  r"""Divides by the staleness: the rule of staleness-aware ASGD.

  .. math:: \alpha(\tau) = 1 / \max(\tau, 1)

  A staleness of 0 and a staleness of 1 both have factor 1.

  Examples:
    >>> from jasgd import policies
    >>> print(policies.inverse()(tau=4, count=0))
    0.25

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """
  return lambda tau, count: 1 / jnp.maximum(_real(tau), 1)


def inverse_plus_one() -> Policy:
  r"""Divides by the staleness plus one: DynSGD.

  .. math:: \alpha(\tau) = 1 / (1 + \tau)

  Examples:
    >>> from jasgd import policies
    >>> print(policies.inverse_plus_one()(tau=4, count=0))
    0.2

  References:
    Jiang et al., `Heterogeneity-aware Distributed Parameter Servers
    <https://doi.org/10.1145/3035918.3035933>`_, 2017
  """
  return lambda tau, count: 1 / (1 + _real(tau))


def polynomial(exponent: ArrayLike = 0.5) -> Policy:
  r"""Falls with a power of the staleness: FedAsync.

  .. math:: \alpha(\tau) = (1 + \tau)^{-a}

  Args:
    exponent: Exponent a, at least 0.

  Examples:
    >>> from jasgd import policies
    >>> print(policies.polynomial(0.5)(tau=3, count=0))
    0.5

  References:
    Xie et al., `Asynchronous Federated Optimization
    <https://arxiv.org/abs/1903.03934>`_, 2019
  """
  _checks.check_at_least('exponent', exponent, 0)
  return lambda tau, count: (1 + _real(tau)) ** -_real(exponent)


def exponential(decay: ArrayLike = 0.2) -> Policy:
  r"""Falls exponentially: Chan & Lane, Kardam.

  .. math:: \alpha(\tau) = e^{-a \tau}

  For a staleness in the hundreds the factor is practically 0, which is why
  Zhang et al. chose `inverse`.

  Args:
    decay: Decay a, at least 0.

  Examples:
    >>> from jasgd import policies
    >>> print(f'{policies.exponential(0.2)(tau=5, count=0):.4f}')
    0.3679

  References:
    Chan and Lane, `Distributed asynchronous optimization of convolutional
    neural networks
    <https://www.isca-archive.org/interspeech_2014/chan14_interspeech.html>`_,
    2014; Damaskinos et al., `Asynchronous Byzantine Machine Learning
    <https://proceedings.mlr.press/v80/damaskinos18a.html>`_, 2018
  """
  _checks.check_at_least('decay', decay, 0)
  return lambda tau, count: jnp.exp(-_real(decay) * _real(tau))


def hinge(a: ArrayLike = 10.0, b: ArrayLike = 4.0) -> Policy:
  r"""Factor 1 up to a staleness of b, then hyperbolic: FedAsync.

  .. math:: \alpha(\tau) = 1 / (1 + a \max(\tau - b, 0))

  Args:
    a: Slope of the denominator, at least 0.
    b: Largest staleness with factor 1, at least 0.

  Examples:
    >>> from jasgd import policies
    >>> print(policies.hinge(a=1.0, b=4)(tau=7, count=0))
    0.25

  References:
    Xie et al., `Asynchronous Federated Optimization
    <https://arxiv.org/abs/1903.03934>`_, 2019
  """
  _checks.check_at_least('a', a, 0)
  _checks.check_at_least('b', b, 0)
  return lambda tau, count: (
    1 / (1 + _real(a) * jnp.maximum(_real(tau) - _real(b), 0))
  )


def adadelay(scale: ArrayLike = 1.0) -> Policy:
  r"""Falls with the number of updates and with the staleness: AdaDelay.

  The paper's step size is :math:`1 / (L + c \sqrt{t + \tau})`. With a learning
  rate of 1/L the factor is

  .. math:: \alpha(t, \tau) = 1 / (1 + s \sqrt{t + \tau}), \quad s = c / L

  It is the only policy that uses the count, and replaces a rate schedule.

  Args:
    scale: Scale s, at least 0.

  Examples:
    >>> from jasgd import policies
    >>> print(policies.adadelay(1.0)(tau=4, count=5))
    0.25

  References:
    Sra et al., `AdaDelay: Delay Adaptive Distributed Stochastic Optimization
    <https://proceedings.mlr.press/v51/sra16.html>`_, 2016
  """
  _checks.check_at_least('scale', scale, 0)
  return lambda tau, count: (
    1 / (1 + _real(scale) * jnp.sqrt(_real(count) + _real(tau)))
  )


def tail(threshold: ArrayLike) -> Policy:
  r"""Factor 1 up to a threshold, damped above it.

  .. math:: \alpha(\tau) = \min(1, \theta / \tau)

  Koloskova et al. and Mishchenko et al. show that with the number of learners
  as threshold, the delays of the slowest learners do not enter the bound.

  Args:
    threshold: Threshold theta, above 0.

  Examples:
    >>> from jasgd import policies
    >>> print(policies.tail(8)(tau=32, count=0))
    0.25

  References:
    Koloskova et al., `Sharper Convergence Guarantees for Asynchronous SGD
    <https://arxiv.org/abs/2206.08307>`_, 2022; Mishchenko et al., `Asynchronous
    SGD Beats Minibatch SGD <https://arxiv.org/abs/2206.07638>`_, 2022
  """
  _checks.check_positive('threshold', threshold)
  return lambda tau, count: (
    _real(threshold) / jnp.maximum(_real(tau), _real(threshold))
  )


def drop_above(threshold: ArrayLike) -> Policy:
  r"""Factor 1 up to a threshold, 0 above it.

  .. math:: \alpha(\tau) = 1 \text{ if } \tau \le \theta \text{ else } 0

  The update is still made, with zeros in place of the gradient: the clock
  advances, and momentum still moves the weights. This differs from a protocol
  that drops stale gradients (Ringmaster ASGD), which makes no update.

  Args:
    threshold: Threshold theta, at least 0.

  Examples:
    >>> from jasgd import policies
    >>> print(policies.drop_above(8)(tau=9, count=0))
    0.0

  References:
    Koloskova et al., `Sharper Convergence Guarantees for Asynchronous SGD
    <https://arxiv.org/abs/2206.08307>`_, 2022
  """
  _checks.check_at_least('threshold', threshold, 0)
  return lambda tau, count: jnp.where(
    _real(tau) <= _real(threshold), _real(1), _real(0)
  )


def fixed_fraction(n: ArrayLike) -> Policy:
  """Factor 1/n for any staleness: the control experiment for `inverse`.

  With n learners of equal speed the mean staleness is about n, so `inverse`
  divides the learning rate by about n. A gain of `inverse` over this constant
  comes from the differences in staleness between gradients.

  Args:
    n: Divisor, above 0.

  Examples:
    >>> from jasgd import policies
    >>> print(policies.fixed_fraction(4)(tau=100, count=0))
    0.25

  References:
    Gupta et al., `Model Accuracy and Runtime Tradeoff in Distributed Deep
    Learning <https://arxiv.org/abs/1509.04210>`_, 2016
  """
  _checks.check_positive('n', n)
  return lambda tau, count: jnp.broadcast_to(1 / _real(n), jnp.shape(tau))


_FACTORIES: dict[str, Callable[..., Policy]] = {
  factory.__name__: factory
  for factory in (
    adadelay,
    constant,
    drop_above,
    exponential,
    fixed_fraction,
    hinge,
    inverse,
    inverse_plus_one,
    polynomial,
    tail,
  )
}

NAMES: tuple[str, ...] = tuple(_FACTORIES)


def make_policy(policy: PolicyLike, *args: Any, **kwargs: Any) -> Policy:
  """Builds a policy from a name and arguments, or checks a callable.

  Args:
    policy: Name, tuple `(name, *arguments)`, or function
      `(tau, count) -> factor`.
    *args: Arguments of the named policy.
    **kwargs: Keyword arguments of the named policy.

  Returns:
    A function `(tau, count) -> factor`.

  Raises:
    ValueError: if the name is unknown, or the arguments do not fit.

  Examples:
    >>> from jasgd import policies
    >>> policy = policies.make_policy('polynomial', exponent=1.0)
    >>> print(policy(3, 0), policies.make_policy(('tail', 8))(16, 0))
    0.25 0.5
  """
  if isinstance(policy, (tuple, list)) and policy:
    return make_policy(policy[0], *policy[1:], *args, **kwargs)
  if callable(policy):
    return _check_callable(policy, args, kwargs)
  if not isinstance(policy, str) or policy not in _FACTORIES:
    raise ValueError(
      f'Unknown policy {policy!r}. Known: {", ".join(NAMES)}; or give any '
      'function (tau, count) -> factor.'
    )
  factory = _FACTORIES[policy]
  signature = inspect.signature(factory)
  try:
    signature.bind(*args, **kwargs)
  except TypeError as error:
    parameters = ', '.join(str(p) for p in signature.parameters.values())
    raise ValueError(
      f'Policy {policy!r} takes ({parameters}), got args={args} '
      f'kwargs={kwargs}: {error}. Give arguments as '
      f'({policy!r}, ...) or policies.{policy}(...).'
    ) from None
  return factory(*args, **kwargs)


def _check_callable(policy: Policy, args: tuple, kwargs: dict) -> Policy:
  """Raises a ValueError for a callable that cannot be a policy."""
  if policy in _FACTORIES.values():
    name = getattr(policy, '__name__', '')
    raise ValueError(
      f'policies.{name} builds a policy: call it, policies.{name}(...).'
    )
  if args or kwargs:
    raise ValueError(
      f'Arguments {args} {kwargs} go with the name of a policy; got the '
      f'callable {policy!r}.'
    )
  try:
    signature = inspect.signature(policy)
  except (TypeError, ValueError):
    return policy  # Some builtins have no signature.
  try:
    signature.bind(0, 0)
  except TypeError as error:
    raise ValueError(
      f'A policy is called as policy(tau, count), which {policy!r} does not '
      f'take: {error}.'
    ) from None
  return policy


def _real(value: ArrayLike) -> jax.Array:
  """Converts to float32, or to float64 in jax's x64 mode."""
  return jnp.asarray(value, float)
