"""Numbers and values as people read them."""

import json
import math
from typing import Any

MISSING = '–'


def format_number(number: float | None) -> str:
  """Whole numbers in full, others to four digits, a dash for nothing."""
  if number is None:
    return MISSING
  if not math.isfinite(number):
    return str(float(number))
  if float(number).is_integer() and abs(number) < 1e15:
    return f'{int(number):,}'
  if 1e3 <= abs(number) < 1e15:
    return f'{number:,.0f}'
  return f'{number:.4g}'


def format_share(share: float) -> str:
  """A share in percent, a dash if it is one of nothing."""
  return f'{share:.1%}' if math.isfinite(share) else MISSING


def format_cell(number: float) -> str:
  """Three digits, for little room: .976 or 1.23e+04."""
  text = f'{number:.3f}' if abs(number) < 1 else f'{number:.3g}'
  return text.replace('0.', '.', 1) if abs(float(text)) < 1 else text


def format_value(value: Any, max_length: int = 200) -> str:
  """A value of a config, cut if it is long: JSON, a text without its quotes."""
  text = value if isinstance(value, str) else json.dumps(value, default=str)
  return text if len(text) <= max_length else f'{text[:max_length]}...'


def flatten(tree: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """The leaves of nested dicts by their full paths, such as optimizer.rate."""
  leaves = {}
  for key, value in tree.items():
    if isinstance(value, dict) and value:
      leaves |= flatten(value, f'{prefix}{key}.')
    else:
      leaves[f'{prefix}{key}'] = value
  return leaves


def is_lower_better(name: str) -> bool:
  """Whether less of a metric is more: of losses and errors."""
  return name.endswith(('loss', 'error'))
