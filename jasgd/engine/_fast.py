"""Replay by one compiled loop per chunk, for simulation and sweeps.

Everything that varies from run to run (rates, seed, versions that are read) is
an argument of the compiled loop, so that many runs share one compilation.
Versions of weights that are still needed are rows of arrays, which are read and
written in place.

There are two loops. In the loop of a server, the server's state is part of the
carry. In the loop of nodes, states of nodes are in slots, and an inner loop
makes the mixes between two steps.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import tasks
from jasgd.engine import _gradient
from jasgd.engine import _layout
from jasgd.engine import _node_functions
from jasgd.engine import _operations
from jasgd.engine import _plan
from jasgd.engine import _server_functions
from jasgd.engine import _slots

_Outputs = dict[str, jax.Array]
# Part of a plan: (steps, mixes, mix_ends, num_steps). A server has no mixes.
_Part = tuple[_plan.Steps, _plan.Mixes | None, Any, Any]
# (data, seed, local_rate)
_Inputs = tuple[Any, Any, Any]


class FastCarry(NamedTuple):
  """Complete state of a fast replay between two chunks."""

  weights: Any  # Slots: (params, stats) with a leading axis.
  # State of the server; or slots for states of nodes' optimizers, with a
  # leading axis.
  states: Any
  locals: Any  # Learners' own replicas with a leading axis.


_Loop = Callable[[FastCarry, _Part, _Inputs], tuple[FastCarry, _Outputs]]


class FastEngine:
  """Executes a plan, a chunk of updates at a time.

  Attributes:
    carry: Complete state after the updates made so far.
  """

  def __init__(
    self,
    task: tasks.Task,
    optimizer: _server_functions.Update | optax.GradientTransformation,
    plan: _plan.Plan,
    *,
    weights: tuple[Any, Any],
    seed: int,
    local_rate: float,
    chunk: int,
    num_slots: int | None = None,
  ) -> None:
    """Starts from weights.

    Args:
      task: Task to learn.
      optimizer: Functions of the server, or optimizer of the nodes.
      plan: Plan of the computation.
      weights: First (params, stats).
      seed: Seed of every random draw.
      local_rate: Rate of learners' own steps.
      chunk: Largest number of updates per call of `advance`.
      num_slots: Number of slots, at least that of the plan. Plans with equal
        numbers share a compilation. None: that of the plan.
    """
    self._task = task
    self._plan = plan
    self._inputs = seed, local_rate
    num_slots = num_slots or plan.num_slots
    if isinstance(optimizer, _server_functions.Update):
      self._columns = _SERVER_COLUMNS
      self._loop = _make_server_loop(task, optimizer, plan)
      local = _server_functions.start_local(*weights)
      self.carry = FastCarry(
        weights=_slots.repeat_row(weights, num_slots),
        states=optimizer.init(*weights),
        locals=_slots.repeat_row(local, plan.num_locals),
      )
    else:
      work = _node_functions.make_node_work(task, optimizer)
      self._columns = _NODE_COLUMNS
      self._loop = _make_node_loop(work, _find_shape(plan, weights))
      self.carry = FastCarry(
        weights=_slots.repeat_row(weights, num_slots),
        states=_slots.repeat_row(work.init(weights[0]), plan.num_states),
        locals=(),
      )
    counts = [
      self._find_range(start, min(start + chunk, plan.num_updates))
      for start in range(0, plan.num_updates, chunk)
    ]
    # Largest numbers of steps and mixes in a chunk: all chunks are padded to
    # them. At least one, since an index into an empty array does not compile.
    self._num_steps = max(last - first for first, last, _, _ in counts)
    self._num_mixes = max(1, *(last - first for _, _, first, last in counts))

  def advance(self, start: int, stop: int) -> dict[str, Any]:
    """Makes the updates `start` to `stop`.

    Args:
      start: Number of updates made before.
      stop: Number of updates made afterwards.

    Returns:
      Columns with an entry for each step: `loss`, and with a server also `gap`
      and `factor`.
    """
    first, last, first_mix, last_mix = self._find_range(start, stop)
    plan = self._plan
    columns: dict[str, Any] = dict.fromkeys(_plan.Steps._fields)
    for name in self._columns:  # The others are not needed by the loop.
      column = getattr(plan.steps, name)[first:last]
      columns[name] = _pad(column, self._num_steps)
    mixes, ends = None, None
    if not plan.has_server:
      mixes = _plan.Mixes(
        *(
          _pad(each[first_mix:last_mix], self._num_mixes) for each in plan.mixes
        )
      )
      ends = plan.mix_ends[first : last + 1] - first_mix
      ends = _pad(ends, self._num_steps + 1)
    self.carry, outputs = self._loop(
      self.carry,
      (_plan.Steps(**columns), mixes, ends, last - first),
      (self._load_data(first, last), *self._inputs),
    )
    return {
      name: np.asarray(column)[: last - first]
      for name, column in outputs.items()
    }

  def restore(self, carry: FastCarry) -> None:
    """Continues from a saved carry."""
    # A copy, since the loop donates the carry.
    self.carry = jax.tree.map(jnp.array, carry)

  @property
  def weights(self) -> tuple[Any, Any]:
    """The server's (params, stats)."""
    return self.carry.states.params, self.carry.states.stats

  @property
  def locals(self) -> dict[int, tuple[Any, Any]]:
    """The (params, stats) of learners that step on their own."""
    rows = self.carry.locals
    return {
      learner: _slots.read_row((rows.params, rows.stats), learner)
      for learner in range(self._plan.num_locals)
    }

  @property
  def opt_states(self) -> dict[int, Any]:
    """The server's state: a learner's own steps have none."""
    return {_plan.SERVER: self.carry.states}

  def read_weights(self, slots: np.ndarray) -> tuple[Any, Any]:
    """The (params, stats) in several slots, with a leading axis."""
    return _slots.read_row(self.carry.weights, slots)

  def read_states(self, slots: np.ndarray) -> Any:
    """The states of optimizers in several slots, with a leading axis."""
    return _slots.read_row(self.carry.states, slots)

  def _find_range(self, start: int, stop: int) -> tuple[int, int, int, int]:
    """Ranges of some updates: first and last step, first and last mix."""
    first, last = self._plan.step_ends[[start, stop]].tolist()
    ends = self._plan.mix_ends
    # Mixes before the first step belong to the first update.
    return first, last, int(ends[first]) if start else 0, int(ends[last])

  def _load_data(self, first: int, last: int) -> Any:
    """The task's data; for a streamed task, the minibatches of the steps."""
    if not self._task.is_streamed:
      return self._task.data
    seed, _ = self._inputs
    steps = self._plan.steps
    rows = [
      self._task.batches(None, seed, int(worker), int(step))
      for worker, step in zip(
        steps.worker[first:last], steps.step[first:last], strict=True
      )
    ]
    rows += rows[:1] * (self._num_steps - len(rows))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def _pad(column: np.ndarray, size: int) -> np.ndarray:
  """Pads a column with zeros to a fixed size, so that nothing recompiles."""
  padded = np.zeros(size, column.dtype)
  padded[: len(column)] = column
  return padded


# --- A server and its learners.

_SERVER_COLUMNS = (
  *('kind', 'worker', 'step', 'num_steps', 'staleness', 'is_reset'),
  *('num_learners', 'source', 'write', 'rate', 'local_rate'),
)


def _make_server_loop(
  task: tasks.Task, server: _server_functions.Update, plan: _plan.Plan
) -> _Loop:
  """Makes the loop for plans like this one."""
  return _compile_server_loop(
    _gradient.make_gradient(task),
    _server_functions.make_local_step(task),
    server,
    task.is_streamed,
    plan.is_single,
    plan.num_locals > 0,
    plan.has_local_steps,
  )


@functools.lru_cache(maxsize=32)
def _compile_server_loop(
  gradient: Callable[..., _gradient.Gradient],
  local_step: Callable[..., _server_functions.LocalReplica],
  server: _server_functions.Update,
  is_streamed: bool,
  is_single: bool,
  has_locals: bool,
  has_local_steps: bool,
) -> _Loop:
  """Compiles the loop over pushes and fetches, once for equal arguments."""

  def step_locally(
    local: _server_functions.LocalReplica, row: _plan.Steps, inputs: _Inputs
  ) -> _server_functions.LocalReplica:
    """Makes a learner's own steps up to a push or a fetch."""
    data, seed, local_rate = inputs
    rate = local_rate * row.local_rate
    return lax.fori_loop(
      0,
      row.num_steps,
      lambda number, local: local_step(
        local, data, seed, row.worker, row.step + number, rate
      ),
      local,
    )

  def compute(snapshot: Any, row: _plan.Steps, inputs: _Inputs) -> Any:
    """Computes the push of a learner without its own replica."""
    if has_local_steps:
      local = _server_functions.start_local(*snapshot)
      return _server_functions.get_push(step_locally(local, row, inputs))
    data, seed, _ = inputs
    return gradient(*snapshot, data, seed, row.worker, row.step)

  def consume(
    carry: FastCarry,
    row: _plan.Steps,
    result: _gradient.Gradient,
    stale_params: Any,
  ) -> tuple[FastCarry, _Outputs]:
    """Gives the server a push."""
    state = carry.states
    clock = state.aggregation.server_clock
    outputs = {
      'loss': result.loss,
      'gap': server.measure_gap(state, stale_params),
      'factor': server.get_factor(row.staleness, clock),
    }
    push = (result, row.staleness, stale_params)
    update = (row.rate, row.num_learners)
    if is_single:
      state = server.apply(state, *push, *update, is_single=True)
    else:
      state = lax.cond(
        row.kind == _operations.STEP,
        lambda state: server.apply(state, *push, *update, is_single=False),
        lambda state: server.accumulate(state, *push),
        state,
      )
    return carry._replace(states=state), outputs

  def publish(carry: FastCarry, slot: Any) -> FastCarry:
    """Copies the server's weights into a slot."""
    published = (carry.states.params, carry.states.stats)
    weights = _slots.write_row(carry.weights, slot, published)
    return carry._replace(weights=weights)

  def push_or_fetch(
    carry: FastCarry, row: _plan.Steps, inputs: _Inputs
  ) -> tuple[FastCarry, _Outputs]:
    """Makes a learner's steps on its own replica, then a push or a fetch."""
    local = _slots.read_row(carry.locals, row.worker)
    local = step_locally(local, row, inputs)

    def push(carry: FastCarry) -> Any:
      # The gap is measured to the fetched version, not to the local replica.
      stale_params, _ = _slots.read_row(carry.weights, row.source)
      result = _server_functions.get_push(local)
      carry, outputs = consume(carry, row, result, stale_params)
      return carry, _server_functions.empty_local(local), outputs

    def fetch(carry: FastCarry) -> Any:
      params, stats = _slots.read_row(carry.weights, row.source)
      fresh = _server_functions.start_local(params, stats)
      kept = local._replace(params=params, stats=stats)
      chosen = jax.tree.map(
        functools.partial(jnp.where, row.is_reset), fresh, kept
      )
      nan = jnp.full((), jnp.nan, local.loss_sum.dtype)
      return carry, chosen, {'loss': nan, 'gap': nan, 'factor': nan}

    is_push = row.kind != _operations.FETCH
    carry, local, outputs = lax.cond(is_push, push, fetch, carry)
    locals_ = _slots.write_row(carry.locals, row.worker, local)
    return carry._replace(locals=locals_), outputs

  def loop(
    carry: FastCarry, part: _Part, inputs: _Inputs
  ) -> tuple[FastCarry, _Outputs]:
    steps, _, _, num_steps = part

    # A step's weights are published when the next step begins. If a step first
    # read a slot and then wrote one, XLA could fuse the read with a computation
    # that comes after the write, and would copy all slots in each step.
    def body(index: Any, held: Any) -> Any:
      carry, slot, outputs = held
      carry = publish(carry, slot)
      row = _slots.read_row(steps, index)
      if has_locals:
        carry, output = push_or_fetch(carry, row, inputs)
      else:
        data, *others = inputs
        if is_streamed:
          data = _slots.read_row(data, index)
        snapshot = _slots.read_row(carry.weights, row.source)
        result = compute(snapshot, row, (data, *others))
        carry, output = consume(carry, row, result, snapshot[0])
      return carry, row.write, _slots.write_row(outputs, index, output)

    zeros = jnp.zeros(steps.step.shape)
    outputs = {'loss': zeros, 'gap': zeros, 'factor': zeros}
    num_slots = len(jax.tree.leaves(carry.weights)[0])
    # Nothing reads the last slot: the first `publish` has no effect.
    slot = jnp.asarray(num_slots - 1, steps.write.dtype)
    carry, slot, outputs = lax.fori_loop(
      0, num_steps, body, (carry, slot, outputs)
    )
    return publish(carry, slot), outputs

  return jax.jit(loop, donate_argnums=0)


# --- Nodes.

_NODE_COLUMNS = (
  *('worker', 'step', 'own', 'source', 'write', 'state_read', 'state_write'),
  'rate',
)


class _Shape(NamedTuple):
  """Properties of a plan that the compiled loop is specialised for."""

  has_rates: bool
  has_differences: bool
  is_stale: bool  # Whether gradients are computed at older weights.
  averages_gradients: bool
  has_starts: bool  # Whether nodes join.
  wire: _layout.Layout | None  # The layout of messages, if they round anything.


def _find_shape(plan: _plan.Plan, weights: tuple[Any, Any]) -> _Shape:
  wire = None
  # An all-reduce does not round its messages.
  has_means = np.any(plan.mixes.kind == _operations.AVERAGE)
  if plan.wire_dtype != 'float32' and not has_means:
    wire = _layout.make_layout(weights, plan.wire_dtype)
  return _Shape(
    has_rates=plan.has_rates,
    has_differences=_plan.SERVER in plan.replicas,
    is_stale=bool(np.any(plan.steps.source != plan.steps.own)),
    averages_gradients=plan.averages_gradients,
    has_starts=bool(np.any(plan.mixes.kind == _operations.START)),
    wire=wire,
  )


@functools.lru_cache(maxsize=32)
def _make_node_loop(work: _node_functions.NodeWork, shape: _Shape) -> _Loop:
  """Compiles the loop over steps, with an inner loop over mixes."""

  def step(
    carry: FastCarry, row: _plan.Steps, inputs: _Inputs, once: Any
  ) -> tuple[FastCarry, jax.Array]:
    node = _read_node(carry, row)
    stale = ()
    if shape.is_stale:
      stale = _slots.read_row(carry.weights, row.source)

    def compute(index: Any, held: Any) -> Any:
      node, _ = held
      source = (node.params, node.stats)
      if shape.is_stale:
        # Without the barrier, XLA moves computations on `stale`, which does not
        # change in the loop, in front of the loop, and stores their results:
        # further copies of the weights.
        source, _ = lax.optimization_barrier((stale, index))
      data, seed, _ = inputs
      result = work.gradient(*source, data, seed, row.worker, row.step)
      if shape.averages_gradients:
        node = node._replace(params=result.gradient, stats=result.stats)
      else:
        if shape.is_stale:
          changed = _node_functions.add_changes(
            node.stats, result.stats, source[1]
          )
          result = result._replace(stats=changed)
        rate = row.rate if shape.has_rates else None
        node = work.update(node, result, source[0], rate)
      return node, result.loss.astype(float)

    # A loop of one iteration. Without it, XLA would fuse the computation with
    # the write to the slots, and would copy all slots instead of one.
    node, loss = lax.fori_loop(0, once, compute, (node, jnp.zeros(())))
    return _write_node(carry, row, node), loss

  def send(weights: Any) -> Any:
    if shape.wire is None:
      return weights
    return _node_functions.round_weights(weights, shape.wire)

  def mix(carry: FastCarry, row: _plan.Mixes) -> FastCarry:
    own = _slots.read_row(carry.weights, row.own)
    source = send(_slots.read_row(carry.weights, row.source))
    made = _node_functions.mix_weights(own, source, row.own_weight, row.weight)
    if shape.has_differences:
      force = send(_node_functions.measure_force(own, source, row.weight))
      is_difference = row.kind == _operations.DIFFERENCE
      made = jax.tree.map(
        lambda one, other: jnp.where(is_difference, one, other), force, made
      )
    weights = _slots.write_row(carry.weights, row.write, made)
    return carry._replace(weights=weights)

  def update_or_mix(carry: FastCarry, row: _plan.Mixes) -> FastCarry:
    node = _read_node(carry, row)
    own = (node.params, node.stats)
    source = _slots.read_row(carry.weights, row.source)

    def update() -> _node_functions.NodeState:
      gradient, stats = source
      result = _gradient.Gradient(gradient, stats, jnp.zeros(()))
      rate = row.rate if shape.has_rates else None
      return work.update(node, result, node.params, rate)

    def mix() -> _node_functions.NodeState:
      mixed = _node_functions.mix_weights(
        own, source, row.own_weight, row.weight
      )
      return _node_functions.make_node(mixed, node.opt_state)

    made = lax.cond(row.kind == _operations.UPDATE, update, mix)
    return _write_node(carry, row, made)

  def start_or(
    do: Callable[..., FastCarry], carry: FastCarry, row: _plan.Mixes
  ) -> FastCarry:
    def start(carry: FastCarry) -> FastCarry:
      node = _node_functions.join_at(work, _read_node(carry, row), row.step)
      return _write_node(carry, row, node)

    is_start = row.kind == _operations.START
    return lax.cond(is_start, start, lambda carry: do(carry, row), carry)

  def loop(
    carry: FastCarry, part: _Part, inputs: _Inputs
  ) -> tuple[FastCarry, _Outputs]:
    steps, mixes, ends, num_steps = part
    do = update_or_mix if shape.averages_gradients else mix
    if shape.has_starts:
      do = functools.partial(start_or, do)

    def run_mixes(start: Any, end: Any, carry: FastCarry) -> FastCarry:
      return lax.fori_loop(
        start, end, lambda i, held: do(held, _slots.read_row(mixes, i)), carry
      )

    def body(index: Any, held: tuple[FastCarry, jax.Array]) -> Any:
      carry, losses = held
      row = _slots.read_row(steps, index)
      carry, loss = step(carry, row, inputs, jnp.minimum(num_steps, 1))
      carry = run_mixes(ends[index], ends[index + 1], carry)
      return carry, losses.at[index].set(loss.astype(losses.dtype))

    carry = run_mixes(0, ends[0], carry)
    losses = jnp.zeros(steps.step.shape)
    carry, losses = lax.fori_loop(0, num_steps, body, (carry, losses))
    return carry, {'loss': losses}

  return jax.jit(loop, donate_argnums=0)


def _read_node(carry: FastCarry, row: Any) -> _node_functions.NodeState:
  """Reads a node from its slots."""
  return _node_functions.make_node(
    _slots.read_row(carry.weights, row.own),
    _slots.read_row(carry.states, row.state_read),
  )


def _write_node(
  carry: FastCarry, row: Any, node: _node_functions.NodeState
) -> FastCarry:
  """Writes a node to its slots."""
  weights = (node.params, node.stats)
  return carry._replace(
    weights=_slots.write_row(carry.weights, row.write, weights),
    states=_slots.write_row(carry.states, row.state_write, node.opt_state),
  )
