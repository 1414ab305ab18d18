"""Statistics of staleness in the optimizer state, for logging."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jasgd.transforms import _checks
from jasgd.transforms import _staleness
from jasgd.transforms import _trees


class MonitorStalenessState(NamedTuple):
  """State of `monitor_staleness`. The means are over all updates."""

  staleness_count: jax.Array  # shape=(), int32: number of updates.
  staleness_last: jax.Array  # shape=(), float32.
  staleness_mean: jax.Array  # shape=(), float32.
  staleness_max: jax.Array  # shape=(), float32.
  staleness_histogram: jax.Array  # shape=(num_bins,), int32.
  gap_last: Any  # shape=(), float32; () if the gap is not measured.
  gap_mean: Any  # Mean of the gap, in the same form.


def monitor_staleness(
  num_bins: int = 64, *, measure_gap: bool = False
) -> optax.GradientTransformationExtraArgs:
  r"""Records the staleness of updates, and leaves the updates unchanged.

  The histogram has a bin for each staleness 0, 1, ..., num_bins - 2, and a last
  one for all larger values; a mean staleness of several gradients is rounded.
  The cost is a few scalar operations per update. The gap

  .. math:: \| w_\text{now} - w_\text{read} \|_2

  is measured on request only: it needs a pass over the weights, the current
  params and the keyword `stale_params`.

  Args:
    num_bins: Number of bins, at least 1.
    measure_gap: Whether to measure the gap too.

  Returns:
    A transformation. Read its state with `optax.tree.get(state, name)`.

  Examples:
    >>> import jasgd, jax.numpy as jnp, optax
    >>> optimizer = optax.chain(jasgd.monitor_staleness(4), optax.sgd(0.1))
    >>> x = jnp.array(1.0)
    >>> state = optimizer.init(x)
    >>> for staleness in (0, 1, 1, 9):
    ...   _, state = optimizer.update(x, state, staleness=staleness)
    >>> print(optax.tree.get(state, 'staleness_mean'))
    2.75
    >>> print(optax.tree.get(state, 'staleness_histogram'))
    [1 2 0 1]
  """
  num_bins = _checks.check_whole('num_bins', num_bins, 1)

  def init_fn(params: optax.Params) -> MonitorStalenessState:
    if measure_gap:
      _trees.require_real('monitor_staleness(measure_gap=True)', params)
    zero = jnp.zeros((), jnp.float32)
    return MonitorStalenessState(
      staleness_count=_staleness.zero_clock(),
      staleness_last=zero,
      staleness_mean=zero,
      staleness_max=zero,
      staleness_histogram=jnp.zeros((num_bins,), jnp.int32),
      gap_last=zero if measure_gap else (),
      gap_mean=zero if measure_gap else (),
    )

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    *,
    staleness: _staleness.Staleness = None,
    read_clock: _staleness.Staleness = None,
    stale_params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, MonitorStalenessState]:
    del extra_args  # For other transformations of the chain.
    count = state.staleness_count
    tau = _staleness.resolve_staleness(count, staleness, read_clock)
    tau = tau.astype(jnp.float32)
    bin_index = jnp.minimum(jnp.round(tau), num_bins - 1).astype(jnp.int32)
    bin_count = _staleness.tick(state.staleness_histogram[bin_index])
    gap_last, gap_mean = state.gap_last, state.gap_mean
    if measure_gap:
      gap_last = _measure_gap(updates, params, stale_params)
      gap_mean = _staleness.update_mean(gap_mean, gap_last, count)
    return updates, MonitorStalenessState(
      staleness_count=_staleness.tick(count),
      staleness_last=tau,
      staleness_mean=_staleness.update_mean(state.staleness_mean, tau, count),
      staleness_max=jnp.maximum(state.staleness_max, tau),
      staleness_histogram=state.staleness_histogram.at[bin_index].set(
        bin_count
      ),
      gap_last=gap_last,
      gap_mean=gap_mean,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _measure_gap(
  updates: optax.Updates,
  params: optax.Params | None,
  stale_params: optax.Params | None,
) -> jax.Array:
  """L2 distance between two trees, over the leaves that are not masked."""
  params = _trees.require_params('monitor_staleness(measure_gap=True)', params)
  stale_params = _trees.require_stale_params(
    'monitor_staleness(measure_gap=True)', stale_params
  )
  squares = _trees.map_unmasked(
    lambda _, now, read: jnp.sum(
      jnp.square(jnp.astype(now, jnp.float32) - jnp.astype(read, jnp.float32))
    ),
    updates,
    params,
    stale_params,
  )
  total = sum(jax.tree.leaves(squares), start=jnp.zeros((), jnp.float32))
  # The derivative of the root is infinite at 0. The inner `where` keeps that
  # infinity out of gradients that are taken through this function.
  has_moved = total > 0
  return jnp.where(has_moved, jnp.sqrt(jnp.where(has_moved, total, 1.0)), 0.0)
