"""`replay`: what does a trace do to the weights?"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import tasks
from jasgd import traces
from jasgd import transforms
from jasgd.engine import _memory
from jasgd.engine import _nodes
from jasgd.engine import _plan
from jasgd.engine import _update
from jasgd.engine import exact
from jasgd.engine import fast

MODES = ('exact', 'fast')

# Updates between looks at the loss, if there are no evaluations.
_DEFAULT_CHUNK = 1000


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
  """What replay gives.

  Attributes:
    params: The weights after the last update.
    stats: What is not trained, after the last update.
    state: The server's whole state.
    clock: Updates made; fewer than in the trace if the run diverged.
    is_diverged: Whether a loss was not finite.
    history: An entry for each update: `clock` (after it), `epoch`, `time`,
      `loss` (of the minibatches, before it), `staleness`, `factor` (of the
      policy) and `gap` (|w - w_read|), each the mean over its gradients.
    evaluations: An entry for each evaluation: `clock`, `epoch`, `time`, and the
      task's metrics over its test data.
  """

  params: Any
  stats: Any
  state: _update.ServerState
  clock: int
  is_diverged: bool
  history: dict[str, np.ndarray]
  evaluations: dict[str, np.ndarray]


def replay(
  task: tasks.Task,
  optimizer: optax.GradientTransformation,
  trace: traces.Trace | traces.NodeTrace,
  *,
  policy: transforms.policies.PolicyLike = 'constant',
  per_gradient: optax.GradientTransformation | None = None,
  get_rate: Callable[[float], float] | None = None,
  local_rate: float | None = None,
  seed: int = 0,
  mode: str = 'fast',
  eval_every: int | None = None,
  init: tuple[Any, Any] | None = None,
  num_parallel: int = 1,
) -> Replayed | _nodes.NodesReplayed:
  """Executes a trace: weights, and how they came about.

  A run is a function of its trace. Replay never asks a protocol: it computes
  each gradient on the weights that the record says, and applies it when the
  record says.

  A trace of nodes, which step and mix without a server, is executed in the same
  way; `policy`, `per_gradient`, `local_rate` and `num_parallel` are a server's
  and must be left out, and `eval_every` counts steps and mixes.

  Args:
    task: What is learned.
    optimizer: Any optax optimizer; stepped once per update.
    trace: What happened, or what a simulation made happen.
    policy: What the staleness leaves of a gradient, as in
      `jasgd.scale_by_staleness`.
    per_gradient: Run on each gradient before the policy.
    get_rate: A schedule: from epochs, before an update, to a factor on what the
      optimizer says. An epoch is `task.num_samples` samples of applied
      gradients.
    local_rate: The rate at which learners step on their own copy, where they do
      (downpour); the schedule's factor is applied to it too.
    seed: Of the first weights, the minibatches, and everything else.
    mode: 'fast', one compiled loop; or 'exact', call by call as a real server
      and its learners do it. They agree but for rounding.
    eval_every: Updates between evaluations on the test data; None: at the end.
    init: The first (params, stats); None: the task's own, from the seed.
    num_parallel: In 'fast' mode, the most gradients to compute at once, where
      they do not depend on each other. For accelerators: a CPU gains nothing.

  Returns:
    The weights and the history: of nodes, a `NodesReplayed`.

  Raises:
    ValueError: if an argument makes no sense.
    TraceError: if the trace cannot be executed.

  Examples:
    >>> import jasgd, optax
    >>> from jasgd import protocols, tasks
    >>> trace = jasgd.simulate(
    ...     protocols.softsync(4), num_learners=8, num_gradients=400)
    >>> task = tasks.make_task('quadratic', batch=1)
    >>> result = jasgd.replay(task, optax.sgd(0.05), trace, policy='inverse')
    >>> result.clock, len(result.history['loss'])
    (200, 200)
  """
  if mode not in MODES:
    raise ValueError(f'mode must be one of {", ".join(MODES)}, got {mode!r}.')
  if isinstance(trace, traces.NodeTrace):
    if (policy, per_gradient, local_rate, num_parallel) != (
      ('constant', None, None, 1)
    ):
      raise ValueError(
        'Nodes have no server, hence no policy, per_gradient, local_rate or '
        'num_parallel.'
      )
    return _nodes.replay_nodes(
      task,
      optimizer,
      trace,
      get_rate=get_rate,
      seed=seed,
      mode=mode,
      eval_every=eval_every,
      init=init,
    )
  run = Replay(
    task,
    _update.make_update(optimizer, policy=policy, per_gradient=per_gradient),
    _plan.make_plan(trace, num_samples=task.num_samples, get_rate=get_rate),
    seed=seed,
    mode=mode,
    local_rate=local_rate,
    chunk=eval_every or _DEFAULT_CHUNK,
    init=init,
    num_parallel=num_parallel,
  )
  histories, evaluations = [], []
  while not run.is_done:
    histories.append(run.advance())
    if eval_every or run.is_done:
      evaluations.append(run.evaluate())
  return Replayed(
    params=run.state.params,
    stats=run.state.stats,
    state=run.state,
    clock=run.clock,
    is_diverged=run.is_diverged,
    history=_join(histories),
    evaluations=_join(evaluations),
  )


class Replay:
  """A replay under way, chunk by chunk, which can be saved and resumed.

  Attributes:
    plan: What is to be computed.
    clock: Updates made.
    is_diverged: Whether a loss was not finite.
  """

  def __init__(
    self,
    task: tasks.Task,
    server: _update.Update,
    plan: _plan.Plan,
    *,
    seed: int,
    mode: str,
    local_rate: float | None,
    chunk: int,
    init: tuple[Any, Any] | None = None,
    num_parallel: int = 1,
    loop: fast.Loop | None = None,
    num_slots: int | None = None,
  ) -> None:
    """Starts at clock 0; `loop` and `num_slots` share a compilation."""
    _check(plan, mode, local_rate, num_parallel, task)
    self._task = task
    self.plan = plan
    self.clock = 0
    self.is_diverged = False
    self._chunk = chunk
    params, stats = init or task.init(jax.random.key(seed, impl='threefry2x32'))
    params, stats = jax.tree.map(jnp.asarray, (params, stats))
    _memory.check_memory(plan.num_slots + 3 * plan.num_copies, (params, stats))
    rate = 0.0 if local_rate is None else local_rate
    self._engine: exact.ExactEngine | fast.FastEngine
    if mode == 'exact':
      self._engine = exact.ExactEngine(
        task,
        server,
        plan,
        params=params,
        stats=stats,
        seed=seed,
        local_rate=rate,
      )
    else:
      self._engine = fast.FastEngine(
        task,
        plan,
        loop or make_loop(task, server, plan, num_parallel),
        fast.init_carry(server, plan, params, stats, num_slots),
        seed=seed,
        local_rate=rate,
        num_events=_count_events(plan, chunk),
        num_parallel=num_parallel,
      )

  @property
  def state(self) -> _update.ServerState:
    """The server's state after the updates made so far."""
    return self._engine.state

  @property
  def carry(self) -> Any:
    """All that is needed, with `clock`, to go on: a tree of arrays."""
    return self._engine.carry

  @property
  def is_done(self) -> bool:
    """Whether all updates were made, or there is no use in making more."""
    return self.clock >= self.plan.num_updates or self.is_diverged

  def restore(self, clock: int, carry: Any) -> None:
    """Goes on from a `carry` that was saved at `clock`."""
    self.clock = clock
    self._engine.carry = carry

  def advance(self) -> dict[str, np.ndarray]:
    """Makes the updates of one chunk.

    Returns:
      The history of these updates, as in `Replayed`. Of a run that diverges it
      ends with the first loss that is not finite.
    """
    start = self.clock
    # Chunks end at multiples, so that a resumed run has the same ones.
    stop = min((start // self._chunk + 1) * self._chunk, self.plan.num_updates)
    outputs = self._engine.advance(start, stop)
    history = _summarize(self.plan, start, stop, jax.device_get(outputs))
    history['epoch'] = history['epoch'] / self._task.num_samples
    self.clock = stop
    is_bad = ~np.isfinite(history['loss'])
    if np.any(is_bad):
      self.is_diverged = True
      end = int(np.argmax(is_bad)) + 1
      history = {name: column[:end] for name, column in history.items()}
    return history

  def evaluate(self) -> dict[str, Any]:
    """The task's metrics on its test data, now; a row of `evaluations`."""
    last = self.plan.ends[self.clock] - 1
    row = {
      'clock': self.clock,
      'epoch': self.plan.samples[last] / self._task.num_samples,
      'time': self.plan.time[last],
    }
    if self._task.test_data is not None:
      metrics = tasks.evaluate(self._task, self.state.params, self.state.stats)
      row |= {name: float(value) for name, value in metrics.items()}
    return row


def make_loop(
  task: tasks.Task,
  server: _update.Update,
  plan: _plan.Plan,
  num_parallel: int = 1,
) -> fast.Loop:
  """The compiled loop for plans like this one."""
  return fast.make_loop(
    task,
    server,
    is_single=plan.is_single,
    has_copies=plan.has_copies,
    has_local_steps=bool(np.any(plan.num_steps > 1)),
    num_parallel=num_parallel,
  )


def find_difference(
  task: tasks.Task,
  optimizer: optax.GradientTransformation,
  first: traces.Trace,
  second: traces.Trace,
  *,
  policy: transforms.policies.PolicyLike = 'constant',
  local_rate: float | None = None,
  seed: int = 0,
) -> int | None:
  """The first clock at which two traces give other weights, bit for bit.

  Args:
    task: What is learned.
    optimizer: Any optax optimizer.
    first: A trace.
    second: Another.
    policy: As in `replay`.
    local_rate: As in `replay`.
    seed: As in `replay`.

  Returns:
    The clock after the first update that differs, or the end of the shorter
    trace; None if there is no difference.

  Examples:
    >>> import jasgd, optax
    >>> from jasgd import engine, protocols, tasks
    >>> first, second = (
    ...     jasgd.simulate(protocols.constant_delay(d), num_gradients=9)
    ...     for d in (2, 3))
    >>> task = tasks.make_task('quadratic', batch=1)
    >>> engine.find_difference(task, optax.sgd(0.1), first, second)
    4
  """
  server = _update.make_update(optimizer, policy=policy)
  runs = [
    Replay(
      task,
      server,
      _plan.make_plan(trace, num_samples=task.num_samples),
      seed=seed,
      mode='exact',
      local_rate=local_rate,
      chunk=1,
    )
    for trace in (first, second)
  ]
  while not any(run.is_done for run in runs):
    for run in runs:
      run.advance()
    if not _is_same(*(run.state.params for run in runs)):
      return runs[0].clock
  is_longer = runs[0].plan.num_updates != runs[1].plan.num_updates
  return runs[0].clock if is_longer else None


def _is_same(first: Any, second: Any) -> bool:
  """Whether two trees have the same bits."""
  pairs = zip(
    *(map(np.asarray, jax.tree.leaves(tree)) for tree in (first, second)),
    strict=True,
  )
  return all(a.tobytes() == b.tobytes() for a, b in pairs)


def _check(
  plan: _plan.Plan,
  mode: str,
  local_rate: float | None,
  num_parallel: int,
  task: tasks.Task,
) -> None:
  """Raises a ValueError for what cannot be."""
  if mode not in MODES:
    raise ValueError(f'mode must be one of {", ".join(MODES)}, got {mode!r}.')
  if num_parallel < 1:
    raise ValueError(f'num_parallel must be at least 1, got {num_parallel}.')
  has_local_steps = plan.has_copies or bool(np.any(plan.num_steps > 1))
  if has_local_steps and local_rate is None:
    raise ValueError(
      'In this trace learners step on their own copies of the weights: say at '
      'which local_rate.'
    )
  if has_local_steps and task.is_streamed and mode == 'fast':
    raise ValueError(
      f'The task {task.name!r} is streamed, and learners step on their own: '
      "that needs mode='exact'."
    )
  if plan.has_copies and num_parallel > 1:
    raise ValueError(
      'Where learners step on their own copies, num_parallel must be 1, got '
      f'{num_parallel}.'
    )


def _count_events(plan: _plan.Plan, chunk: int) -> int:
  """The most events in a chunk of updates."""
  starts = np.arange(0, plan.num_updates, chunk)
  stops = np.minimum(starts + chunk, plan.num_updates)
  return int((plan.ends[stops] - plan.ends[starts]).max())


def _summarize(
  plan: _plan.Plan, start: int, stop: int, outputs: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """The history of some updates from what their events gave."""
  first, last = plan.ends[start], plan.ends[stop]
  is_push = plan.is_push[first:last]
  starts = plan.ends[start:stop] - first
  sizes = np.add.reduceat(is_push.astype(int), starts)
  ends = plan.ends[start + 1 : stop + 1] - 1

  def average(values: np.ndarray) -> np.ndarray:
    pushed = np.where(is_push, values, 0).astype(float)
    return np.add.reduceat(pushed, starts) / sizes

  return {
    'clock': np.arange(start + 1, stop + 1),
    'epoch': plan.samples[ends],
    'time': plan.time[ends],
    'loss': average(outputs['loss']),
    'staleness': average(plan.staleness[first:last]),
    'factor': average(outputs['factor']),
    'gap': average(outputs['gap']),
  }


def _join(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
  """Columns, end to end."""
  return {
    name: np.concatenate([np.atleast_1d(row[name]) for row in rows])
    for name in rows[0]
  }
