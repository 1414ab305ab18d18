"""What a checkpoint holds besides arrays, and how a run goes on from it."""

import logging
from typing import Any

import numpy as np

from jasgd import traces
from jasgd.runtime import _books
from jasgd.runtime import _core
from jasgd.runtime import _snapshots

_log = logging.getLogger(__name__)


def list_snapshots(core: _core.Core) -> list[_snapshots.Snapshot]:
  """The snapshots that a checkpoint must hold: those that somebody needs."""
  needed = {
    snapshot.version: snapshot
    for book in core.register
    for snapshot in book.leases.values()
  }
  if core.to_evaluate is not None:
    needed[core.to_evaluate.version] = core.to_evaluate
  return list(needed.values())


def make_position(
  core: _core.Core, snapshots: list[_snapshots.Snapshot]
) -> dict[str, Any]:
  """All that a checkpoint holds besides arrays, as JSON can say it.

  Args:
    core: The run.
    snapshots: What `list_snapshots` gave.

  Returns:
    What `resume` takes.
  """
  versions = [snapshot.version for snapshot in snapshots]
  evaluated = core.to_evaluate
  return {
    **core.weights.save(),
    'protocol': core.protocol.save(),
    'books': [book.save(versions) for book in core.register],
    'snapshots': [[*snapshot.version, snapshot.rate] for snapshot in snapshots],
    'snapshot_size': core.weights.layout.size,
    'evaluation': -1
    if evaluated is None
    else versions.index(evaluated.version),
    'records': core.recorder.num_records,
    'metrics': core.recorder.metrics_position,
    'recorder': core.recorder.save(),
    'time': core.get_time(),
    'counts': dict(core.counts),
    'has_begun': core.has_begun,
    'end_reason': None if core.is_interrupted else core.end_reason,
    'is_failed': core.is_failed,
    'is_diverged': core.is_diverged,
  }


def resume(
  core: _core.Core,
  state: Any,
  buffers: list[np.ndarray],
  position: dict[str, Any],
) -> None:
  """Goes on from a checkpoint, and says what was lost.

  Args:
    core: A run that has not begun.
    state: The engine's state.
    buffers: The bytes of the snapshots.
    position: What `make_position` gave.
  """
  core.set_time(position['time'])
  core.weights.restore(state, position)
  core.journal.samples = core.weights.samples
  core.protocol.restore(position['protocol'])
  _restore_snapshots(core, buffers, position)
  core.counts.update(position['counts'])
  core.recorder.restore(position['recorder'])
  core.has_begun = position['has_begun']
  num_lost = core.recorder.num_records - position['records']
  core.incarnation = core.recorder.find_incarnation() + 1
  core.recorder.incarnation = core.incarnation
  core.journal.note_server(traces.Kind.RESTART, step=position['records'] - 1)
  _log.warning(
    'Incarnation %d goes on from the checkpoint of clock %d; %d records that '
    'came after it are void.',
    core.incarnation,
    core.weights.clock,
    num_lost,
  )


def _restore_snapshots(
  core: _core.Core, buffers: list[np.ndarray], position: dict[str, Any]
) -> None:
  """Brings back the weights that somebody needs, and who that is."""
  snapshots = [
    core.store.restore(incarnation, clock, rate, buffer)
    for (incarnation, clock, rate), buffer in zip(
      position['snapshots'], buffers, strict=True
    )
  ]
  for saved in position['books']:
    book = _books.Book.restore(saved, snapshots)
    for snapshot in book.leases.values():
      core.store.lease(snapshot)
    core.register.add(book)
  if position['evaluation'] >= 0:
    core.to_evaluate = core.store.lease(snapshots[position['evaluation']])
  for snapshot in snapshots:  # Each has its own lease now; this was ours.
    core.store.end_lease(snapshot)
