"""Are nodes what their traces say? Exact replay must have the same bits."""

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from jasgd import engine
from jasgd import gossip
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _node_training
from jasgd.experiment import _running
from jasgd.experiment import _train

# All-reduce sums in an order of its own: so close must its weights be, as the
# norm of the difference over the norm of the weights.
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeVerification:
  """What replay says of a run of nodes.

  Attributes:
    versions: Of the checkpoints that were compared, by node, and `CENTRE`.
    different: Those that are not the same: bit for bit in weights, statistics
      and the optimizer's state; of all-reduce, to 1e-6 of the weights' norm.
    distance: The largest difference of a node, over the norm of its weights.
    is_exact: Whether bits were compared.
  """

  versions: dict[int, int]
  different: list[int]
  distance: float
  is_exact: bool

  @property
  def is_same(self) -> bool:
    """Whether all of them are."""
    return not self.different


def read_nodes(
  workdir: str | os.PathLike[str],
) -> tuple[_node_training.NodeTrainingConfig, traces.NodeTrace] | None:
  """The config and the traces of a run of nodes.

  Args:
    workdir: Its folder.

  Returns:
    Both; None if it is a run with a server.

  Raises:
    ValueError: if they are not there.
  """
  folder = workdirs.Workdir(workdir)
  settings = workdirs.read_json(folder.config)
  if 'strategy' not in settings:
    return None
  config = _running.read_config(settings)
  assert isinstance(config, _node_training.NodeTrainingConfig)
  trace = traces.NodeTrace.load(folder.trace, allow_truncated=True)
  return config, trace


def verify_nodes(workdir: str | os.PathLike[str]) -> NodeVerification:
  """Replays a run of nodes, and compares each with its last checkpoint.

  The process must see as many threads as the run's had: see `get_environment`.

  Args:
    workdir: The folder of the run.

  Returns:
    What came out.

  Raises:
    ValueError: if there is nothing to compare.
  """
  found = read_nodes(workdir)
  if found is None:
    raise ValueError(f'There are no nodes in {os.fspath(workdir)!r}.')
  config, trace = found
  run = workdirs.Workdir(workdir)
  versions = {}
  for member in runtime.list_members(run):
    clocks = workdirs.list_checkpoints(runtime.find_folder(run, member))
    if clocks and clocks[-1]:
      versions[member] = clocks[-1]
  if not versions:
    raise ValueError(
      f'No node of {os.fspath(workdir)!r} has a checkpoint after a step.'
    )
  replayed = engine.replay_nodes(
    config.make_task(),
    config.make_optimizer(),
    trace,
    get_rate=config.make_schedule(),
    seed=config.seed,
    mode='exact',
    init=_train.load_init(config),
    until=versions,
  )
  is_exact = not isinstance(config.make_strategy(), gossip.AllReduce)
  distances = {
    member: _measure(run, member, replayed, is_exact) for member in versions
  }
  bound = 0.0 if is_exact else _TOLERANCE
  return NodeVerification(
    versions=versions,
    different=[
      member for member, distance in distances.items() if distance > bound
    ],
    distance=max(distances.values()),
    is_exact=is_exact,
  )


def _measure(
  run: workdirs.Workdir,
  member: int,
  replayed: engine.NodesReplayed,
  is_exact: bool,
) -> float:
  """How far a node is from its checkpoint; above 0 if a bit differs."""
  if member == traces.CENTRE:
    params, stats = replayed.centre
    state: Any = engine.Node(params, stats, ())
  else:
    state = engine.Node(
      *(
        jax.tree.map(lambda leaf: leaf[member], part)
        for part in (*replayed.nodes, replayed.opt_states)
      )
    )
  saved = runtime.restore_server(runtime.find_folder(run, member), state, 0)
  assert saved is not None  # It has a checkpoint.
  own = jax.tree.leaves((state.params, state.stats))
  others = jax.tree.leaves((saved[0].params, saved[0].stats))
  squares = np.zeros(2)
  for a, b in zip(own, others, strict=True):
    wide = np.float64(a), np.float64(b)
    squares += [np.sum((wide[0] - wide[1]) ** 2), np.sum(wide[1] ** 2)]
  distance = float(np.sqrt(squares[0] / max(squares[1], 1e-300)))
  if is_exact and not distance and not _is_same(state, saved[0]):
    return np.inf  # In what the optimizer keeps, or in the sign of a zero.
  return distance


def _is_same(state: Any, other: Any) -> bool:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)] == [
    np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(other)
  ]
