"""Grids of configs: which fields take which values."""

import ast
import copy
import dataclasses
import itertools
from typing import Any

# A cell: from full paths of fields, such as 'optimizer.rate', to values.
Cell = dict[str, Any]


def parse_grid(text: str) -> list[list[Cell]]:
  """Reads a grid such as 'optimizer.rate=0.1,0.2;protocol.delay=0,8'.

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
  """All combinations, with values of the types that the config's fields have.

  Args:
    config: What the cells change.
    axes: What `parse_grid` gave.

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
