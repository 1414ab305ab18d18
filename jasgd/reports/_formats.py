"""Numbers, values and tables as text."""

from collections.abc import Mapping, Sequence
import json
import math
from typing import Any, NamedTuple

MISSING = '–'


def format_number(number: float | None) -> str:
  """A whole number in full, others to four digits, a dash for None."""
  if number is None:
    return MISSING
  if not math.isfinite(number):
    return str(float(number))
  if float(number).is_integer() and abs(number) < 1e15:
    return f'{int(number):,}'
  if 1e3 <= abs(number) < 1e15:
    return f'{number:,.0f}'
  return f'{number:.4g}'


def format_share(part: float, whole: float = 1.0) -> str:
  """A share in percent; a dash if the whole is 0, or the part not finite."""
  share = float(part) / float(whole) if whole else math.nan
  return f'{share:.1%}' if math.isfinite(share) else MISSING


def format_mean(mean: float) -> str:
  """A mean with two decimals; a dash for NaN, the mean of nothing."""
  return MISSING if math.isnan(mean) else f'{mean:.2f}'


def format_cell(number: float) -> str:
  """A number with three digits, for little room: .976 or 1.23e+04."""
  text = f'{number:.3f}' if abs(number) < 1 else f'{number:.3g}'
  return text.replace('0.', '.', 1) if abs(float(text)) < 1 else text


def format_value(value: Any, max_length: int = 200) -> str:
  """A value of a config as JSON, or a text without quotes; cut if long."""
  text = value if isinstance(value, str) else json.dumps(value, default=str)
  return text if len(text) <= max_length else f'{text[:max_length]}...'


def count(number: int, noun: str, plural: str | None = None) -> str:
  """A number with its noun: '1 learner', '2 learners'."""
  return f'{number:,} {noun if number == 1 else plural or noun + "s"}'


def escape_math(text: str) -> str:
  """A text that matplotlib draws as it is: `$` does not begin a formula."""
  return text.replace('$', r'\$')


def is_lower_better(name: str) -> bool:
  """Whether a lower value of a metric is better: of losses and errors."""
  return name.endswith(('loss', 'error'))


# --- Tables.

MAX_ROWS = 32  # Workers that a table lists.


class Table(NamedTuple):
  """Cells of text. The first cell of each row is the row's name."""

  title: str
  header: tuple[str, ...]
  rows: Sequence[tuple[str, ...]]
  marked: frozenset[str] = frozenset()  # Names of rows that stand out.
  note: str = ''


def join_columns(
  title: str,
  name: str,
  columns: Sequence[Mapping[str, str]],
  labels: Sequence[str],
) -> Table | None:
  """A table with a column for each run; None if there are no rows.

  `columns` have the cells of each run, by the names of their rows; `name` is
  the header of these names.
  """
  keys = dict.fromkeys(key for column in columns for key in column)
  if not keys:
    return None
  rows = [
    (key, *(column.get(key, MISSING) for column in columns)) for key in keys
  ]
  header = (name, *labels) if len(labels) > 1 else (name, 'value')
  return Table(title, header, rows)


def note_rest(number: int, note: str = '') -> str:
  """A note that also says how many of `number` workers a table leaves out."""
  rest = number - MAX_ROWS
  return f'... and {rest:,} more. {note}'.strip() if rest > 0 else note


def format_table(
  rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> str:
  """Formats fields of many runs as lines of text.

  Numbers are aligned to the right, floats have four digits. A dash is a field
  that a row does not have.

  Args:
    rows: Fields by name, such as full paths of a config and results.
    columns: Names of the fields to show, in this order.

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
    return MISSING
  return f'{value:.4g}' if isinstance(value, float) else format_value(value)
