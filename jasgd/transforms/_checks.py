"""Checks of hyper-parameters: concrete values are judged, traced ones pass."""

import math
from typing import Any

import jax


def is_traced(value: Any) -> bool:
  """Whether `value` is known only when the compiled program runs."""
  return isinstance(value, jax.core.Tracer)


def check_at_least(name: str, value: Any, minimum: float) -> None:
  """Raises a ValueError unless `value` is a finite number >= `minimum`."""
  number = _as_number(name, value)
  if number is not None and not number >= minimum:
    raise ValueError(f'{name} must be at least {minimum}, got {value}.')


def check_positive(name: str, value: Any) -> None:
  """Raises a ValueError unless `value` is a finite number above 0."""
  number = _as_number(name, value)
  if number is not None and not number > 0:
    raise ValueError(f'{name} must be above 0, got {value}.')


def check_fraction(name: str, value: Any) -> None:
  """Raises a ValueError unless 0 <= `value` < 1."""
  number = _as_number(name, value)
  if number is not None and not 0 <= number < 1:
    raise ValueError(f'{name} must be in [0, 1), got {value}.')


def _as_number(name: str, value: Any) -> float | None:
  """The concrete value as a finite float, or None if it is traced."""
  if is_traced(value):
    return None
  try:
    number = float(value)
  except (TypeError, ValueError):
    raise ValueError(f'{name} must be a number, got {value!r}.') from None
  if not math.isfinite(number):
    raise ValueError(f'{name} must be finite, got {value}.')
  return number
