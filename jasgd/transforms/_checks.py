"""Checks of hyper-parameters. Traced values pass: they are not known yet."""

import math
import numbers
from typing import Any

import jax
import optax


def is_traced(value: Any) -> bool:
  """Whether `value` is known only when the compiled program runs."""
  return isinstance(value, jax.core.Tracer)


def check_at_least(name: str, value: Any, minimum: float) -> None:
  """Raises a ValueError unless `value` is a finite number >= `minimum`."""
  number = _as_number(name, value)
  if number is not None and not number >= minimum:
    raise ValueError(f'{name} must be at least {minimum}, got {value}.')


def check_at_most(name: str, value: Any, maximum: float) -> None:
  """Raises a ValueError unless `value` is a finite number <= `maximum`."""
  number = _as_number(name, value)
  if number is not None and not number <= maximum:
    raise ValueError(f'{name} must be at most {maximum}, got {value}.')


def check_whole(name: str, value: Any, minimum: int) -> int:
  """Returns a static integer >= `minimum` as an int; else a ValueError."""
  is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not is_whole or value < minimum:
    raise ValueError(
      f'{name} must be an int of at least {minimum}, got {value!r}.'
    )
  return int(value)


def check_transform(
  name: str, value: Any
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that takes extra arguments; else a ValueError."""
  if not hasattr(value, 'init') or not hasattr(value, 'update'):
    raise ValueError(
      f'{name} must be an optax.GradientTransformation, got {value!r}.'
    )
  return optax.with_extra_args_support(value)


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
  """Returns a concrete value as a finite float, or None if it is traced."""
  if is_traced(value):
    return None
  try:
    number = float(value) if not isinstance(value, str) else None
  except (TypeError, ValueError):
    number = None
  if number is None:
    raise ValueError(f'{name} must be a number, got {value!r}.')
  if not math.isfinite(number):
    raise ValueError(f'{name} must be finite, got {value}.')
  return number
