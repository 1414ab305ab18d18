"""Trains every cell of a grid, and draws the results as heat maps.

  python -m launch.sweep --config=configs/mnist_delay.py --workdir=/tmp/s \
    --config.task.data_dir=DATA \
    --grid='optimizer.rate=1e-3,1e-2;task.batch=64,128;strategy.delay=0,8'

  python -m launch.sweep --config=configs/gossip_digits.py:simulate \
    --workdir=/tmp/t --grid='strategy.name=pull,elastic;num_workers=4,16'

Any field of the config may be an axis. Fields that change together are joined:
--grid='optimizer.name,optimizer.rate=sgd:0.1,adam:0.001;seed=0,1,2'.

One row is printed for each finished cell. Killed and started again, the sweep
skips finished cells. Started several times at once on one workdir (as a job
array does), each process takes cells that no other process has. At the end it
writes `sweep.csv` and heat maps: the first axis goes down, the second across,
and the third makes panels.
"""

import pathlib
from typing import Any

from absl import app
from absl import flags
from ml_collections import config_flags

from jasgd import experiment
from jasgd import reports
from jasgd import workdir as workdirs
from launch import entry

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The training run.')
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'Folder of the results; it is made if it does not exist.',
  required=True,
)
_GRID = flags.DEFINE_string(
  'grid', None, 'Fields and their values, as in the examples.', required=True
)
_VALUE = flags.DEFINE_string(
  'value', 'test/accuracy', 'Result that the heat map shows.'
)


def main() -> None:
  """Validates all cells, trains them, and writes the table and pictures."""
  config = _CONFIG.value
  entry.check_config(config)
  workdir = pathlib.Path(_WORKDIR.value)
  try:
    axes = experiment.parse_grid(_GRID.value)
    cells = experiment.list_cells(config, axes)
    print(f'{len(cells)} cells', flush=True)
    experiment.sweep(config, _GRID.value, workdir, on_row=_print_row)
  except (FileNotFoundError, ValueError) as error:
    raise app.UsageError(str(error)) from None
  # The last process has the most rows, and writes the files that stay.
  with workdirs.lock_file(workdir / 'sweep.lock'):
    rows = experiment.read_rows(workdir, cells)
    _write(workdir, cells, axes, rows)


def _write(
  workdir: pathlib.Path,
  cells: list[dict[str, Any]],
  axes: list[list[dict[str, Any]]],
  rows: list[dict[str, Any]],
) -> None:
  """Prints the table; writes it, and the pictures."""
  columns = [*cells[0], 'clock', _VALUE.value, 'train/loss', 'is_diverged']
  print(reports.format_table(rows, columns))
  for row in rows:
    if 'error' in row:
      print(f'{ {name: row[name] for name in cells[0]} }: {row["error"]}')
  if len(rows) < len(cells):
    print(f'{len(cells) - len(rows)} cells are in work in other processes.')
  experiment.write_csv(workdir / 'sweep.csv', rows)
  print(f'Wrote {workdir / "sweep.csv"}')
  for path in reports.plot_sweep(
    rows, workdir, [list(axis[0]) for axis in axes], value=_VALUE.value
  ):
    print(f'Wrote {path}')


def _print_row(row: dict[str, Any]) -> None:
  """Prints one line for a finished cell: its fields, and its result."""
  end = list(row).index('clock')  # The cell's own fields come first.
  shown = dict(list(row.items())[:end])
  shown[_VALUE.value] = row.get(_VALUE.value)
  if row['is_diverged']:
    shown['is_diverged'] = True
  print(
    *(
      f'{name}={f"{value:.4g}" if isinstance(value, float) else value}'
      for name, value in shown.items()
    ),
    flush=True,
  )


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main)
