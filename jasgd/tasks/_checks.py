"""Checks of arguments: an error names the value, the rule and a way out."""

from collections.abc import Iterable
import operator
from typing import Any

import jax
import numpy as np


def check_count(name: str, value: Any, minimum: int = 1) -> int:
  """Gives `value` as an int; a ValueError if it is none, or too small."""
  try:
    if isinstance(value, bool):
      raise TypeError
    count = operator.index(value)
  except TypeError:
    raise ValueError(f'{name} must be an integer, got {value!r}.') from None
  if count < minimum:
    raise ValueError(f'{name} must be at least {minimum}, got {count}.')
  return count


def check_positive(name: str, value: Any) -> float:
  """Gives `value` as a float; a ValueError unless finite and above 0."""
  try:
    number = float(value)
  except (TypeError, ValueError):
    raise ValueError(f'{name} must be a number, got {value!r}.') from None
  if not 0 < number < np.inf:
    raise ValueError(f'{name} must be finite and above 0, got {value}.')
  return number


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
  """Raises a ValueError unless `value` is one of the choices."""
  choices = sorted(choices)
  if value not in choices:
    raise ValueError(f'Unknown {name} {value!r}. Known: {", ".join(choices)}.')


def count_examples(name: str, examples: Any) -> int:
  """The length that the leading axes of all leaves share.

  Args:
    name: What the examples are, for the error.
    examples: A tree of arrays.

  Returns:
    The number of examples.

  Raises:
    ValueError: if there is no array, or their lengths differ.
  """
  shapes = [np.shape(leaf) for leaf in jax.tree.leaves(examples)]
  lengths = {shape[0] if shape else -1 for shape in shapes}
  if len(lengths) != 1 or -1 in lengths:
    raise ValueError(
      f'The arrays of {name} must share a leading axis of examples, got the '
      f'shapes {shapes}.'
    )
  return lengths.pop()
