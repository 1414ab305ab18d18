"""Replay: executes a trace, which gives weights and curves."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import gossip
from jasgd import tasks
from jasgd import traces
from jasgd import transforms
from jasgd.engine import _exact
from jasgd.engine import _fast
from jasgd.engine import _local_optimizers
from jasgd.engine import _node_functions
from jasgd.engine import _plan
from jasgd.engine import _server_functions
from jasgd.engine import _slots

MODES = ('exact', 'fast')
SERVER = _plan.SERVER

# Updates between two checks of the loss, if there are no evaluations.
_DEFAULT_CHUNK = 1000

_Weights = tuple[Any, Any]  # (params, stats)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
  """The result of a replay.

  A run that diverges ends early: at the next evaluation, or at the end of a
  chunk. Its history ends with the first loss that is not finite.

  Attributes:
    params: Weights of the server after its last update; without a server, the
      mean of the nodes' weights (for push-sum, weighted by their masses).
    stats: Statistics that are not trained, likewise.
    replicas: Number of a replica -> its (params, stats). -1 is the server or
      the elastic centre; i is node i, or learner i if learners have their own
      replicas (at its last push or fetch).
    opt_states: Number of a replica -> state of its optimizer; for -1 the whole
      state of the server. Replicas without an optimizer, such as a centre, are
      left out.
    versions: Number of a replica -> number of changes of its weights.
    num_updates: Number of updates of the server, or of steps of all nodes.
    is_diverged: Whether a loss or a weight was not finite.
    history: Columns with an entry for each update: `clock` (after it), `epoch`,
      `time`, `loss` (of its minibatches, before it). With a server also
      `staleness`, `factor` (of the policy) and `gap` (|w - w_read|), each the
      mean over its gradients; without a server also `worker`.
    evaluations: Columns with an entry for each evaluation: see
      `Replay.evaluate`.
  """

  params: Any
  stats: Any
  replicas: dict[int, _Weights]
  opt_states: dict[int, Any]
  versions: dict[int, int]
  num_updates: int
  is_diverged: bool
  history: dict[str, np.ndarray]
  evaluations: dict[str, np.ndarray]


def replay(
  task: tasks.Task,
  optimizer: optax.GradientTransformation,
  trace: traces.Trace,
  *,
  policy: transforms.policies.PolicyLike = 'constant',
  per_gradient: optax.GradientTransformation | None = None,
  get_rate: Callable[[float], float] | None = None,
  local_rate: float | None = None,
  local_optimizer: optax.GradientTransformation | None = None,
  seed: int = 0,
  mode: str = 'fast',
  eval_every: int | None = None,
  init: tuple[Any, Any] | None = None,
) -> Replayed:
  """Executes a trace.

  A run is a function of its trace. Replay needs no protocol or strategy: it
  computes each gradient on the weights that the record names, and applies it in
  the order of the records.

  Args:
    task: Task to learn.
    optimizer: Any optax optimizer. A server steps it once per update; each node
      has its own state of it.
    trace: Trace of any strategy, recorded or simulated.
    policy: Factor of a stale gradient, as in `jasgd.scale_by_staleness`; only
      with a server.
    per_gradient: Transformation of each gradient before the policy; only with a
      server.
    get_rate: Schedule: function from the epochs before an update to a factor on
      the optimizer's updates. An epoch is `task.num_samples` samples of applied
      gradients. A node knows only its own steps, and assumes that all nodes
      have made as many: see `jasgd.engine.count_epochs`.
    local_rate: Rate of learners' steps on their own replicas (downpour), which
      the schedule multiplies too; only with a server.
    local_optimizer: Optimizer of learners that push differences of weights
      instead of gradients, as the trace's header says; only in mode 'exact'.
    seed: Seed of the first weights, the minibatches, and all other draws.
    mode: Name of the mode. 'fast': one compiled loop. 'exact': the calls of
      real processes, with their rounding of messages. The results of the two
      differ by rounding.
    eval_every: Number of updates, or of steps of all nodes, between evaluations
      on the test data. None: one evaluation at the end.
    init: First (params, stats). None: the task draws them with the seed.

  Returns:
    The weights and the history.

  Raises:
    ValueError: if an argument makes no sense.
    TraceError: if the trace cannot be executed.

  Examples:
    >>> import jasgd, optax
    >>> from jasgd import protocols, tasks
    >>> trace = jasgd.simulate(
    ...     protocols.softsync(4), num_workers=8, num_gradients=400)
    >>> task = tasks.make_task('quadratic', batch=1)
    >>> result = jasgd.replay(task, optax.sgd(0.05), trace, policy='inverse')
    >>> result.num_updates, len(result.history['loss'])
    (200, 200)
  """
  _check_mode(mode)
  run = Replay(
    task,
    optimizer,
    _plan.make_plan(
      trace,
      num_samples=task.num_samples,
      batch=task.batch,
      get_rate=get_rate,
    ),
    policy=policy,
    per_gradient=per_gradient,
    seed=seed,
    mode=mode,
    local_rate=local_rate,
    local_optimizer=local_optimizer,
    chunk=eval_every or _DEFAULT_CHUNK,
    init=init,
  )
  histories, evaluations = [], []
  while not run.is_done:
    histories.append(run.advance())
    if eval_every or run.is_done:
      evaluations.append(run.evaluate())
  params, stats = run.weights
  return Replayed(
    params=params,
    stats=stats,
    replicas=run.replicas,
    opt_states=run.opt_states,
    versions=run.versions,
    num_updates=run.clock,
    is_diverged=run.is_diverged,
    history=_join(histories),
    evaluations=_join(evaluations),
  )


def _join(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
  """Concatenates the columns of several tables."""
  return {
    name: np.concatenate([np.atleast_1d(row[name]) for row in rows])
    for name in rows[0]
  }


class Replay:
  """A replay that runs chunk by chunk, and can be saved and resumed.

  All replicas start from the same weights.

  Attributes:
    plan: Plan of the computation.
    clock: Number of updates made: those of the server, or the steps of all
      nodes, each with all mixes up to the next step.
    is_diverged: Whether a loss or a weight was not finite.

  Examples:
    >>> import optax
    >>> from jasgd import engine, gossip, simulation, tasks
    >>> task = tasks.make_task('quadratic', batch=1)
    >>> trace = simulation.simulate(
    ...     gossip.Pull(), num_workers=4, num_gradients=100)
    >>> plan = engine.make_plan(
    ...     trace, num_samples=task.num_samples, batch=task.batch)
    >>> run = engine.Replay(task, optax.sgd(0.1), plan, chunk=30)
    >>> while not run.is_done:
    ...   history = run.advance()
    ...   print(run.clock, len(history['loss']))
    30 30
    60 30
    90 30
    100 10
  """

  def __init__(
    self,
    task: tasks.Task,
    optimizer: optax.GradientTransformation,
    plan: _plan.Plan,
    *,
    policy: transforms.policies.PolicyLike = 'constant',
    per_gradient: optax.GradientTransformation | None = None,
    local_rate: float | None = None,
    local_optimizer: optax.GradientTransformation | None = None,
    seed: int = 0,
    mode: str = 'fast',
    chunk: int = _DEFAULT_CHUNK,
    init: tuple[Any, Any] | None = None,
    num_slots: int | None = None,
    wire_dtype: str | None = None,
  ) -> None:
    """Starts at clock 0.

    Args:
      task: Task to learn. Node i has the minibatches and keys of learner i.
      optimizer: Optimizer of the server or of the nodes, as in `replay`.
      plan: Result of `make_plan`.
      policy: Policy, as in `replay`.
      per_gradient: Transformation of each gradient, as in `replay`.
      local_rate: Rate of learners' own steps, as in `replay`.
      local_optimizer: Optimizer of learners, as in `replay`.
      seed: Seed of every random draw.
      mode: Name of the mode, one of `MODES`.
      chunk: Number of updates per `advance`. In 'exact' mode a chunk is longer
        if it would end between updates that the server made by one call.
      init: First (params, stats), as in `replay`.
      num_slots: Number of slots for weights in 'fast' mode, at least that of
        the plan. Replays with equal numbers share a compilation.
      wire_dtype: Dtype that float32 was rounded to in messages, in 'exact'
        mode. None: that of the trace.

    Raises:
      ValueError: if an argument makes no sense, or the weights do not fit into
        memory.
    """
    _check_mode(mode)
    if not plan.has_server and (policy, per_gradient, local_rate) != (
      ('constant', None, None)
    ):
      raise ValueError(
        'Nodes have no server, hence no policy, per_gradient or local_rate.'
      )
    _check_local_optimizer(plan, mode, local_optimizer)
    if local_optimizer is None:
      _check_local_steps(task, plan, mode, local_rate)
    self._task = task
    self.plan = plan
    self.clock = 0
    self.is_diverged = False
    self._is_exact = mode == 'exact'
    self._chunk = chunk
    weights = init or task.init(jax.random.key(seed, impl='threefry2x32'))
    weights = jax.tree.map(jnp.asarray, weights)
    _slots.check_memory(plan.num_slots + 3 * plan.num_locals, weights)
    fields: dict[str, Any] = {'weights': weights, 'seed': seed}
    wire_dtype = wire_dtype or plan.wire_dtype
    made: Any = optimizer
    if plan.has_server:
      made = _server_functions.make_update(
        optimizer, policy=policy, per_gradient=per_gradient
      )
    else:
      work = _node_functions.make_node_work(task, optimizer)
      state = jax.eval_shape(work.init, weights[0])
      _slots.check_memory(plan.num_states, state)
    self._engine: Any
    local_rate = local_rate or 0.0
    if local_optimizer is not None:
      self._engine = _local_optimizers.ExactLocalOptimizers(
        task, made, local_optimizer, plan, wire_dtype=wire_dtype, **fields
      )
    elif mode == 'fast':
      self._engine = _fast.FastEngine(
        task,
        made,
        plan,
        local_rate=local_rate,
        chunk=chunk,
        num_slots=num_slots,
        **fields,
      )
    elif plan.has_server:
      self._engine = _exact.ExactServer(
        task, made, plan, local_rate=local_rate, wire_dtype=wire_dtype, **fields
      )
    else:
      self._engine = _exact.ExactNodes(
        task, made, plan, wire_dtype=wire_dtype, **fields
      )

  @property
  def carry(self) -> Any:
    """Tree of arrays: with `clock`, the complete state of the replay."""
    return self._engine.carry

  @property
  def is_done(self) -> bool:
    """Whether all updates were made, or the run has diverged."""
    return self.clock >= self.plan.num_updates or self.is_diverged

  def restore(self, clock: int, carry: Any) -> None:
    """Continues from a `carry` that was saved at `clock`."""
    self.clock = clock
    self._engine.restore(carry)

  def advance(self) -> dict[str, np.ndarray]:
    """Makes the updates of one chunk.

    Returns:
      The history of these updates, as in `Replayed`. If the run diverges, it
      ends with the first loss that is not finite.
    """
    start = self.clock
    # Chunks end at multiples, so that a resumed run has the same chunks.
    stop = min((start // self._chunk + 1) * self._chunk, self.plan.num_updates)
    if self._is_exact:
      stop = self.plan.find_call_end(stop)
    outputs = self._engine.advance(start, stop)
    self.clock = stop
    history = self._summarize(start, stop, jax.device_get(outputs))
    is_bad = ~np.isfinite(history['loss'])
    if np.any(is_bad):
      self.is_diverged = True
      end = int(np.argmax(is_bad)) + 1
      return {name: column[:end] for name, column in history.items()}
    # No loss has been computed yet on the weights of the last update.
    if not _is_finite(self._list_params()):
      self.is_diverged = True
    return history

  def _summarize(
    self, start: int, stop: int, outputs: dict[str, np.ndarray]
  ) -> dict[str, np.ndarray]:
    """Makes the history of some updates from the outputs of their steps."""
    plan = self.plan
    first, last = plan.step_ends[[start, stop]].tolist()
    updates = slice(start + 1, stop + 1)
    history = {
      'clock': np.arange(start + 1, stop + 1),
      'epoch': plan.samples[updates] / self._task.num_samples,
      'time': plan.time[updates],
    }
    if not plan.has_server:
      return history | {
        'worker': plan.steps.worker[first:last],
        'loss': outputs['loss'],
      }
    is_push = plan.steps.kind[first:last] != _plan.FETCH
    starts = plan.step_ends[start:stop] - first
    sizes = np.add.reduceat(is_push.astype(int), starts)

    def average(values: np.ndarray) -> np.ndarray:
      pushed = np.where(is_push, values, 0).astype(float)
      return np.add.reduceat(pushed, starts) / sizes

    return history | {
      'loss': average(outputs['loss']),
      'staleness': average(plan.steps.staleness[first:last]),
      'factor': average(outputs['factor']),
      'gap': average(outputs['gap']),
    }

  def evaluate(self) -> dict[str, Any]:
    """Evaluates the present weights on the task's test data.

    Returns:
      `clock`, `epoch`, `time`, and the metrics at `weights`. For nodes also
      `consensus`, the root mean square distance of the nodes from their mean.
      If there is a centre, also its metrics, as `centre_loss` and so on, and
      the means of the nodes' own metrics, as `local_loss` and so on.
    """
    row = {
      'clock': self.clock,
      'epoch': self.plan.samples[self.clock] / self._task.num_samples,
      'time': float(self.plan.time[self.clock]),
    }
    weights = self.weights
    if not self.plan.has_server:
      row['consensus'] = float(_measure_consensus(self._read_nodes()[0]))
    if self._task.test_data is None:
      return row
    metrics = tasks.evaluate(self._task, *weights)
    row |= {name: float(value) for name, value in metrics.items()}
    if not self.plan.has_server and SERVER in self.plan.replicas:
      replicas = self.replicas
      metrics = tasks.evaluate(self._task, *replicas.pop(SERVER))
      row |= {f'centre_{name}': float(each) for name, each in metrics.items()}
      metrics = tasks.evaluate_all(self._task, replicas.values())
      row |= {f'local_{name}': each for name, each in metrics.items()}
    return row

  def get_digest(self) -> int:
    """Digest of the server's weights, to be compared with `plan.digests`.

    Raises:
      ValueError: if there is no server, or the mode is not 'exact'.
    """
    has_digest = self.plan.has_server and self.plan.fragments is None
    if not (has_digest and self._is_exact):
      raise ValueError("Only a server's replay in mode='exact' has a digest.")
    return self._engine.get_digest()

  # --- Weights, after the updates made so far.

  @property
  def weights(self) -> _Weights:
    """(params, stats) of the server, or the mean of the nodes by mass."""
    if self.plan.has_server:
      return self._engine.weights
    return average_nodes(self._read_nodes(), self.plan.find_shares(self.clock))

  @property
  def replicas(self) -> dict[int, _Weights]:
    """(params, stats) of each replica, as in `Replayed`."""
    if self.plan.has_server:
      return {SERVER: self.weights, **self._engine.locals}
    located = self.plan.locate(self.clock)
    rows = self._read(located.slot)
    return _split(self.plan.replicas, rows)

  @property
  def opt_states(self) -> dict[int, Any]:
    """State of each optimizer, as in `Replayed`."""
    if self.plan.has_server:
      return self._engine.opt_states
    nodes = self.plan.nodes
    located = self.plan.locate(self.clock)
    rows = self._engine.read_states(located.state[: len(nodes)])
    return _split(nodes, rows)

  @property
  def versions(self) -> dict[int, int]:
    """Number of changes of the weights of each replica."""
    return self.plan.find_versions(self.clock)

  def _list_params(self) -> Any:
    """The params of a server, or those in all slots of nodes."""
    if self.plan.has_server:
      return self._engine.weights[0]
    carry = self._engine.carry
    if self._is_exact:
      return [params for params, _ in carry.weights]
    return carry.weights[0]

  def _read_nodes(self) -> _Weights:
    """(params, stats) of all nodes, with a leading axis."""
    slots = self.plan.locate(self.clock).slot
    return self._read(slots[: len(self.plan.nodes)])

  def _read(self, slots: np.ndarray) -> _Weights:
    return self._engine.read_weights(slots)


def _check_mode(mode: str) -> None:
  """Raises a ValueError for an unknown mode."""
  if mode not in MODES:
    raise ValueError(f'mode must be one of {", ".join(MODES)}, got {mode!r}.')


def _check_local_optimizer(
  plan: _plan.Plan,
  mode: str,
  local_optimizer: optax.GradientTransformation | None,
) -> None:
  """Raises a ValueError if a local optimizer is missing or out of place."""
  pushes_differences = plan.fragments is not None
  if pushes_differences != (local_optimizer is not None):
    raise ValueError(
      'In this trace learners push '
      + (
        'differences of weights: pass local_optimizer.'
        if pushes_differences
        else 'gradients, or have no server: local_optimizer must be None.'
      )
    )
  if pushes_differences and mode != 'exact':
    raise ValueError(
      "Learners with optimizers of their own need mode='exact', got "
      f'mode={mode!r}.'
    )


def _check_local_steps(
  task: tasks.Task, plan: _plan.Plan, mode: str, local_rate: float | None
) -> None:
  """Raises a ValueError for a task or rate that does not fit the plan."""
  is_fast_stream = task.is_streamed and mode == 'fast'
  if not plan.has_server and is_fast_stream:
    raise ValueError(
      f"The task {task.name!r} is streamed: nodes need mode='exact'."
    )
  if not plan.has_server or not plan.has_local_steps:
    return
  if local_rate is None:
    raise ValueError(
      'In this trace learners step on their own replicas of the weights: pass '
      'local_rate, the rate of these steps.'
    )
  if is_fast_stream:
    raise ValueError(
      f'The task {task.name!r} is streamed, and learners step on their own: '
      "that needs mode='exact'."
    )


def _split(numbers: tuple[int, ...], rows: Any) -> dict[int, Any]:
  """Number of a replica -> its row of a tree with a leading axis."""
  return {
    number: _slots.read_row(rows, index) for index, number in enumerate(numbers)
  }


@jax.jit
def _is_finite(tree: Any) -> jax.Array:
  """Whether all numbers in a tree are finite."""
  leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.all(jnp.stack(leaves))


@jax.jit
def average_nodes(nodes: _Weights, shares: np.ndarray | None) -> _Weights:
  """The mean of nodes, weighted by shares if there are any."""

  def average(leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      return leaf[0]  # Integers are not mixed.
    if shares is None:
      return leaf.mean(axis=0)
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    weighted = jnp.tensordot(jnp.asarray(shares, wide.dtype), wide, axes=1)
    return weighted.astype(leaf.dtype)

  return jax.tree.map(average, nodes)


@jax.jit
def _measure_consensus(params: Any) -> jax.Array:
  """Distance of the nodes from their mean, unweighted even if masses differ."""
  measure = functools.partial(gossip.consensus_distance, axis_name='nodes')
  return jax.vmap(measure, axis_name='nodes')(params)[0]
