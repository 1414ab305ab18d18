"""Half of the nodes are three times slower: are the others slowed, too?

Nodes compute by sleeping, so that the number of cores does not matter. Gossip
and all-reduce run as processes, each undisturbed and disturbed. The table has
the steps per second of each node, between its first and its last step. Goals:
with gossip, fast nodes stay within 10% of undisturbed ones; with all-reduce,
all nodes fall to the speed of the slowest.
"""

from collections.abc import Mapping
import html
import io
import pathlib
import sys

import numpy as np

from jasgd import experiment
from jasgd import reports
from jasgd import traces
from launch.benchmarks import measuring

STRATEGIES = ('pull', 'allreduce')
_SECONDS = 0.05  # Duration of a step.
_SLOW_SECONDS = 0.15  # Duration of a slow node's step.
_TOLERANCE = 0.1


def run_nodes(
  folder: pathlib.Path,
  strategy: str,
  num_nodes: int,
  num_steps: int,
  slow_seconds: float,
) -> np.ndarray:
  """Trains small models; the second half of the nodes may be slow.

  Args:
    folder: The workdir of the run.
    strategy: One of `STRATEGIES`.
    num_nodes: Number of processes.
    num_steps: Steps of each node.
    slow_seconds: Seconds of a step of the second half.

  Returns:
    Steps per second of each node.
  """
  task = experiment.TaskConfig(name='logistic', batch=4)
  samples = num_steps * num_nodes * task.batch
  config = experiment.TrainingConfig(
    task=task,
    optimizer=experiment.OptimizerConfig(rate=0.05, momentum=0.9),
    strategy=experiment.StrategyConfig(name=strategy),
    num_workers=num_nodes,
    runtime=experiment.RuntimeConfig(mode='local'),
    processes=experiment.ProcessConfig(
      # The last number holds for all nodes that follow.
      min_seconds=(_SECONDS,) * (num_nodes // 2) + (slow_seconds,)
    ),
    num_epochs=samples / task.make(1, 0).num_samples,
  )
  experiment.train_and_evaluate(config, folder, stream=io.StringIO())
  return reports.measure_step_rates(traces.Trace.load(folder / 'trace'))


def judge(rates: Mapping[str, np.ndarray]) -> tuple[list[str], bool]:
  """Compares disturbed runs with undisturbed ones.

  Args:
    rates: Name of a run -> steps per second of its nodes.

  Returns:
    Lines of text (for both strategies, the share of their steps per second that
    the fast nodes keep; for each goal, whether it is met), and whether both
    goals are met.
  """
  num_fast = len(rates['pull']) // 2
  shares = {
    strategy: (rates[f'{strategy}-disturbed'] / rates[strategy])[:num_fast]
    for strategy in STRATEGIES
  }
  kept = shares['pull'].min()
  # With gossip, the slow nodes do not wait for others.
  slowest = rates['pull-disturbed'][num_fast:].min()
  fastest = rates['allreduce-disturbed'].max()
  has_stayed = bool(kept >= 1 - _TOLERANCE)
  has_fallen = bool(
    shares['allreduce'].max() < 1 - _TOLERANCE
    and fastest <= (1 + _TOLERANCE) * slowest
  )
  lines = [
    f'{strategy}: the fast nodes make {share.min():.2f} to {share.max():.2f} '
    'of their undisturbed steps per second.'
    for strategy, share in shares.items()
  ]
  lines += [
    f'Goal: fast gossip nodes within {_TOLERANCE:.0%} of undisturbed: '
    f'{measuring.say_met(has_stayed)}, {kept:.2f}.',
    'Goal: all-reduce falls to the slowest: '
    f'{measuring.say_met(has_fallen)}, its fastest node makes '
    f'{fastest:.2f} steps per second, the slowest that gossips {slowest:.2f}.',
  ]
  return lines, has_stayed and has_fallen


def run(quick: bool, workdir: str) -> None:
  """Prints a table and verdicts, and writes a report of all four runs.

  Raises:
    SystemExit: if a goal is missed.
  """
  print(__doc__)
  folder = pathlib.Path(workdir)
  num_nodes, num_steps = (2, 20) if quick else (4, 200)
  rates = {}
  print(f'{"run":22} {"steps per second of each node":>30}')
  for strategy in STRATEGIES:
    for suffix, slow in (('', _SECONDS), ('-disturbed', _SLOW_SECONDS)):
      name = f'{strategy}{suffix}'
      rates[name] = run_nodes(
        folder / name, strategy, num_nodes, num_steps, slow
      )
      cells = ' '.join(f'{rate:7.2f}' for rate in rates[name])
      print(f'{name:22} {cells}', flush=True)
  lines, is_met = judge(rates)
  print('\n'.join(lines))
  page = reports.write_report(
    [folder / name for name in rates],
    folder / 'report.html',
    title='Half of the nodes are three times slower',
  )
  # The verdicts go below the heading of the page.
  found = ''.join(f'<p>{html.escape(line)}</p>\n' for line in lines)
  text = page.read_text(encoding='utf-8')
  page.write_text(text.replace('</h1>', f'</h1>\n{found}', 1), encoding='utf-8')
  print(f'Wrote {page}')
  if not is_met:
    sys.exit(1)
