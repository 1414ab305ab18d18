"""Exact replay, by the same compiled functions that real processes call.

It is a loop on the host, one call at a time, in the order of the trace. Its
results have the same bits as the real run's; those of `jasgd.engine._fast`
differ by rounding.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import tasks
from jasgd.engine import _gradient
from jasgd.engine import _layout
from jasgd.engine import _mean
from jasgd.engine import _node_functions
from jasgd.engine import _operations
from jasgd.engine import _plan
from jasgd.engine import _server_functions
from jasgd.engine import _slots

_Views = _layout.BufferViews


class ExactCarry(NamedTuple):
  """Complete state of an exact replay between two updates."""

  weights: tuple[Any, ...]  # Slots: buffers with a server, trees with nodes.
  states: Any  # State of the server; or slots for states of nodes' optimizers.
  locals: tuple[_server_functions.LocalReplica, ...]  # Learners' own replicas.


def make_columns(outputs: list[tuple[Any, Any, Any]]) -> dict[str, np.ndarray]:
  """Arranges (loss, gap, factor) of each step as columns by name."""
  columns = zip(*jax.device_get(outputs), strict=True)
  return {
    name: np.array(column)
    for name, column in zip(('loss', 'gap', 'factor'), columns, strict=True)
  }


def locate_minibatch(
  task: tasks.Task, data: Any, seed: int, worker: int, step: int
) -> tuple[Any, int, int, int]:
  """The arguments (data, seed, worker, step) that name a minibatch.

  Args:
    task: Task to learn.
    data: Data of the task; a streamed task reads the minibatch instead.
    seed: Seed of the run.
    worker: Number of the worker.
    step: Number of the worker's step.

  Returns:
    The four arguments.
  """
  if task.is_streamed:
    data = task.batches(None, seed, worker, step)
  return data, seed, worker, step


# --- A server and its learners.


class _Learner(NamedTuple):
  """Functions and data of all learners with the same number of devices."""

  functions: _server_functions.LearnerFunctions
  data: Any


class ExactServer:
  """Executes the plan of a server, call by call.

  Attributes:
    carry: Complete state after the updates made so far.
  """

  def __init__(
    self,
    task: tasks.Task,
    update: _server_functions.Update,
    plan: _plan.Plan,
    *,
    weights: tuple[Any, Any],
    seed: int,
    local_rate: float,
    wire_dtype: str,
  ) -> None:
    """Starts from weights."""
    self._task = task
    self._plan = plan
    self._seed = seed
    self._local_rate = local_rate
    self._layout = _layout.make_layout(weights, wire_dtype)
    self._server = _server_functions.make_server(update, self._layout)
    self._learners = {
      num_devices: self._make_learner(num_devices)
      for num_devices in {1, *np.unique(plan.steps.num_devices).tolist()}
    }
    # Buffers of messages, one for each gradient of a call; they are reused.
    self._messages = [np.empty(self._layout.size, np.uint8)]
    snapshot = _layout.pack_buffer(self._layout, weights)
    locals_ = ()
    if plan.num_locals:
      start = self._learners[1].functions.start_copy
      locals_ = (start(self._layout.view(snapshot)),) * plan.num_locals
    self.carry = ExactCarry(
      weights=(snapshot,) * plan.num_slots,
      # A copy: the state is donated, and the caller keeps the weights.
      states=self._server.init(*jax.tree.map(jnp.copy, weights)),
      locals=locals_,
    )

  @property
  def weights(self) -> tuple[Any, Any]:
    """The server's (params, stats)."""
    return self.carry.states.params, self.carry.states.stats

  @property
  def locals(self) -> dict[int, tuple[Any, Any]]:
    """The (params, stats) of learners that step on their own."""
    return {
      learner: (local.params, local.stats)
      for learner, local in enumerate(self.carry.locals)
    }

  @property
  def opt_states(self) -> dict[int, Any]:
    """The server's state: a learner's own steps have none."""
    return {_plan.SERVER: self.carry.states}

  def restore(self, carry: ExactCarry) -> None:
    """Continues from a saved carry."""
    self.carry = carry

  def advance(self, start: int, stop: int) -> dict[str, np.ndarray]:
    """Makes the updates `start` to `stop`.

    Args:
      start: Number of updates made before.
      stop: Number of updates made afterwards.

    Returns:
      Columns `loss`, `gap` and `factor`, with an entry for each step.
    """
    outputs: list[tuple[Any, Any, Any]] = []
    calls = self._plan.steps.call
    index, last = self._plan.step_ends[[start, stop]].tolist()
    while index < last:
      pushes = [self._compute(index)]
      call = calls[index]
      while call and index + len(pushes) < last:
        following = index + len(pushes)
        if calls[following] != call:
          break
        pushes.append(self._compute(following))
      outputs += self._apply(index, pushes)
      index += len(pushes)
    return make_columns(outputs)

  def get_digest(self) -> int:
    """Digest of the weights, as a real server writes it into its trace."""
    return self._layout.digest(_layout.pack_buffer(self._layout, self.weights))

  # --- A learner's work.

  def _make_learner(self, num_devices: int) -> _Learner:
    """Functions and data of a learner with a number of devices."""
    if num_devices > jax.local_device_count():
      raise ValueError(
        f'A learner of this trace spread its minibatches over {num_devices} '
        f'devices, and this process has {jax.local_device_count()}. On a CPU, '
        f'set XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}.'
      )
    return _Learner(
      _server_functions.make_learner(self._task, self._layout, num_devices),
      _gradient.place_data(self._task.data, num_devices),
    )

  def _compute(self, index: int) -> _server_functions.Push | None:
    """Computes the push of a step; None if the learner fetches instead."""
    steps = self._plan.steps
    read = self._view_slot(steps.source[index])
    functions = self._learners[int(steps.num_devices[index])].functions
    if not self._plan.num_locals:
      if steps.num_steps[index] == 1:
        (minibatch,) = self._list_minibatches(index)
        return functions.compute(read, *minibatch)
      local = self._step_locally(index, functions.start_copy(read))
      push, _ = functions.push_copy(local)
      return push
    learner = int(steps.worker[index])
    local = self._step_locally(index, self.carry.locals[learner])
    push = None
    if steps.kind[index] != _operations.FETCH:
      push, local = functions.push_copy(local)
    elif steps.is_reset[index]:
      local = functions.start_copy(read)
    else:
      local = functions.keep_copy(local, read)
    locals_ = list(self.carry.locals)
    locals_[learner] = local
    self.carry = self.carry._replace(locals=tuple(locals_))
    return push

  def _step_locally(
    self, index: int, local: _server_functions.LocalReplica
  ) -> _server_functions.LocalReplica:
    """Makes a learner's own steps up to a push or a fetch."""
    steps = self._plan.steps
    functions = self._learners[int(steps.num_devices[index])].functions
    rate = self._local_rate * float(steps.local_rate[index])
    for minibatch in self._list_minibatches(index):
      local = functions.step_copy(local, *minibatch, rate)
    return local

  def _list_minibatches(
    self, index: int
  ) -> Iterator[tuple[Any, int, int, int]]:
    """Yields (data, seed, learner, step) for each minibatch of a row."""
    steps = self._plan.steps
    learner, first = int(steps.worker[index]), int(steps.step[index])
    data = self._learners[int(steps.num_devices[index])].data
    for step in range(first, first + int(steps.num_steps[index])):
      yield locate_minibatch(self._task, data, self._seed, learner, step)

  # --- The server's work.

  def _apply(
    self, index: int, pushes: list[_server_functions.Push | None]
  ) -> list[tuple[Any, Any, Any]]:
    """Gives the server the gradients of one call.

    Args:
      index: Index of the first step. With several pushes, each makes its own
        update.
      pushes: Pushes of the call; `[None]` if the step is a fetch.

    Returns:
      Loss, gap and factor of each step.
    """
    if pushes == [None]:
      return [(np.nan, np.nan, np.nan)]
    server, state = self._server, self.carry.states
    clock = state.aggregation.server_clock
    while len(self._messages) < len(pushes):
      self._messages.append(np.empty(self._layout.size, np.uint8))
    rows, outputs = [], []
    for number, (push, message) in enumerate(
      zip(pushes, self._messages, strict=False)
    ):
      assert push is not None  # Fetches share no call.
      self._layout.pack(push.message, message)
      row = self._make_arguments(index + number, message)
      rows.append(row)
      # Before the call, which donates the state. The gaps of a call with
      # several updates are all measured from the weights before the first.
      gap = server.measure_gap(state, row[2])
      outputs.append(
        (push.loss, gap, server.get_factor(row[1], clock + number))
      )
    if len(rows) > 1:
      state = server.apply_many(state, tuple(rows))
    else:
      state = self._apply_one(index, state, rows[0])
    # The call reads the messages in place; they are overwritten by the next.
    jax.block_until_ready(state)
    self._publish(index + len(rows) - 1, state)
    return outputs

  def _make_arguments(self, index: int, message: np.ndarray) -> tuple[Any, ...]:
    """(gradient, staleness, stale weights, rate, num_learners) of a step."""
    steps = self._plan.steps
    return (
      self._layout.view(message),
      int(steps.staleness[index]),
      self._view_slot(steps.source[index]),
      float(steps.rate[index]) if self._plan.has_rates else None,
      int(steps.num_learners[index]),
    )

  def _apply_one(
    self,
    index: int,
    state: _server_functions.ServerState,
    arguments: tuple[Any, ...],
  ) -> _server_functions.ServerState:
    """Accumulates one gradient; updates if it is the last of its update.

    A real server makes one call for the last gradient and its update, unless
    the update came later (`is_separate`). The calls here are the same, so that
    the bits are.
    """
    steps, server = self._plan.steps, self._server
    is_update = steps.kind[index] == _operations.STEP
    if is_update and not steps.is_separate[index]:
      is_single = index == 0 or (
        steps.kind[index - 1] != _operations.ACCUMULATE
      )
      return server.apply(state, *arguments, is_single=bool(is_single))
    *push, rate, num_learners = arguments
    state = server.accumulate(state, *push)
    if is_update:
      state = server.update(state, rate, num_learners)
    return state

  def _publish(self, index: int, state: _server_functions.ServerState) -> None:
    """Stores the weights after a step in its slot, if anything reads them."""
    weights = self.carry.weights
    slot = int(self._plan.steps.write[index])
    if slot < self._plan.num_slots - 1:  # Nothing reads the last slot.
      # A copy: the next call donates the state.
      buffer = _layout.pack_buffer(self._layout, (state.params, state.stats))
      weights = (*weights[:slot], buffer, *weights[slot + 1 :])
    self.carry = self.carry._replace(weights=weights, states=state)

  def _view_slot(self, slot: int) -> _Views:
    return self._layout.view(np.asarray(self.carry.weights[slot]))


# --- Nodes.


class ExactNodes:
  """Executes the plan of nodes, call by call.

  No two slots share a buffer, since calls donate the values of slots.
  """

  def __init__(
    self,
    task: tasks.Task,
    optimizer: optax.GradientTransformation,
    plan: _plan.Plan,
    *,
    weights: tuple[Any, Any],
    seed: int,
    wire_dtype: str,
  ) -> None:
    """Starts from weights."""
    self._task = task
    self._plan = plan
    self._seed = seed
    self._wire = _layout.make_layout(weights, wire_dtype)
    self._whole = _layout.make_layout(weights)
    self._functions = _node_functions.make_node_functions(
      task, optimizer, self._wire
    )
    # Placeholder in all slots but the first. The slots share it, since a slot
    # is written before it is read or donated.
    empty = jax.tree.map(jnp.zeros_like, self._functions.start(weights))
    node = self._functions.start(weights)
    self._weights = [(empty.params, empty.stats)] * plan.num_slots
    self._weights[0] = (node.params, node.stats)
    self._states = [empty.opt_state] * plan.num_states
    self._states[0] = node.opt_state

  @property
  def carry(self) -> ExactCarry:
    """Complete state after the steps made so far."""
    return ExactCarry(tuple(self._weights), tuple(self._states), ())

  def restore(self, carry: ExactCarry) -> None:
    """Continues from a saved carry."""
    carry = jax.tree.map(jnp.array, carry)  # A copy, since slots are donated.
    self._weights, self._states = list(carry.weights), list(carry.states)

  def advance(self, start: int, stop: int) -> dict[str, np.ndarray]:
    """Makes the steps `start` to `stop` and their mixes; returns the losses."""
    ends = self._plan.mix_ends
    if start == 0:
      self._run_mixes(0, int(ends[0]))
    losses = []
    for index in range(start, stop):
      losses.append(self._step(index))
      self._run_mixes(int(ends[index]), int(ends[index + 1]))
    return {'loss': np.array(jax.device_get(losses))}

  def read_weights(self, slots: np.ndarray) -> tuple[Any, Any]:
    """The (params, stats) in several slots, with a leading axis."""
    return _slots.stack_rows([self._weights[slot] for slot in slots])

  def read_states(self, slots: np.ndarray) -> Any:
    """The states of optimizers in several slots, with a leading axis."""
    return _slots.stack_rows([self._states[slot] for slot in slots])

  # --- Calls.

  def _step(self, index: int) -> jax.Array:
    """Makes one step of a node; returns its loss."""
    row = _pick(self._plan.steps, index)
    minibatch = locate_minibatch(
      self._task, self._task.data, self._seed, row.worker, row.step
    )
    if row.kind == _operations.GRADIENT:
      result = self._functions.gradient(*self._weights[row.source], *minibatch)
      made = (result.gradient, result.stats)
      # A copy: statistics that did not change may share the node's buffers.
      self._weights[row.write] = jax.tree.map(jnp.copy, made)
      return result.loss
    rate = row.rate if self._plan.has_rates else None
    stale = None
    if row.source != row.own:
      # Before `_take`: the call may donate the slot that is read here.
      stale = self._send(self._whole, row.source)
    node = self._take(row)
    if stale is None:
      node, loss = self._functions.step(node, *minibatch, rate)
    else:
      node, loss = self._functions.step_at(node, stale, *minibatch, rate)
    self._put(row, node)
    return loss

  def _run_mixes(self, start: int, end: int) -> None:
    """Executes the mixes from `start` to `end`."""
    while start < end:
      row = _pick(self._plan.mixes, start)
      if row.kind == _operations.DIFFERENCE:
        start += 1  # One call makes a difference and subtracts it.
        self._pull(row, _pick(self._plan.mixes, start))
      elif row.kind == _operations.AVERAGE:
        start = self._average(start, end)
      elif row.kind == _operations.UPDATE:
        rate = row.rate if self._plan.has_rates else None
        mean = self._weights[row.source]
        node = self._functions.update(self._take(row), mean, rate)
        self._put(row, node)
      elif row.kind == _operations.START:
        self._put(row, self._functions.join(self._take(row), row.step))
      elif row.kind == _operations.MOVE:
        force = self._send(self._wire, row.source)
        self._weights[row.write] = self._functions.move_centre(
          self._take_weights(row), force, row.weight
        )
      else:
        other = self._send(self._wire, row.source)
        node = self._functions.mix(
          self._take(row), other, row.own_weight, row.weight
        )
        self._put(row, node)
      start += 1

  def _pull(self, difference: Any, row: Any) -> None:
    """Moves a node towards the centre, and stores the difference."""
    centre = self._send(self._wire, difference.source)
    node, made = self._functions.pull_centre(
      self._take(row), centre, difference.weight
    )
    self._weights[difference.write] = made
    self._put(row, node)

  def _average(self, start: int, end: int) -> int:
    """Computes a mean; returns the index of its last row.

    A plan has a row for each addition. Real nodes make one call for all of
    them.
    """
    row = _pick(self._plan.mixes, start)
    values = [self._weights[row.own], self._weights[row.source]]
    while start + 1 < end:
      following = _pick(self._plan.mixes, start + 1)
      is_another = following.own_weight == _operations.FIRST_SHARE
      if following.kind != _operations.AVERAGE or is_another:
        break
      row, start = following, start + 1
      values.append(self._weights[row.source])
    self._weights[row.write] = _mean.average(values)
    return start

  # --- Slots.

  def _send(self, layout: _layout.Layout, slot: int) -> _Views:
    """Views of a message with the weights, or the difference, of a slot."""
    return layout.view(_layout.pack_buffer(layout, self._weights[slot]))

  def _take(self, row: Any) -> _node_functions.NodeState:
    """A node to be donated; copies of what is read again from its slots."""
    state = self._states[row.state_read]
    if row.state_write != row.state_read:
      state = jax.tree.map(jnp.copy, state)
    return _node_functions.make_node(self._take_weights(row), state)

  def _take_weights(self, row: Any) -> tuple[Any, Any]:
    weights = self._weights[row.own]
    if row.write != row.own:
      weights = jax.tree.map(jnp.copy, weights)
    return weights

  def _put(self, row: Any, node: _node_functions.NodeState) -> None:
    self._weights[row.write] = (node.params, node.stats)
    self._states[row.state_write] = node.opt_state


def _pick(columns: Any, index: int) -> Any:
  """One row of columns, as Python numbers."""
  return type(columns)(*(column[index].item() for column in columns))
