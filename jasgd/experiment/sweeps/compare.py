"""Peer strategies, compared with a single worker at equal epochs."""

from collections.abc import Callable, Sequence
import copy
import dataclasses
import math
import os
import pathlib
from typing import Any

from jasgd import gossip
from jasgd.experiment.configs import training
from jasgd.experiment.sweeps import sweep as sweeps

STRATEGIES = tuple(gossip.STRATEGIES)
_ACCURACY = 'test/accuracy'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
  """Results of one strategy.

  Attributes:
    name: Name of the strategy, or 'single'.
    num_workers: Number of workers.
    rate: Best rate on the validation split.
    multiple: The rate as a multiple of the config's.
    validation: Accuracy on the validation split at that rate.
    accuracies: Accuracy on the test set for each seed.
    difference: Mean of the accuracies, minus that of the single worker.
    edge: 'lowest' or 'highest', if the rate is the lowest or highest of all
      that were tried: there may be a better one beyond. Otherwise ''.
  """

  name: str
  num_workers: int
  rate: float
  multiple: float
  validation: float
  accuracies: tuple[float, ...]
  difference: float
  edge: str = ''

  @property
  def accuracy(self) -> float:
    """The mean over the seeds."""
    return sum(self.accuracies) / len(self.accuracies)


def compare(
  config: training.TrainingConfig,
  workdir: str | os.PathLike[str],
  *,
  strategies: Sequence[str] = STRATEGIES,
  rates: Sequence[float] = (0.3, 0.1, 0.03, 0.01),
  num_seeds: int = 3,
  validation: float = 0.1,
  num_jobs: int = 1,
  on_row: Callable[[sweeps.Row], None] | None = None,
) -> list[Compared]:
  """Trains a single worker, and nodes with each strategy, for equal epochs.

  The rate of each is chosen first, among multiples of the config's: the one
  with the best accuracy on a part of the training set, which is not trained on
  then. At that rate each trains on the whole training set, with several seeds.

  Both are sweeps, in the folders `rates` and `seeds`: killed and started again,
  a comparison skips finished runs.

  Args:
    config: Config of the nodes. Strategies differ in `strategy.name` only, and
      the single worker in `num_workers`.
    workdir: Folder of the results.
    strategies: Names of the strategies.
    rates: Rates to choose from, as multiples of `optimizer.rate`.
    num_seeds: Number of seeds, counted from the config's own.
    validation: Share of the training set that rates are chosen on.
    num_jobs: Number of processes; 1: this one.
    on_row: Called with the row of each finished run. Several processes call it
      each for its own runs: it must be a function of a module.

  Returns:
    The single worker, then the strategies.

  Raises:
    ValueError: if an argument makes no sense, or every rate diverged.
  """
  _check(strategies, rates, num_seeds, validation, num_jobs)
  nodes = {'single': ('allreduce', 1)} | {
    name: (name, config.num_workers) for name in strategies
  }
  first = copy.deepcopy(config)
  first.task.validation = validation
  names = 'strategy.name,num_workers'
  cells = [f'{name}:{count}' for name, count in nodes.values()]
  # Rounded, because 0.3 * 0.1 is not exactly 0.03.
  tried = [float(f'{each * config.optimizer.rate:.12g}') for each in rates]
  rows = sweeps.sweep_in_jobs(
    first,
    f'{names}={",".join(cells)};optimizer.rate={_join(tried)}',
    pathlib.Path(workdir) / 'rates',
    num_jobs,
    on_row,
  )
  best = [
    max(rows[start : start + len(rates)], key=_get_accuracy)
    for start in range(0, len(rows), len(rates))
  ]
  for name, row in zip(nodes, best, strict=True):
    if _get_accuracy(row) == -math.inf:
      raise ValueError(
        f'{name} could not be trained at any of the rates {_join(tried)}'
        f'{": " + row["error"] if "error" in row else ": all diverged."}'
      )
  chosen = [row['optimizer.rate'] for row in best]
  cells = [f'{cell}:{rate!r}' for cell, rate in zip(cells, chosen, strict=True)]
  seeds = range(config.seed, config.seed + num_seeds)
  rows = sweeps.sweep_in_jobs(
    config,
    f'{names},optimizer.rate={",".join(cells)};seed={_join(seeds)}',
    pathlib.Path(workdir) / 'seeds',
    num_jobs,
    on_row,
  )
  return _summarize(nodes, best, rows, dict(zip(tried, rates, strict=True)))


def format_comparison(compared: Sequence[Compared], bound: float) -> str:
  """A comparison as a table.

  Args:
    compared: Result of `compare`.
    bound: Largest loss of accuracy, against the single worker, that is allowed.

  Returns:
    Lines of text, with a warning for each rate at an edge of those tried.

  Examples:
    >>> from jasgd import experiment
    >>> rows = [
    ...   experiment.Compared(
    ...     name='single', num_workers=1, rate=0.005, multiple=0.01,
    ...     validation=0.961, accuracies=(0.96, 0.98), difference=0.0,
    ...     edge='lowest'),
    ...   experiment.Compared(
    ...     name='pull', num_workers=8, rate=0.05, multiple=0.1,
    ...     validation=0.957, accuracies=(0.95, 0.97), difference=-0.01),
    ... ]
    >>> print(experiment.format_comparison(rows, bound=0.005))
    strategy  nodes   rate  x base   valid.    test  of seeds       difference
    single        1  0.005    0.01   96.10%  97.00%  96.00 to 98.00
    pull          8   0.05     0.1   95.70%  96.00%  95.00 to 97.00 -1.00% below
    Warning: 0.005, the best rate of single, is the lowest that was tried.
  """
  lines = [
    'strategy  nodes   rate  x base   valid.    test  of seeds       difference'
  ]
  for row in compared:
    lowest, highest = (100 * end(row.accuracies) for end in (min, max))
    line = (
      f'{row.name:<9} {row.num_workers:>5}  {row.rate:>5.3g}  '
      f'{row.multiple:>6.3g}  {row.validation:>7.2%}  {row.accuracy:>6.2%}  '
      f'{lowest:.2f} to {highest:.2f}'
    )
    if row.name != 'single':
      is_within = row.difference >= -bound
      line += f' {row.difference:+.2%} {"within" if is_within else "below"}'
    lines.append(line)
  lines += [
    f'Warning: {row.rate:.3g}, the best rate of {row.name}, is the {row.edge} '
    'that was tried.'
    for row in compared
    if row.edge
  ]
  return '\n'.join(lines)


def _summarize(
  nodes: dict[str, tuple[str, int]],
  best: list[sweeps.Row],
  rows: list[sweeps.Row],
  multiples: dict[float, float],
) -> list[Compared]:
  """The results of each strategy; the first is the single worker."""
  num_seeds = len(rows) // len(nodes)
  compared: list[Compared] = []
  for index, (name, (_, num_workers)) in enumerate(nodes.items()):
    part = rows[index * num_seeds : (index + 1) * num_seeds]
    # A run that diverged counts as an accuracy of 0.
    accuracies = tuple(max(_get_accuracy(row), 0.0) for row in part)
    single = compared[0].accuracy if compared else sum(accuracies) / num_seeds
    rate = best[index]['optimizer.rate']
    compared.append(
      Compared(
        name=name,
        num_workers=num_workers,
        rate=rate,
        multiple=multiples[rate],
        edge=_find_edge(rate, list(multiples)),
        validation=_get_accuracy(best[index]),
        accuracies=accuracies,
        difference=sum(accuracies) / num_seeds - single,
      )
    )
  return compared


def _find_edge(rate: float, rates: list[float]) -> str:
  """'lowest', 'highest' or ''; '' for two rates, which are both at an edge."""
  if len(rates) < 3 or min(rates) < rate < max(rates):
    return ''
  return 'lowest' if rate == min(rates) else 'highest'


def _get_accuracy(row: sweeps.Row) -> float:
  """The accuracy of a run; minus infinity if it has none."""
  if row['is_diverged'] or _ACCURACY not in row:
    return -math.inf
  return row[_ACCURACY]


def _join(values: Any) -> str:
  return ','.join(map(repr, values))


def _check(
  strategies: Sequence[str],
  rates: Sequence[float],
  num_seeds: int,
  validation: float,
  num_jobs: int,
) -> None:
  """Raises a ValueError for arguments that make no sense."""
  rules = {
    f'strategies must be some of {", ".join(STRATEGIES)}, each once, got '
    f'{list(strategies)}.': (
      0 < len(strategies) == len({*strategies} & {*STRATEGIES})
    ),
    f'rates must be different numbers above 0, got {list(rates)}.': (
      0 < len(rates) == len({*rates}) and all(rate > 0 for rate in rates)
    ),
    f'num_seeds must be at least 1, got {num_seeds}.': num_seeds >= 1,
    f'num_jobs must be at least 1, got {num_jobs}.': num_jobs >= 1,
    f'validation must be above 0 and below 1, got {validation}.': (
      0 < validation < 1
    ),
  }
  problems = [rule for rule, holds in rules.items() if not holds]
  if problems:
    raise ValueError(' '.join(problems))
