"""Constant and varying delays: what asynchrony does to any optimizer.

The gradients wait in a ring of max_delay + 1 slots. Each call first writes the
new gradient, then reads the old one *from the ring it has just written*. The
other order (read a slot, then overwrite it) looks cheaper by one slot, but
there XLA must keep the old ring alive and copies all of it in each step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd.transforms import _checks
from jasgd.transforms import _staleness
from jasgd.transforms import _trees

Delay = int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike]


class DelayState(NamedTuple):
  """State of `delay`."""

  num_received: jax.Array  # shape=(), int32: calls so far.
  next_slot: jax.Array  # shape=(), int32: where the next update is written.
  ring: optax.Updates  # Like the params, with an axis of slots in front.


class DelayedState(NamedTuple):
  """State of `delayed`."""

  num_applied: jax.Array  # shape=(), int32: updates that the optimizer made.
  delay_state: DelayState
  optimizer_state: optax.OptState


def delay(
  num_updates: Delay, max_delay: int | None = None
) -> optax.GradientTransformationExtraArgs:
  r"""Gives back the updates of `num_updates` calls ago, zeros until then.

  .. math:: u_t \leftarrow g_{t-d} \text{ if } t \ge d \text{ else } 0

  The cost of a call does not depend on d; the memory is max_delay + 1 copies of
  the params, in their dtypes (none for a delay that is always 0). The zeros at
  the start are updates like any other to the links behind: they advance Adam's
  count. Use `delayed` to spare an optimizer that.

  A delay that varies is a lookup into the past: some gradients are used twice,
  some never. That each gradient is used exactly once is the job of a trace of
  who pushed when, not of a delay line.

  Args:
    num_updates: d, the delay in calls. An int; or, if `max_delay` is given, a
      (traced) integer array, so that delays can be swept with `jax.vmap`, or a
      function of the number of calls so far, so that they can be drawn per
      step. Such values are clipped to [0, max_delay].
    max_delay: The largest delay that there is room for. Static.

  Returns:
    A transformation.

  Raises:
    ValueError: if the delay is negative or above `max_delay`, or needs a
      `max_delay` and has none.

  Examples:
    >>> import jasgd, jax.numpy as jnp
    >>> line = jasgd.delay(2)
    >>> state = line.init(jnp.zeros(()))
    >>> for gradient in (1.0, 2.0, 3.0, 4.0):
    ...   late, state = line.update(jnp.array(gradient), state)
    ...   print(late)
    0.0
    0.0
    1.0
    2.0

  References:
    Jain et al., `An Analysis of the Delayed Gradients Problem in Asynchronous
    SGD <https://openreview.net/forum?id=BJLSGcywG>`_, 2018
  """
  max_delay, get_delay = _parse_delay(num_updates, max_delay)

  def init_fn(params):
    return _init_line(params, max_delay)

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args  # Other links of the chain may need them.
    num_late = get_delay(state.num_received)
    new_state = _push(state, updates, max_delay)
    return _look_back(new_state, num_late, updates), new_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def delayed(
  optimizer: optax.GradientTransformation,
  num_updates: Delay,
  max_delay: int | None = None,
  *,
  keep_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Wraps an optimizer so that it sees each gradient `num_updates` calls late.

  .. math:: w_{t+1} = w_t + \text{optimizer}(g(w_{t-d}))

  This is what d + 1 learners of equal speed do to an optimizer, in a training
  loop that knows nothing of it. The optimizer's own state (momentum, Adam's
  moments) sees the late gradients, and the current params. Until the first
  gradient arrives it is not stepped at all: the updates are zero, and its
  state, Adam's count included, does not change. It is given `staleness`, the
  number of updates since the gradient was computed, which is
  min(updates so far, d), so that a stale-aware chain can be wrapped.

  Args:
    optimizer: Any optax optimizer, or a chain with this library's links.
    num_updates: d, as in `delay`.
    max_delay: As in `delay`.
    keep_params: Whether to keep the params of the last `max_delay` calls too
      (which doubles the memory) and give the optimizer `stale_params`, which
      `delay_compensation` and `gap_aware` need.

  Returns:
    The wrapped optimizer.

  Raises:
    ValueError: as `delay`; or if `keep_params` is set and `update` is called
      without params.

  Examples:
    >>> import jasgd, jax, jax.numpy as jnp, optax
    >>> optimizer = jasgd.delayed(optax.sgd(0.1), 1)
    >>> x = jnp.array(1.0)
    >>> state = optimizer.init(x)
    >>> for _ in range(3):  # The gradient of x^2 / 2 is x.
    ...   updates, state = optimizer.update(x, state, x)
    ...   x = optax.apply_updates(x, updates)
    ...   print(f'{x:.2f}')
    1.00
    0.90
    0.80

  References:
    Jain et al., `An Analysis of the Delayed Gradients Problem in Asynchronous
    SGD <https://openreview.net/forum?id=BJLSGcywG>`_, 2018
  """
  max_delay, get_delay = _parse_delay(num_updates, max_delay)
  optimizer = optax.with_extra_args_support(optimizer)

  def make_item(updates, num_applied, params):
    """What waits in the ring: a gradient, and where it was computed."""
    return updates, num_applied, params if keep_params else ()

  def init_fn(params):
    num_applied = _staleness.zero_clock()
    item = make_item(params, num_applied, params)
    return DelayedState(
      num_applied=num_applied,
      delay_state=_init_line(item, max_delay),
      optimizer_state=optimizer.init(params),
    )

  def update_fn(updates, state, params=None, **extra_args):
    if keep_params:
      _trees.require_params('delayed(..., keep_params=True)', params)
    # What the caller said of staleness was about the gradient that went in.
    for key in ('staleness', 'read_clock', 'stale_params'):
      extra_args.pop(key, None)
    num_applied = state.num_applied
    num_received = state.delay_state.num_received
    num_late = get_delay(num_received)
    item = make_item(updates, num_applied, params)
    delay_state = _push(state.delay_state, item, max_delay)

    def step(delay_state, optimizer_state):
      # Looked up in here, the late gradient is read by the optimizer straight
      # from its slot; as an argument it would be copied first.
      late_updates, read_clock, stale_params = _look_back(
        delay_state, num_late, item
      )
      late_updates, new_state = optimizer.update(
        late_updates,
        optimizer_state,
        params,
        staleness=num_applied - read_clock,
        stale_params=stale_params if keep_params else None,
        **extra_args,
      )
      return late_updates, _trees.cast_like(new_state, optimizer_state)

    def wait(delay_state, optimizer_state):
      like_updates, _ = jax.eval_shape(step, delay_state, optimizer_state)
      return jax.tree.map(jnp.zeros_like, like_updates), optimizer_state

    has_arrived = num_received >= num_late
    if max_delay:
      late_updates, optimizer_state = jax.lax.cond(
        has_arrived, step, wait, delay_state, state.optimizer_state
      )
    else:
      late_updates, optimizer_state = step(delay_state, state.optimizer_state)
    return late_updates, DelayedState(
      num_applied=num_applied + has_arrived.astype(jnp.int32),
      delay_state=delay_state,
      optimizer_state=optimizer_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init_line(item: Any, max_delay: int) -> DelayState:
  """An empty line for things like `item`; without slots if none are needed."""

  def make_slots(leaf):
    return jnp.zeros((max_delay + 1, *jnp.shape(leaf)), jnp.result_type(leaf))

  return DelayState(
    num_received=_staleness.zero_clock(),
    next_slot=_staleness.zero_clock(),
    ring=jax.tree.map(make_slots, item) if max_delay else (),
  )


def _push(line: DelayState, item: Any, max_delay: int) -> DelayState:
  """The line after `item` was written into its next slot."""

  def write(slots, leaf):
    return jax.lax.dynamic_update_index_in_dim(
      slots, jnp.astype(leaf, slots.dtype), line.next_slot, axis=0
    )

  return DelayState(
    num_received=_staleness.tick(line.num_received),
    next_slot=(line.next_slot + 1) % (max_delay + 1),
    ring=jax.tree.map(write, line.ring, item) if max_delay else (),
  )


def _look_back(line: DelayState, num_late: jax.Array, newest: Any) -> Any:
  """What was pushed `num_late` calls before the newest item."""
  if isinstance(line.ring, tuple) and not line.ring:
    return newest  # No slots: what goes in comes out.

  def read(slots, leaf):
    slot = (line.next_slot - 1 - num_late) % slots.shape[0]
    late = jax.lax.dynamic_index_in_dim(slots, slot, axis=0, keepdims=False)
    return late.astype(jnp.result_type(leaf))

  return jax.tree.map(read, line.ring, newest)


def _parse_delay(
  num_updates: Delay, max_delay: int | None
) -> tuple[int, Callable[[jax.Array], jax.Array]]:
  """The largest delay, and a function from the number of calls to the delay."""
  if max_delay is None:
    if not isinstance(num_updates, (int, np.integer)):
      raise ValueError(
        'A delay that is not a plain int needs max_delay, the number of slots '
        f'to make room for; got num_updates={num_updates!r}.'
      )
    _checks.check_at_least('num_updates', num_updates, 0)
    max_delay = int(num_updates)
  if isinstance(max_delay, bool) or not isinstance(
    max_delay, (int, np.integer)
  ):
    raise ValueError(f'max_delay must be an int, got {max_delay!r}.')
  _checks.check_at_least('max_delay', max_delay, 0)
  if not callable(num_updates):
    _check_delay(num_updates, max_delay)

  def get_delay(num_received: jax.Array) -> jax.Array:
    value = num_updates(num_received) if callable(num_updates) else num_updates
    return jnp.clip(jnp.asarray(value, jnp.int32), 0, max_delay)

  return int(max_delay), get_delay


def _check_delay(num_updates: Any, max_delay: int) -> None:
  """Refuses what is no integer scalar, and concrete values out of range."""
  is_whole = jnp.issubdtype(jnp.result_type(num_updates), jnp.integer)
  if jnp.ndim(num_updates) != 0 or not is_whole:
    raise ValueError(
      'num_updates must be an int, an integer scalar or a function of the '
      f'count, got {num_updates!r}.'
    )
  if not _checks.is_traced(num_updates) and not 0 <= num_updates <= max_delay:
    raise ValueError(
      f'num_updates must be from 0 to max_delay={max_delay}, got {num_updates}.'
    )
