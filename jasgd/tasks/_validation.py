"""Part of a training set, held out to choose settings on."""

from typing import Any

import numpy as np

from jasgd.tasks import _checks


def hold_out(
  train: dict[str, Any], share: float
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Splits examples, always in the same way for a share and a size.

  Args:
    train: Arrays with a leading axis of examples.
    share: Of those to hold out, above 0 and below 1.

  Returns:
    Those to train on, and those held out.

  Raises:
    ValueError: if the share leaves nothing on one side.
  """
  num_samples = _checks.count_examples('train', train)
  num_held = round(share * num_samples) if 0 < share < 1 else 0
  if not 0 < num_held < num_samples:
    raise ValueError(
      'validation must be a share of the training set that leaves something on '
      f'both sides, or 0, got {share} of {num_samples} examples.'
    )
  # Sets may be sorted.
  generator = np.random.Generator(np.random.Philox(key=num_samples))
  order = generator.permutation(num_samples)
  arrays = {name: np.asarray(array) for name, array in train.items()}
  held, kept = np.sort(order[:num_held]), np.sort(order[num_held:])
  return (
    {name: array[kept] for name, array in arrays.items()},
    {name: array[held] for name, array in arrays.items()},
  )
