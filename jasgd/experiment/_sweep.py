"""Sweeps: one run per cell of a grid, resumable, by any number of processes."""

from collections.abc import Callable, Iterator
import csv
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from typing import Any

from jasgd import workdir as workdirs
from jasgd.experiment import _chunks
from jasgd.experiment import _grid
from jasgd.experiment import _node_train
from jasgd.experiment import _node_training
from jasgd.experiment import _train
from jasgd.experiment import _training

Row = dict[str, Any]
Config = _training.TrainingConfig | _node_training.NodeTrainingConfig


def sweep(
  config: Config,
  grid: str,
  workdir: str | os.PathLike[str],
  *,
  on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
  """Trains every cell of a grid that is not done yet.

  Each cell's result is a file of its own, written whole or not at all. A cell
  that is being worked on is locked, and the lock goes with the process that
  holds it, however that ends. So a sweep may be killed and started again, and
  several processes may work on one folder: each takes what nobody else has.

  Cells that share the task, the batch and the optimizer share a compilation:
  rates, delays, seeds and traces are arguments of the compiled program. (Who
  owns which shard depends on the seed, and `gap_aware` on the rate: there each
  has a program of its own.)

  A cell that cannot be trained to its end, as when all learners are gone, has
  the reason in its row as `error`; the others go on.

  Args:
    config: What the cells have in common.
    grid: As in `parse_grid`.
    workdir: Where the results go.
    on_row: Called with each row as it is done.

  Returns:
    The rows of all cells that are done, by whomever, in the order of the grid:
    the fields of the cell, and the results.

  Raises:
    ValueError: before any work, if the grid or a cell's config makes no sense,
      or the folder is of another sweep.
  """
  cells = _grid.list_cells(config, _grid.parse_grid(grid))
  configs = [_grid.apply_cell(config, cell) for cell in cells]
  _validate(cells, configs)
  root = workdirs.open_workdir(
    workdir, {'config': dataclasses.asdict(config), 'grid': grid}
  ).root
  (root / 'cells').mkdir(exist_ok=True)
  jobs = sorted(
    zip(cells, configs, strict=True), key=lambda job: _group_key(job[1])
  )
  for _, group in itertools.groupby(jobs, lambda job: _group_key(job[1])):
    for cell, row in _train_group(root, list(group)):
      if on_row is not None:
        on_row({**cell, **row})
  return read_rows(root, cells)


def read_rows(root: pathlib.Path, cells: list[_grid.Cell]) -> list[Row]:
  """The rows of the cells that are done."""
  rows = []
  for cell in cells:
    path = _get_path(root, cell)
    if path.exists():
      rows.append({**cell, **workdirs.read_json(path)})
  return rows


def write_csv(path: str | os.PathLike[str], rows: list[Row]) -> None:
  """Writes rows as a table, whole or not at all."""
  columns = list(dict.fromkeys(name for row in rows for name in row))
  part = pathlib.Path(f'{os.fspath(path)}.{os.getpid()}.part')
  with open(part, 'w', newline='') as file:
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(rows)
  part.replace(path)


def _train_group(
  root: pathlib.Path,
  jobs: list[tuple[_grid.Cell, Config]],
) -> Iterator[tuple[_grid.Cell, Row]]:
  """Trains cells that share a compilation."""
  num_slots: int | None = None
  for cell, config in jobs:
    path = _get_path(root, cell)
    if path.exists():
      continue
    lock = path.with_suffix('.lock')
    with workdirs.lock_file(lock, patience=0.0) as is_mine:
      if not is_mine or path.exists():
        continue
      if num_slots is None:
        num_slots = max(_count_slots(config) for _, config in jobs)
      row = _train_cell(config, num_slots)
      workdirs.write_json(path, row)
    yield cell, row


def _count_slots(config: Config) -> int:
  """How many versions of the weights a cell with a server needs at a time."""
  if isinstance(config, _node_training.NodeTrainingConfig):
    return 0  # Of nodes, the trace says it.
  try:
    return config.make_plan(config.simulate()).num_slots
  except ValueError:  # Its row will say why.
    return 1


def _train_cell(config: Config, num_slots: int) -> Row:
  """The result of one cell, or why there is none."""
  init = _train.load_init(config)
  try:
    run = _make_run(config, init, num_slots)
  except ValueError as error:
    return {'clock': 0, 'is_diverged': False, 'error': str(error)}
  metrics: dict[str, Any] = {}
  replay = run.replay
  while not replay.is_done:
    metrics = run.measure(replay.advance())
  return {'clock': replay.clock, **metrics, 'is_diverged': replay.is_diverged}


def _make_run(
  config: Config, init: tuple[Any, Any] | None, num_slots: int
) -> _chunks.Run:
  """The run of a cell, at its start."""
  if isinstance(config, _node_training.NodeTrainingConfig):
    return _node_train.NodeRun(config, config.simulate(), init=init)
  return _train.ServerRun(
    _train.make_replay(
      config, config.simulate(), init=init, num_slots=num_slots
    )
  )


def _validate(cells: list[_grid.Cell], configs: list[Config]) -> None:
  """Raises one ValueError that names the problems of all cells."""
  problems = []
  for cell, config in zip(cells, configs, strict=True):
    try:
      config.validate()
    except ValueError as error:
      problems.append(f'{cell}: {error}')
    if config.runtime.mode != 'simulate':
      problems.append(
        f"{cell}: A sweep is made in virtual time, with runtime.mode='simulate'"
        f', got {config.runtime.mode!r}.'
      )
  if problems:
    shown = '\n'.join(problems[:10])
    raise ValueError(f'{len(problems)} cells cannot be:\n{shown}')


def _group_key(config: Config) -> str:
  """Equal for configs that share a compilation."""
  settings = dataclasses.asdict(config)
  settings['optimizer'].pop('rate')
  if 'protocol' in settings:
    settings['protocol'].pop('delay')
  settings.pop('seed')
  return json.dumps(settings, sort_keys=True)


def _get_path(root: pathlib.Path, cell: _grid.Cell) -> pathlib.Path:
  """Where a cell's result goes."""
  text = json.dumps(cell, sort_keys=True)
  return (
    root / 'cells' / f'{hashlib.sha256(text.encode()).hexdigest()[:16]}.json'
  )
