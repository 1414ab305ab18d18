"""Is a run what its trace says? Its exact replay must have the same bits."""

import dataclasses
import os
from typing import Any, TextIO

import jax
import numpy as np

from jasgd import engine
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _running
from jasgd.experiment import _training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
  """What replay says of a run.

  Attributes:
    clock: Of the checkpoint that was compared.
    is_same: Whether weights, statistics and the optimizer's state are the same,
      bit for bit.
    first_difference: The clock of the first weights that differ, by the digests
      in the trace; None if none of them differs.
    num_digests: How many versions were compared on the way.
  """

  clock: int
  is_same: bool
  first_difference: int | None
  num_digests: int


def read_run(
  workdir: str | os.PathLike[str],
) -> tuple[_training.TrainingConfig, traces.Trace]:
  """The config and the trace of a run.

  Args:
    workdir: Its folder.

  Returns:
    Both.

  Raises:
    ValueError: if they are not there, or no config makes that run.
  """
  folder = workdirs.Workdir(workdir)
  settings = workdirs.read_json(folder.config)
  if 'make_task' in settings:
    raise ValueError(
      f'The run in {os.fspath(workdir)!r} was made by jasgd.train, and only '
      'its program knows the optimizer. Replay it there: jasgd.replay(task, '
      "optimizer, jasgd.Trace.load(workdir + '/trace'), mode='exact')."
    )
  config = _running.read_config(settings)
  if not isinstance(config, _training.TrainingConfig):
    raise ValueError(
      f'The run in {os.fspath(workdir)!r} is one of nodes without a server.'
    )
  return config, traces.Trace.load(folder.trace, allow_truncated=True)


def verify(
  workdir: str | os.PathLike[str], *, stream: TextIO | None = None
) -> Verification:
  """Replays a run, and compares it with its last checkpoint.

  The process must see as many threads and devices as the run's had: see
  `get_environment`.

  Args:
    workdir: The folder of the run.
    stream: Where the progress goes; standard error if None.

  Returns:
    What came out.

  Raises:
    ValueError: if there is nothing to compare.
  """
  config, trace = read_run(workdir)
  clocks = workdirs.list_checkpoints(workdir)
  if not clocks or not clocks[-1]:
    raise ValueError(
      f'The run in {os.fspath(workdir)!r} has no checkpoint after an update.'
    )
  task = config.make_task()
  replay = engine.Replay(
    task,
    config.optimizer.make_optimizer(),
    engine.make_plan(
      trace,
      num_samples=task.num_samples,
      batch=task.batch,
      get_rate=config.make_schedule(),
      num_updates=clocks[-1],
    ),
    **config.make_update_options(),
    seed=config.seed,
    mode='exact',
    local_rate=1.0,
    chunk=1,
    init=_find_init(config, workdir),
    wire_dtype=config.runtime.wire_dtype,
  )
  digests = replay.plan.digests
  difference = None
  num_digests = 0
  with workdirs.Progress(replay.plan.num_updates, stream=stream) as progress:
    with progress.paused():  # It compiles.
      replay.advance()
    while True:
      progress.update(replay.clock)
      expected = digests.get(replay.clock)
      if expected is not None:
        num_digests += 1
        if difference is None and replay.get_digest() != expected:
          difference = replay.clock
      if replay.is_done:
        break
      replay.advance()
  state = replay.opt_states[engine.SERVER]
  is_same = _is_same(state, _restore(workdir, state))
  return Verification(
    clock=replay.clock,
    is_same=is_same,
    first_difference=None if is_same else difference,
    num_digests=num_digests,
  )


def get_environment(trace: traces.Trace | traces.NodeTrace) -> dict[str, str]:
  """What a process needs in its environment to get the bits of a run.

  Args:
    trace: Of the run.

  Returns:
    Variables that must be set before jax is imported.
  """
  threads = trace.header.get('num_threads')
  variables = {} if threads is None else {'NPROC': str(threads)}
  num_devices = 1
  if isinstance(trace, traces.Trace):
    num_devices = engine.count_devices(trace)
  if num_devices > 1 and trace.header.get('platform') == 'cpu':
    flag = f'--xla_force_host_platform_device_count={num_devices}'
    flags = os.environ.get('XLA_FLAGS', '')
    variables['XLA_FLAGS'] = flags if flag in flags else f'{flags} {flag}'
  return variables


def _find_init(
  config: _training.TrainingConfig, workdir: str | os.PathLike[str]
) -> tuple[Any, Any] | None:
  """The first weights, if they are not those of the seed."""
  if not config.init_from:
    return None
  return workdirs.load_weights(config.init_from)


def _restore(workdir: str | os.PathLike[str], state: Any) -> Any:
  """The server's state in the last checkpoint."""
  position = workdirs.read_position(workdir)
  assert position is not None  # There is a checkpoint.
  found = runtime.restore_server(
    workdirs.Workdir(workdir), state, position['snapshot_size']
  )
  assert found is not None
  restored, _, _ = found
  return restored


def _is_same(replayed: Any, saved: Any) -> bool:
  """Whether two states have the same bits, as far as they mean something."""
  # A checkpoint may be of a server that had part of the next update; replay
  # ends with the last one.
  is_within = bool(saved.aggregation.group_size)

  def list_bits(state: Any) -> list[bytes]:
    gathered = state.aggregation
    kept = (state.params, state.stats, gathered.per_update_state)
    if not is_within:
      kept = (*kept, gathered._replace(gradient_sum=()))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(kept)]

  return list_bits(replayed) == list_bits(saved)
