"""Heat maps of sweeps: pictures, cells, and which axis goes where."""

from collections.abc import Mapping, Sequence
import itertools
import math
import os
import pathlib
from typing import Any, NamedTuple

from matplotlib import axes as mpl_axes
from matplotlib import cm
from matplotlib import colors as mpl_colors
from matplotlib import figure as mpl_figure
from matplotlib import patches
import numpy as np

from jasgd.reports import _figures
from jasgd.reports import _formats

_MAX_COLUMNS = 3  # Panels side by side.
_CELL = (0.52, 0.3)  # Inches.

_Rows = Sequence[Mapping[str, Any]]


class Cell(NamedTuple):
  """The results of the runs of one cell."""

  value: float | None  # Mean of those that are finite; None without any.
  is_diverged: bool  # Whether any of them diverged.


def plot_heat_map(
  rows: _Rows,
  path: str | os.PathLike[str] | None = None,
  *,
  x: str,
  y: str,
  value: str = 'test/accuracy',
  panels: str | None = None,
) -> mpl_figure.Figure:
  """Draws the results of a sweep: a cell for each pair of settings.

  The number in a cell is the mean over its runs (such as seeds). Brighter is
  better. A cell without a run is hatched. A cross is on a cell with a run that
  diverged: its value is not finite, or it has an `is_diverged` that is true.

  Args:
    rows: A dict for each run: settings by full path, such as
      'optimizer.rate', and results. A run whose `value` is missing or None is
      not finished; it is left out unless it diverged.
    path: The file to write, if any; its suffix chooses the format.
    x: The setting along the columns.
    y: The setting along the rows.
    value: The result to show.
    panels: The setting that has a panel for each of its values; None: there is
      one panel.

  Returns:
    The picture.

  Raises:
    ValueError: if there are no rows, or one lacks a setting.

  Examples:
    >>> import pathlib, tempfile
    >>> from jasgd import reports
    >>> rows = [
    ...   {'optimizer.rate': rate, 'task.batch': 64, 'test/accuracy': rate}
    ...   for rate in (0.1, 0.2)
    ... ]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = pathlib.Path(folder, 'sweep.png')
    ...   _ = reports.plot_heat_map(
    ...     rows, path, x='task.batch', y='optimizer.rate'
    ...   )
    ...   path.stat().st_size > 1000
    True

  References:
    Jain et al., An analysis of the delayed gradients problem in asynchronous
    SGD (https://openreview.net/forum?id=BJLSGcywG), 2018: figures 2 and 3.
  """
  _check_rows(rows, [x, y] if panels is None else [x, y, panels])
  xs, ys = _list_values(rows, x), _list_values(rows, y)
  names = [None] if panels is None else _list_values(rows, panels)
  cells = collect_cells(rows, x, y, value, panels)
  num_columns = min(len(names), _MAX_COLUMNS)
  num_rows = -(-len(names) // num_columns)
  figure = mpl_figure.Figure(
    figsize=(
      num_columns * max(2.2, _CELL[0] * len(xs) + 0.3) + 1.8,
      num_rows * (max(1.2, _CELL[1] * len(ys)) + 0.5) + 0.6,
    ),
    layout='constrained',
  )
  grid = figure.subplots(
    num_rows, num_columns, squeeze=False, sharex=True, sharey=True
  )
  shades = _make_shades(list(cells.values()), value)
  for axes, name in zip(grid.flat, names, strict=False):
    _draw_panel(axes, cells, name, xs, ys, shades)
    if panels is not None:
      axes.set_title(f'{_label(panels)} = {_label(name)}', fontsize=9)
  for axes in grid.flat[len(names) :]:
    axes.set_axis_off()
  figure.supxlabel(_label(x), fontsize=10)
  figure.supylabel(_label(y), fontsize=10)
  if any(cell.value is not None for cell in cells.values()):
    figure.colorbar(shades, ax=grid, label=_label(value), shrink=0.8)
  return _figures.save(figure, path)


def plot_sweep(
  rows: Sequence[dict[str, Any]],
  folder: str | os.PathLike[str],
  axes: Sequence[Sequence[str]],
  *,
  value: str = 'test/accuracy',
) -> list[pathlib.Path]:
  """Draws the results of a sweep, as Jain et al. do in their figures 2 and 3.

  The first axis goes down, the second across, the third makes panels. There is
  a picture for each combination of all others.

  Args:
    rows: A dict for each cell: its fields and results.
    folder: Folder for the pictures.
    axes: Field of each axis, or the fields that change together.
    value: Name of the result to show.

  Returns:
    The files: `heat_map.png`, or `heat_map_0.png` and so on.

  References:
    Jain et al., `An Analysis of the Delayed Gradients Problem in Asynchronous
    SGD <https://openreview.net/forum?id=BJLSGcywG>`_, 2018
  """
  if not any(value in row for row in rows):
    return []
  names = [_name_axis(fields) for fields in axes]
  shown = [{**row, **_join_fields(row, axes)} for row in rows]
  y, x, panels = (*names[:3], None, None)[:3]
  if x is None:  # One axis: a map of one row.
    x, y = y, ''
    shown = [{**row, '': ''} for row in shown]
  others = names[3:]
  points = list(
    itertools.product(
      *(dict.fromkeys(row[name] for row in shown) for name in others)
    )
  )
  paths = []
  for number, point in enumerate(points):
    chosen = [
      row
      for row in shown
      if all(row[name] == at for name, at in zip(others, point, strict=True))
    ]
    if not chosen:
      continue
    name = f'heat_map_{number}.png' if len(points) > 1 else 'heat_map.png'
    path = pathlib.Path(folder) / name
    plot_heat_map(chosen, path, x=x, y=y, value=value, panels=panels)
    paths.append(path)
  return paths


def collect_cells(
  rows: _Rows, x: str, y: str, value: str, panels: str | None
) -> dict[tuple[Any, Any, Any], Cell]:
  """The cells that have a run, by (panel, y, x)."""
  numbers: dict[tuple[Any, Any, Any], list[float]] = {}
  diverged = set()
  for row in rows:
    found = row.get(value)
    if found is None and not row.get('is_diverged'):
      continue
    panel = None if panels is None else _to_key(row[panels])
    key = panel, _to_key(row[y]), _to_key(row[x])
    # The value may be a text such as 'nan', because JSON has no NaN.
    number = math.nan if found is None else float(found)
    numbers.setdefault(key, [])
    if math.isfinite(number):
      numbers[key].append(number)
    if row.get('is_diverged') or not math.isfinite(number):
      diverged.add(key)
  return {
    key: Cell(float(np.mean(finite)) if finite else None, key in diverged)
    for key, finite in numbers.items()
  }


def _check_rows(rows: _Rows, names: Sequence[str]) -> None:
  if not rows:
    raise ValueError('rows must be one or more runs, got none.')
  for index, row in enumerate(rows):
    for name in names:
      if name not in row:
        raise ValueError(
          f'Row {index} has no {name!r}; it has {", ".join(row)}.'
        )


def _list_values(rows: _Rows, name: str) -> list[Any]:
  """The values of a setting: numbers ascending, others as they come."""
  values = list(dict.fromkeys(_to_key(row[name]) for row in rows))
  if all(isinstance(value, (int, float)) for value in values):
    return sorted(values)
  return values


def _to_key(value: Any) -> Any:
  """A value that can be the key of a dict."""
  if value is None or isinstance(value, (int, float)):
    return value
  return _formats.format_value(value)


def _label(value: Any) -> str:
  text = f'{value:.4g}' if isinstance(value, float) else str(value)
  return _formats.escape_math(text)


def _make_shades(cells: Sequence[Cell], value: str) -> cm.ScalarMappable:
  """The colours of all panels, brighter for better."""
  numbers = [cell.value for cell in cells if cell.value is not None] or [0.0]
  is_reversed = _formats.is_lower_better(value)
  return cm.ScalarMappable(
    mpl_colors.Normalize(min(numbers), max(numbers)),
    'viridis_r' if is_reversed else 'viridis',
  )


def _draw_panel(
  axes: mpl_axes.Axes,
  cells: Mapping[tuple[Any, Any, Any], Cell],
  panel: Any,
  xs: Sequence[Any],
  ys: Sequence[Any],
  shades: cm.ScalarMappable,
) -> None:
  for row, y in enumerate(ys):
    for column, x in enumerate(xs):
      _draw_cell(axes, row, column, cells.get((panel, y, x)), shades)
  axes.set_xlim(-0.5, len(xs) - 0.5)
  axes.set_ylim(len(ys) - 0.5, -0.5)
  axes.set_xticks(range(len(xs)), [_label(x) for x in xs], fontsize=8)
  axes.set_yticks(range(len(ys)), [_label(y) for y in ys], fontsize=8)
  axes.tick_params(length=0)


def _draw_cell(
  axes: mpl_axes.Axes,
  row: int,
  column: int,
  cell: Cell | None,
  shades: cm.ScalarMappable,
) -> None:
  """A square with its number; hatched without a run, crossed if it diverged."""
  square = patches.Rectangle(
    (column - 0.5, row - 0.5), 1, 1, facecolor='white', edgecolor='white'
  )
  axes.add_patch(square)
  if cell is None:
    square.set(hatch='////', edgecolor='#c8c8c8', linewidth=0)
    return
  number = '' if cell.value is None else _formats.format_cell(cell.value)
  ink = 'black'
  if cell.value is not None:
    red, green, blue, _ = shades.to_rgba(np.array([cell.value]))[0]
    square.set_facecolor((red, green, blue))
    # Weights of red, green and blue in the brightness that the eye sees.
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
    ink = 'white' if is_dark else 'black'
  if cell.is_diverged:
    axes.plot(
      column + (0.36 if number else 0),
      row - (0.3 if number else 0),
      'x',
      color=_figures.DIVERGED_COLOR,
      markersize=4 if number else 8,
      markeredgewidth=2,
    )
  axes.text(
    column, row, number, ha='center', va='center', color=ink, fontsize=8
  )


def _name_axis(fields: Sequence[str]) -> str:
  """Label of an axis: a full path, if there is room for it."""
  if len(fields) == 1:
    return fields[0]
  return ', '.join(field.rpartition('.')[2] for field in fields)


def _join_fields(
  row: dict[str, Any], axes: Sequence[Sequence[str]]
) -> dict[str, Any]:
  """One value for each axis of fields that change together."""
  return {
    _name_axis(fields): ' '.join(str(row[field]) for field in fields)
    for fields in axes
    if len(fields) > 1
  }
