"""Verification of a run: its exact replay must have the same bits."""

import dataclasses
import os
from typing import Any, TextIO

import jax
import numpy as np

from jasgd import engine
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment.configs import training
from jasgd.experiment.running import result as results
from jasgd.experiment.running import virtual

# Steps of all nodes between two updates of the progress line.
_CHUNK = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
  """Comparison of a run with its exact replay.

  Attributes:
    versions: Versions of the checkpoints that were compared: by number of the
      node, or -1 for the server or the centre.
    different: Numbers of the replicas that differ in a bit of their weights,
      statistics or optimizer state.
    distance: The largest difference of weights, relative to their norm.
    first_difference: Clock of the first weights of a server that differ, by the
      digests in the trace; None: no digest differs.
    num_digests: Number of digests that were compared.
  """

  versions: dict[int, int]
  different: list[int]
  distance: float = 0.0
  first_difference: int | None = None
  num_digests: int = 0

  @property
  def is_same(self) -> bool:
    """Whether all replicas have the same bits."""
    return not self.different

  @property
  def clock(self) -> int:
    """The version of the server."""
    return self.versions[engine.SERVER]


def read_run(
  workdir: str | os.PathLike[str],
) -> tuple[training.TrainingConfig, traces.Trace]:
  """The config and the trace of a run.

  Args:
    workdir: Folder of the run.

  Returns:
    Both.

  Raises:
    ValueError: if a file is missing, or the run was not made from a config.
  """
  folder = workdirs.Workdir(workdir)
  settings = workdirs.read_json(folder.config)
  if 'make_task' in settings:
    raise ValueError(
      f'The run in {os.fspath(workdir)!r} was made by jasgd.train, and only '
      'its program knows the optimizer. Replay it there: jasgd.replay(task, '
      "optimizer, result.trace, mode='exact')."
    )
  config = training.read_config(settings)
  if config.runtime.mode == 'devices':
    raise ValueError(
      f'The run in {os.fspath(workdir)!r} is of nodes on devices, which all '
      'step at once: there is no trace to replay. The same config in another '
      'folder gives the same weights.'
    )
  return config, results.load_trace(folder)


def get_environment(trace: traces.Trace) -> dict[str, str]:
  """The environment in which a replay gives the same bits as a run.

  Args:
    trace: Trace of the run.

  Returns:
    Variables that must be set before jax is imported.
  """
  threads = trace.header.get('num_threads')
  variables = {} if threads is None else {'NPROC': str(threads)}
  num_devices = engine.count_devices(trace)
  if num_devices > 1 and trace.header.get('platform') == 'cpu':
    flag = f'--xla_force_host_platform_device_count={num_devices}'
    flags = os.environ.get('XLA_FLAGS', '')
    variables['XLA_FLAGS'] = flags if flag in flags else f'{flags} {flag}'
  return variables


def verify(
  workdir: str | os.PathLike[str], *, stream: TextIO | None = None
) -> Verification:
  """Replays a real run, and compares it with its last checkpoints.

  The process must see as many threads and devices as the run's had: see
  `get_environment`.

  Args:
    workdir: Folder of the run.
    stream: Stream of the progress line; standard error if None.

  Returns:
    The comparison.

  Raises:
    ValueError: if there is nothing to compare.
  """
  folder = workdirs.Workdir(workdir)
  # Checkpoints are listed before the trace is read: if the run still goes on,
  # the trace then has the records of every checkpoint.
  members = runtime.list_members(folder)
  folders = {member: runtime.find_folder(folder, member) for member in members}
  folders = folders or {engine.SERVER: folder}  # A server saves in `folder`.
  clocks = {
    replica: workdirs.list_checkpoints(own) for replica, own in folders.items()
  }
  versions = {
    replica: found[-1] for replica, found in clocks.items() if any(found)
  }
  config, trace = read_run(workdir)
  if not config.runtime.is_real:
    raise ValueError(
      f'The run in {os.fspath(workdir)!r} was made in virtual time: it is a '
      'replay of its trace, and there are no processes to compare it with.'
    )
  if not versions:
    raise ValueError(
      f'The run in {os.fspath(workdir)!r} has no checkpoint after an update.'
    )
  replay, num_digests, difference = _replay(config, trace, versions, stream)
  distances = {
    replica: _measure(replay, replica, folders[replica], version)
    for replica, version in versions.items()
  }
  different = [replica for replica, distance in distances.items() if distance]
  return Verification(
    versions=versions,
    different=different,
    distance=max(distances.values()),
    first_difference=difference if different else None,
    num_digests=num_digests,
  )


def _replay(
  config: training.TrainingConfig,
  trace: traces.Trace,
  versions: dict[int, int],
  stream: TextIO | None,
) -> tuple[engine.Replay, int, int | None]:
  """Replays up to the versions.

  Returns:
    The replay, the number of digests that were compared, and the clock of the
    first that differs.
  """
  options: dict[str, Any] = {'chunk': _CHUNK}
  bounds: dict[str, Any] = {'until': versions}
  if not config.strategy.is_peer:
    options = {
      **config.make_update_options(),
      'local_rate': 1.0,
      'chunk': 1,  # Every version may have a digest.
      'wire_dtype': config.runtime.wire_dtype,
    }
    bounds = {'num_updates': versions[engine.SERVER]}
  plan = config.make_plan(trace, **bounds)
  replay = engine.Replay(
    config.make_task(),
    config.make_optimizer(),
    plan,
    **options,
    seed=config.seed,
    mode='exact',
    init=virtual.load_init(config),
  )
  digests = {} if config.strategy.is_peer else plan.digests
  num_digests, difference = 0, None
  unit = 'steps' if config.strategy.is_peer else 'clock'
  with workdirs.Progress(plan.num_updates, stream=stream, unit=unit) as line:
    with line.paused():  # The first chunk compiles.
      replay.advance()
    while True:
      line.update(replay.clock)
      expected = digests.get(replay.clock)
      if expected is not None:
        num_digests += 1
        if difference is None and replay.get_digest() != expected:
          difference = replay.clock
      if replay.clock >= plan.num_updates:  # Even if the loss has diverged.
        break
      replay.advance()
  return replay, num_digests, difference


@np.errstate(invalid='ignore', over='ignore')  # In a run that diverged.
def _measure(
  replay: engine.Replay, replica: int, folder: workdirs.Workdir, clock: int
) -> float:
  """The distance of a replica from a checkpoint; above 0 if a bit differs."""
  state = replay.opt_states.get(replica, ())
  if not hasattr(state, 'aggregation'):  # The state of a node or a centre.
    state = engine.NodeState(*replay.replicas[replica], state)
  position = workdirs.read_position(folder, clock)
  assert position is not None  # There is a checkpoint.
  size = position.get('snapshot_size', 0)
  found = runtime.restore_server(folder, state, size, clock)
  assert found is not None
  saved: Any = found[0]
  if _list_bits(state, saved) == _list_bits(saved, saved):
    return 0.0
  squares = np.zeros(2)
  for a, b in zip(
    jax.tree.leaves((state.params, state.stats)),
    jax.tree.leaves((saved.params, saved.stats)),
    strict=True,
  ):
    wide = np.float64(a), np.float64(b)
    squares += [np.sum((wide[0] - wide[1]) ** 2), np.sum(wide[1] ** 2)]
  distance = float(np.sqrt(squares[0] / max(squares[1], 1e-300)))
  # Otherwise the difference is in the optimizer state, in the sign of a zero,
  # or not finite.
  return distance if distance > 0 else np.inf


def _list_bits(state: Any, saved: Any) -> list[bytes]:
  """The bits of a state that must be equal to those of a checkpoint."""
  kept = state
  if hasattr(saved, 'aggregation'):
    # A checkpoint may be of a server that had part of the next update; replay
    # ends with the last one.
    gathered = state.aggregation
    kept = (state.params, state.stats, gathered.per_update_state)
    if not saved.aggregation.group_size:
      kept = (*kept, gathered._replace(gradient_sum=()))
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(kept)]
