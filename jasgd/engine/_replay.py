"""`replay`: what does a trace do to the weights?"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from jasgd import tasks
from jasgd import traces
from jasgd import transforms
from jasgd.engine import _nodes
from jasgd.engine import _plan
from jasgd.engine import _run
from jasgd.engine import _update

# Updates between looks at the loss, if there are no evaluations.
_DEFAULT_CHUNK = 1000


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
  """What replay gives.

  Attributes:
    params: The weights after the last update.
    stats: What is not trained, after the last update.
    state: The server's whole state.
    clock: Updates made. A run that diverges ends at the next evaluation, or
      after some updates, and its history before: with the first loss that is
      not finite.
    is_diverged: Whether a loss, or a weight, was not finite.
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
  and must be left out, and `eval_every` counts the steps of all nodes.

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
      and its learners do it, messages rounded as theirs. They agree but for
      rounding.
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
  if mode not in _run.MODES:
    raise ValueError(
      f'mode must be one of {", ".join(_run.MODES)}, got {mode!r}.'
    )
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
  run = _run.Replay(
    task,
    _update.make_update(optimizer, policy=policy, per_gradient=per_gradient),
    _plan.make_plan(
      trace,
      num_samples=task.num_samples,
      batch=task.batch,
      get_rate=get_rate,
    ),
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


def find_difference(
  task: tasks.Task,
  optimizer: optax.GradientTransformation,
  first: traces.Trace,
  second: traces.Trace,
  *,
  policy: transforms.policies.PolicyLike = 'constant',
  per_gradient: optax.GradientTransformation | None = None,
  get_rate: Callable[[float], float] | None = None,
  local_rate: float | None = None,
  seed: int = 0,
  init: tuple[Any, Any] | None = None,
) -> int | None:
  """The first clock at which two traces give other weights, bit for bit.

  Args:
    task: What is learned.
    optimizer: Any optax optimizer.
    first: A trace.
    second: Another.
    policy: As in `replay`, and so are the others.
    per_gradient: Run on each gradient before the policy.
    get_rate: The schedule.
    local_rate: Of learners on their own copies.
    seed: Of everything that is random.
    init: The first (params, stats).

  Returns:
    The clock after the first update that differs, or the end of the shorter
    trace; None if there is no difference.

  Raises:
    ValueError: if a trace is one of nodes, which have no clock.

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
  for trace in (first, second):
    if isinstance(trace, traces.NodeTrace):
      raise ValueError('Traces of nodes have no clock to compare them at.')
  server = _update.make_update(
    optimizer, policy=policy, per_gradient=per_gradient
  )
  runs = [
    _run.Replay(
      task,
      server,
      _plan.make_plan(
        trace,
        num_samples=task.num_samples,
        batch=task.batch,
        get_rate=get_rate,
      ),
      seed=seed,
      mode='exact',
      local_rate=local_rate,
      chunk=1,
      init=init,
    )
    for trace in (first, second)
  ]
  while not any(run.is_done for run in runs):
    # One may make several updates by one call, and be ahead.
    clock = min(run.clock for run in runs)
    for run in runs:
      if run.clock == clock:
        run.advance()
    is_level = runs[0].clock == runs[1].clock
    if is_level and not _is_same(*(run.state.params for run in runs)):
      return runs[0].clock
  is_longer = runs[0].plan.num_updates != runs[1].plan.num_updates
  return min(run.clock for run in runs) if is_longer else None


def _is_same(first: Any, second: Any) -> bool:
  """Whether two trees have the same bits."""
  pairs = zip(
    *(map(np.asarray, jax.tree.leaves(tree)) for tree in (first, second)),
    strict=True,
  )
  return all(a.tobytes() == b.tobytes() for a, b in pairs)


def _join(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
  """Columns, end to end."""
  return {
    name: np.concatenate([np.atleast_1d(row[name]) for row in rows])
    for name in rows[0]
  }
