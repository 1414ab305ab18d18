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
from jasgd.engine import _flat
from jasgd.engine import _gradient
from jasgd.engine import _layout
from jasgd.engine import _local
from jasgd.engine import _plan
from jasgd.engine import _update


class Carry(NamedTuple):
  """All that replay knows between two updates; can be saved."""

  state: _update.ServerState
  slots: tuple[Any, ...]  # Buffers with the versions still needed.
  copies: tuple[_local.Copy, ...]  # Of learners that step on their own.


class _Learner(NamedTuple):
  """What learners with equally many devices compute by."""

  functions: _flat.Learner
  data: Any


class ExactEngine:
  """Executes a plan update by update.

  Attributes:
    carry: What is known after the updates made so far.
  """

  def __init__(
    self,
    task: tasks.Task,
    update: _update.Update,
    plan: _plan.Plan,
    *,
    params: Any,
    stats: Any,
    seed: int,
    local_rate: float,
    wire_dtype: str = 'float32',
  ) -> None:
    """Starts from weights."""
    self._task = task
    self._plan = plan
    self._seed = seed
    self._local_rate = local_rate
    self._layout = _layout.make_layout((params, stats), wire_dtype)
    self._server = _flat.make_server(update, self._layout)
    self._learners = {
      num_devices: self._make_learner(num_devices)
      for num_devices in {1, *plan.num_devices.tolist()}
    }
    # One for each gradient of a call.
    self._messages = [np.empty(self._layout.size, np.uint8)]
    snapshot = self._publish((params, stats))
    copies = ()
    if plan.num_copies:
      start_copy = self._learners[1].functions.start_copy
      copy = start_copy(self._layout.view(snapshot))
      copies = (copy,) * plan.num_copies
    self.carry = Carry(
      state=self._server.init(*jax.tree.map(jnp.copy, (params, stats))),
      slots=(snapshot,) * plan.num_slots,
      copies=copies,
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
    outputs: list[tuple[Any, Any, Any]] = []
    event, last = int(self._plan.ends[start]), int(self._plan.ends[stop])
    while event < last:
      pushes = [self._compute(event)]
      call = self._plan.call[event]
      while call and event + len(pushes) < last:
        following = event + len(pushes)
        if self._plan.call[following] != call:
          break
        pushes.append(self._compute(following))
      outputs += self._apply(event, pushes)
      event += len(pushes)
    names = ('loss', 'gap', 'factor')
    columns = zip(*jax.device_get(outputs), strict=True)
    return {
      name: np.array(column)
      for name, column in zip(names, columns, strict=True)
    }

  def get_digest(self) -> int:
    """A digest of the weights, as a server writes it into its trace."""
    state = self.carry.state
    return self._layout.digest(self._publish((state.params, state.stats)))

  # --- A learner's work.

  def _make_learner(self, num_devices: int) -> '_Learner':
    """What a learner with some devices computes by."""
    if num_devices > jax.local_device_count():
      raise ValueError(
        f'A learner of this trace spread its minibatches over {num_devices} '
        f'devices, and this process has {jax.local_device_count()}. On a CPU, '
        f'set XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}.'
      )
    return _Learner(
      _flat.make_learner(self._task, self._layout, num_devices),
      _gradient.place_data(self._task.data, num_devices),
    )

  def _compute(self, event: int) -> _flat.Push | None:
    """The gradient of an event; None if the learner fetches instead."""
    plan = self._plan
    read = self._view_slot(plan.read_slot[event])
    functions = self._learners[int(plan.num_devices[event])].functions
    if not plan.has_copies:
      if plan.num_steps[event] == 1:
        (where,) = self._list_steps(event)
        return functions.compute(read, *where)
      copy = self._step_locally(event, functions.start_copy(read))
      push, _ = functions.push_copy(copy)
      return push
    learner = int(plan.learner[event])
    copy = self._step_locally(event, self.carry.copies[learner])
    push = None
    if plan.is_push[event]:
      push, copy = functions.push_copy(copy)
    elif plan.is_reset[event]:
      copy = functions.start_copy(read)
    else:
      copy = functions.keep_copy(copy, read)
    copies = list(self.carry.copies)
    copies[learner] = copy
    self.carry = self.carry._replace(copies=tuple(copies))
    return push

  def _step_locally(self, event: int, copy: _local.Copy) -> _local.Copy:
    """The steps of a learner up to a push or a fetch."""
    functions = self._learners[int(self._plan.num_devices[event])].functions
    rate = self._local_rate * float(self._plan.local_rate[event])
    for where in self._list_steps(event):
      copy = functions.step_copy(copy, *where, rate)
    return copy

  def _list_steps(self, event: int) -> Iterator[tuple[Any, int, int, int]]:
    """(data, seed, learner, step) of each minibatch of an event."""
    learner = int(self._plan.learner[event])
    first = int(self._plan.step[event])
    for step in range(first, first + int(self._plan.num_steps[event])):
      data = self._learners[int(self._plan.num_devices[event])].data
      if self._task.is_streamed:
        data = self._task.batches(None, self._seed, learner, step)
      yield data, self._seed, learner, step

  # --- The server's work.

  def _apply(
    self, event: int, pushes: list[_flat.Push | None]
  ) -> list[tuple[Any, Any, Any]]:
    """The server takes gradients in by one call: loss, gap and factor of each.

    Args:
      event: The first; each further one is an update of its own.
      pushes: The gradients; None, alone, if the event is a fetch.
    """
    if pushes == [None]:
      return [(np.nan, np.nan, np.nan)]
    server, state = self._server, self.carry.state
    clock = state.aggregation.server_clock
    while len(self._messages) < len(pushes):
      self._messages.append(np.empty(self._layout.size, np.uint8))
    rows, outputs = [], []
    for number, (push, message) in enumerate(
      zip(pushes, self._messages, strict=False)
    ):
      assert push is not None  # Fetches share no call.
      self._layout.pack(push.message, message)
      row = self._make_row(event + number, message)
      rows.append(row)
      gap = server.measure_gap(state, row[2])  # Before the call, as it is one.
      outputs.append(
        (push.loss, gap, server.get_factor(row[1], clock + number))
      )
    if len(rows) > 1:
      state = server.apply_many(state, tuple(rows))
    else:
      state = self._apply_one(event, state, rows[0])
    jax.block_until_ready(state)  # It may read the messages until now.
    self._keep(event + len(rows) - 1, state)
    return outputs

  def _make_row(self, event: int, message: np.ndarray) -> tuple[Any, ...]:
    """(parts, staleness, stale parts, rate, learners) of an event."""
    plan = self._plan
    return (
      self._layout.view(message),
      int(plan.staleness[event]),
      self._view_slot(plan.read_slot[event]),
      float(plan.rate[event]) if plan.has_rates else None,
      int(plan.num_learners[event]),
    )

  def _apply_one(
    self, event: int, state: _update.ServerState, row: tuple[Any, ...]
  ) -> _update.ServerState:
    """Takes one gradient in, and updates if it is due."""
    plan, server = self._plan, self._server
    if plan.is_update[event] and not plan.is_alone[event]:
      is_single = bool(plan.is_first[event])
      return server.apply(state, *row, is_single=is_single)
    *push, rate, num_learners = row
    state = server.accumulate(state, *push)
    if plan.is_update[event]:
      state = server.update(state, rate, num_learners)
    return state

  def _keep(self, event: int, state: _update.ServerState) -> None:
    """Publishes the weights that an event has made, if anybody reads them."""
    slots = self.carry.slots
    slot = int(self._plan.write_slot[event])
    if slot < self._plan.num_slots - 1:
      published = self._publish((state.params, state.stats))
      slots = (*slots[:slot], published, *slots[slot + 1 :])
    self.carry = self.carry._replace(state=state, slots=slots)

  def _publish(self, weights: tuple[Any, Any]) -> np.ndarray:
    """Weights in a buffer of their own."""
    buffer = np.empty(self._layout.size, np.uint8)
    self._layout.pack(weights, buffer)
    return buffer

  def _view_slot(self, slot: int) -> _layout.Parts:
    return self._layout.view(np.asarray(self.carry.slots[slot]))
