"""Checkpoints that cost the server one copy: a thread writes them."""

from collections.abc import Callable
import errno
import logging
import threading
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import workdir as workdirs
from jasgd.runtime import _crash
from jasgd.runtime import _snapshots

_log = logging.getLogger(__name__)

# How often a checkpoint is tried again for which file descriptors were missing,
# and seconds between two tries.
_MAX_RETRIES = 60
_RETRY_PAUSE = 1.0


class Recorder(Protocol):
  """What writes the trace of a run."""

  def flush(self) -> None:
    """Hands records to the operating system: they outlive this process."""

  def sync(self) -> None:
    """Waits for the disk, for what was flushed. Any thread may call it."""


class Saver:
  """Copies the state into kept buffers, and lets a thread write them.

  Args:
    workdir: Where checkpoints go.
    recorder: Of the run; what it has written is synced first.
    crash: Where to be killed, in tests.
    find_learner: Gives a learner's process, to be killed instead.
  """

  def __init__(
    self,
    workdir: workdirs.Workdir,
    recorder: Recorder,
    crash: _crash.CrashPoints,
    find_learner: Callable[[], int],
  ) -> None:
    self._workdir = workdir
    self._recorder = recorder
    self._crash = crash
    self._find_learner = find_learner
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None
    self._kept: Any = None
    clocks = workdirs.list_checkpoints(workdir)
    self.last_clock = clocks[-1] if clocks else -1

  @property
  def is_busy(self) -> bool:
    """Whether the last checkpoint is still being written."""
    return self._thread is not None and self._thread.is_alive()

  def save(
    self,
    state: Any,
    snapshots: list[_snapshots.Snapshot],
    position: dict[str, Any],
  ) -> None:
    """Begins a checkpoint; returns after one copy. Call it if not busy.

    Args:
      state: The engine's state.
      snapshots: Those that learners use; on lease until this is written.
      position: What else there is to know; it has the clock.

    Raises:
      OSError: if the last checkpoint could not be written.
    """
    self.wait()
    if self._kept is None:
      self._kept = jax.tree.map(_make_room, state)
    self._kept = jax.tree.map(_copy, self._kept, state)
    self._recorder.flush()
    self._thread = threading.Thread(
      target=self._write, args=(snapshots, position), name='jasgd-saver'
    )
    self._thread.start()

  def wait(self) -> None:
    """Waits until nothing is being written.

    Raises:
      OSError: if it could not be written.
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    if self._error is not None:
      error, self._error = self._error, None
      raise error

  def _write(
    self, snapshots: list[_snapshots.Snapshot], position: dict[str, Any]
  ) -> None:
    try:
      self._crash.reach('checkpoint_begun', self._find_learner)
      self._recorder.sync()
      buffers = [snapshot.buffer.array for snapshot in snapshots]
      self._write_files({'server': self._kept, 'snapshots': buffers}, position)
      self.last_clock = position['clock']
      self._crash.reach('checkpoint_committed', self._find_learner)
      _log.info('Saved a checkpoint of clock %d.', position['clock'])
    except BaseException as error:  # The owner raises it.
      self._error = error

  def _write_files(self, state: Any, position: dict[str, Any]) -> None:
    """Writes a checkpoint, again if there were too many open files.

    Strangers who connect in great numbers take file descriptors until they are
    cut off, which takes a second or so: that must not end a run.
    """
    clock = position['clock']
    for retries_left in reversed(range(_MAX_RETRIES + 1)):
      try:
        is_retry = retries_left < _MAX_RETRIES
        if is_retry and clock in workdirs.list_checkpoints(self._workdir):
          return  # All but the removal of older ones was done.
        workdirs.save_checkpoint(
          self._workdir,
          clock,
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
          'The checkpoint of clock %d is tried again, as there are too many '
          'open files: %s',
          clock,
          error,
        )
        time.sleep(_RETRY_PAUSE)


def _is_shortage(error: BaseException | None) -> bool:
  """Whether an error comes from a lack of file descriptors."""
  while error is not None:
    number = error.errno if isinstance(error, OSError) else None
    # Tensorstore says it in words only.
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
  """A copy that does not change any more, in kept memory if possible."""
  if _is_key(leaf):
    return jax.block_until_ready(jnp.copy(leaf))
  np.copyto(kept, np.asarray(leaf))
  return kept


def _is_key(leaf: jax.Array) -> bool:
  """Whether an array is of keys, which numpy knows nothing of."""
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def restore(
  workdir: workdirs.Workdir, state: Any, size: int, clock: int | None = None
) -> tuple[Any, list[np.ndarray], dict[str, Any]] | None:
  """What a checkpoint holds: state, snapshots and position.

  Args:
    workdir: Where checkpoints are.
    state: One like it.
    size: Of a snapshot, in bytes.
    clock: Which checkpoint; the last one if None.

  Returns:
    None if there is no checkpoint.
  """
  position = workdirs.read_position(workdir, clock)
  if position is None:
    return None
  row = jax.ShapeDtypeStruct((size,), np.uint8)
  like = {
    'server': jax.eval_shape(lambda: state),
    'snapshots': [row] * len(position['snapshots']),
  }
  found = workdirs.restore_checkpoint(workdir, like, clock)
  assert found is not None  # There was one just now, and nobody removes it.
  _, restored, position = found
  return (
    restored['server'],
    [np.asarray(buffer) for buffer in restored['snapshots']],
    position,
  )
