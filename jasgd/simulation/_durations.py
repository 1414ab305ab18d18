"""Durations one by one, for an event loop: each learner at its own pace."""

import collections

import numpy as np

from jasgd.simulation import _times

# Bytes of the table that are kept. A learner that is so slow that its block is
# gone again has it drawn anew, which costs time, but no memory.
_KEPT_BYTES = 1 << 26


class Durations:
  """The table of a time model, of which each learner uses up its column."""

  def __init__(
    self, compute: _times.ComputeTime, seed: int, num_learners: int
  ) -> None:
    """Begins at step 0 of every learner."""
    self._compute = compute
    self._seed = seed
    self._num_learners = num_learners
    self._num_rows = _times.get_rows_per_block(num_learners)
    block_bytes = 8 * self._num_rows * num_learners
    self._num_kept = max(2, _KEPT_BYTES // block_bytes)
    self._blocks: collections.OrderedDict[int, np.ndarray] = (
      collections.OrderedDict()
    )
    self._next_block = [0] * num_learners
    # Of each learner, what is left of its block; the next one is the last.
    self._left: list[list[float]] = [[]] * num_learners

  def take(self, learner: int) -> float:
    """The learner's next duration."""
    left = self._left[learner]
    if not left:
      left = self._left[learner] = self._take_column(learner)
    return left.pop()

  def _take_column(self, learner: int) -> list[float]:
    """The learner's durations in its next block, from the last to the first."""
    index = self._next_block[learner]
    self._next_block[learner] = index + 1
    block = self._blocks.get(index)
    if block is None:
      block = self._compute.table(
        self._seed, index * self._num_rows, self._num_rows, self._num_learners
      )
      self._blocks[index] = block
      if len(self._blocks) > self._num_kept:
        self._blocks.popitem(last=False)
    return block[::-1, learner].tolist()
