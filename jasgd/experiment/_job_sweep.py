"""A sweep by several processes of this machine, that ends with all its rows."""

from collections.abc import Callable
import multiprocessing
import os
import pathlib
from typing import Any

from jasgd.experiment import _grid
from jasgd.experiment import _sweep


def sweep_in_jobs(
  config: _sweep.Config,
  grid: str,
  folder: pathlib.Path,
  num_jobs: int,
  on_row: Callable[[_sweep.Row], None] | None = None,
) -> list[_sweep.Row]:
  """Trains all cells of a grid.

  Args:
    config: As in `sweep`.
    grid: As in `sweep`.
    folder: Where the results go.
    num_jobs: Processes that share the work; with 1, it is done in this one.
    on_row: As in `sweep`; if there are several processes it is called in any of
      them, and must be a function of a module.

  Returns:
    The rows of all cells, in the order of the grid.

  Raises:
    ValueError: as `sweep` does; or if rows are missing in the end, because some
      other process has them, or one of these ended early.
  """
  cells = _grid.list_cells(config, _grid.parse_grid(grid))
  num_left = len(cells) - len(_sweep.read_rows(folder, cells))
  if num_jobs == 1 or num_left <= 1:
    _sweep.sweep(config, grid, folder, on_row=on_row)
  else:
    _run_processes(
      min(num_jobs, num_left), (config, grid, folder), {'on_row': on_row}
    )
  rows = _sweep.read_rows(folder, cells)
  if len(rows) < len(cells):
    raise ValueError(
      f'{len(cells) - len(rows)} of {len(cells)} runs in {str(folder)!r} are '
      'with other processes, or ended early: start again when they are done.'
    )
  return rows


def _run_processes(
  num_jobs: int, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
  """Sweeps in several processes, until all of them have ended."""
  # Not forked: jax has threads. Each has its share of the cores.
  context = multiprocessing.get_context('spawn')
  jobs = [
    context.Process(target=_sweep.sweep, args=arguments, kwargs=options)
    for _ in range(num_jobs)
  ]
  kept = os.environ.get('NPROC')
  os.environ['NPROC'] = str(max(1, (os.cpu_count() or 1) // num_jobs))
  try:
    for job in jobs:
      job.start()
  finally:
    if kept is None:
      del os.environ['NPROC']
    else:
      os.environ['NPROC'] = kept
  try:
    for job in jobs:
      job.join()
  finally:  # On Ctrl-C nobody stays behind.
    for job in jobs:
      job.terminate()
      job.join()
