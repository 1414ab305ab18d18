"""Replay of nodes that step and mix: in a host's loop, or a compiled one."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import tasks
from jasgd import traces
from jasgd.engine import _memory
from jasgd.engine import _node_plan
from jasgd.engine import _node_step
from jasgd.engine import _rows

_DEFAULT_CHUNK = 1000  # Events.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodesReplayed:
  """What replay of nodes gives.

  Attributes:
    params: The mean of the nodes' weights.
    stats: The mean of what they keep besides.
    nodes: (params, stats) of all nodes, with a leading axis.
    centre: (params, stats) of the centre, or None.
    num_steps: Steps of all nodes together.
    is_diverged: Whether a loss was not finite.
    history: An entry for each step: `epoch`, `time`, `node`, `loss`.
    evaluations: An entry for each evaluation: `epoch`, `time`, `consensus` (the
      root of the mean squared distance of the nodes from their mean), and the
      task's metrics at that mean.
  """

  params: Any
  stats: Any
  nodes: Any
  centre: Any
  num_steps: int
  is_diverged: bool
  history: dict[str, np.ndarray]
  evaluations: dict[str, np.ndarray]


class Rows(NamedTuple):
  """The nodes, the centre and the versions kept, with a leading axis."""

  weights: Any  # (params, stats) of all rows.
  opt_state: Any  # Of the nodes alone.


class _Events(NamedTuple):
  """Columns of a plan."""

  kind: Any
  row: Any
  step: Any
  sources: Any
  weights: Any
  own_weight: Any
  group: Any
  rate: Any


def replay_nodes(
  task: tasks.Task,
  optimizer: optax.GradientTransformation,
  trace: traces.NodeTrace,
  *,
  get_rate: Callable[[float], float] | None = None,
  seed: int = 0,
  mode: str = 'fast',
  eval_every: int | None = None,
  init: tuple[Any, Any] | None = None,
) -> NodesReplayed:
  """Executes a trace of nodes; `jasgd.replay` calls it for those.

  All nodes, and the centre, start from the same weights.

  Args:
    task: What is learned; node i computes what learner i would.
    optimizer: Any optax optimizer; every node has a state of its own.
    trace: What the nodes did.
    get_rate: As in `replay`; an epoch is counted over the steps of all nodes.
    seed: As in `replay`.
    mode: As in `replay`.
    eval_every: Events, which are steps and mixes, between evaluations; None: at
      the end.
    init: As in `replay`.

  Returns:
    The weights and the history.
  """
  if task.is_streamed:
    raise ValueError(
      f'The task {task.name!r} is streamed; nodes need its data.'
    )
  plan = _node_plan.make_node_plan(
    trace, num_samples=task.num_samples, batch=task.batch, get_rate=get_rate
  )
  params, stats = init or task.init(jax.random.key(seed, impl='threefry2x32'))
  weights = jax.tree.map(jnp.asarray, (params, stats))
  _memory.check_memory(plan.num_rows, weights)
  functions = _node_step.make_node_functions(task, optimizer)
  rows = _start_rows(plan, weights, optimizer)
  chunk = eval_every or _DEFAULT_CHUNK
  run = _run_exact if mode == 'exact' else _run_fast
  losses, evaluations = [], []
  done, is_diverged = 0, False
  while done < len(plan.kind) and not is_diverged:
    stop = min(done + chunk, len(plan.kind))
    rows, loss = run(task, functions, plan, rows, seed, done, stop, chunk)
    losses.append(loss)
    is_step = plan.kind[done:stop] == _node_plan.STEP
    is_diverged = not np.all(np.isfinite(loss[is_step]))
    done = stop
    if eval_every or is_diverged or done == len(plan.kind):
      evaluations.append(_evaluate(task, plan, rows, done))
  nodes = jax.tree.map(lambda leaf: leaf[: plan.num_nodes], rows.weights)
  mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), nodes)
  is_step = plan.kind[:done] == _node_plan.STEP
  return NodesReplayed(
    params=mean[0],
    stats=mean[1],
    nodes=nodes,
    centre=_rows.read_row(rows.weights, plan.num_nodes)
    if plan.has_centre
    else None,
    num_steps=int(np.count_nonzero(is_step)),
    is_diverged=is_diverged,
    history={
      'epoch': plan.samples[:done][is_step] / task.num_samples,
      'time': plan.time[:done][is_step],
      'node': plan.row[:done][is_step],
      'loss': np.concatenate(losses)[is_step],
    },
    evaluations={
      name: np.array([row[name] for row in evaluations])
      for name in evaluations[0]
    },
  )


def _start_rows(
  plan: _node_plan.NodePlan,
  weights: Any,
  optimizer: optax.GradientTransformation,
) -> Rows:
  """All rows hold the first weights."""
  return Rows(
    weights=_rows.repeat_row(weights, plan.num_rows),
    opt_state=_rows.repeat_row(optimizer.init(weights[0]), plan.num_nodes),
  )


def _run_exact(
  task: tasks.Task,
  functions: _node_step.NodeFunctions,
  plan: _node_plan.NodePlan,
  rows: Rows,
  seed: int,
  start: int,
  stop: int,
  chunk: int,
) -> tuple[Rows, np.ndarray]:
  """One call per step and mix, as real nodes do it."""
  del chunk
  weights = [_rows.read_row(rows.weights, row) for row in range(plan.num_rows)]
  states = [
    _rows.read_row(rows.opt_state, row) for row in range(plan.num_nodes)
  ]
  losses = np.zeros(stop - start)
  for event in range(start, stop):
    row = int(plan.row[event])
    kind = plan.kind[event]
    first = weights[plan.sources[event, 0]]
    if kind == _node_plan.STEP:
      node = _make_node(weights[row], states[row])
      step = int(plan.step[event])
      node, loss = functions.step(
        node, first, task.data, seed, row, step, plan.rate[event]
      )
      weights[row], states[row] = (node.params, node.stats), node.opt_state
      losses[event - start] = float(loss)
    elif kind == _node_plan.MIX:
      others = _rows.stack_rows(
        [weights[source] for source in plan.sources[event]]
      )
      node = functions.mix(
        _make_node(weights[row], None),
        others,
        plan.weights[event],
        plan.own_weight[event],
      )
      weights[row] = (node.params, node.stats)
    elif kind == _node_plan.MEAN:
      members = np.flatnonzero(plan.members[plan.group[event]])
      together = _rows.stack_rows([weights[member] for member in members])
      mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), together)
      for member in members:
        weights[member] = mean
    else:
      weights[row] = first
  return Rows(_rows.stack_rows(weights), _rows.stack_rows(states)), losses


def _run_fast(
  task: tasks.Task,
  functions: _node_step.NodeFunctions,
  plan: _node_plan.NodePlan,
  rows: Rows,
  seed: int,
  start: int,
  stop: int,
  chunk: int,
) -> tuple[Rows, np.ndarray]:
  """All events of a chunk in one compiled loop."""
  columns = []
  for name in _Events._fields:
    column = getattr(plan, name)[start:stop]
    padded = np.zeros((chunk, *column.shape[1:]), column.dtype)
    padded[: stop - start] = column
    columns.append(jnp.asarray(padded))
  rows, losses = _make_loop(functions)(
    rows,
    _Events(*columns),
    jnp.asarray(plan.members),
    stop - start,
    task.data,
    seed,
  )
  return rows, np.asarray(losses)[: stop - start]


@functools.lru_cache(maxsize=32)
def _make_loop(functions: _node_step.NodeFunctions) -> Callable[..., Any]:
  """Compiles the loop over events."""

  def loop(
    rows: Rows,
    events: _Events,
    members: Any,
    num_events: Any,
    data: Any,
    seed: Any,
  ) -> tuple[Rows, jax.Array]:
    def step(rows: Rows, event: _Events) -> tuple[Rows, jax.Array]:
      node = _make_node(
        _rows.read_row(rows.weights, event.row),
        _rows.read_row(rows.opt_state, event.row),
      )
      stale = _rows.read_row(rows.weights, event.sources[0])
      node, loss = functions.step(
        node, stale, data, seed, event.row, event.step, event.rate
      )
      weights = _rows.write_row(
        rows.weights, event.row, (node.params, node.stats)
      )
      opt_state = _rows.write_row(rows.opt_state, event.row, node.opt_state)
      return Rows(weights, opt_state), loss.astype(jnp.result_type(float))

    def mix(rows: Rows, event: _Events) -> tuple[Rows, jax.Array]:
      node = functions.mix(
        _make_node(_rows.read_row(rows.weights, event.row), None),
        _rows.read_row(rows.weights, event.sources),
        event.weights,
        event.own_weight,
      )
      weights = _rows.write_row(
        rows.weights, event.row, (node.params, node.stats)
      )
      return rows._replace(weights=weights), jnp.zeros(())

    def mean(rows: Rows, event: _Events) -> tuple[Rows, jax.Array]:
      is_member = members[event.group]

      def average(leaf: jax.Array) -> jax.Array:
        shape = (-1,) + (1,) * (leaf.ndim - 1)
        mask = is_member.reshape(shape)
        value = jnp.where(mask > 0, leaf, 0).sum(axis=0) / is_member.sum()
        return jnp.where(mask > 0, value, leaf).astype(leaf.dtype)

      weights = jax.tree.map(average, rows.weights)
      return rows._replace(weights=weights), jnp.zeros(())

    def keep(rows: Rows, event: _Events) -> tuple[Rows, jax.Array]:
      copied = _rows.read_row(rows.weights, event.sources[0])
      weights = _rows.write_row(rows.weights, event.row, copied)
      return rows._replace(weights=weights), jnp.zeros(())

    def body(index: Any, held: Any) -> Any:
      rows, losses = held
      event = _rows.read_row(events, index)
      rows, loss = lax.switch(event.kind, (step, mix, mean, keep), rows, event)
      return rows, losses.at[index].set(loss)

    losses = jnp.zeros(events.kind.shape)
    return lax.fori_loop(0, num_events, body, (rows, losses))

  return jax.jit(loop, donate_argnums=0)


def _evaluate(
  task: tasks.Task, plan: _node_plan.NodePlan, rows: Rows, done: int
) -> dict[str, float]:
  """The metrics at the mean of the nodes, and how far they are from it."""
  nodes = jax.tree.map(lambda leaf: leaf[: plan.num_nodes], rows.weights)
  params, stats = jax.tree.map(lambda leaf: leaf.mean(axis=0), nodes)
  squares = jax.tree.map(
    lambda leaf, mean: jnp.sum(jnp.square(leaf - mean)), nodes[0], params
  )
  total = sum(float(leaf) for leaf in jax.tree.leaves(squares))
  row = {
    'epoch': float(plan.samples[done - 1]) / task.num_samples,
    'time': float(plan.time[done - 1]),
    'consensus': (total / plan.num_nodes) ** 0.5,
  }
  if task.test_data is not None:
    metrics = tasks.evaluate(task, params, stats)
    row |= {name: float(value) for name, value in metrics.items()}
  return row


def _make_node(weights: tuple[Any, Any], opt_state: Any) -> _node_step.Node:
  """A node from its (params, stats) and what its optimizer keeps."""
  params, stats = weights
  return _node_step.Node(params, stats, opt_state)
