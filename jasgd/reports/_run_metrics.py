"""The metrics of a run, as far as they are there."""

import json
import math
import os
import pathlib

import numpy as np

from jasgd import workdir


def read_columns(
  paths: workdir.Workdir, problems: list[str]
) -> dict[str, np.ndarray]:
  """The metrics; without any, no rows of them. Adds what is wrong."""
  nothing = {'clock': np.zeros(0, np.int64)}
  if not paths.metrics.exists():
    problems.append('There are no metrics yet.')
    return nothing
  try:
    metrics = workdir.read_metrics(paths)
  except workdir.WorkdirError as error:
    problem = str(error).replace(f'{paths.root}{os.sep}', '')
    problems.append(f'The metrics cannot be read: {problem}')
    return nothing
  if not len(metrics['clock']):
    problems.append('There are no metrics yet.')
  return metrics


def scan_lines(
  path: pathlib.Path, metrics: dict[str, np.ndarray]
) -> tuple[dict[str, int], int | None]:
  """Finds what the columns do not tell: what is NaN, and what is missing.

  Args:
    path: The file of the metrics.
    metrics: Its columns; a row is that of all lines of a clock.

  Returns:
    The last row of each metric, and the clock of the first bad loss, if any.
  """
  rows = {clock: row for row, clock in enumerate(metrics['clock'].tolist())}
  last_rows: dict[str, int] = {}
  bad_clocks = []
  lines = path.read_bytes().split(b'\n')[:-1] if rows else []
  for line in lines:
    values = json.loads(line)
    clock = values['clock']
    # The run may have written more since the columns were read.
    if clock not in rows or not values.keys() <= metrics.keys():
      continue
    for name, value in values.items():
      last_rows[name] = max(rows[clock], last_rows.get(name, 0))
      if name.endswith('/loss') and not math.isfinite(float(value)):
        bad_clocks.append(clock)
  return last_rows, min(bad_clocks, default=None)
