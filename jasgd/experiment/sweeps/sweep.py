"""Sweeps: one run per cell of a grid, resumable, by any number of processes."""

import ast
from collections.abc import Callable, Iterator
import copy
import csv
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
from typing import Any

from jasgd import workdir as workdirs
from jasgd.experiment.configs import training
from jasgd.experiment.running import virtual

Row = dict[str, Any]
# A cell: from full paths of fields, such as 'optimizer.rate', to values.
Cell = dict[str, Any]


def sweep(
  config: training.TrainingConfig,
  grid: str,
  workdir: str | os.PathLike[str],
  *,
  on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
  """Trains every cell of a grid that is not done yet.

  Each cell's result is a file of its own, written whole or not at all. The cell
  in work is locked by its process, and the lock ends with the process. So a
  sweep may be killed and started again, and several processes may share one
  folder: each takes cells that no other process has.

  Cells that share the task, the batch and the optimizer share a compilation:
  rates, delays, seeds and traces are arguments of the compiled program. (Shards
  depend on the seed, and `gap_aware` on the rate: there each cell has a program
  of its own.)

  A cell that cannot be trained to its end, as when all workers are gone, has
  the reason in its row as `error`; the other cells go on.

  Args:
    config: Config that the cells change.
    grid: The grid, as in `parse_grid`.
    workdir: Folder of the results.
    on_row: Called with each row when its cell is done.

  Returns:
    The rows of all finished cells in the order of the grid: the fields of the
    cell, and its results.

  Raises:
    ValueError: before any work, if the grid or a cell's config makes no sense,
      or the folder is of another sweep.
  """
  cells = list_cells(config, parse_grid(grid))
  configs = [apply_cell(config, cell) for cell in cells]
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


def sweep_in_jobs(
  config: training.TrainingConfig,
  grid: str,
  folder: pathlib.Path,
  num_jobs: int,
  on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
  """Trains all cells of a grid, in several processes of this machine.

  Args:
    config: As in `sweep`.
    grid: As in `sweep`.
    folder: Folder of the results.
    num_jobs: Number of processes; 1: this one.
    on_row: As in `sweep`. Several processes call it each for its own cells: it
      must be a function of a module.

  Returns:
    The rows of all cells, in the order of the grid.

  Raises:
    ValueError: as `sweep` does; or if rows are missing at the end, because
      another sweep has their cells, or a process ended early.
  """
  cells = list_cells(config, parse_grid(grid))
  num_left = len(cells) - len(read_rows(folder, cells))
  if num_jobs == 1 or num_left <= 1:
    sweep(config, grid, folder, on_row=on_row)
  else:
    _run_processes(
      min(num_jobs, num_left), (config, grid, folder), {'on_row': on_row}
    )
  rows = read_rows(folder, cells)
  if len(rows) < len(cells):
    raise ValueError(
      f'{len(cells) - len(rows)} of {len(cells)} runs in {str(folder)!r} are '
      'not done: other processes make them, or ended early. Start again later.'
    )
  return rows


def _run_processes(
  num_jobs: int, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
  """Sweeps in several processes, until all of them have ended."""
  # Spawned, since jax has threads. Each process gets its share of the cores.
  context = multiprocessing.get_context('spawn')
  jobs = [
    context.Process(target=sweep, args=arguments, kwargs=options)
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
  finally:  # After Ctrl-C no process stays behind.
    for job in jobs:
      job.terminate()
      job.join()


def read_rows(root: pathlib.Path, cells: list[Cell]) -> list[Row]:
  """The rows of the finished cells."""
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
  jobs: list[tuple[Cell, training.TrainingConfig]],
) -> Iterator[tuple[Cell, Row]]:
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
      # The number of slots is part of the compiled program of a server.
      if num_slots is None and not config.strategy.is_peer:
        num_slots = max(_count_slots(config) for _, config in jobs)
      row = _train_cell(config, num_slots)
      workdirs.write_json(path, row)
    yield cell, row


def _count_slots(config: training.TrainingConfig) -> int:
  """Number of versions of the weights that a cell needs at a time."""
  try:
    return config.make_plan(config.simulate()).num_slots
  except ValueError:  # Its row will name the reason.
    return 1


def _train_cell(config: training.TrainingConfig, num_slots: int | None) -> Row:
  """The result of one cell, or the reason why there is none."""
  init = virtual.load_init(config)
  try:
    run = virtual.make_run(
      config, config.simulate(), init=init, num_slots=num_slots
    )
  except ValueError as error:
    return {'clock': 0, 'is_diverged': False, 'error': str(error)}
  metrics: dict[str, Any] = {}
  replay = run.replay
  while not replay.is_done:
    metrics = run.measure(replay.advance())
  return {'clock': replay.clock, **metrics, 'is_diverged': replay.is_diverged}


def _validate(
  cells: list[Cell], configs: list[training.TrainingConfig]
) -> None:
  """Raises one ValueError that names the errors of all cells."""
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
  if not problems:  # Errors that only the data can show; each task once.
    tasks = {
      str(config.task): (cell, config)
      for cell, config in zip(cells, configs, strict=True)
    }
    for cell, config in tasks.values():
      try:
        config.make_task()
      except ValueError as error:
        problems.append(f'{cell}: {error}')
  if problems:
    shown = '\n'.join(problems[:10])
    raise ValueError(f'{len(problems)} cells cannot be trained:\n{shown}')


def _group_key(config: training.TrainingConfig) -> str:
  """A text that is equal for configs that share a compilation."""
  settings = dataclasses.asdict(config)
  settings['optimizer'].pop('rate')
  settings['strategy'].pop('delay')
  settings.pop('seed')
  return json.dumps(settings, sort_keys=True)


def _get_path(root: pathlib.Path, cell: Cell) -> pathlib.Path:
  """Path of the file with a cell's result."""
  text = json.dumps(cell, sort_keys=True)
  return (
    root / 'cells' / f'{hashlib.sha256(text.encode()).hexdigest()[:16]}.json'
  )


# --- Grids.


def parse_grid(text: str) -> list[list[Cell]]:
  """Reads a grid such as 'optimizer.rate=0.1,0.2;strategy.delay=0,8'.

  Axes are separated by semicolons, values by commas. Fields that change
  together are joined by commas, and their values by colons:
  'optimizer.name,optimizer.rate=sgd:0.1,adam:0.001'. A tuple is written in
  parentheses: 'schedule.epochs=(10,20),(15,)'.

  Args:
    text: The grid.

  Returns:
    For each axis, its points.

  Raises:
    ValueError: if it cannot be read.

  Examples:
    >>> from jasgd import experiment
    >>> experiment.parse_grid('seed=0,1')
    [[{'seed': '0'}, {'seed': '1'}]]
  """
  axes = []
  seen: set[str] = set()
  for part in filter(None, _split(text, ';')):
    left, sign, right = part.partition('=')
    names = [name.strip() for name in left.split(',')]
    points = _split(right, ',')
    if not sign or not all(names) or not all(points):
      raise ValueError(
        f'An axis of a grid is written as field=value,value, got {part!r}.'
      )
    for name in names:
      if name in seen:
        raise ValueError(f'{name} is in the grid twice.')
      seen.add(name)
    axis = []
    for point in points:
      values = _split(point, ':') if len(names) > 1 else [point]
      if len(values) != len(names):
        raise ValueError(
          f'{left!r} are {len(names)} fields, but {point!r} has '
          f'{len(values)} values.'
        )
      axis.append(dict(zip(names, values, strict=True)))
    axes.append(axis)
  if not axes:
    raise ValueError(
      'The grid is empty; write it as optimizer.rate=0.1,0.2;seed=0,1,2.'
    )
  return axes


def list_cells(config: Any, axes: list[list[Cell]]) -> list[Cell]:
  """All combinations of the axes, with values of the types of the fields.

  Args:
    config: Config that the cells change.
    axes: Result of `parse_grid`.

  Returns:
    The cells, the last axis changing fastest.

  Raises:
    ValueError: if a field is unknown, or a value does not fit it.
  """
  cells = []
  for points in itertools.product(*axes):
    joined = {name: value for point in points for name, value in point.items()}
    cells.append(
      {
        name: _convert(name, value, _get(config, name))
        for name, value in joined.items()
      }
    )
  return cells


def apply_cell(config: Any, cell: Cell) -> Any:
  """A copy of a config with the fields of a cell changed."""
  config = copy.deepcopy(config)
  for name, value in cell.items():
    *path, last = name.split('.')
    part = config
    for step in path:
      part = getattr(part, step)
    setattr(part, last, value)
  return config


def _get(config: Any, name: str) -> Any:
  """The value of a field by its full path."""
  part = config
  for step in name.split('.'):
    known = (
      [field.name for field in dataclasses.fields(part)]
      if dataclasses.is_dataclass(part)
      else []
    )
    if step not in known:
      raise ValueError(
        f'The config has no field {name!r}: at {step!r} there are '
        f'{", ".join(known) or "none"}.'
      )
    part = getattr(part, step)
  if dataclasses.is_dataclass(part):
    raise ValueError(f'{name!r} is no field, but a part of the config.')
  return part


def _split(text: str, sign: str) -> list[str]:
  """Splits at a sign, but not within parentheses."""
  parts, depth = [''], 0
  for letter in text:
    depth += (letter in '([{') - (letter in ')]}')
    if letter == sign and not depth:
      parts.append('')
    else:
      parts[-1] += letter
  return [part.strip() for part in parts]


def _convert(name: str, text: str, old: Any) -> Any:
  """A value from the command line, of the type of the field's old value."""
  try:
    if isinstance(old, bool):
      return {'true': True, 'false': False, '1': True, '0': False}[text.lower()]
    if isinstance(old, tuple):
      value = ast.literal_eval(text)
      return value if isinstance(value, tuple) else (value,)
    if isinstance(old, (int, float, str)):
      return type(old)(text)
  except (KeyError, SyntaxError, ValueError):
    pass
  raise ValueError(
    f'{name} takes a {type(old).__name__} in a grid, got {text!r}.'
  )
