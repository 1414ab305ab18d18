"""Replay of nodes by one compiled loop for all steps and mixes of a chunk."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from jasgd import tasks
from jasgd.engine import _gradient
from jasgd.engine import _layout
from jasgd.engine import _node_operations
from jasgd.engine import _node_plan
from jasgd.engine import _node_step
from jasgd.engine import _rows


class Carry(NamedTuple):
  """All slots, along a leading axis."""

  weights: Any  # (params, stats)
  opt_states: Any


class FastNodes:
  """Executes a plan chunk by chunk.

  Attributes:
    carry: What is known after the steps made so far.
  """

  def __init__(
    self,
    task: tasks.Task,
    work: _node_step.NodeWork,
    plan: _node_plan.NodePlan,
    *,
    weights: tuple[Any, Any],
    seed: int,
    chunk: int,
  ) -> None:
    """Starts from weights; `chunk` is the most steps to be made at once."""
    if task.is_streamed:
      raise ValueError(
        f"The task {task.name!r} is streamed: nodes need mode='exact'."
      )
    self._data = task.data
    self._plan = plan
    self._seed = seed
    self._num_steps = min(chunk, plan.num_steps)
    starts = np.arange(0, plan.num_steps, chunk)
    stops = np.minimum(starts + chunk, plan.num_steps)
    first = np.where(starts == 0, 0, plan.ends[starts])
    # At least one, for an index into nothing cannot be compiled.
    self._num_mixes = max(1, int((plan.ends[stops] - first).max()))
    shape = _Shape(
      has_rates=plan.has_rates,
      has_forces=plan.has_centre,
      is_stale=bool(np.any(plan.steps.source != plan.steps.own)),
      averages_gradients=plan.averages_gradients,
      wire=_find_wire(plan, weights),
    )
    self._loop = _make_loop(work, shape)
    self.carry = Carry(
      weights=_rows.repeat_row(weights, plan.num_slots),
      opt_states=_rows.repeat_row(work.init(weights[0]), plan.num_states),
    )

  def advance(self, start: int, stop: int) -> np.ndarray:
    """Makes the steps `start` to `stop`, and mixes; gives their losses."""
    plan = self._plan
    first = 0 if start == 0 else int(plan.ends[start])
    last = int(plan.ends[stop])
    ends = plan.ends[start : stop + 1] - first
    self.carry, losses = self._loop(
      self.carry,
      _cut(plan.steps, start, stop, self._num_steps),
      _cut(plan.mixes, first, last, self._num_mixes),
      _pad(ends, self._num_steps + 1),
      stop - start,
      self._data,
      self._seed,
    )
    return np.asarray(losses)[: stop - start]

  def read(self, slots: np.ndarray) -> tuple[Any, Any]:
    """The (params, stats) in some slots, along a leading axis."""
    return _rows.read_row(self.carry.weights, slots)

  def read_states(self, slots: np.ndarray) -> Any:
    """What optimizers keep in some slots, along a leading axis."""
    return _rows.read_row(self.carry.opt_states, slots)

  def restore(self, carry: Carry) -> None:
    """Goes on from what was saved."""
    self.carry = jax.tree.map(jnp.array, carry)  # It is donated.


def _cut(columns: Any, start: int, stop: int, size: int) -> Any:
  """Some rows of columns, which are always of one length."""
  return type(columns)(*(_pad(each[start:stop], size) for each in columns))


def _pad(column: np.ndarray, size: int) -> np.ndarray:
  padded = np.zeros(size, column.dtype)
  padded[: len(column)] = column
  return padded


class _Shape(NamedTuple):
  """What there is in a plan, and so in the compiled loop."""

  has_rates: bool
  has_forces: bool
  is_stale: bool  # Whether gradients are computed at older weights.
  averages_gradients: bool
  wire: _layout.Layout | None  # Of messages, if they round anything.


def _find_wire(
  plan: _node_plan.NodePlan, weights: tuple[Any, Any]
) -> _layout.Layout | None:
  """How messages round weights; means of all are sent as they are."""
  is_mean = np.any(plan.mixes.kind == _node_operations.AVERAGE)
  if plan.wire_dtype == 'float32' or is_mean:
    return None
  return _layout.make_layout(weights, plan.wire_dtype)


@functools.lru_cache(maxsize=32)
def _make_loop(
  work: _node_step.NodeWork, shape: _Shape
) -> Callable[..., tuple[Carry, jax.Array]]:
  """Compiles the loop over steps, and within it that over mixes."""

  def step(
    carry: Carry, row: _node_plan.Steps, data: Any, seed: Any, once: Any
  ) -> tuple[Carry, jax.Array]:
    node = _node_step.make_node(
      _rows.read_row(carry.weights, row.own),
      _rows.read_row(carry.opt_states, row.state_read),
    )
    stale = _rows.read_row(carry.weights, row.source) if shape.is_stale else ()

    def compute(index: Any, held: Any) -> Any:
      node, _ = held
      source = (node.params, node.stats)
      if shape.is_stale:
        # Or else what does not change in a loop is computed ahead of it, and
        # kept: the gradient's copies of the weights.
        source, _ = lax.optimization_barrier((stale, index))
      result = work.gradient(*source, data, seed, row.node, row.step)
      if shape.averages_gradients:
        node = node._replace(params=result.gradient, stats=result.stats)
      else:
        if shape.is_stale:
          changed = _node_step.add_changes(node.stats, result.stats, source[1])
          result = result._replace(stats=changed)
        rate = row.rate if shape.has_rates else None
        node = work.update(node, result, source[0], rate)
      return node, result.loss.astype(float)

    # A loop of one: or else what is computed would be fused with the writing,
    # which then could not be done in place, and all slots would be copied.
    node, loss = lax.fori_loop(0, once, compute, (node, jnp.zeros(())))
    return _write(carry, row, node), loss

  def send(weights: Any) -> Any:
    if shape.wire is None:
      return weights
    return _node_step.round_weights(weights, shape.wire)

  def mix(carry: Carry, row: _node_plan.Mixes) -> Carry:
    own = _rows.read_row(carry.weights, row.own)
    source = send(_rows.read_row(carry.weights, row.source))
    made = _node_step.mix_weights(own, source, row.own_weight, row.weight)
    if shape.has_forces:
      force = send(_node_step.measure_force(own, source, row.weight))
      is_force = row.kind == _node_operations.FORCE
      made = jax.tree.map(
        lambda one, other: jnp.where(is_force, one, other), force, made
      )
    weights = _rows.write_row(carry.weights, row.write, made)
    return carry._replace(weights=weights)

  def update_or_mix(carry: Carry, row: _node_plan.Mixes) -> Carry:
    own, source = (
      _rows.read_row(carry.weights, slot) for slot in (row.own, row.source)
    )
    state = _rows.read_row(carry.opt_states, row.state_read)

    def update() -> _node_step.Node:
      gradient, stats = source
      return work.update(
        _node_step.make_node(own, state),
        _gradient.Gradient(gradient, stats, jnp.zeros(())),
        own[0],
        row.rate if shape.has_rates else None,
      )

    def mix() -> _node_step.Node:
      mixed = _node_step.mix_weights(own, source, row.own_weight, row.weight)
      return _node_step.make_node(mixed, state)

    node = lax.cond(row.kind == _node_operations.UPDATE, update, mix)
    return _write(carry, row, node)

  def loop(
    carry: Carry,
    steps: _node_plan.Steps,
    mixes: _node_plan.Mixes,
    ends: Any,
    num_steps: Any,
    data: Any,
    seed: Any,
  ) -> tuple[Carry, jax.Array]:
    do = update_or_mix if shape.averages_gradients else mix

    def run_mixes(start: Any, end: Any, carry: Carry) -> Carry:
      return lax.fori_loop(
        start, end, lambda i, held: do(held, _rows.read_row(mixes, i)), carry
      )

    def body(index: Any, held: tuple[Carry, jax.Array]) -> Any:
      carry, losses = held
      row = _rows.read_row(steps, index)
      carry, loss = step(carry, row, data, seed, jnp.minimum(num_steps, 1))
      carry = run_mixes(ends[index], ends[index + 1], carry)
      return carry, losses.at[index].set(loss.astype(losses.dtype))

    carry = run_mixes(0, ends[0], carry)
    losses = jnp.zeros(steps.step.shape)
    return lax.fori_loop(0, num_steps, body, (carry, losses))

  return jax.jit(loop, donate_argnums=0)


def _write(carry: Carry, row: Any, node: _node_step.Node) -> Carry:
  """Puts a node into its slots."""
  weights = (node.params, node.stats)
  return Carry(
    weights=_rows.write_row(carry.weights, row.write, weights),
    opt_states=_rows.write_row(
      carry.opt_states, row.state_write, node.opt_state
    ),
  )
