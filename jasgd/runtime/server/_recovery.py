"""Saving the whole state of a server, and resuming from it."""

from collections.abc import Mapping
import logging
from typing import Any, Protocol

import numpy as np

from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _checkpoints
from jasgd.runtime import _recorder
from jasgd.runtime import _snapshots
from jasgd.runtime.server import _weights

_log = logging.getLogger(__name__)

Key = tuple[int, int]  # Key of a snapshot: (incarnation, version).
Checkpoint = tuple[Any, list[np.ndarray], dict[str, Any]]


class Part(Protocol):
  """A part of the server that is saved: its own state, JSON-serialisable."""

  def save(self) -> Any:
    """State for a checkpoint."""

  def restore(self, saved: Any, /) -> object:
    """Inverse of `save`."""


class LeaseHolder(Protocol):
  """A part that holds leases of snapshots, which are saved with it."""

  def list_leased(self) -> list[_snapshots.Snapshot]:
    """Snapshots that it holds a lease of."""

  def save(self, keys: list[Key], /) -> Any:
    """State for a checkpoint; leases as their indices in `keys`."""

  def restore(
    self, saved: Any, snapshots: list[_snapshots.Snapshot], /
  ) -> object:
    """Inverse of `save`; takes leases of its own."""


def read_checkpoint(
  workdir: workdirs.Workdir, weights: _weights.ServerWeights
) -> Checkpoint | None:
  """Reads the last readable checkpoint; None if there is none."""
  workdirs.set_aside_broken(workdir)
  return _checkpoints.restore(workdir, weights.state, weights.layout.size)


class Recovery:
  """Saves and restores the parts of a server, all at one point of its trace.

  A checkpoint names the number of records that had been written: records that
  came after them are void for the server that resumes.

  Args:
    weights: Weights, optimizer state and clock.
    parts: Parts that are saved, by name.
    lease_holders: Parts that hold leases of snapshots, by name.
    store: Store of the snapshots.
    recorder: Recorder of the trace.
    checkpoints: Writer of checkpoints; None: the run has no files.

  Attributes:
    start_clock: Clock at which this incarnation of the server began.
    checkpoints: Writer of checkpoints, or None.
  """

  def __init__(
    self,
    weights: _weights.ServerWeights,
    parts: Mapping[str, Part],
    lease_holders: Mapping[str, LeaseHolder],
    store: _snapshots.SnapshotStore,
    recorder: _recorder.Recorder,
    checkpoints: _checkpoints.Checkpoints | None,
  ) -> None:
    self.start_clock = 0
    self.checkpoints = checkpoints
    self._weights = weights
    self._parts = parts
    self._lease_holders = lease_holders
    self._store = store
    self._recorder = recorder

  @property
  def last_clock(self) -> int:
    """Clock of the last checkpoint; -1: there is none."""
    return -1 if self.checkpoints is None else self.checkpoints.last_version

  def save_if_due(self) -> None:
    """Begins a checkpoint if the last one is old, and the clock has advanced.

    Raises:
      OSError: if the last checkpoint could not be written.
    """
    if self.checkpoints and self.checkpoints.is_ready(self._weights.clock):
      self._save(self.checkpoints)

  def save_now(self) -> None:
    """Saves a checkpoint of unsaved updates, and waits until it is written.

    Raises:
      OSError: if it could not be written.
    """
    if self.checkpoints is not None:
      self.checkpoints.wait()
      if self.last_clock < self._weights.clock:
        self._save(self.checkpoints)
        self.checkpoints.wait()

  def _save(self, checkpoints: _checkpoints.Checkpoints) -> None:
    needed = {
      snapshot.key: snapshot
      for holder in self._lease_holders.values()
      for snapshot in holder.list_leased()
    }
    keys = list(needed)
    holders = self._lease_holders.items()
    position = {
      'clock': self._weights.clock,
      'weights': self._weights.save(),
      **{name: part.save() for name, part in self._parts.items()},
      **{name: holder.save(keys) for name, holder in holders},
      'snapshots': [[*each.key, each.rate] for each in needed.values()],
      'snapshot_size': self._weights.layout.size,
      'records': self._recorder.num_records,
    }
    checkpoints.save(self._weights.state, position, list(needed.values()))

  def resume(self, checkpoint: Checkpoint) -> None:
    """Restores all parts, and records the restart as a new incarnation.

    Raises:
      TraceError: if records that the checkpoint refers to are missing or
        inconsistent.
    """
    state, buffers, position = checkpoint
    # First: a damaged trace must be refused before any part has changed.
    self._recorder.check_server(position['records'])
    self._weights.restore(state, position['weights'])
    for name, part in self._parts.items():
      part.restore(position[name])
    snapshots = [
      self._store.restore(buffer, incarnation, version, rate=rate)
      for (incarnation, version, rate), buffer in zip(
        position['snapshots'], buffers, strict=True
      )
    ]
    for name, holder in self._lease_holders.items():
      holder.restore(position[name], snapshots)
    # After the holders have taken their leases: this ends the lease that
    # `SnapshotStore.restore` gave to its caller.
    for snapshot in snapshots:
      self._store.end_lease(snapshot)
    self.start_clock = self._weights.clock
    self._record_restart(position['records'])

  def begin(self) -> None:
    """Begins without a checkpoint: records of an earlier run are void."""
    if self._recorder.num_records:
      self._record_restart(0)

  def _record_restart(self, num_valid: int) -> None:
    recorder, clock = self._recorder, self._weights.clock
    num_void = recorder.num_records - num_valid
    recorder.begin_incarnation()
    recorder.write(
      traces.Kind.RESTART,
      {
        'worker': 0,
        'updates': False,
        'version': clock,
        'read_version': clock,
        'stands': num_valid - 1,
      },
    )
    _log.warning(
      'Incarnation %d goes on from the checkpoint of clock %d; %d records that '
      'came after it are void.',
      recorder.incarnation,
      clock,
      num_void,
    )
