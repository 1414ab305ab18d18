"""The heat maps of a sweep: which axis goes where."""

from collections.abc import Sequence
import itertools
import os
import pathlib
from typing import Any

from jasgd.reports import _heat_maps


def plot_sweep(
  rows: Sequence[dict[str, Any]],
  folder: str | os.PathLike[str],
  axes: Sequence[Sequence[str]],
  *,
  value: str = 'test/accuracy',
) -> list[pathlib.Path]:
  """Draws the results of a sweep, as Jain et al. do in their figures 2 and 3.

  The first axis goes down, the second across, the third makes panels; for each
  combination of all others there is a picture of its own.

  Args:
    rows: A dict for each cell: its fields and results.
    folder: Where the pictures go.
    axes: For each axis its field, or the fields that change together.
    value: Which result to show.

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
    _heat_maps.plot_heat_map(chosen, path, x=x, y=y, value=value, panels=panels)
    paths.append(path)
  return paths


def _name_axis(fields: Sequence[str]) -> str:
  """What to write beside an axis: full paths, if there is room for them."""
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
