"""Checks of arguments, for all rooms: an error names the value and the rule."""

from collections.abc import Iterable
import math
import numbers
import operator
from typing import Any


def check_count(name: str, value: Any, minimum: int = 1) -> int:
  """Checks that `value` is a whole number of at least `minimum`.

  Args:
    name: Name of the value, for the error message.
    value: Number to check.
    minimum: Smallest number allowed.

  Returns:
    The number, as an int.

  Raises:
    ValueError: if it is no whole number, or too small.
  """
  try:
    # A bool has an index too, but True for a count is a mistake.
    count = None if isinstance(value, bool) else operator.index(value)
  except TypeError:
    count = None
  if count is None or count < minimum:
    raise ValueError(
      f'{name} must be a whole number of at least {minimum}, got {value!r}.'
    )
  return count


def check_number(
  name: str,
  value: Any,
  minimum: float = -math.inf,
  maximum: float = math.inf,
) -> float:
  """Checks that `value` is a real number, from `minimum` to `maximum`.

  Args:
    name: Name of the value, for the error message.
    value: Number to check. NaN passes only if there are no bounds.
    minimum: Smallest number allowed.
    maximum: Largest number allowed.

  Returns:
    The number, as a float.

  Raises:
    ValueError: if it is no real number, or out of bounds.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise ValueError(f'{name} must be a number, got {value!r}.')
  number = float(value)
  has_bounds = math.isfinite(minimum) or math.isfinite(maximum)
  if has_bounds and not minimum <= number <= maximum:
    rule = f'from {minimum:g} to {maximum:g}'
    if maximum == math.inf:
      rule = f'at least {minimum:g}'
    elif minimum == -math.inf:
      rule = f'at most {maximum:g}'
    raise ValueError(f'{name} must be {rule}, got {value}.')
  return number


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
  """Raises a ValueError that lists the choices unless `value` is one of them.

  Args:
    name: Name of the value, for the error message.
    value: Value to check.
    choices: Values allowed.
  """
  known = sorted(choices)
  if value not in known:
    raise ValueError(f'Unknown {name} {value!r}. Known: {", ".join(known)}.')
