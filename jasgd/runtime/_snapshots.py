"""Versions of the weights that were published, and who still uses them."""

import dataclasses
from typing import Any

import numpy as np

from jasgd import engine
from jasgd.runtime import _buffers


@dataclasses.dataclass(slots=True, eq=False)
class Snapshot:
  """Weights that do not change any more.

  Attributes:
    incarnation: Which server made them.
    clock: After how many updates.
    rate: The factor of the schedule for the next update, for learners that
      step on their own.
    buffer: The weights, flat.
    parts: The same, as the compiled functions take them.
    num_leases: How many use them.
  """

  incarnation: int
  clock: int
  rate: float
  buffer: _buffers.Buffer
  parts: engine.BufferViews
  num_leases: int = 0

  @property
  def version(self) -> tuple[int, int]:
    """The name of these weights."""
    return self.incarnation, self.clock


class SnapshotStore:
  """Copies of weights in kept buffers; belongs to the owner's thread.

  Args:
    layout: Of the weights.
    is_shared: Whether other processes map the buffers.
  """

  def __init__(self, layout: engine.Layout, *, is_shared: bool) -> None:
    self._layout = layout
    self._pool = _buffers.BufferPool(layout.size, is_shared=is_shared)

  def __len__(self) -> int:
    """Buffers made so far."""
    return len(self._pool)

  def copy(
    self, incarnation: int, clock: int, rate: float, weights: Any
  ) -> Snapshot:
    """Copies weights into a buffer; the caller has a lease of it."""
    buffer = self.reserve()
    self._layout.pack(weights, buffer.array)
    return self.wrap(incarnation, clock, rate, buffer)

  def restore(
    self, incarnation: int, clock: int, rate: float, data: np.ndarray
  ) -> Snapshot:
    """A snapshot from its bytes; the caller has a lease of it."""
    buffer = self.reserve()
    np.copyto(buffer.array, data)
    return self.wrap(incarnation, clock, rate, buffer)

  def reserve(self) -> _buffers.Buffer:
    """A buffer that nobody uses, to be filled and given to `wrap`."""
    return self._pool.take()

  def wrap(
    self, incarnation: int, clock: int, rate: float, buffer: _buffers.Buffer
  ) -> Snapshot:
    """A snapshot of a buffer that is filled; the caller has a lease of it."""
    parts = self._layout.view(buffer.array)
    return Snapshot(incarnation, clock, rate, buffer, parts, 1)

  def lease(self, snapshot: Snapshot) -> Snapshot:
    """One more uses it."""
    snapshot.num_leases += 1
    return snapshot

  def end_lease(self, snapshot: Snapshot) -> None:
    """One less uses it; the last one frees the buffer."""
    snapshot.num_leases -= 1
    if not snapshot.num_leases:
      self._pool.give_back(snapshot.buffer)

  def close(self) -> None:
    """Gives the buffers back."""
    self._pool.close()
