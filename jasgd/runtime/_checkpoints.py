"""Checkpoints of a server or a node: a thread writes a copy of the state."""

from collections.abc import Callable, Sequence
import errno
import logging
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import workdir as workdirs
from jasgd.runtime import _crash
from jasgd.runtime import _recorder
from jasgd.runtime import _snapshots

_log = logging.getLogger(__name__)

# Number of retries of a checkpoint that failed for lack of file descriptors,
# and the seconds between two tries.
_MAX_RETRIES = 60
_RETRY_PAUSE = 1.0


class Checkpoints:
  """Copies the state into kept buffers, and lets a thread write them.

  Only the thread that owns the state may call its methods.

  Args:
    workdir: Folder of the checkpoints.
    recorder: Recorder of the trace.
    seconds: Seconds between two checkpoints.
    store: Store of the snapshots that are saved, if any are.
    get_time: Function that gives the time in seconds.
    crash: Crash points, for tests; None: there are none.

  Attributes:
    last_version: Version of the last checkpoint; -1: there is none.
  """

  def __init__(
    self,
    workdir: workdirs.Workdir,
    recorder: _recorder.Recorder,
    seconds: float,
    *,
    store: _snapshots.SnapshotStore | None = None,
    get_time: Callable[[], float] = time.monotonic,
    crash: _crash.CrashPoints | None = None,
  ) -> None:
    versions = workdirs.list_checkpoints(workdir)
    self.last_version = versions[-1] if versions else -1
    self._workdir = workdir
    self._recorder = recorder
    self._seconds = seconds
    self._store = store
    self._get_time = get_time
    self._crash = crash
    self._saved_at = get_time()
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None
    self._leased: list[_snapshots.Snapshot] = []
    self._kept: Any = None

  @property
  def is_due(self) -> bool:
    """Whether the last checkpoint was begun at least `seconds` ago."""
    return self._get_time() - self._saved_at >= self._seconds

  def is_ready(self, version: int) -> bool:
    """Whether a checkpoint of a version is due, new, and can begin now.

    Raises:
      OSError: if the last checkpoint could not be written.
    """
    if self._thread is not None and self._thread.is_alive():
      return False
    self.wait()  # Returns immediately, but raises if the last one failed.
    return self.is_due and self.last_version < version

  def save(
    self,
    state: Any,
    position: dict[str, Any],
    snapshots: Sequence[_snapshots.Snapshot] = (),
  ) -> None:
    """Begins a checkpoint; returns after one copy.

    Args:
      state: State with `params` and `stats`, which is copied.
      position: The other parts of the state, JSON-serialisable; `clock` is the
        version.
      snapshots: Snapshots to save. They are leased until they are written.

    Raises:
      OSError: if the last checkpoint could not be written.
    """
    self.wait()
    self._saved_at = self._get_time()
    if self._store is not None:
      self._leased = [self._store.lease(each) for each in snapshots]
    if self._kept is None:
      self._kept = jax.tree.map(_make_room, state)
    # Copied before this returns: the owner's next call donates the state.
    self._kept = jax.tree.map(_copy, self._kept, state)
    # Flushed before this returns: the position refers to all records until now.
    self._recorder.flush()
    self._thread = threading.Thread(
      target=self._write, args=(position,), name='jasgd-checkpoints'
    )
    self._thread.start()

  def wait(self) -> None:
    """Waits until the last checkpoint is written.

    Raises:
      OSError: if it could not be written.
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    while self._leased:
      assert self._store is not None
      self._store.end_lease(self._leased.pop())
    if self._error is not None:
      error, self._error = self._error, None
      raise error

  def _write(self, position: dict[str, Any]) -> None:
    try:
      if self._crash:
        self._crash.maybe_crash('checkpoint_begun')
      # Before the checkpoint: after a loss of power, it must not refer to
      # records that are not on disk.
      self._recorder.sync()
      buffers = [snapshot.buffer.array for snapshot in self._leased]
      self._write_files({'server': self._kept, 'snapshots': buffers}, position)
      self.last_version = position['clock']
      if self._crash:
        self._crash.maybe_crash('checkpoint_committed')
      _log.info('Saved a checkpoint of version %d.', position['clock'])
    except BaseException as error:  # The owner raises it, in `wait`.
      self._error = error

  def _write_files(self, state: Any, position: dict[str, Any]) -> None:
    """Writes a checkpoint; tries again if there are too many open files.

    Many connections of strangers take file descriptors until they are cut,
    which takes about a second: that must not end a run.
    """
    version = position['clock']
    for retries_left in reversed(range(_MAX_RETRIES + 1)):
      try:
        is_retry = retries_left < _MAX_RETRIES
        if is_retry and version in workdirs.list_checkpoints(self._workdir):
          return  # Only the removal of older ones has failed.
        workdirs.save_checkpoint(
          self._workdir,
          version,
          state,
          position=position,
          params=self._kept.params,
          stats=self._kept.stats,
        )
        return
      except Exception as error:  # Orbax has classes of its own.
        if not retries_left or not _is_shortage(error):
          raise
        _log.warning(
          'The checkpoint of version %d is tried again, as there are too many '
          'open files: %s',
          version,
          error,
        )
        time.sleep(_RETRY_PAUSE)


def restore(
  workdir: workdirs.Workdir, state: Any, size: int, version: int | None = None
) -> tuple[Any, list[np.ndarray], dict[str, Any]] | None:
  """Reads a checkpoint.

  Args:
    workdir: Folder of the checkpoints.
    state: State of the same structure, shapes and dtypes.
    size: Bytes of a snapshot.
    version: Version of the checkpoint; None: the last one.

  Returns:
    State, snapshots and position; None if there is no checkpoint.
  """
  position = workdirs.read_position(workdir, version)
  if position is None:
    return None
  row = jax.ShapeDtypeStruct((size,), np.uint8)
  like = {
    'server': jax.eval_shape(lambda: state),
    'snapshots': [row] * len(position['snapshots']),
  }
  found = workdirs.restore_checkpoint(workdir, like, version)
  assert found is not None  # Its position was read just now.
  _, restored, position = found
  return (
    restored['server'],
    [np.asarray(buffer) for buffer in restored['snapshots']],
    position,
  )


def _is_shortage(error: BaseException | None) -> bool:
  """Whether an error comes from a lack of file descriptors."""
  while error is not None:
    number = error.errno if isinstance(error, OSError) else None
    # Tensorstore has no error number, only the text.
    if number in (errno.EMFILE, errno.ENFILE) or 'too many open files' in (
      str(error).lower()
    ):
      return True
    error = error.__cause__ or error.__context__
  return False


def _make_room(leaf: jax.Array) -> Any:
  """Memory for a copy of an array."""
  return np.empty(0) if _is_key(leaf) else np.empty_like(leaf)


def _copy(kept: np.ndarray, leaf: jax.Array) -> Any:
  """A copy of an array that is donated later, in kept memory if possible."""
  if _is_key(leaf):
    return jax.block_until_ready(jnp.copy(leaf))
  np.copyto(kept, np.asarray(leaf))
  return kept


def _is_key(leaf: jax.Array) -> bool:
  """Whether an array holds random keys, which numpy cannot hold."""
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
