"""Replay of nodes by the very functions that real ones call.

A loop on the host, one call per step and mix. It gives the bits of real nodes;
`jasgd.engine._node_fast` gives their values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import tasks
from jasgd.engine import _layout
from jasgd.engine import _mean
from jasgd.engine import _node_operations
from jasgd.engine import _node_plan
from jasgd.engine import _node_step
from jasgd.engine import _rows


class Carry(NamedTuple):
  """What is in all slots."""

  weights: tuple[Any, ...]  # (params, stats), each.
  opt_states: tuple[Any, ...]


class ExactNodes:
  """Executes a plan call by call.

  Slots are never shared by two: what a call donates, nobody else has.
  """

  def __init__(
    self,
    task: tasks.Task,
    optimizer: optax.GradientTransformation,
    plan: _node_plan.NodePlan,
    *,
    weights: tuple[Any, Any],
    seed: int,
  ) -> None:
    """Starts from weights."""
    self._task = task
    self._plan = plan
    self._seed = seed
    self._wire = _layout.make_layout(weights, plan.wire_dtype)
    self._whole = _layout.make_layout(weights)
    self._functions = _node_step.make_node_functions(
      task, optimizer, self._wire
    )
    # Slots that nothing was written to yet; nobody reads or donates these.
    empty = jax.tree.map(jnp.zeros_like, self._functions.start(weights))
    node = self._functions.start(weights)
    self._weights = [(empty.params, empty.stats)] * plan.num_slots
    self._weights[0] = (node.params, node.stats)
    self._states = [empty.opt_state] * plan.num_states
    self._states[0] = node.opt_state

  @property
  def carry(self) -> Carry:
    """What is known after the steps made so far."""
    return Carry(tuple(self._weights), tuple(self._states))

  def restore(self, carry: Carry) -> None:
    """Goes on from what was saved."""
    carry = jax.tree.map(jnp.array, carry)  # Slots are donated.
    self._weights, self._states = list(carry.weights), list(carry.opt_states)

  def advance(self, start: int, stop: int) -> np.ndarray:
    """Makes the steps `start` to `stop`, and mixes; gives their losses."""
    plan = self._plan
    if start == 0:
      self._mix_between(0, int(plan.ends[0]))
    losses = []
    for index in range(start, stop):
      losses.append(self._step(index))
      self._mix_between(int(plan.ends[index]), int(plan.ends[index + 1]))
    return np.array(jax.device_get(losses))

  def read(self, slots: np.ndarray) -> tuple[Any, Any]:
    """The (params, stats) in some slots, along a leading axis."""
    return _rows.stack_rows([self._weights[slot] for slot in slots])

  def read_states(self, slots: np.ndarray) -> Any:
    """What optimizers keep in some slots, along a leading axis."""
    return _rows.stack_rows([self._states[slot] for slot in slots])

  # --- Calls.

  def _step(self, index: int) -> jax.Array:
    """One step of a node; gives its loss."""
    row = _pick(self._plan.steps, index)
    where = self._locate(row)
    if self._plan.averages_gradients:
      result = self._functions.gradient(*self._weights[row.source], *where)
      made = (result.gradient, result.stats)
      self._weights[row.write] = jax.tree.map(jnp.copy, made)
      return result.loss
    rate = row.rate if self._plan.has_rates else None
    stale = None
    if row.source != row.own:
      stale = _pack(self._whole, self._weights[row.source])
    node = self._take(row)
    if stale is None:
      node, loss = self._functions.step(node, *where, rate)
    else:
      node, loss = self._functions.step_at(node, stale, *where, rate)
    self._put(row, node)
    return loss

  def _mix_between(self, start: int, end: int) -> None:
    """All that is no step, from one to another."""
    while start < end:
      row = _pick(self._plan.mixes, start)
      if row.kind == _node_operations.FORCE:
        start += 1  # What comes next is the other half of it.
        self._pull(row, _pick(self._plan.mixes, start))
      elif row.kind == _node_operations.AVERAGE:
        start = self._average(start, end)
      else:
        self._mix(row)
      start += 1

  def _mix(self, row: _node_plan.Mixes) -> None:
    """A call that makes one value."""
    if row.kind == _node_operations.MIX:
      other = _pack(self._wire, self._weights[row.source])
      node = self._take(row)
      node = self._functions.mix(node, other, row.own_weight, row.weight)
      self._put(row, node)
    elif row.kind == _node_operations.MOVE:
      force = _pack(self._wire, self._weights[row.source])
      centre = self._take_weights(row)
      self._weights[row.write] = self._functions.move_centre(
        centre, force, row.weight
      )
    else:
      self._update_all(row)

  def _pull(self, force: _node_plan.Mixes, row: _node_plan.Mixes) -> None:
    """A node moves towards the centre, and the force is kept."""
    centre = _pack(self._wire, self._weights[force.source])
    node = self._take(row)
    node, made = self._functions.pull_centre(node, centre, force.weight)
    self._weights[force.write] = made
    self._put(row, node)

  def _average(self, start: int, end: int) -> int:
    """A mean of many, which is planned one by one; gives its last row."""
    row = _pick(self._plan.mixes, start)
    values = [self._weights[row.own], self._weights[row.source]]
    while start + 1 < end:
      following = _pick(self._plan.mixes, start + 1)
      is_another = following.own_weight == _node_operations.FIRST_SHARE
      if following.kind != _node_operations.AVERAGE or is_another:
        break
      row, start = following, start + 1
      values.append(self._weights[row.source])
    self._weights[row.write] = _mean.average(values)
    return start

  def _update_all(self, row: _node_plan.Mixes) -> None:
    """One update with a mean of gradients, for all who have the same."""
    mean = self._weights[row.source]
    rate = row.rate if self._plan.has_rates else None
    self._put(row, self._functions.update(self._take(row), mean, rate))

  # --- Slots.

  def _take(self, row: Any) -> _node_step.Node:
    """A node, to be donated: a copy of what is needed afterwards."""
    state = self._states[row.state_read]
    if row.state_write != row.state_read:
      state = jax.tree.map(jnp.copy, state)
    return _node_step.make_node(self._take_weights(row), state)

  def _take_weights(self, row: Any) -> tuple[Any, Any]:
    weights = self._weights[row.own]
    if row.write != row.own:
      weights = jax.tree.map(jnp.copy, weights)
    return weights

  def _put(self, row: Any, node: _node_step.Node) -> None:
    self._weights[row.write] = (node.params, node.stats)
    self._states[row.state_write] = node.opt_state

  def _locate(self, row: Any) -> tuple[Any, int, int, int]:
    """(data, seed, learner, step) of a minibatch."""
    where = (self._seed, row.node, row.step)
    if self._task.is_streamed:
      return self._task.batches(None, *where), *where
    return self._task.data, *where


def _pick(columns: Any, index: int) -> Any:
  """A row of columns, in Python's own numbers."""
  return type(columns)(*(column[index].item() for column in columns))


def _pack(layout: _layout.Layout, tree: Any) -> _layout.Parts:
  """What another node gets."""
  buffer = np.empty(layout.size, np.uint8)
  layout.pack(tree, buffer)
  return layout.view(buffer)
