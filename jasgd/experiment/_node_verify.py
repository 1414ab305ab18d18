"""Are nodes what their traces say? Exact replay must have the same bits."""

import dataclasses
import os
from typing import Any, TextIO

import jax
import numpy as np

from jasgd import engine
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _node_training
from jasgd.experiment import _running
from jasgd.experiment import _train

# Of all nodes, between two looks at how far it is.
_STEPS_PER_LOOK = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeVerification:
  """What replay says of a run of nodes.

  Attributes:
    versions: Of the checkpoints that were compared, by node, and `CENTRE`.
    different: Those that are not the same, bit for bit, in weights, statistics
      and the optimizer's state.
    distance: The largest difference of a node, over the norm of its weights.
  """

  versions: dict[int, int]
  different: list[int]
  distance: float

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
  if config.runtime.mode == 'simulate':
    raise ValueError(
      f'{os.fspath(workdir)!r} was trained in virtual time: it is a replay of '
      'its trace, and there are no processes to compare it with.'
    )
  if config.runtime.mode == 'devices':
    raise ValueError(
      f'{os.fspath(workdir)!r} is of nodes on devices, which all step at once: '
      'there is no trace to replay. The same config in another folder gives '
      'the same weights.'
    )
  trace = traces.NodeTrace.load(folder.trace, allow_truncated=True)
  return config, trace


def verify_nodes(
  workdir: str | os.PathLike[str], *, stream: TextIO | None = None
) -> NodeVerification:
  """Replays a run of nodes, and compares each with its last checkpoint.

  The process must see as many threads as the run's had: see `get_environment`.

  Args:
    workdir: The folder of the run.
    stream: Where the progress goes; standard error if None.

  Returns:
    What came out.

  Raises:
    ValueError: if there is nothing to compare.
  """
  run = workdirs.Workdir(workdir)
  versions = {}  # Before the trace, which has them then, if it still grows.
  for member in runtime.list_members(run):
    clocks = workdirs.list_checkpoints(runtime.find_folder(run, member))
    if clocks and clocks[-1]:
      versions[member] = clocks[-1]
  found = read_nodes(workdir)
  if found is None:
    raise ValueError(f'There are no nodes in {os.fspath(workdir)!r}.')
  if not versions:
    raise ValueError(
      f'No node of {os.fspath(workdir)!r} has a checkpoint after a step.'
    )
  replay = _replay(*found, versions, stream)
  distances = {
    member: _measure(run, member, clock, replay)
    for member, clock in versions.items()
  }
  return NodeVerification(
    versions=versions,
    different=[member for member, distance in distances.items() if distance],
    distance=max(distances.values()),
  )


def _replay(
  config: _node_training.NodeTrainingConfig,
  trace: traces.NodeTrace,
  versions: dict[int, int],
  stream: TextIO | None,
) -> engine.Replay:
  """Comes to some versions of nodes, and shows how far it is."""
  task = config.make_task()
  plan = engine.make_plan(
    trace,
    num_samples=task.num_samples,
    batch=task.batch,
    get_rate=config.make_schedule(),
    until={_get_replica(member): each for member, each in versions.items()},
  )
  replay = engine.Replay(
    task,
    config.make_optimizer(),
    plan,
    seed=config.seed,
    mode='exact',
    chunk=_STEPS_PER_LOOK,
    init=_train.load_init(config),
  )
  replay.advance()  # Compiles: that is not in the rate.
  with workdirs.Progress(
    plan.num_updates, start=replay.clock, stream=stream, unit='steps'
  ) as line:
    while replay.clock < plan.num_updates:  # Also if it diverges.
      replay.advance()
      line.update(replay.clock)
  return replay


@np.errstate(invalid='ignore', over='ignore')  # Of a run that diverged.
def _measure(
  run: workdirs.Workdir, member: int, clock: int, replay: engine.Replay
) -> float:
  """How far a node is from a checkpoint; above 0 if a bit differs."""
  replica = _get_replica(member)
  params, stats = replay.replicas[replica]
  state: Any = engine.NodeState(
    params, stats, replay.opt_states.get(replica, ())
  )
  saved = runtime.restore_server(
    runtime.find_folder(run, member), state, 0, clock
  )
  assert saved is not None  # It has a checkpoint.
  if _is_same(state, saved[0]):
    return 0.0
  own = jax.tree.leaves((state.params, state.stats))
  others = jax.tree.leaves((saved[0].params, saved[0].stats))
  squares = np.zeros(2)
  for a, b in zip(own, others, strict=True):
    wide = np.float64(a), np.float64(b)
    squares += [np.sum((wide[0] - wide[1]) ** 2), np.sum(wide[1] ** 2)]
  distance = float(np.sqrt(squares[0] / max(squares[1], 1e-300)))
  # Or in what the optimizer keeps, in the sign of a zero, or not finite.
  return distance if distance > 0 else np.inf


def _get_replica(member: int) -> int:
  """The number of a member's weights in a replay."""
  return engine.SERVER if member == traces.CENTRE else member


def _is_same(state: Any, other: Any) -> bool:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)] == [
    np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(other)
  ]
