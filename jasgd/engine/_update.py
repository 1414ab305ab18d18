"""The server's work: gathering gradients and updating the weights, compiled."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jasgd import transforms
from jasgd.engine import _gradient


class ServerState(NamedTuple):
  """All that a server knows of the weights."""

  params: Any
  stats: Any  # What is not trained.
  stats_sum: Any  # Of the gradients gathered since the last update.
  aggregation: transforms.AggregationState


class Update(NamedTuple):
  """A server's work, as pure, jitted functions that donate the state.

  Attributes:
    init: `(params, stats) -> state`.
    accumulate: `(state, gradient, staleness, stale_params) -> state`. Takes a
      `Gradient` in, to be part of the next update.
    update: `(state, rate, num_learners) -> state`. Updates the weights with
      what was taken in. The optimizer's updates are multiplied by `rate`;
      None leaves them alone, as even a factor of 1 may change how a compiler
      rounds.
    apply: `(state, gradient, staleness, stale_params, rate, num_learners, *,
      is_single) -> state`. Both at once. `is_single` says, to the compiler,
      that nothing was taken in before; the optimizer gets `stale_params` then.
    measure_gap: `(state, stale_params) -> |w - w_stale|`.
    get_factor: `(staleness, clock) -> factor` of the policy.
  """

  init: Callable[..., ServerState]
  accumulate: Callable[..., ServerState]
  update: Callable[..., ServerState]
  apply: Callable[..., ServerState]
  measure_gap: Callable[..., jax.Array]
  get_factor: Callable[..., jax.Array]


def make_update(
  optimizer: optax.GradientTransformation,
  *,
  policy: transforms.policies.PolicyLike = 'constant',
  per_gradient: optax.GradientTransformation | None = None,
) -> Update:
  r"""Compiles what a server does with gradients.

  .. math::
    w \leftarrow w + r \, \text{optimizer}\Big(
      \frac1c \sum_{l=1}^{c} \alpha(\tau_l)\, h(g_l) \Big), \quad
    s \leftarrow (1 - \tfrac c\lambda) s + \tfrac c\lambda \bar s

  s are the statistics that are not trained; of lambda learners c brought new
  ones, and neither policy nor optimizer touches them.

  Args:
    optimizer: The per-update chain, any optax optimizer.
    policy: alpha, as in `jasgd.scale_by_staleness`.
    per_gradient: h, run on each gradient before the policy.

  Returns:
    The functions.

  Examples:
    >>> import jax.numpy as jnp, optax
    >>> from jasgd import engine
    >>> server = engine.make_update(optax.sgd(0.1))
    >>> state = server.init(jnp.array([1.0]), {})
    >>> gradient = engine.Gradient(jnp.array([2.0]), {}, jnp.array(0.0))
    >>> state = server.apply(
    ...     state, gradient, 0, state.params, 1.0, 1, is_single=True)
    >>> print(state.params)
    [0.8]

  References:
    Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
    <https://arxiv.org/abs/1511.05950>`_, 2016
  """
  if isinstance(policy, list):
    policy = tuple(policy)
  return _compile(optimizer, policy, per_gradient)


@functools.lru_cache(maxsize=32)
def _compile(
  optimizer: optax.GradientTransformation,
  policy: transforms.policies.PolicyLike,
  per_gradient: optax.GradientTransformation | None,
) -> Update:
  """The same functions each time, so that nothing is compiled twice."""
  aggregation = transforms.make_aggregation(optimizer, policy, per_gradient)

  def init(params: Any, stats: Any) -> ServerState:
    return ServerState(
      params=params,
      stats=stats,
      stats_sum=jax.tree.map(jnp.zeros_like, stats),
      aggregation=aggregation.init(params),
    )

  def accumulate(
    state: ServerState,
    gradient: _gradient.Gradient,
    staleness: Any,
    stale_params: Any,
  ) -> ServerState:
    is_first = state.aggregation.group_size == 0
    return state._replace(
      stats_sum=jax.tree.map(
        lambda total, leaf: jnp.where(is_first, leaf, total + leaf),
        state.stats_sum,
        gradient.stats,
      ),
      aggregation=aggregation.accumulate(
        state.aggregation,
        gradient.gradient,
        state.params,
        staleness=staleness,
        stale_params=stale_params,
      ),
    )

  def update(
    state: ServerState,
    rate: Any,
    num_learners: Any,
    stale_params: Any = None,
  ) -> ServerState:
    size = state.aggregation.group_size.astype(jnp.float32)
    share = jnp.minimum(size / num_learners, 1)
    updates, aggregated = aggregation.update(
      state.aggregation, state.params, stale_params=stale_params
    )
    if rate is not None:
      updates = jax.tree.map(
        lambda leaf: leaf * jnp.asarray(rate, leaf.dtype), updates
      )
    return ServerState(
      params=optax.apply_updates(state.params, updates),
      stats=jax.tree.map(
        lambda old, total: ((1 - share) * old + share * (total / size)).astype(
          old.dtype
        ),
        state.stats,
        state.stats_sum,
      ),
      stats_sum=state.stats_sum,
      aggregation=aggregated,
    )

  def apply(
    state: ServerState,
    gradient: _gradient.Gradient,
    staleness: Any,
    stale_params: Any,
    rate: Any,
    num_learners: Any,
    *,
    is_single: bool,
  ) -> ServerState:
    if not is_single:
      state = accumulate(state, gradient, staleness, stale_params)
      return update(state, rate, num_learners)
    # The compiler learns that there is no sum to be read, and the old ones go
    # through untouched: memory is what an update costs.
    gathered = accumulate(
      state._replace(
        aggregation=state.aggregation._replace(
          group_size=jnp.zeros_like(state.aggregation.group_size)
        )
      ),
      gradient,
      staleness,
      stale_params,
    )
    updated = update(gathered, rate, num_learners, stale_params)
    return updated._replace(
      stats_sum=state.stats_sum,
      aggregation=updated.aggregation._replace(
        gradient_sum=state.aggregation.gradient_sum
      ),
    )

  def measure_gap(state: ServerState, stale_params: Any) -> jax.Array:
    squares = jax.tree.map(
      lambda new, old: jnp.sum(jnp.square(new - old)),
      state.params,
      stale_params,
    )
    return jnp.sqrt(sum(jax.tree.leaves(squares)))

  donated = functools.partial(jax.jit, donate_argnums=0)
  return Update(
    init=jax.jit(init),
    accumulate=donated(accumulate),
    update=donated(update),
    apply=donated(apply, static_argnames='is_single'),
    measure_gap=jax.jit(measure_gap),
    get_factor=jax.jit(transforms.policies.make_policy(policy)),
  )
