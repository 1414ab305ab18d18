"""Two of four nodes are three times slower: who else is slowed?

Nodes compute by sleeping, so that it does not matter how many cores there are.
Gossip and all-reduce, each undisturbed and disturbed, as processes; steps per
second of each node, between its first and its last step. Gossip's fast nodes
are to stay within 10% of undisturbed; all-reduce falls to the slowest.
"""

from collections.abc import Iterable, Mapping
import html
import io
import pathlib
import sys

import numpy as np

from jasgd import experiment
from jasgd import reports
from jasgd import traces

STRATEGIES = ('pull', 'allreduce')
_NUM_NODES = 4
_NUM_FAST = 2  # The first ones; the others may be slow.
_SECONDS = 0.05  # Of a step.
_SLOW_SECONDS = 0.15  # Of a slow node's.
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
      min_seconds=(_SECONDS,) * _NUM_FAST + (slow,)  # Of all that follow.
    ),
    num_epochs=samples / task.make(1, 0).num_samples,
  )


def run_all(folder: pathlib.Path, num_steps: int) -> dict[str, np.ndarray]:
  """Runs all four, and gives the rates of their nodes by name."""
  rates = {}
  for strategy in STRATEGIES:
    for is_disturbed in (False, True):
      name = f'{strategy}{"-disturbed" if is_disturbed else ""}'
      print(f'... {name}', file=sys.stderr, flush=True)
      config = make_config(strategy, is_disturbed, num_steps)
      experiment.run_nodes(config, folder / name, stream=io.StringIO())
      trace = traces.NodeTrace.load(folder / name / 'trace')
      rates[name] = reports.measure_step_rates(trace)
  return rates


def judge(rates: Mapping[str, np.ndarray]) -> list[str]:
  """Says what became of the fast nodes, and whether that was to be.

  Args:
    rates: What `run_all` gave.

  Returns:
    Lines: for both strategies the share of their steps per second that the fast
    nodes keep, and for each goal whether it is met.
  """
  shares = {
    strategy: (rates[f'{strategy}-disturbed'] / rates[strategy])[:_NUM_FAST]
    for strategy in STRATEGIES
  }
  lines = [
    f'{strategy}: the fast nodes make {share.min():.2f} to {share.max():.2f} '
    'of their undisturbed steps per second.'
    for strategy, share in shares.items()
  ]
  kept = shares['pull'].min()
  # What a slow node makes that waits for nobody.
  slowest = rates['pull-disturbed'][_NUM_FAST:].min()
  fastest = rates['allreduce-disturbed'].max()
  has_fallen = shares['allreduce'].max() < 1 - _TOLERANCE and fastest <= (
    (1 + _TOLERANCE) * slowest
  )
  return [
    *lines,
    f'Goal: fast gossip nodes within {_TOLERANCE:.0%} of undisturbed: '
    f'{_say(kept >= 1 - _TOLERANCE)}, {kept:.2f}.',
    'Goal: all-reduce falls to the slowest: '
    f'{_say(has_fallen)}, its fastest node makes '
    f'{fastest:.2f} steps per second, the slowest that gossips {slowest:.2f}.',
  ]


def write_page(
  folder: pathlib.Path, names: Iterable[str], lines: Iterable[str]
) -> pathlib.Path:
  """Writes a report of all runs, with what was found on top.

  Args:
    folder: Where the runs are.
    names: Of the runs.
    lines: What to say.

  Returns:
    The path of the page.
  """
  page = reports.write_report(
    [folder / name for name in names],
    folder / 'report.html',
    title='Two of four nodes are three times slower',
  )
  heading, end, rest = page.read_text(encoding='utf-8').partition('</h1>')
  assert end, 'Every page has a heading.'
  found = '\n'.join(f'<p>{html.escape(line)}</p>' for line in lines)
  page.write_text(f'{heading}{end}\n{found}{rest}', encoding='utf-8')
  return page


def run(quick: bool, workdir: str) -> None:
  """Prints a table and verdicts, and leaves a report of all four runs.

  Raises:
    SystemExit: if it is not as it is to be.
  """
  print(__doc__)
  folder = pathlib.Path(workdir)
  rates = run_all(folder, 40 if quick else 200)
  print(f'{"run":22} {"steps per second of each node":>30}')
  for name, found in rates.items():
    print(f'{name:22} ' + ' '.join(f'{rate:7.2f}' for rate in found))
  lines = judge(rates)
  print('\n'.join(lines))
  print(f'Wrote {write_page(folder, rates, lines)}')
  if any(': missed, ' in line for line in lines):
    sys.exit(1)


def _say(is_met: bool | np.bool_) -> str:
  return 'met' if is_met else 'missed'
