"""Times that were measured, drawn again: each learner's from its own."""

from collections.abc import Sequence

import numpy as np

from jasgd import protocols
from jasgd.simulation import _times

_List = Sequence[float] | np.ndarray


def resampled(
  times: Sequence[_List],
  firsts: Sequence[_List] | np.ndarray = (),
  num_steps: int = 1,
) -> _times.ComputeTime:
  """Draws each learner's durations from a list of its own, with replacement.

  Args:
    times: For each learner its durations, any number of them.
    firsts: Rows with an entry per learner, which come first, as they are: a
      learner may have had to compile.
    num_steps: How many steps of a learner, one after another, take what is
      drawn, each: those of a push, if pushes were measured.

  Returns:
    A time model for as many learners.

  Raises:
    ValueError: if a list is empty, a duration is not finite and above 0, a row
      of `firsts` has not an entry per learner, or `num_steps` is below 1.

  Examples:
    >>> from jasgd import simulation
    >>> time = simulation.resampled([[1.0], [2.0, 2.0, 2.0]], [[5.0, 6.0]])
    >>> print(time.table(seed=0, first_step=0, num_steps=3, num_learners=2))
    [[5. 6.]
     [1. 2.]
     [1. 2.]]
  """
  protocols.check_count('num_steps', num_steps, 1)
  lists = [np.asarray(each, float) for each in times]
  if not lists or any(each.ndim != 1 or not each.size for each in lists):
    raise ValueError(
      'resampled times must be a list of durations for each learner, none of '
      f'them empty, got shapes {[each.shape for each in lists]}.'
    )
  rows = np.asarray(firsts, float) if len(firsts) else np.zeros((0, len(lists)))
  if rows.ndim != 2 or rows.shape[1] != len(lists):
    raise ValueError(
      f'firsts must be rows of {len(lists)} entries, one per learner, got '
      f'shape {rows.shape}.'
    )
  pool = np.concatenate(lists)
  for values in (pool, rows):
    if not np.all(np.isfinite(values) & (values > 0)):
      raise ValueError('resampled times must be finite and above 0.')
  counts = np.array([each.size for each in lists])
  offsets = np.cumsum(counts) - counts

  def draw(
    generator: np.random.Generator, first: int, shape: tuple[int, int]
  ) -> np.ndarray:
    if shape[1] != len(lists):
      raise ValueError(
        f'resampled times are of {len(lists)} learners, but there are '
        f'{shape[1]}.'
      )
    drawn = pool[offsets + (generator.random(shape) * counts).astype(int)]
    if num_steps > 1:
      steps = first + np.arange(shape[0])
      drawn = drawn[(steps - steps % num_steps - first).clip(0)]
    given = rows[first : first + shape[0]]
    drawn[: len(given)] = given
    return drawn

  return _times.ComputeTime('resampled', draw)
