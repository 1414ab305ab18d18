"""Two of four nodes are three times slower: who else is slowed?

Nodes compute by sleeping, so that it does not matter how many cores there are.
Gossip and all-reduce, each undisturbed and disturbed, as processes; steps per
second of each node, between its first and its last step. Gossip's fast nodes
are to stay within 10% of undisturbed; all-reduce falls to the slowest.
"""

import io
import pathlib

import numpy as np

from jasgd import experiment
from jasgd import reports
from jasgd import traces

_NUM_NODES = 4
_SECONDS = 0.05  # Of a step.
_SLOW_SECONDS = 0.15  # Of the last two nodes, if they are slow.
_TOLERANCE = 0.1


def make_config(
  strategy: str, is_disturbed: bool, num_steps: int
) -> experiment.NodeTrainingConfig:
  """A run of small models."""
  task = experiment.TaskConfig(name='logistic', batch=4)
  samples = num_steps * _NUM_NODES * task.batch
  slow = _SLOW_SECONDS if is_disturbed else _SECONDS
  return experiment.NodeTrainingConfig(
    task=task,
    optimizer=experiment.OptimizerConfig(rate=0.05, momentum=0.9),
    strategy=experiment.StrategyConfig(name=strategy, num_nodes=_NUM_NODES),
    runtime=experiment.RuntimeConfig(mode='local'),
    processes=experiment.ProcessConfig(
      min_seconds=(_SECONDS, _SECONDS, slow, slow)
    ),
    num_epochs=samples / task.make(1, 0).num_samples,
  )


def run_all(folder: pathlib.Path, num_steps: int) -> dict[str, np.ndarray]:
  """Runs all four, and gives the rates of their nodes by name."""
  rates = {}
  for strategy in ('pull', 'allreduce'):
    for is_disturbed in (False, True):
      name = f'{strategy}{"-disturbed" if is_disturbed else ""}'
      config = make_config(strategy, is_disturbed, num_steps)
      experiment.run_nodes(config, folder / name, stream=io.StringIO())
      trace = traces.NodeTrace.load(folder / name / 'trace')
      rates[name] = reports.measure_step_rates(trace)
  return rates


def run(quick: bool, workdir: str) -> None:
  """Prints a table, and leaves a report of all four runs."""
  print(__doc__)
  folder = pathlib.Path(workdir)
  rates = run_all(folder, 40 if quick else 200)
  print(f'{"run":22} {"steps per second of each node":>30}')
  for name, found in rates.items():
    print(f'{name:22} ' + ' '.join(f'{rate:7.2f}' for rate in found))
  for strategy in ('pull', 'allreduce'):
    before, after = rates[strategy], rates[f'{strategy}-disturbed']
    ratio = (after / before)[:2].min()
    verdict = 'within 10%' if ratio > 1 - _TOLERANCE else 'slowed'
    print(f'{strategy}: fast nodes at {ratio:.2f} of undisturbed, {verdict}.')
  names = [folder / name for name in rates]
  print(f'Wrote {reports.write_report(names, folder / "report.html")}')
