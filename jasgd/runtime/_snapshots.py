"""Snapshots: published versions of weights, and the leases of their readers."""

import dataclasses
import threading
from typing import Any

import numpy as np

from jasgd import engine
from jasgd.runtime.wires import _buffers
from jasgd.runtime.wires import _messages


@dataclasses.dataclass(slots=True, eq=False)
class Snapshot:
  """Weights that do not change any more.

  Attributes:
    incarnation: Incarnation of the owner that made them.
    version: Version of the weights; of a server, its clock.
    buffer: The weights, flat.
    parts: The same memory, as the compiled functions take it.
    rate: Factor of the schedule for the next update, for learners that step on
      their own replicas.
    step: Steps that are in a node's weights.
    mass: Mass of a node's weights, in push-sum.
    num_leases: Number of readers that use the weights.
  """

  incarnation: int
  version: int
  buffer: _buffers.Buffer
  parts: engine.BufferViews
  rate: float = 1.0
  step: int = 0
  mass: float = 0.0
  num_leases: int = 1

  @property
  def key(self) -> tuple[int, int]:
    """(incarnation, version), which no other weights of this owner have."""
    return self.incarnation, self.version

  def make_message(
    self,
    *,
    worker: int = -1,
    push: int = -1,
    fate: int = 0,
    text: str = '',
  ) -> _messages.Message:
    """A SNAPSHOT message of these weights."""
    return _messages.Message(
      _messages.Verb.SNAPSHOT,
      fate,
      worker=worker,
      incarnation=self.incarnation,
      push=push,
      step=self.step,
      version=self.version,
      rate=self.rate,
      mass=self.mass,
      text=text,
    )


class SnapshotStore:
  """Copies of weights in kept buffers, and the newest of them.

  A buffer is used again when its last lease has ended. Any thread may call any
  method, but only the owner of the weights makes snapshots.

  Args:
    layout: Layout of the weights.
    is_shared: Whether other processes can map the buffers.
  """

  def __init__(self, layout: engine.Layout, *, is_shared: bool) -> None:
    self._layout = layout
    self._pool = _buffers.BufferPool(layout.size, is_shared=is_shared)
    self._newest: Snapshot | None = None
    self._lock = threading.Lock()  # Guards the pool, the newest and leases.

  def __len__(self) -> int:
    """Number of buffers that were made so far."""
    return len(self._pool)

  @property
  def newest(self) -> Snapshot:
    """The newest published snapshot. Only the owner may use it unleased."""
    assert self._newest is not None  # Owners publish before they answer.
    return self._newest

  def copy(
    self, weights: Any, incarnation: int, version: int, **fields: Any
  ) -> Snapshot:
    """Copies (params, stats) into a snapshot that no reader knows of yet.

    The caller has a lease of it. No lock is held while the weights are copied.
    """
    buffer = self._take()
    self._layout.pack(weights, buffer.array)
    parts = self._layout.view(buffer.array)
    return Snapshot(incarnation, version, buffer, parts, **fields)

  def restore(
    self, data: np.ndarray, incarnation: int, version: int, **fields: Any
  ) -> Snapshot:
    """A snapshot from the bytes in a checkpoint; the caller has a lease."""
    buffer = self._take()
    np.copyto(buffer.array, data)
    parts = self._layout.view(buffer.array)
    return Snapshot(incarnation, version, buffer, parts, **fields)

  def _take(self) -> _buffers.Buffer:
    with self._lock:
      return self._pool.take()

  def publish(self, snapshot: Snapshot) -> None:
    """Makes a snapshot the newest, and takes over its lease."""
    with self._lock:
      old, self._newest = self._newest, snapshot
      if old is not None:
        self._end_lease(old)

  def lease(self, snapshot: Snapshot) -> Snapshot:
    """Adds a lease to a snapshot that the caller has a lease of, or owns."""
    with self._lock:
      snapshot.num_leases += 1
    return snapshot

  def lease_newest(self) -> Snapshot | None:
    """The newest snapshot, with a lease; None if there is none yet."""
    with self._lock:
      if self._newest is not None:
        self._newest.num_leases += 1
      return self._newest

  def end_lease(self, snapshot: Snapshot) -> None:
    """Ends a lease; the last one frees the buffer."""
    with self._lock:
      self._end_lease(snapshot)

  def _end_lease(self, snapshot: Snapshot) -> None:
    snapshot.num_leases -= 1
    if not snapshot.num_leases:
      self._pool.give_back(snapshot.buffer)

  def close(self) -> None:
    """Closes the buffers' file descriptors."""
    self._pool.close()
