"""Results of many runs as a table of text."""

from collections.abc import Mapping, Sequence
from typing import Any

from jasgd.reports import _formats


def format_table(
  rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> str:
  """Some fields of some rows as lines of text.

  Numbers stand to the right, floats with four digits; a dash is a field that a
  row does not have.

  Args:
    rows: Fields by name, such as full paths of a config and results.
    columns: The names to show, in this order.

  Returns:
    A line of names, and a line for each row.

  Raises:
    ValueError: if there are no columns, or no row has one of them.

  Examples:
    >>> from jasgd import reports
    >>> rows = [
    ...   {'optimizer.name': 'sgd', 'optimizer.rate': 0.1, 'epochs': 30},
    ...   {'optimizer.name': 'adam', 'optimizer.rate': 0.0003162},
    ... ]
    >>> print(reports.format_table(rows, ['optimizer.name', 'epochs']))
    optimizer.name  epochs
    sgd                 30
    adam                 –
  """
  if not columns:
    raise ValueError('columns must be one or more names, got none.')
  for column in columns:
    if rows and not any(column in row for row in rows):
      known = ', '.join(dict.fromkeys(name for row in rows for name in row))
      raise ValueError(f'No row has the column {column!r}; they have {known}.')
  cells = [[_format(row.get(column)) for column in columns] for row in rows]
  widths = [
    max(len(text) for text in column)
    for column in zip(columns, *cells, strict=True)
  ]
  is_text = [
    any(isinstance(row.get(column), str) for row in rows) for column in columns
  ]
  lines = [
    '  '.join(
      text.ljust(width) if is_left else text.rjust(width)
      for text, width, is_left in zip(line, widths, is_text, strict=True)
    )
    for line in [list(columns), *cells]
  ]
  return '\n'.join(line.rstrip() for line in lines)


def _format(value: Any) -> str:
  if value is None:
    return _formats.MISSING
  if isinstance(value, float):
    return f'{value:.4g}'
  return _formats.format_value(value)
