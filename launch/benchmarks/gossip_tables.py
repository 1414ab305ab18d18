"""What the suite `gossip` prints: rows of ratios, and whether its goal is met.

A ratio is the median of the ratios of rounds: what runs in the same round meets
the same machine.
"""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from launch.benchmarks import gossip_nodes
from launch.benchmarks import gossip_worker

GOAL = 1.25

MIX_HEADER = (
  f'{"where":12} {"runner":10} {"MB":>6} {"rule":12} {"ms":>9} '
  f'{"x all-reduce":>12} {"x copy":>8} {"pmap / shard_map":>17}'
)
NODES_HEADER = (
  f'{"task":8} {"nodes":>5} {"strategy":11} {"us / step":>10} '
  f'{"x bare loop":>12} {"x bare steps":>13} {"x one node":>11}'
)

Seconds = Sequence[float]  # Of rounds.


def get_ratio(seconds: Seconds, base: Seconds) -> float:
  """How many times as long something takes, in the median of the rounds."""
  return statistics.median(
    mine / other for mine, other in zip(seconds, base, strict=True)
  )


def format_mixes(where: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """Lines for all rules and runners of one size.

  Args:
    where: How many devices, and where.
    rows: What a `gossip_worker` answered.

  Returns:
    A line for each row; the copy is the last one.
  """
  found = {(row['runner'], row['rule']): row['seconds'] for row in rows}
  copy = found['', gossip_worker.COPY]
  (size,) = {row['size'] for row in rows}
  lines = []
  for (runner, rule), seconds in found.items():
    is_copy = rule == gossip_worker.COPY
    other = found.get(('shard_map', rule)) if runner == 'pmap' else None
    base = found.get((runner, gossip_worker.ALL_REDUCE))
    lines.append(
      format_mix(
        where,
        runner,
        size,
        rule,
        seconds,
        None if base is None else get_ratio(seconds, base),
        None if is_copy else get_ratio(seconds, copy),
        None if other is None else get_ratio(seconds, other),
      )
    )
  return lines[1:] + lines[:1]


def format_mix(
  where: str,
  runner: str,
  size: int,
  rule: str,
  seconds: Seconds,
  *ratios: float | None,
) -> str:
  """A line of the table of mixes.

  Args:
    where: How many devices, and where.
    runner: That ran it.
    size: Bytes of a node.
    rule: What was done.
    seconds: Of the rounds.
    *ratios: To an all-reduce, a copy, and of pmap to shard_map; None: there is
      none.

  Returns:
    The line.
  """
  cells = ['-' if ratio is None else f'{ratio:.2f}' for ratio in ratios]
  return (
    f'{where:12} {runner or "-":10} {size / 2**20:6.4g} {rule:12} '
    f'{1e3 * statistics.median(seconds):9.3f} '
    f'{cells[0]:>12} {cells[1]:>8} {cells[2]:>17}'
  )


def compare_nodes(
  measured: Mapping[str, Seconds],
) -> dict[str, dict[str, float]]:
  """The ratios of all programs to each of the plain ones.

  Args:
    measured: Program -> seconds of its rounds.

  Returns:
    Program -> plain program -> ratio.
  """
  return {
    program: {
      plain: get_ratio(seconds, measured[plain]) for plain in gossip_nodes.PLAIN
    }
    for program, seconds in measured.items()
  }


def format_nodes(
  task: str, num_nodes: int, num_steps: int, measured: Mapping[str, Seconds]
) -> list[str]:
  """Lines for all programs of a task and number of nodes.

  Args:
    task: What is learned.
    num_nodes: Of the strategies; plain programs have one.
    num_steps: Of all nodes together.
    measured: Program -> seconds of its rounds.

  Returns:
    A line for each program.
  """
  lines = []
  for program, ratios in compare_nodes(measured).items():
    per_step = 1e6 * statistics.median(measured[program]) / num_steps
    lines.append(
      f'{task:8} {num_nodes:5} {program:11} {per_step:10.1f} '
      f'{ratios[gossip_nodes.BARE_LOOP]:12.2f} '
      f'{ratios[gossip_nodes.BARE_STEPS]:13.2f} '
      f'{ratios[gossip_nodes.ONE_NODE]:11.2f}'
    )
  return lines


def judge(
  results: Mapping[tuple[str, int], Mapping[str, Seconds]],
) -> list[str]:
  """Says for every task and strategy whether the goal is met.

  The worst number of nodes counts, against that bare program which was faster.

  Args:
    results: (task, number of nodes) -> program -> seconds of its rounds.

  Returns:
    Lines.
  """
  lines = []
  for task in dict.fromkeys(task for task, _ in results):
    for strategy in gossip_nodes.STRATEGIES:
      ratios = {}
      for (other, num_nodes), measured in results.items():
        if other == task:
          found = compare_nodes(measured)[strategy]
          ratios[num_nodes] = max(
            found[gossip_nodes.BARE_LOOP], found[gossip_nodes.BARE_STEPS]
          )
      worst = max(ratios, key=lambda num_nodes: ratios[num_nodes])
      # As precise as it is printed: the third digit is noise.
      value = round(ratios[worst], 2)
      word = 'met' if value <= GOAL else 'missed'
      lines.append(
        f'{task:8} {strategy:11} Goal: at most {GOAL} x: {word}, '
        f'{value:.2f} with {worst} nodes'
      )
  return lines
