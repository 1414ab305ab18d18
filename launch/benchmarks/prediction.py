"""Does the simulator predict what real processes do, with one of them killed?

Four workers of unequal speed train a small model in processes, for every
strategy. One of them is killed (SIGKILL) after a third of all steps; an
all-reduce is started again, all others go on without it. Then the run is
simulated from its own times (`jasgd.simulation.predict`, 8 seeds), and both are
compared.

Bounds: where a number depends on the times of steps, or on random peers,
updates per gradient and mixes per step within 10%, mean staleness within 25% or
0.1 updates, mean age within 0.15 steps. Where the strategy's rule alone makes
the number, within 1%; within 5% if it also depends on when the worker died; and
no gradient may be stale where the rule forbids it. Lost mass within 150%: it is
chance how much of the mass the dead node held. Outside, the exit code is 1.

Two strategies are not in the table. A constant delay needs workers of equal
speed; with unequal ones it is asynchronous, in real runs and in predictions.
Pairs do not run in processes.
"""

import io
import os
import pathlib
import signal
import sys
import threading
from typing import Any

from jasgd import experiment
from jasgd import simulation
from jasgd import traces

# Name of a row -> fields of its `StrategyConfig`, whose name is the row's.
ROWS: dict[str, dict[str, Any]] = {
  'asynchronous': {},
  'backup': {'num_backups': 1},
  'downpour': {'n_push': 2, 'n_fetch': 4},
  'hardsync': {},
  'ramp_up': {'name': 'asynchronous', 'ramp_up': 100},
  'rennala': {'s': 3},
  'ringmaster': {'r': 2},
  'softsync': {'n': 2},
  'ssp': {'s': 3},
  'allreduce': {},
  'elastic': {},
  'pull': {},
  'push': {},
  'push_sum': {},
}
_QUICK = ('softsync', 'pull')
NUM_WORKERS, VICTIM = 4, 3
_SECONDS = (0.030, 0.033, 0.037, 0.055)  # Least time of a step of each worker.
_NUM_SEEDS = 8
# Number -> largest relative difference, and largest absolute one; the larger
# of the two counts.
BOUNDS = {
  'updates_per_gradient': (0.10, 0.0),
  'mixes_per_step': (0.10, 0.0),
  'staleness': (0.25, 0.1),
  'age': (0.0, 0.15),
  'lost_mass': (1.5, 0.0),
}
# Bounds of numbers that the strategy's rule alone determines. They are 1%, not
# 0, as gradients that arrive after the end make no update.
_FIXED, _FIXED_BUT_DEATH = (0.01, 0.0), (0.05, 0.0)
_EACH_UPDATES = {
  'updates_per_gradient': _FIXED,
  'staleness': _FIXED_BUT_DEATH,
}
_NONE_STALE = {'staleness': (0.0, 0.0)}
# Row -> bounds that are narrower than those of `BOUNDS`.
NARROW: dict[str, dict[str, tuple[float, float]]] = {
  'asynchronous': _EACH_UPDATES,
  'backup': _NONE_STALE,
  'downpour': _EACH_UPDATES,
  'hardsync': {'updates_per_gradient': _FIXED_BUT_DEATH, **_NONE_STALE},
  'ramp_up': _EACH_UPDATES,
  'rennala': _NONE_STALE,
  'softsync': dict.fromkeys(_EACH_UPDATES, _FIXED_BUT_DEATH),
  'ssp': {'updates_per_gradient': _FIXED},
  'allreduce': {'mixes_per_step': _FIXED},
  'elastic': {'mixes_per_step': _FIXED},
}


def run_strategy(
  strategy: experiment.StrategyConfig, folder: pathlib.Path, num_steps: int
) -> simulation.Comparison:
  """Trains with real processes, of which one is killed, and predicts the run.

  Args:
    strategy: The strategy; it may be a user's own, as 'module:name'.
    folder: Workdir of the run.
    num_steps: Steps of each worker, on average.

  Returns:
    The run beside the mean of its predictions.

  Raises:
    RuntimeError: if the run ended before a worker was killed.
  """
  config = _make_config(strategy, num_steps)
  process = f'{"node" if strategy.is_peer else "learner"}-{VICTIM}'
  num_before = num_steps * NUM_WORKERS // 3
  made = config.make_strategy()
  num_before //= made.steps_per_push if made.has_server else 1
  stopped, killed = threading.Event(), threading.Event()
  killer = threading.Thread(
    target=_kill, args=(folder, process, num_before, stopped, killed)
  )
  killer.start()
  try:
    experiment.train_and_evaluate(config, folder, stream=io.StringIO())
  except experiment.RunError:
    if made.has_server or not made.is_collective:
      raise
    # Started again, it goes on with all its members.
    experiment.train_and_evaluate(config, folder, stream=io.StringIO())
  finally:
    stopped.set()
    killer.join()
  if not killed.is_set():
    raise RuntimeError(f'The run ended before {process} was killed.')
  trace = traces.Trace.load(folder / 'trace')
  predicted = [simulation.predict(trace, seed) for seed in range(_NUM_SEEDS)]
  return simulation.compare(trace, *predicted)


def _make_config(
  strategy: experiment.StrategyConfig, num_steps: int
) -> experiment.TrainingConfig:
  """A run of some steps of each worker, on average."""
  return experiment.TrainingConfig(
    task=experiment.TaskConfig(name='logistic', batch=4),
    optimizer=experiment.OptimizerConfig(rate=0.05),
    strategy=strategy,
    num_workers=NUM_WORKERS,
    runtime=experiment.RuntimeConfig(
      mode='local', checkpoint_seconds=0.5, eval_every=10**6
    ),
    processes=experiment.ProcessConfig(min_seconds=_SECONDS),
    num_epochs=num_steps * NUM_WORKERS * 4 / 1000,
  )


def _kill(
  folder: pathlib.Path,
  process: str,
  num_before: int,
  stopped: threading.Event,
  killed: threading.Event,
) -> None:
  """Kills a process once the trace has a number of gradients."""
  while not stopped.wait(0.01):
    try:
      trace = traces.Trace.load(folder / 'trace', allow_truncated=True)
    except traces.TraceError:
      continue  # The trace does not exist yet, or is being written.
    if trace.num_gradients >= num_before:
      for pid in _list_children(process):
        os.kill(pid, signal.SIGKILL)
        killed.set()
      return


def _list_children(name: str) -> list[int]:
  """The processes of a name that this process has started."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      parent = int(path.joinpath('stat').read_text().rsplit(')')[-1].split()[1])
      words = path.joinpath('cmdline').read_bytes().split(b'\0')
    except (OSError, ValueError):
      continue  # The process has ended.
    if parent == os.getpid() and name.encode() in words:
      found.append(int(path.name))
  return found


def judge(
  comparison: simulation.Comparison, row: str = ''
) -> list[tuple[str, bool]]:
  """Compares a run with its prediction.

  Args:
    comparison: The result of `simulation.compare`.
    row: One of `ROWS`, for its bounds in `NARROW`; '' for another strategy.

  Returns:
    A line for each number in `BOUNDS` that the run has, and whether the number
    is within its bound.
  """
  lines = []
  for name, (relative, absolute) in (BOUNDS | NARROW.get(row, {})).items():
    if name not in comparison.measured:
      continue
    measured, predicted = comparison.measured[name], comparison.predicted[name]
    if measured != measured and predicted != predicted:  # A mean has no age.
      continue
    bound = max(relative * abs(predicted), absolute)
    is_good = abs(measured - predicted) <= bound
    verdict = 'within' if is_good else 'OUTSIDE'
    lines.append(
      (
        f'{name:22} {measured:9.3f} {predicted:9.3f}  {verdict} {bound:.4f}',
        is_good,
      )
    )
  return lines


def run(quick: bool, workdir: str) -> None:
  """Prints a table of all strategies.

  Args:
    quick: Whether to make few steps, of two strategies.
    workdir: Folder for the runs.
  """
  print(__doc__)
  is_all_good = True
  print(f'{"strategy":13} {"number":22} {"real":>9} {"simulated":>9}')
  for name in _QUICK if quick else ROWS:
    fields: dict[str, Any] = {'name': name, **ROWS[name]}
    strategy = experiment.StrategyConfig(**fields)
    folder = pathlib.Path(workdir, name)
    comparison = run_strategy(strategy, folder, 100 if quick else 200)
    for line, is_good in judge(comparison, name):
      print(f'{name:13} {line}', flush=True)
      is_all_good &= is_good
  if not is_all_good and not quick:
    sys.exit(1)
