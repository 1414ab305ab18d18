"""Constant and varying delays: what asynchrony does to any optimizer.

The gradients wait in a ring of max_delay + 1 slots. Each call first writes the
new gradient, then reads the old one *from the ring it has just written*. The
other order (read a slot, then overwrite it) looks cheaper by one slot, but
there XLA must keep the old ring alive and copies all of it in each step.
"""

from collections.abc import Callable
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
  count. Use `delayed` to spare an optimizer that. (`optax.MultiSteps` around a
  delay selects over its whole state and so copies the ring in each call; around
  the optimizer inside `delayed` it costs nothing.)

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

  def init_fn(params: optax.Params) -> DelayState:
    return _init_line(params, max_delay)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DelayState]:
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
  number of its calls since the gradient was computed, which is
  min(calls so far, d), so that a stale-aware chain can be wrapped. (A
  `softsync` in here makes fewer updates than it gets calls: put it outside.)
  Jit the update: run eagerly it is compiled in each call.

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
  optimizer = _checks.check_transform('optimizer', optimizer)

  def make_item(
    updates: optax.Updates,
    num_applied: jax.Array,
    params: optax.Params | None,
  ) -> tuple[Any, jax.Array, Any]:
    """What waits in the ring: a gradient, and where it was computed."""
    return updates, num_applied, params if keep_params else ()

  def init_fn(params: optax.Params) -> DelayedState:
    num_applied = _staleness.zero_clock()
    item = make_item(params, num_applied, params)
    return DelayedState(
      num_applied=num_applied,
      delay_state=_init_line(item, max_delay),
      optimizer_state=optimizer.init(params),
    )

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DelayedState]:
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

    def step(optimizer_state: Any) -> tuple[optax.Updates, Any]:
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

    has_arrived = num_received >= num_late
    if max_delay:
      late_updates, optimizer_state = _trees.step_or_wait(
        has_arrived, step, state.optimizer_state
      )
    else:
      late_updates, optimizer_state = step(state.optimizer_state)
    return late_updates, DelayedState(
      # May wrap around: what counts is the difference of two of them.
      num_applied=num_applied + has_arrived.astype(jnp.int32),
      delay_state=delay_state,
      optimizer_state=optimizer_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init_line(item: Any, max_delay: int) -> DelayState:
  """An empty line for things like `item`; without slots if none are needed."""

  def make_slots(leaf: Any) -> jax.Array:
    return jnp.zeros((max_delay + 1, *jnp.shape(leaf)), _slot_dtype(leaf))

  return DelayState(
    num_received=_staleness.zero_clock(),
    next_slot=_staleness.zero_clock(),
    ring=jax.tree.map(make_slots, item) if max_delay else (),
  )


def _push(line: DelayState, item: Any, max_delay: int) -> DelayState:
  """The line after `item` was written into its next slot."""

  def write(slots: jax.Array, leaf: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(
      slots, _to_slot(leaf, slots.dtype), line.next_slot, axis=0
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

  def read(slots: jax.Array, leaf: Any) -> jax.Array:
    slot = (line.next_slot - 1 - num_late) % slots.shape[0]
    late = jax.lax.dynamic_index_in_dim(slots, slot, axis=0, keepdims=False)
    return _from_slot(late, jnp.result_type(leaf))

  return jax.tree.map(read, line.ring, newest)


def _slot_dtype(leaf: Any) -> Any:
  """What a leaf is kept as: its own dtype, or bfloat16's bits as integers.

  XLA's CPU backend writes into an array of bfloat16 by way of float32, and
  converts *all* of it back and forth each time.
  """
  dtype = jnp.result_type(leaf)
  if dtype == jnp.uint16:
    return jnp.uint32  # So that uint16 always stands for bfloat16.
  return jnp.uint16 if dtype == jnp.bfloat16 else dtype


def _to_slot(leaf: Any, slot_dtype: Any) -> jax.Array:
  """A leaf as it is kept."""
  if slot_dtype == jnp.uint16:
    leaf = jnp.astype(leaf, jnp.bfloat16)
    return jax.lax.bitcast_convert_type(leaf, jnp.uint16)
  return jnp.astype(leaf, slot_dtype)


def _from_slot(kept: jax.Array, dtype: Any) -> jax.Array:
  """The inverse of `_to_slot`."""
  if kept.dtype == jnp.uint16:
    kept = jax.lax.bitcast_convert_type(kept, jnp.bfloat16)
  return kept.astype(dtype)


def _parse_delay(
  num_updates: Delay, max_delay: int | None
) -> tuple[int, Callable[[jax.Array], jax.Array]]:
  """The largest delay, and a function from the number of calls to the delay."""
  if max_delay is None:
    if not isinstance(num_updates, numbers.Integral):
      raise ValueError(
        'A delay that is not a plain int needs max_delay, the number of slots '
        f'to make room for; got num_updates={num_updates!r}.'
      )
    max_delay = _checks.check_whole('num_updates', num_updates, 0)
  longest = _checks.check_whole('max_delay', max_delay, 0)
  if not callable(num_updates):
    _check_delay(num_updates, longest)

  def get_delay(num_received: jax.Array) -> jax.Array:
    value = num_updates
    if callable(value):
      value = value(num_received)
      _check_whole_scalar(value)
    return jnp.clip(jnp.asarray(value, jnp.int32), 0, longest)

  return longest, get_delay


def _check_delay(num_updates: Any, max_delay: int) -> None:
  """Refuses what is no integer scalar, and concrete values out of range."""
  _check_whole_scalar(num_updates)
  if not _checks.is_traced(num_updates) and not 0 <= num_updates <= max_delay:
    raise ValueError(
      f'num_updates must be from 0 to max_delay={max_delay}, got {num_updates}.'
    )


def _check_whole_scalar(value: Any) -> None:
  """Refuses delays that are no integer scalars, traced or not."""
  is_number = not isinstance(value, (str, bool)) and jnp.ndim(value) == 0
  if not is_number or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
    raise ValueError(
      'num_updates must be an int, an integer scalar or a function of the '
      f'count that gives one, got {value!r}.'
    )
