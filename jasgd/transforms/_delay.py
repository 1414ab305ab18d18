"""Constant and varying delays of gradients, for any optimizer.

A ring buffer of max_delay + 1 slots holds the gradients. Each call first writes
the new gradient, then reads the old one *from the ring it has just written*.
The other order (read a slot, then overwrite it) would need one slot less, but
XLA would have to keep the old ring alive and copy all of it in each step.
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

  num_received: jax.Array  # shape=(), int32: number of calls.
  next_slot: jax.Array  # shape=(), int32: slot that is written next.
  ring: optax.Updates  # Like the params, with a leading axis of slots.


class DelayedState(NamedTuple):
  """State of `delayed`."""

  num_applied: jax.Array  # shape=(), int32: updates of the optimizer.
  delay_state: DelayState
  optimizer_state: optax.OptState


def delay(
  num_updates: Delay, max_delay: int | None = None
) -> optax.GradientTransformationExtraArgs:
  r"""Returns the updates of `num_updates` calls ago; zeros at first.

  .. math:: u_t \leftarrow g_{t-d} \text{ if } t \ge d \text{ else } 0

  The cost of a call does not depend on d. The memory is max_delay + 1 copies of
  the params, in their dtypes (none for a delay that is always 0). The following
  transformations of a chain take the zeros at the start for updates: they
  advance Adam's count. Use `delayed` to avoid that. (`optax.MultiSteps` around
  a delay selects over its whole state and so copies the ring in each call;
  around the optimizer inside `delayed` it costs nothing.)

  A varying delay is a lookup into the past: some gradients are used twice, some
  never. To use each gradient exactly once, replay a trace (`jasgd.simulate`,
  `jasgd.replay`).

  Args:
    num_updates: Delay d, in calls. An int; or, if `max_delay` is given, a
      (traced) integer array, so that delays can be swept with `jax.vmap`, or a
      function of the number of calls so far, so that delays can be drawn per
      step. Arrays and results of functions are clipped to [0, max_delay].
    max_delay: Largest delay; the ring has max_delay + 1 slots. Static.

  Returns:
    A transformation.

  Raises:
    ValueError: if the delay is negative or above `max_delay`, or if it is no
      int and `max_delay` is missing.

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
    del params, extra_args  # For other transformations of the chain.
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

  This is the effect of d + 1 asynchronous learners of equal speed, in an
  ordinary training loop. The optimizer gets the late gradients and the current
  params. Until the first gradient arrives it is not stepped: the updates are
  zero, and its state, with Adam's count, does not change. It also gets
  `staleness`, the number of its calls since the gradient was computed, which is
  min(calls so far, d), so that a stale-aware chain can be wrapped. (A
  `softsync` must be outside: inside, it would make fewer updates than it gets
  calls.) Call the update inside `jax.jit`: called eagerly, it is compiled in
  each call.

  Args:
    optimizer: Any optax optimizer, or a chain with transformations of jasgd.
    num_updates: Delay d, as in `delay`.
    max_delay: Largest delay, as in `delay`.
    keep_params: Whether to keep the params of the last `max_delay` calls too
      (which doubles the memory) and pass them to the optimizer as
      `stale_params`, for `delay_compensation` and `gap_aware`.

  Returns:
    The wrapped optimizer.

  Raises:
    ValueError: if `delay` would refuse the delay, or if `keep_params` is set
      and `update` is called without params.

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
    """Content of a slot: a gradient, its read clock and its params."""
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
    # The caller's values describe the gradient that goes in, not the late one
    # that comes out.
    for key in ('staleness', 'read_clock', 'stale_params'):
      extra_args.pop(key, None)
    num_applied = state.num_applied
    num_received = state.delay_state.num_received
    num_late = get_delay(num_received)
    item = make_item(updates, num_applied, params)
    delay_state = _push(state.delay_state, item, max_delay)

    def step(optimizer_state: Any) -> tuple[optax.Updates, Any]:
      # The lookup is inside the branch, so that the optimizer reads the late
      # gradient from its slot; as an argument of the branch it would be copied.
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
      # An overflow does no harm: only differences of two counts are used.
      num_applied=num_applied + has_arrived.astype(jnp.int32),
      delay_state=delay_state,
      optimizer_state=optimizer_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init_line(item: Any, max_delay: int) -> DelayState:
  """An empty delay line for items like `item`; no slots if max_delay is 0."""

  def make_slots(leaf: Any) -> jax.Array:
    return jnp.zeros((max_delay + 1, *jnp.shape(leaf)), _slot_dtype(leaf))

  return DelayState(
    num_received=_staleness.zero_clock(),
    next_slot=_staleness.zero_clock(),
    ring=jax.tree.map(make_slots, item) if max_delay else (),
  )


def _push(line: DelayState, item: Any, max_delay: int) -> DelayState:
  """Writes `item` into the next slot of the delay line."""

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
  """Reads the item that was pushed `num_late` calls before the newest one."""
  if isinstance(line.ring, tuple) and not line.ring:
    return newest  # No slots: the delay is always 0.

  def read(slots: jax.Array, leaf: Any) -> jax.Array:
    slot = (line.next_slot - 1 - num_late) % slots.shape[0]
    late = jax.lax.dynamic_index_in_dim(slots, slot, axis=0, keepdims=False)
    return _from_slot(late, jnp.result_type(leaf))

  return jax.tree.map(read, line.ring, newest)


def _slot_dtype(leaf: Any) -> Any:
  """Dtype of a leaf in the ring: its own, or uint16 for bfloat16.

  To write into an array of bfloat16, XLA's CPU backend converts *all* of the
  array to float32 and back. Integers with the same bits are written in place.
  """
  dtype = jnp.result_type(leaf)
  if dtype == jnp.uint16:
    return jnp.uint32  # In a ring, uint16 always means bfloat16.
  return jnp.uint16 if dtype == jnp.bfloat16 else dtype


def _to_slot(leaf: Any, slot_dtype: Any) -> jax.Array:
  """Converts a leaf to the dtype of its slots."""
  if slot_dtype == jnp.uint16:
    leaf = jnp.astype(leaf, jnp.bfloat16)
    return jax.lax.bitcast_convert_type(leaf, jnp.uint16)
  return jnp.astype(leaf, slot_dtype)


def _from_slot(stored: jax.Array, dtype: Any) -> jax.Array:
  """The inverse of `_to_slot`."""
  if stored.dtype == jnp.uint16:
    stored = jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
  return stored.astype(dtype)


def _parse_delay(
  num_updates: Delay, max_delay: int | None
) -> tuple[int, Callable[[jax.Array], jax.Array]]:
  """Returns the largest delay, and a function from call count to delay."""
  if max_delay is None:
    if not isinstance(num_updates, numbers.Integral):
      raise ValueError(
        'A delay that is not a plain int needs max_delay, the largest delay; '
        f'got num_updates={num_updates!r}.'
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
  """Raises a ValueError unless it is an integer scalar within the range."""
  _check_whole_scalar(num_updates)
  if not _checks.is_traced(num_updates) and not 0 <= num_updates <= max_delay:
    raise ValueError(
      f'num_updates must be from 0 to max_delay={max_delay}, got {num_updates}.'
    )


def _check_whole_scalar(value: Any) -> None:
  """Raises a ValueError unless it is an integer scalar, traced or not."""
  is_number = not isinstance(value, (str, bool)) and jnp.ndim(value) == 0
  if not is_number or not jnp.issubdtype(jnp.result_type(value), jnp.integer):
    raise ValueError(
      'num_updates must be an int, an integer scalar or a function of the '
      f'count that returns one, got {value!r}.'
    )
