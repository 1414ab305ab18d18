"""`replay_nodes`: what does a trace of nodes do to their weights?"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import numpy as np
import optax

from jasgd import tasks
from jasgd import traces
from jasgd.engine import _node_plan
from jasgd.engine import _node_run

_DEFAULT_CHUNK = 1000  # Steps.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodesReplayed:
  """What replay of nodes gives.

  Attributes:
    params: The mean of the nodes' weights; of push-sum, by their masses.
    stats: The mean of what they keep besides.
    nodes: (params, stats) of all nodes, with a leading axis.
    opt_states: What the nodes' optimizers keep, with a leading axis.
    centre: (params, stats) of the centre, or None.
    versions: How often the weights of each node, and of `CENTRE`, have changed.
    num_steps: Steps of all nodes together.
    is_diverged: Whether a loss was not finite.
    history: An entry for each step: `clock`, `epoch`, `time`, `node`, `loss`.
    evaluations: An entry for each evaluation: `clock`, `epoch`, `time`,
      `consensus` (the root of the mean squared distance of the nodes from their
      mean), the task's metrics at that mean, and if there is a centre, those
      at it and the means of the nodes' own, as `centre_loss`, `local_loss`.
  """

  params: Any
  stats: Any
  nodes: Any
  opt_states: Any
  centre: Any
  versions: dict[int, int]
  num_steps: int
  is_diverged: bool
  history: dict[str, np.ndarray]
  evaluations: dict[str, np.ndarray]


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
  until: Mapping[int, int] | None = None,
) -> NodesReplayed:
  """Executes a trace of nodes; `jasgd.replay` calls it for those.

  All nodes, and the centre, start from the same weights.

  Args:
    task: What is learned; node i computes what learner i would.
    optimizer: Any optax optimizer; every node has a state of its own.
    trace: What the nodes did.
    get_rate: As in `replay`; a node counts epochs by its own steps, as if all
      nodes had made as many: see `count_node_epochs`.
    seed: As in `replay`.
    mode: As in `replay`.
    eval_every: Steps of all nodes between evaluations; None: at the end.
    init: As in `replay`.
    until: The version of each node, and of `CENTRE`, to come to; what these do
      not depend on is left out, and so is not asked for. None: all.

  Returns:
    The weights and the history.

  Raises:
    ValueError: if an argument makes no sense.
    TraceError: if the trace cannot be executed.

  Examples:
    >>> import optax
    >>> from jasgd import engine, gossip, simulation, tasks
    >>> trace = simulation.simulate_nodes(
    ...     gossip.Pull(), num_nodes=4, num_steps=25)
    >>> task = tasks.make_task('quadratic', batch=1)
    >>> result = engine.replay_nodes(
    ...     task, optax.sgd(0.1), trace, until={0: 10, 3: 6})
    >>> result.versions[0], result.versions[3]
    (10, 6)
  """
  plan = _node_plan.make_node_plan(
    trace,
    num_samples=task.num_samples,
    batch=task.batch,
    get_rate=get_rate,
    until=until,
  )
  run = _node_run.NodeReplay(
    task,
    optimizer,
    plan,
    seed=seed,
    mode=mode,
    chunk=eval_every or _DEFAULT_CHUNK,
    init=init,
  )
  histories, evaluations = [], []
  while not run.is_done:
    histories.append(run.advance())
    if eval_every or run.is_done:
      evaluations.append(run.evaluate())
  params, stats = run.mean
  return NodesReplayed(
    params=params,
    stats=stats,
    nodes=run.nodes,
    opt_states=run.opt_states,
    centre=run.centre,
    versions=run.versions,
    num_steps=run.clock,
    is_diverged=run.is_diverged,
    history={
      name: np.concatenate([each[name] for each in histories])
      for name in histories[0]
    },
    evaluations={
      name: np.array([each[name] for each in evaluations])
      for name in evaluations[0]
    },
  )
