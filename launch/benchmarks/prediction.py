"""Does the simulator predict what real processes do, with one of them killed?

Four workers of unequal speed train a small model in processes, for every
strategy. Worker 3 is killed (SIGKILL) after a third of its steps; an all-reduce
is started again, all others go on without it. Then the run is simulated from
its own times (`jasgd.simulation.predict`, 8 seeds), and both are compared.

Bounds: updates per gradient and mixes per step within 10%; mean staleness and
age within 25%, or 0.3 updates; lost mass within 0.6, as it is chance whether
the dead node had just sent half of its mass. Outside, the exit code is 1.
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

PROTOCOLS: dict[str, dict[str, Any]] = {
  'asynchronous': {},
  'softsync': {'n': 2},
  'ssp': {'s': 3},
}
PEERS = ('pull', 'push', 'push_sum', 'elastic', 'allreduce')
NUM_WORKERS, VICTIM = 4, 3
_SECONDS = (0.030, 0.033, 0.037, 0.055)  # Least time of a step of each worker.
_NUM_SEEDS = 8
# Number -> largest relative and largest absolute difference.
BOUNDS = {
  'updates_per_gradient': (0.10, 0.0),
  'mixes_per_step': (0.10, 0.0),
  'staleness': (0.25, 0.3),
  'age': (0.25, 0.3),
  'lost_mass': (0.0, 0.6),
}


def make_config(name: str, num_steps: int) -> experiment.TrainingConfig:
  """A run of some steps of each worker, on average.

  Args:
    name: One of `PROTOCOLS` or `PEERS`.
    num_steps: Steps of each worker.

  Returns:
    The config.
  """
  arguments = PROTOCOLS.get(name, {})
  return experiment.TrainingConfig(
    task=experiment.TaskConfig(name='logistic', batch=4),
    optimizer=experiment.OptimizerConfig(rate=0.05),
    strategy=experiment.StrategyConfig(name=name, **arguments),
    num_workers=NUM_WORKERS,
    runtime=experiment.RuntimeConfig(
      mode='local', checkpoint_seconds=0.5, eval_every=10**6
    ),
    processes=experiment.ProcessConfig(min_seconds=_SECONDS),
    num_epochs=num_steps * NUM_WORKERS * 4 / 1000,
  )


def run_strategy(name: str, folder: pathlib.Path, num_steps: int) -> None:
  """Trains with real processes, of which one is killed.

  Args:
    name: One of `PROTOCOLS` or `PEERS`.
    folder: Workdir of the run.
    num_steps: Steps of each worker.
  """
  config = make_config(name, num_steps)
  stopped = threading.Event()
  process = f'node-{VICTIM}' if name in PEERS else f'learner-{VICTIM}'
  killer = threading.Thread(
    target=_kill, args=(folder, process, num_steps // 3, stopped)
  )
  killer.start()
  try:
    experiment.train_and_evaluate(config, folder, stream=io.StringIO())
  except experiment.RunError:
    if name != 'allreduce':  # It cannot go on without a member.
      raise
    experiment.train_and_evaluate(config, folder, stream=io.StringIO())
  finally:
    stopped.set()
    killer.join()


def _kill(
  folder: pathlib.Path, process: str, num_steps: int, stopped: threading.Event
) -> None:
  """Kills a process once the victim has made some steps."""
  while not stopped.wait(0.01):
    try:
      trace = traces.Trace.load(folder / 'trace', allow_truncated=True)
    except traces.TraceError:
      continue  # It is not there yet, or is being written.
    if (trace.worker == VICTIM).sum() >= num_steps:
      for pid in _list_children(process):
        os.kill(pid, signal.SIGKILL)
      return


def _list_children(name: str) -> list[int]:
  """The processes of a name that this process has started."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      parent = int(path.joinpath('stat').read_text().rsplit(')')[-1].split()[1])
      words = path.joinpath('cmdline').read_bytes().split(b'\0')
    except (OSError, ValueError):
      continue  # It has ended.
    if parent == os.getpid() and name.encode() in words:
      found.append(int(path.name))
  return found


def judge(comparison: simulation.Comparison) -> list[tuple[str, bool]]:
  """Compares a run with its prediction.

  Args:
    comparison: The result of `simulation.compare`.

  Returns:
    A line for each number in `BOUNDS` that the run has, and whether the number
    is within its bounds.
  """
  lines = []
  for name, (relative, absolute) in BOUNDS.items():
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
        f'{name:22} {measured:9.3f} {predicted:9.3f}  {verdict} {bound:.3f}',
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
  names = ('softsync', 'pull') if quick else (*PROTOCOLS, *PEERS)
  is_all_good = True
  print(f'{"strategy":13} {"number":22} {"real":>9} {"simulated":>9}')
  for name in names:
    folder = pathlib.Path(workdir, name)
    run_strategy(name, folder, 60 if quick else 200)
    trace = traces.Trace.load(folder / 'trace')
    predicted = [simulation.predict(trace, seed) for seed in range(_NUM_SEEDS)]
    for line, is_good in judge(simulation.compare(trace, *predicted)):
      print(f'{name:13} {line}', flush=True)
      is_all_good &= is_good
  if not is_all_good and not quick:
    sys.exit(1)
