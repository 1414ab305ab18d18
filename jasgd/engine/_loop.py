"""The compiled loop over the events of a plan."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from jasgd import tasks
from jasgd.engine import _gradient
from jasgd.engine import _local
from jasgd.engine import _rows
from jasgd.engine import _update

_Outputs = dict[str, jax.Array]


class Carry(NamedTuple):
  """All that replay knows between two updates; can be saved."""

  state: _update.ServerState
  slots: Any  # (params, stats) with a leading axis: versions still needed.
  copies: Any  # Of learners that step on their own, with a leading axis.


class Events(NamedTuple):
  """Columns of a plan, on the device."""

  learner: jax.Array
  step: jax.Array
  num_steps: jax.Array
  staleness: jax.Array
  is_push: jax.Array
  is_update: jax.Array
  is_reset: jax.Array
  num_learners: jax.Array
  read_slot: jax.Array
  write_slot: jax.Array
  rate: jax.Array
  local_rate: jax.Array


class Windows(NamedTuple):
  """Runs of events whose gradients do not depend on each other."""

  start: jax.Array
  size: jax.Array


Loop = Callable[..., tuple[Carry, _Outputs]]


def make_loop(
  task: tasks.Task,
  server: _update.Update,
  *,
  is_single: bool = False,
  has_copies: bool = False,
  has_local_steps: bool = False,
  num_parallel: int = 1,
) -> Loop:
  """Compiles the loop over events; one may serve many runs.

  Args:
    task: What is learned.
    server: What `make_update` gave.
    is_single: Whether every update is of one gradient.
    has_copies: Whether learners step on copies of their own.
    has_local_steps: Whether a push is of several minibatches.
    num_parallel: The most gradients to compute at once.

  Returns:
    A jitted `(carry, events, windows, num_windows, data, seed, local_rate) ->
    (carry, outputs)`, which donates the carry.
  """
  return _compile(
    _gradient.make_gradient(task),
    _local.make_local_step(task),
    server,
    task.is_streamed,
    is_single,
    has_copies,
    has_local_steps,
    num_parallel,
  )


@functools.lru_cache(maxsize=32)
def _compile(
  gradient: Callable[..., _gradient.Gradient],
  local_step: Callable[..., _local.Copy],
  server: _update.Update,
  is_streamed: bool,
  is_single: bool,
  has_copies: bool,
  has_local_steps: bool,
  num_parallel: int,
) -> Loop:
  """The same function each time, so that nothing is compiled twice."""
  compute = _make_compute(gradient, local_step, is_streamed, has_local_steps)
  consume = _make_consume(server, is_single)
  move = _make_move(local_step, server)

  def loop(
    carry: Carry,
    events: Events,
    windows: Windows,
    num_windows: Any,
    data: Any,
    seed: Any,
    local_rate: Any,
  ) -> tuple[Carry, _Outputs]:
    inputs = (data, seed, local_rate)

    def handle_one(index: Any, carry: Carry) -> tuple[Carry, _Outputs]:
      event = _rows.read_row(events, index)
      if has_copies:
        return move(carry, event, inputs)
      snapshot = _rows.read_row(carry.slots, event.read_slot)
      result = compute(snapshot, event, index, inputs)
      return consume(carry, event, result, snapshot[0])

    def handle_many(index: Any, held: Any) -> Any:
      """Computes a window of gradients at once, and consumes one by one."""
      carry, outputs = held
      places = windows.start[index] + jnp.arange(num_parallel)
      places = jnp.minimum(places, len(events.step) - 1)
      group = _rows.read_row(events, places)
      snapshots = _rows.read_row(carry.slots, group.read_slot)
      results = _map(
        lambda args: compute(*args, inputs), (snapshots, group, places)
      )

      def consume_one(number: Any, held: Any) -> Any:
        carry, outputs = held
        stale_params = _rows.read_row(snapshots[0], number)
        carry, output = consume(
          carry,
          _rows.read_row(group, number),
          _rows.read_row(results, number),
          stale_params,
        )
        return carry, _rows.write_row(
          outputs, windows.start[index] + number, output
        )

      return lax.fori_loop(
        0, windows.size[index], consume_one, (carry, outputs)
      )

    def body(index: Any, held: Any) -> Any:
      carry, outputs = held
      carry, output = handle_one(index, carry)
      return carry, _rows.write_row(outputs, index, output)

    zeros = jnp.zeros(events.step.shape)
    outputs = {'loss': zeros, 'gap': zeros, 'factor': zeros}
    return lax.fori_loop(
      0,
      num_windows,
      handle_many if num_parallel > 1 else body,
      (carry, outputs),
    )

  return jax.jit(loop, donate_argnums=0)


def _make_compute(
  gradient: Callable[..., _gradient.Gradient],
  local_step: Callable[..., _local.Copy],
  is_streamed: bool,
  has_local_steps: bool,
) -> Callable[..., _gradient.Gradient]:
  """The gradient of an event that reads its weights from a slot."""

  def compute(
    snapshot: Any, event: Events, index: Any, inputs: Any
  ) -> _gradient.Gradient:
    data, seed, local_rate = inputs
    if is_streamed:
      data = _rows.read_row(data, index)
    if not has_local_steps:
      return gradient(*snapshot, data, seed, event.learner, event.step)
    return _local.get_push(
      _step_locally(
        local_step, _local.start_copy(*snapshot), event, data, seed, local_rate
      )
    )

  return compute


def _make_consume(
  server: _update.Update, is_single: bool
) -> Callable[..., tuple[Carry, _Outputs]]:
  """What the server does with a gradient."""

  def consume(
    carry: Carry, event: Events, result: _gradient.Gradient, stale_params: Any
  ) -> tuple[Carry, _Outputs]:
    state = carry.state
    clock = state.aggregation.server_clock
    outputs = {
      'loss': result.loss,
      'gap': server.measure_gap(state, stale_params),
      'factor': server.get_factor(event.staleness, clock),
    }
    push = (result, event.staleness, stale_params)
    update = (event.rate, event.num_learners)
    if is_single:
      state = server.apply(state, *push, *update, is_single=True)
    else:
      state = lax.cond(
        event.is_update,
        lambda state: server.apply(state, *push, *update, is_single=False),
        lambda state: server.accumulate(state, *push),
        state,
      )
    published = (state.params, state.stats)
    slots = _rows.write_row(carry.slots, event.write_slot, published)
    return carry._replace(state=state, slots=slots), outputs

  return consume


def _make_move(
  local_step: Callable[..., _local.Copy], server: _update.Update
) -> Callable[..., tuple[Carry, _Outputs]]:
  """An event of a learner with a copy of its own: steps, then push or fetch."""
  consume = _make_consume(server, is_single=True)

  def move(carry: Carry, event: Events, inputs: Any) -> tuple[Carry, _Outputs]:
    copy = _step_locally(
      local_step, _rows.read_row(carry.copies, event.learner), event, *inputs
    )

    def push(carry: Carry) -> tuple[Carry, _local.Copy, _Outputs]:
      # A server knows of no weights but its own.
      stale_params, _ = _rows.read_row(carry.slots, event.read_slot)
      carry, outputs = consume(
        carry, event, _local.get_push(copy), stale_params
      )
      return carry, _local.empty_copy(copy), outputs

    def fetch(carry: Carry) -> tuple[Carry, _local.Copy, _Outputs]:
      params, stats = _rows.read_row(carry.slots, event.read_slot)
      fresh = _local.start_copy(params, stats)
      kept = copy._replace(params=params, stats=stats)
      chosen = jax.tree.map(
        functools.partial(jnp.where, event.is_reset), fresh, kept
      )
      nan = jnp.full((), jnp.nan, copy.loss_sum.dtype)
      return carry, chosen, {'loss': nan, 'gap': nan, 'factor': nan}

    carry, copy, outputs = lax.cond(event.is_push, push, fetch, carry)
    copies = _rows.write_row(carry.copies, event.learner, copy)
    return carry._replace(copies=copies), outputs

  return move


def _step_locally(
  local_step: Callable[..., _local.Copy],
  copy: _local.Copy,
  event: Events,
  data: Any,
  seed: Any,
  local_rate: Any,
) -> _local.Copy:
  """The steps of a learner up to a push or a fetch."""
  rate = local_rate * event.local_rate
  return lax.fori_loop(
    0,
    event.num_steps,
    lambda number, copy: local_step(
      copy, data, seed, event.learner, event.step + number, rate
    ),
    copy,
  )


def _map(function: Callable[..., Any], rows: Any) -> Any:
  """Over a leading axis: at once, but on a CPU one after another is faster."""
  if jax.default_backend() == 'cpu':
    return lax.map(function, rows)
  return jax.vmap(function)(rows)
