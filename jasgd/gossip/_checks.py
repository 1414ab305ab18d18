"""Checks of arguments: an error names the value, the rule and a way out."""

from collections.abc import Callable
import itertools
from typing import Any

from jasgd import protocols


def check_count(name: str, value: Any, minimum: int = 1) -> int:
  """As `protocols.check_count`; most counts here are at least 1."""
  return protocols.check_count(name, value, minimum)


def check_seed(seed: Any) -> int:
  """Gives `seed` as an int; it must fit the 64 bits that a key has for it."""
  seed = check_count('seed', seed, 0)
  if seed >= 2**64:
    raise ValueError(f'seed must be below 2**64, got {seed}.')
  return seed


def check_weight(weight: float, name: str = 'weight') -> float:
  """Gives `weight` as a float; a ValueError unless it is in [0, 1]."""
  try:
    number = float(weight)
  except (TypeError, ValueError):
    raise ValueError(f'{name} must be a number, got {weight!r}.') from None
  if not 0 <= number <= 1:
    raise ValueError(f'{name} must be from 0 to 1, got {weight}.')
  return number


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
  """Raises a ValueError unless `value` is one of the choices."""
  if value not in choices:
    raise ValueError(
      f'Unknown {name} {value!r}. Known: {", ".join(sorted(choices))}.'
    )


def check_size(
  kind: str,
  num_nodes: int,
  rule: str,
  is_possible: Callable[[int], bool],
) -> None:
  """Refuses a size that a kind cannot have, and names the nearest that it can.

  Args:
    kind: What is being built.
    num_nodes: The size asked for.
    rule: What sizes must be, in words.
    is_possible: The rule as a function; true for some size above `num_nodes`.

  Raises:
    ValueError: if the size is impossible.
  """
  if is_possible(num_nodes):
    return
  below = next(filter(is_possible, range(num_nodes - 1, 0, -1)), None)
  above = next(filter(is_possible, itertools.count(num_nodes + 1)))
  nearest = (
    f'the smallest is {above}'
    if below is None
    else f'the nearest are {below} and {above}'
  )
  raise ValueError(
    f'{kind} needs {rule}, got num_nodes={num_nodes}: {nearest}.'
  )
