"""Where a node, or the centre, lives: its files, its wires, its host."""

from collections.abc import Callable
import contextlib
import os
import threading
import time
from typing import Any

from jasgd import engine
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _crash
from jasgd.runtime import _host
from jasgd.runtime import _node_books
from jasgd.runtime import _node_settings
from jasgd.runtime import _saver
from jasgd.runtime import _settings
from jasgd.runtime import addresses
from jasgd.runtime import hosting
from jasgd.runtime import members


class Station:
  """The files and wires of a node, or of the centre.

  Args:
    settings: What it was told.
    run: The folder of the run.
    node: Its number, or `traces.CENTRE`.
    registry: Where others are.
    take: Gets what others send.
    describe: How it stands, as JSON can say it.
    wires: On which it will listen.

  Attributes:
    folder: Its own folder, in that of the run.
    layout: Of weights, as they travel.
    fingerprint: By which others know that it learns the same.
    book: Its trace.
    host: Shows its weights.
    met: Numbers of all who have come.
    returned: Those who were started again since, and came back; its owner
      may forget them.
  """

  def __init__(
    self,
    settings: _node_settings.NodeSettings,
    run: workdirs.Workdir,
    node: int,
    registry: members.Registry,
    *,
    take: _host.Take,
    describe: Callable[[], dict[str, Any]],
    wires: tuple[str, ...],
  ) -> None:
    self._stack = contextlib.ExitStack()
    self._settings = settings
    self._run = run
    self._node = node
    self._registry = registry
    self.met: set[int] = set()
    self.returned: set[int] = set()
    self._since: dict[int, float] = {}
    self.folder = members.find_folder(run, node)
    self._stack.enter_context(
      workdirs.hold_workdir(
        self.folder, 'node', patience=settings.deadlines.end
      )
    )
    try:
      workdirs.set_aside_broken(self.folder)
    except BaseException:
      self._stack.close()
      raise
    self.layout = settings.make_layout()
    self.fingerprint = _settings.make_fingerprint(
      settings.task, self.layout, settings.seed, settings.way
    )
    name = 'centre' if node == traces.CENTRE else f'node-{node}'
    self.book = _node_books.NodeBook(
      run.trace / name, self._make_header(), node, settings.origin
    )
    self._stack.callback(self.book.close)
    self.host = _host.Host(
      self.layout,
      self.fingerprint,
      is_shared='memory' in wires,
      take=take,
      describe=lambda: self._describe(describe()),
      meet=self._meet,
    )
    self._stack.callback(self.host.close)
    self._saved_at = time.monotonic()
    self._saver = _saver.Saver(
      self.folder, self.book, _crash.CrashPoints(''), lambda: 0
    )

  def _describe(self, status: dict[str, Any]) -> dict[str, Any]:
    """What others hear of it."""
    began_with = status.get('began_with', ())
    return {
      **status,
      'node': self._node,
      # Who was started again has begun with nobody yet.
      'began_with': [each for each in began_with if each not in self.returned],
      'num_sent': self.host.num_sent,
      'num_refused': self.host.num_refused,
      'origin': self.book.origin,
      'members': self._registry.tell(),
    }

  def _make_header(self) -> dict[str, Any]:
    """What replay and reports need to know."""
    settings = self._settings
    means: dict[str, Any] = {}
    if settings.strategy.is_collective:
      means['messages_per_mean'] = engine.count_mean_messages(
        self.layout.size, settings.num_nodes
      )
    return {
      **settings.header,
      **means,
      'is_recorded': True,
      'strategy': settings.strategy.describe(),
      'averages': settings.averages,
      'num_nodes': settings.num_nodes,
      'num_steps': settings.num_steps,
      'bytes_per_message': self.layout.size,
      'wire_dtype': settings.wire_dtype,
    }

  def restore(
    self, state: Any, start: dict[str, Any]
  ) -> tuple[Any, dict[str, Any]] | None:
    """State and position to go on from; None if it has never been here.

    Args:
      state: The first one, or one like it.
      start: The position of the first one, for a process that was killed before
        its first checkpoint.

    Returns:
      Both.
    """
    found = _saver.restore(self.folder, state, self.layout.size)
    if found is not None:
      return found[0], found[2]
    return (state, start) if self.book.last_version else None

  def find_steps(self) -> dict[int, int]:
    """The clocks of all checkpoints, by their steps."""
    found = {}
    for clock in workdirs.list_checkpoints(self.folder):
      position = workdirs.read_position(self.folder, clock)
      assert position is not None  # It is in the list.
      found[position['step']] = clock
    return found

  def load(self, state: Any, clock: int) -> tuple[Any, dict[str, Any]]:
    """State and position of a checkpoint.

    Args:
      state: One like it.
      clock: Which one.

    Returns:
      Both.
    """
    found = _saver.restore(self.folder, state, self.layout.size, clock)
    assert found is not None  # Somebody has seen it.
    return found[0], found[2]

  @property
  def is_due(self) -> bool:
    """Whether the last checkpoint is old."""
    age = time.monotonic() - self._saved_at
    return age > self._settings.checkpoint_seconds

  def save_if_due(self, state: Any, position: dict[str, Any]) -> None:
    """Begins a checkpoint if the last one is old, and something has changed.

    Args:
      state: Like an `engine.NodeState`; it is copied.
      position: What else there is to know; it has the version as `clock`.
    """
    if self.is_due and not self._saver.is_busy:
      self.save(state, position)

  def finish(self, state: Any, position: dict[str, Any]) -> None:
    """Saves the last state, and says in the trace that this is the end.

    Args:
      state: As in `save_if_due`.
      position: As in `save_if_due`; what it has in common with a record is
        written there too.
    """
    self.save(state, position)
    self._saver.wait()
    row = {
      'version': position['clock'],
      'step': position['step'],
      'mass': position['mass'],
    }
    self.book.write(traces.NodeKind.END, [row])

  def save(self, state: Any, position: dict[str, Any]) -> None:
    """Begins a checkpoint, if something has changed since the last one."""
    self._saver.wait()
    self._saved_at = time.monotonic()
    if position['clock'] != self._saver.last_clock:
      self._saver.save(state, [], {**position, 'snapshots': []})

  def open(self, place: hosting.Place) -> None:
    """Lets others come: the host answers them, in a thread of its own."""
    found = hosting.listen(
      self.host.inbox, self.layout.size, self._run, place, self._stack
    )
    self._came_at = time.time()
    self._address = found.get('flight')
    if self._address is not None:
      self._registry.note(self._node, self._address, self._came_at)
    self._thread = threading.Thread(target=self.host.run, name='jasgd-host')
    self._thread.start()
    # Before the listeners are closed, which its thread owns.
    self._stack.callback(self.hang_up)
    addresses.write_address(
      self.folder, found, pid=os.getpid(), fingerprint=self.fingerprint
    )
    self._stack.callback(self.folder.server.unlink, missing_ok=True)

  def _meet(self, node: int, address: str | None, since: float) -> None:
    """Somebody has come, who can be found at an address."""
    self.met.add(node)
    if self._since.setdefault(node, since) != since:
      self._since[node] = since
      self.returned.add(node)
    if address is not None:
      self._registry.note(node, address, since)

  def greet(self) -> str:
    """What it says to others when it comes: who it is, and where."""
    return _host.make_greeting(
      self.fingerprint, self._node, self._address, self._came_at
    )

  def hang_up(self) -> None:
    """Answers nobody any more. Twice is no error.

    Raises:
      OSError: or whatever else has ended the host before.
    """
    self.host.stop()
    self._thread.join()
    self.host.check()

  def close(self) -> None:
    """Hangs up, and closes all files."""
    try:
      self._saver.wait()
    finally:
      self._stack.close()
