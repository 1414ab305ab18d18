"""Replay by the very functions that a real learner and server call.

A loop on the host, one call per gradient and per update, in the order of the
trace. It gives the bits of a real run; `jasgd.engine.fast` gives its values.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import tasks
from jasgd.engine import _gradient
from jasgd.engine import _local
from jasgd.engine import _plan
from jasgd.engine import _update


class Carry(NamedTuple):
  """All that replay knows between two updates; can be saved."""

  state: _update.ServerState
  slots: tuple[Any, ...]  # (params, stats) of the versions still needed.
  copies: tuple[_local.Copy, ...]  # Of learners that step on their own.


class ExactEngine:
  """Executes a plan update by update.

  Attributes:
    carry: What is known after the updates made so far.
  """

  def __init__(
    self,
    task: tasks.Task,
    server: _update.Update,
    plan: _plan.Plan,
    *,
    params: Any,
    stats: Any,
    seed: int,
    local_rate: float,
  ) -> None:
    """Starts from weights."""
    self._task = task
    self._server = server
    self._plan = plan
    self._seed = seed
    self._local_rate = local_rate
    self._gradient = _gradient.make_gradient(task)
    self._local_step = _local.make_local_step(task)
    snapshot = (params, stats)
    self.carry = Carry(
      state=server.init(*_copy(snapshot)),
      slots=(snapshot,) * plan.num_slots,
      copies=(_local.start_copy(*snapshot),) * plan.num_copies,
    )

  @property
  def state(self) -> _update.ServerState:
    """The server's state after the updates made so far."""
    return self.carry.state

  def advance(self, start: int, stop: int) -> dict[str, np.ndarray]:
    """Makes the updates `start` to `stop`.

    Args:
      start: How many were made before.
      stop: How many will have been made.

    Returns:
      For each event in between: `loss`, `gap` and `factor`.
    """
    outputs = [
      self._handle(event)
      for event in range(self._plan.ends[start], self._plan.ends[stop])
    ]
    names = ('loss', 'gap', 'factor')
    columns = zip(*jax.device_get(outputs), strict=True)
    return {
      name: np.array(column)
      for name, column in zip(names, columns, strict=True)
    }

  def _handle(self, event: int) -> tuple[Any, Any, Any]:
    """One event: the loss, the gap and the factor of its push."""
    if not self._plan.has_copies:
      snapshot = self.carry.slots[self._plan.read_slot[event]]
      return self._push(event, self._compute(event, snapshot), snapshot[0])
    learner = int(self._plan.learner[event])
    copy = self._step_locally(event, self.carry.copies[learner])
    outputs = (np.nan, np.nan, np.nan)
    if self._plan.is_push[event]:
      outputs = self._push(event, _local.get_push(copy), copy.params)
      copy = _local.empty_copy(copy)
    else:
      params, stats = self.carry.slots[self._plan.read_slot[event]]
      if self._plan.is_reset[event]:
        copy = _local.start_copy(params, stats)
      copy = copy._replace(params=params, stats=stats)
    copies = list(self.carry.copies)
    copies[learner] = copy
    self.carry = self.carry._replace(copies=tuple(copies))
    return outputs

  def _compute(self, event: int, snapshot: Any) -> _gradient.Gradient:
    """The gradient of an event, at a snapshot."""
    if self._plan.num_steps[event] > 1:
      return _local.get_push(
        self._step_locally(event, _local.start_copy(*snapshot))
      )
    (where,) = self._list_steps(event)
    return self._gradient(*snapshot, *where)

  def _step_locally(self, event: int, copy: _local.Copy) -> _local.Copy:
    """The steps of a learner up to a push or a fetch."""
    rate = self._local_rate * self._plan.rate[event]
    for where in self._list_steps(event):
      copy = self._local_step(copy, *where, rate)
    return copy

  def _list_steps(self, event: int) -> Iterator[tuple[Any, int, int, int]]:
    """(data, seed, learner, step) of each minibatch of an event."""
    learner = int(self._plan.learner[event])
    first = int(self._plan.step[event])
    for step in range(first, first + int(self._plan.num_steps[event])):
      data = self._task.data
      if self._task.is_streamed:
        data = self._task.batches(None, self._seed, learner, step)
      yield data, self._seed, learner, step

  def _push(
    self, event: int, gradient: _gradient.Gradient, stale_params: Any
  ) -> tuple[Any, Any, Any]:
    """The server takes a gradient in, and updates if it is due."""
    plan, server, state = self._plan, self._server, self.carry.state
    staleness = int(plan.staleness[event])
    gap = server.measure_gap(state, stale_params)
    factor = server.get_factor(staleness, state.aggregation.server_clock)
    rate = plan.rate[event] if plan.has_rates else None
    num_learners = int(plan.num_learners[event])
    if plan.is_update[event] and not plan.is_alone[event]:
      is_single = event == 0 or bool(plan.is_update[event - 1])
      state = server.apply(
        state,
        gradient,
        staleness,
        stale_params,
        rate,
        num_learners,
        is_single=is_single or plan.is_single,
      )
    else:
      state = server.accumulate(state, gradient, staleness, stale_params)
      if plan.is_update[event]:
        state = server.update(state, rate, num_learners)
    slots = self.carry.slots
    slot = int(plan.write_slot[event])
    if slot < plan.num_slots - 1:  # Donated is only what nobody else has.
      published = _copy((state.params, state.stats))
      slots = (*slots[:slot], published, *slots[slot + 1 :])
    self.carry = self.carry._replace(state=state, slots=slots)
    return gradient.loss, gap, factor


def _copy(tree: Any) -> Any:
  """The same values in buffers of their own."""
  return jax.tree.map(jnp.copy, tree)
