"""The work of a parameter server and its learners, as compiled functions.

`make_update` compiles the server's work on trees of arrays, for fast replay.
`make_server` and `make_learner` compile the same work on flat buffers. A real
run and its exact replay call only the functions of these two: equal programs on
equal numbers give equal bits.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jasgd import tasks
from jasgd import transforms
from jasgd.engine import _gradient
from jasgd.engine import _layout

# --- The server, on trees.


class ServerState(NamedTuple):
  """Weights of a server, and the state of its optimizer."""

  params: Any
  stats: Any  # Statistics that are not trained.
  stats_sum: Any  # Sum of the statistics that came since the last update.
  aggregation: transforms.AggregationState


class Update(NamedTuple):
  """Work of a server, as pure, jitted functions.

  `accumulate`, `update` and `apply` donate the state.

  Attributes:
    init: Function `(params, stats) -> state`.
    accumulate: Function `(state, gradient, staleness, stale_params) -> state`.
      It adds a `Gradient` to the sum that the next update uses.
    update: Function `(state, rate, num_learners) -> state`. It updates the
      weights with the accumulated gradients. `rate` is a factor on the
      optimizer's updates; None means no factor, since even a factor of 1 may
      change the compiler's roundings.
    apply: Function `(state, gradient, staleness, stale_params, rate,
      num_learners, *, is_single) -> state`: both at once. `is_single` promises
      that nothing was accumulated before; the optimizer then gets
      `stale_params`.
    measure_gap: Function `(state, stale_params) -> |w - w_stale|`.
    get_factor: Function `(staleness, clock) -> factor` of the policy.
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
  r"""Compiles a server's work on gradients.

  .. math::
    w \leftarrow w + r \, \text{optimizer}\Big(
      \frac1c \sum_{l=1}^{c} \alpha(\tau_l)\, h(g_l) \Big), \quad
    s \leftarrow (1 - \tfrac c\lambda) s + \tfrac c\lambda \bar s

  s are the statistics that are not trained, and s-bar is the mean of those that
  came with the c gradients. There are lambda learners. Policy and optimizer do
  not change statistics.

  Args:
    optimizer: Per-update chain, any optax optimizer.
    policy: Policy alpha, as in `jasgd.scale_by_staleness`.
    per_gradient: Chain h that is run on each gradient before the policy.

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
  if isinstance(policy, list):  # The key of a cache must be hashable.
    policy = tuple(policy)
  return _compile_update(optimizer, policy, per_gradient)


# Like the other cached functions below, it returns the same functions for equal
# arguments, so that nothing is compiled twice.
@functools.lru_cache(maxsize=32)
def _compile_update(
  optimizer: optax.GradientTransformation,
  policy: transforms.policies.PolicyLike,
  per_gradient: optax.GradientTransformation | None,
) -> Update:
  """Compiles the functions of an `Update`."""
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
    # With a constant group size of 0, the compiler sees that the old sums are
    # never read, and passes them through. An update costs as much as the memory
    # that it reads and writes.
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


# --- A learner's own replica, on trees.


class LocalReplica(NamedTuple):
  """A learner's own weights, and the sums since its last push."""

  params: Any
  stats: Any
  gradient_sum: Any
  loss_sum: jax.Array  # shape=()
  num_gathered: jax.Array  # shape=(), int32: number of gradients in the sum.


def start_local(params: Any, stats: Any) -> LocalReplica:
  """Makes a replica with fetched weights and sums of zero."""
  return LocalReplica(
    params=params,
    stats=stats,
    gradient_sum=jax.tree.map(jnp.zeros_like, params),
    loss_sum=jnp.zeros(()),
    num_gathered=jnp.zeros((), jnp.int32),
  )


def make_local_step(task: tasks.Task) -> Callable[..., LocalReplica]:
  r"""Compiles one step of a learner on its own replica.

  .. math:: s \leftarrow s + g(w), \quad w \leftarrow w - r \, g(w)

  Args:
    task: Task to learn.

  Returns:
    A jitted `(replica, data, seed, learner, step, rate) -> replica`.

  References:
    Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012
  """
  return _compile_local_step(_gradient.make_gradient(task))


@functools.lru_cache(maxsize=32)
def _compile_local_step(
  gradient: Callable[..., _gradient.Gradient],
) -> Callable[..., LocalReplica]:
  """Compiles a local step with a given gradient."""

  def step_once(
    replica: LocalReplica,
    data: Any,
    seed: Any,
    learner: Any,
    step: Any,
    rate: Any,
  ) -> LocalReplica:
    result = gradient(replica.params, replica.stats, data, seed, learner, step)
    return LocalReplica(
      params=jax.tree.map(
        lambda leaf, grad: leaf - jnp.asarray(rate, leaf.dtype) * grad,
        replica.params,
        result.gradient,
      ),
      stats=result.stats,
      gradient_sum=jax.tree.map(jnp.add, replica.gradient_sum, result.gradient),
      loss_sum=replica.loss_sum + result.loss.astype(replica.loss_sum.dtype),
      num_gathered=replica.num_gathered + 1,
    )

  return jax.jit(step_once)


def get_push(replica: LocalReplica) -> _gradient.Gradient:
  """Content of a push: the sum of the gradients, and their mean loss."""
  return _gradient.Gradient(
    replica.gradient_sum, replica.stats, replica.loss_sum / replica.num_gathered
  )


def empty_local(replica: LocalReplica) -> LocalReplica:
  """The replica after a push: the same weights, and sums of zero."""
  return start_local(replica.params, replica.stats)


# --- Learners and the server, on flat buffers.


class Push(NamedTuple):
  """Result of one or several minibatches, for the server."""

  message: tuple[Any, Any]  # (gradient, stats), to be packed by the layout.
  loss: jax.Array  # shape=()
  is_finite: jax.Array  # shape=(), bool: whether gradient and loss are finite.


class LearnerFunctions(NamedTuple):
  """Work of a learner, as jitted functions.

  `views` are the views of a buffer with a snapshot (`Layout.view`).

  Attributes:
    compute: Function `(views, data, seed, learner, step) -> Push`.
    start_copy: Function `(views) -> local`. It makes the learner's own replica,
      with sums of zero.
    keep_copy: Function `(local, views) -> local`. It replaces the weights, and
      keeps the sums.
    step_copy: Function `(local, data, seed, learner, step, rate) -> local`.
    push_copy: Function `(local) -> (Push, local)`. It returns the sums, and the
      replica with sums of zero.
  """

  compute: Callable[..., Push]
  start_copy: Callable[..., LocalReplica]
  keep_copy: Callable[..., LocalReplica]
  step_copy: Callable[..., LocalReplica]
  push_copy: Callable[..., tuple[Push, LocalReplica]]


class ServerFunctions(NamedTuple):
  """Work of a server on views of buffers, as jitted functions; see `Update`.

  `views` are the views of a message with a gradient, and `stale_views` those of
  the snapshot that it was computed on.

  Attributes:
    init: Function `(params, stats) -> state`.
    accumulate: Function `(state, views, staleness, stale_views) -> state`.
    update: Function `(state, rate, num_learners) -> state`.
    apply: Function `(state, views, staleness, stale_views, rate, num_learners,
      *, is_single) -> state`.
    apply_many: Function `(state, pushes) -> state`. It makes an update for each
      tuple (views, staleness, stale_views, rate, num_learners), in one call.
    measure_gap: Function `(state, stale_views) -> |w - w_stale|`.
    get_factor: Function `(staleness, clock) -> factor` of the policy.
  """

  init: Callable[..., ServerState]
  accumulate: Callable[..., ServerState]
  update: Callable[..., ServerState]
  apply: Callable[..., ServerState]
  apply_many: Callable[..., ServerState]
  measure_gap: Callable[..., jax.Array]
  get_factor: Callable[..., jax.Array]


def make_learner(
  task: tasks.Task, layout: _layout.Layout, num_devices: int = 1
) -> LearnerFunctions:
  """Compiles a learner's work.

  Args:
    task: Task to learn.
    layout: Layout of (params, stats).
    num_devices: Number of devices of this process that a minibatch is spread
      over.

  Returns:
    The functions.

  Raises:
    ValueError: if the minibatch cannot be spread over so many devices.
  """
  if task.batch % num_devices:
    raise ValueError(
      f'A batch of {task.batch} cannot be spread evenly over {num_devices} '
      'devices.'
    )
  return _compile_learner(
    _gradient.make_gradient(task, num_devices),
    make_local_step(task),
    layout,
  )


@functools.lru_cache(maxsize=32)
def _compile_learner(
  gradient: Callable[..., _gradient.Gradient],
  local_step: Callable[..., LocalReplica],
  layout: _layout.Layout,
) -> LearnerFunctions:
  """Compiles a learner's functions."""

  def make_push(result: _gradient.Gradient) -> Push:
    numbers = jax.tree.leaves((result.gradient, result.loss))
    is_finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in numbers])
    return Push(
      (result.gradient, result.stats), result.loss, jnp.all(is_finite)
    )

  def compute(
    views: Any, data: Any, seed: Any, learner: Any, step: Any
  ) -> Push:
    params, stats = layout.split(views)
    return make_push(gradient(params, stats, data, seed, learner, step))

  def start_copy(views: Any) -> LocalReplica:
    return start_local(*layout.split(views))

  def keep_copy(replica: LocalReplica, views: Any) -> LocalReplica:
    params, stats = layout.split(views)
    return replica._replace(params=params, stats=stats)

  def push_copy(replica: LocalReplica) -> tuple[Push, LocalReplica]:
    return make_push(get_push(replica)), empty_local(replica)

  return LearnerFunctions(
    compute=jax.jit(compute),
    start_copy=jax.jit(start_copy),
    keep_copy=jax.jit(keep_copy),
    step_copy=local_step,
    push_copy=jax.jit(push_copy),
  )


@functools.lru_cache(maxsize=32)
def make_server(update: Update, layout: _layout.Layout) -> ServerFunctions:
  """Compiles a server's work, for gradients in buffers.

  Args:
    update: Result of `make_update`.
    layout: Layout of (params, stats).

  Returns:
    The functions. `accumulate`, `update`, `apply` and `apply_many` donate the
    state.
  """

  def read_gradient(views: Any) -> _gradient.Gradient:
    gradient, stats = layout.split(views)
    return _gradient.Gradient(gradient, stats, jnp.zeros(()))

  def read_params(views: Any) -> Any:
    params, _ = layout.split(views)
    return params

  def accumulate(
    state: ServerState, views: Any, staleness: Any, stale_views: Any
  ) -> ServerState:
    return update.accumulate(
      state, read_gradient(views), staleness, read_params(stale_views)
    )

  def apply(
    state: ServerState,
    views: Any,
    staleness: Any,
    stale_views: Any,
    rate: Any,
    num_learners: Any,
    *,
    is_single: bool,
  ) -> ServerState:
    return update.apply(
      state,
      read_gradient(views),
      staleness,
      read_params(stale_views),
      rate,
      num_learners,
      is_single=is_single,
    )

  def apply_many(
    state: ServerState, pushes: tuple[tuple[Any, ...], ...]
  ) -> ServerState:
    for push in pushes:
      state = apply(state, *push, is_single=True)
    return state

  def measure_gap(state: ServerState, stale_views: Any) -> jax.Array:
    return update.measure_gap(state, read_params(stale_views))

  donated = functools.partial(jax.jit, donate_argnums=0)
  return ServerFunctions(
    init=update.init,
    accumulate=donated(accumulate),
    update=update.update,
    apply=donated(apply, static_argnames='is_single'),
    apply_many=donated(apply_many),
    measure_gap=jax.jit(measure_gap),
    get_factor=update.get_factor,
  )
