"""Scaling of gradients or updates by a policy of their staleness."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jasgd.transforms import _checks
from jasgd.transforms import _staleness
from jasgd.transforms import _trees
from jasgd.transforms import policies


class ScaleByStalenessState(NamedTuple):
  """State of `scale_by_staleness`."""

  clock: jax.Array  # shape=(), int32: number of updates.
  mean_staleness: jax.Array  # shape=(), float32: over those updates.


def scale_by_staleness(
  policy: policies.PolicyLike = 'inverse',
) -> optax.GradientTransformationExtraArgs:
  r"""Multiplies the updates by a factor that depends on their staleness.

  .. math:: g \leftarrow \alpha(\tau, t)\, g

  `update` takes the keyword `staleness` (tau itself), or `read_clock` (the
  clock of the weights that the gradient was computed on). With `read_clock`,
  tau is the state's clock minus it, which is correct if each gradient makes its
  own update. The position in a chain matters: see :mod:`jasgd.transforms`.

  Args:
    policy: Factor of a gradient of staleness tau: a name, a tuple
      `(name, *arguments)` or a function `(tau, count) -> factor`. See
      :mod:`jasgd.policies`.

  Returns:
    A transformation whose state holds the clock and the mean staleness.

  Examples:
    >>> import jasgd, jax.numpy as jnp, optax
    >>> optimizer = optax.chain(
    ...     jasgd.scale_by_staleness('inverse'), optax.sgd(0.1))
    >>> params = jnp.array(1.0)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(
    ...     jnp.array(2.0), state, params, staleness=4)
    >>> print(f'{updates:.3f} {optax.tree.get(state, "mean_staleness"):.1f}')
    -0.050 4.0

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """
  policy = policies.make_policy(policy)

  def init_fn(params: optax.Params) -> ScaleByStalenessState:
    del params
    return ScaleByStalenessState(
      clock=_staleness.zero_clock(),
      mean_staleness=jnp.zeros((), jnp.float32),
    )

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    *,
    staleness: _staleness.Staleness = None,
    read_clock: _staleness.Staleness = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ScaleByStalenessState]:
    del params, extra_args  # For other transformations of the chain.
    tau = _staleness.resolve_staleness(state.clock, staleness, read_clock)
    updates = _trees.scale_tree(updates, policy(tau, state.clock))
    return updates, ScaleByStalenessState(
      clock=_staleness.tick(state.clock),
      mean_staleness=_staleness.update_mean(
        state.mean_staleness, tau, state.clock
      ),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def staleness_aware(
  optimizer: optax.GradientTransformation,
  policy: policies.PolicyLike = 'inverse',
  where: Literal['gradients', 'updates'] = 'gradients',
) -> optax.GradientTransformationExtraArgs:
  """Makes an optimizer stale-aware by scaling its inputs or its outputs.

  `where='gradients'` scales the gradients. Each one enters the momentum with
  its own factor, as in Zhang et al. Adam and similar optimizers divide by the
  root mean square of the gradients: if tau is constant, they undo the scaling.

  `where='updates'` scales the updates, which amounts to a learning rate that
  depends on tau. It works with every optimizer; with momentum it also damps the
  contributions of other gradients.

  Args:
    optimizer: Any optax optimizer.
    policy: Policy, as in `scale_by_staleness`.
    where: Place of the scaling: 'gradients' or 'updates'.

  Returns:
    The chain of the two. `update` takes `staleness` or `read_clock`.

  Raises:
    ValueError: if `where` is neither of the two.

  Examples:
    >>> import jasgd, jax.numpy as jnp, optax
    >>> optimizer = jasgd.staleness_aware(optax.adam(0.1), where='updates')
    >>> params = jnp.array(1.0)
    >>> updates, _ = optimizer.update(
    ...     jnp.array(2.0), optimizer.init(params), params, staleness=4)
    >>> print(f'{updates:.3f}')
    -0.025

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """
  scaling = scale_by_staleness(policy)
  optimizer = _checks.check_transform('optimizer', optimizer)
  if where == 'gradients':
    return optax.chain(scaling, optimizer)
  if where == 'updates':
    return optax.chain(optimizer, scaling)
  raise ValueError(f"where must be 'gradients' or 'updates', got {where!r}.")
