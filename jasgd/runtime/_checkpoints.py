"""When a server saves, and what is on lease meanwhile."""

from jasgd import workdir as workdirs
from jasgd.runtime import _core
from jasgd.runtime import _crash
from jasgd.runtime import _resuming
from jasgd.runtime import _saver
from jasgd.runtime import _snapshots


class Checkpoints:
  """Saves a run now and then; belongs to the owner's thread.

  Args:
    core: The run; its recorder is open.
    workdir: Where checkpoints go.
    crash: Where to be killed, in tests.
  """

  def __init__(
    self,
    core: _core.Core,
    workdir: workdirs.Workdir,
    crash: _crash.CrashPoints,
  ) -> None:
    self._core = core
    self._saver = _saver.Saver(
      workdir, core.recorder, crash, lambda: core.last_pid
    )
    self._leased: list[_snapshots.Snapshot] = []
    self._saved_at = core.get_time()

  @property
  def last_clock(self) -> int:
    """Of the last one; -1: there is none."""
    return self._saver.last_clock

  def save_if_due(self) -> None:
    """Begins a checkpoint if it is time, and there is anything new.

    Raises:
      OSError: if the last one could not be written.
    """
    if self._saver.is_busy:
      return
    self.wait()  # For nothing, but if it failed it is said at once.
    core = self._core
    is_time = (
      core.get_time() - self._saved_at >= core.settings.checkpoint_seconds
    )
    if is_time and self.last_clock < core.weights.clock:
      self._save()

  def finish(self) -> None:
    """Saves what was not saved yet, and waits for it."""
    self.wait()
    if self.last_clock < self._core.weights.clock:
      self._save()
      self.wait()

  def wait(self) -> None:
    """Waits until nothing is being written.

    Raises:
      OSError: if it could not be written.
    """
    self._saver.wait()
    self._end_leases()

  def _save(self) -> None:
    """Begins a checkpoint: one copy, then a thread writes it."""
    core = self._core
    self._saved_at = core.get_time()
    self._leased = [
      core.store.lease(each) for each in _resuming.list_snapshots(core)
    ]
    self._saver.save(
      core.weights.state,
      self._leased,
      _resuming.make_position(core, self._leased),
    )

  def _end_leases(self) -> None:
    """What was being saved is free again."""
    while self._leased:
      self._core.store.end_lease(self._leased.pop())
