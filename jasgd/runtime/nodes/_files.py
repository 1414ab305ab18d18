"""Files and wires of a node, or of the centre."""

from collections.abc import Callable
import contextlib
import os
import threading
import time
from typing import Any

from jasgd import engine
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _checkpoints
from jasgd.runtime import _recorder
from jasgd.runtime import _settings
from jasgd.runtime.nodes import _registry
from jasgd.runtime.nodes import _snapshot_server
from jasgd.runtime.wires import _addresses


class NodeFiles:
  """Folder, trace, checkpoints and snapshot server of a node or of the centre.

  Args:
    settings: Settings of the run.
    run: Folder of the run.
    node: Number of the node, or `traces.SERVER`.
    registry: Addresses of other nodes.
    receive: Function that takes the messages of other nodes.
    describe: Function that gives the status, a JSON-serialisable dict.
    on_gone: Function called with the number of a node whose process has ended:
      a launcher says that it is dead, or a new process of the node says HELLO.
    wires: Names of the wires that will be opened.

  Attributes:
    folder: Own folder of the node, in the folder of the run.
    layout: Layout of weights in messages.
    origin: Unix time at which the run began: times in records count from it.
      Other nodes may know an earlier one, which then replaces it.
    recorder: Recorder of the node's trace.
    snapshots: Snapshot server of the node.
    met: Numbers of all nodes that have contacted this one.
    returned: Numbers of those that were restarted and have contacted this node
      again; the owner may clear them.
  """

  def __init__(
    self,
    settings: _settings.NodeSettings,
    run: workdirs.Workdir,
    node: int,
    registry: _registry.Registry,
    *,
    receive: _snapshot_server.Receive,
    describe: Callable[[], dict[str, Any]],
    on_gone: Callable[[int], None],
    wires: tuple[str, ...],
  ) -> None:
    self._stack = contextlib.ExitStack()
    self._settings = settings
    self._run = run
    self._node = node
    self._registry = registry
    self._owner_status = describe
    self._on_gone = on_gone
    self.met: set[int] = set()
    self.returned: set[int] = set()
    self._started_at: dict[int, float] = {}
    self.folder = _registry.find_folder(run, node)
    self._stack.enter_context(
      workdirs.hold_workdir(
        self.folder, 'node', patience=settings.deadlines.end
      )
    )
    self.layout = settings.make_layout()
    self.origin = settings.origin
    try:
      self.recorder = self._open_trace()
    except BaseException:
      self._stack.close()
      raise
    self._fingerprint = _settings.make_fingerprint(
      settings.task, self.layout, settings.seed, settings.fingerprint_text
    )
    self.snapshots = _snapshot_server.SnapshotServer(
      self.layout,
      self._fingerprint,
      is_shared='memory' in wires,
      receive=receive,
      describe=self._describe,
      on_node=self._note_node,
    )
    self._stack.callback(self.snapshots.close)
    self._checkpoints = _checkpoints.Checkpoints(
      self.folder, self.recorder, settings.checkpoint_seconds
    )

  def _open_trace(self) -> _recorder.Recorder:
    """Opens the trace, which must agree with the checkpoints."""
    workdirs.set_aside_broken(self.folder)
    versions = workdirs.list_checkpoints(self.folder)
    recorder = _recorder.Recorder(
      self._run.trace / traces.get_file_name(self._node),
      self._make_header(),
      self._node,
      lambda: time.time() - self.origin,
      has_checkpoint=bool(versions),
    )
    self._stack.callback(recorder.close)
    recorder.check_node(max(versions, default=0))
    return recorder

  def _describe(self) -> dict[str, Any]:
    """Status for other processes."""
    status, desk = self._owner_status(), self.snapshots.desk
    began_with = status.get('began_with', ())
    return {
      **status,
      'node': self._node,
      # A node that was restarted since has not begun yet.
      'began_with': [each for each in began_with if each not in self.returned],
      'num_sent': desk.num_sent,
      'num_refused': desk.num_refused,
      'origin': self.origin,
      'members': self._registry.list_addresses(),
    }

  def _make_header(self) -> dict[str, Any]:
    """Header of the trace, with all data that replay and reports need."""
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
      'strategy': settings.strategy.to_config(),
      'description': settings.strategy.describe(),
      'averages': settings.averages,
      'num_workers': settings.num_nodes,
      'num_steps': settings.num_steps,
      'batch': settings.task.batch,
      'checkpoint_seconds': settings.checkpoint_seconds,
      'bytes_per_push': self.layout.size,
      'wire_dtype': settings.wire_dtype,
    }

  # --- Checkpoints.

  def restore(
    self, state: Any, start: dict[str, Any]
  ) -> tuple[Any, dict[str, Any]] | None:
    """Finds the state to resume from.

    Args:
      state: First state.
      start: Position of the first state, for a process that was killed before
        its first checkpoint.

    Returns:
      State and position; None if the node is new.
    """
    found = _checkpoints.restore(self.folder, state, self.layout.size)
    if found is not None:
      return found[0], found[2]
    return (state, start) if self.recorder.last_version else None

  def find_steps(self) -> dict[int, int]:
    """Versions of all checkpoints, by their steps."""
    found = {}
    for version in workdirs.list_checkpoints(self.folder):
      position = workdirs.read_position(self.folder, version)
      assert position is not None  # It is in the list.
      found[position['step']] = version
    return found

  def load(self, state: Any, version: int) -> tuple[Any, dict[str, Any]]:
    """State and position of a checkpoint; `state` has the same structure."""
    found = _checkpoints.restore(self.folder, state, self.layout.size, version)
    assert found is not None  # It was listed before.
    return found[0], found[2]

  @property
  def is_due(self) -> bool:
    """Whether a checkpoint is due."""
    return self._checkpoints.is_due

  def save_if_due(self, state: Any, position: dict[str, Any]) -> None:
    """Begins a checkpoint if it is due, and something has changed."""
    if self._checkpoints.is_ready(position['clock']):
      self.save(state, position)

  def save(self, state: Any, position: dict[str, Any]) -> None:
    """Begins a checkpoint, if something has changed since the last one.

    Args:
      state: Like an `engine.NodeState`; it is copied.
      position: The other parts of the state, JSON-serialisable; `clock` is the
        version.
    """
    self._checkpoints.wait()
    if self._checkpoints.last_version < position['clock']:
      self._checkpoints.save(state, {**position, 'snapshots': []})

  def finish(self, state: Any, position: dict[str, Any]) -> None:
    """Saves the last state, and records the end."""
    self.save(state, position)
    self._checkpoints.wait()
    row = {
      'version': position['clock'],
      'step': position['step'],
      'mass': position['mass'],
    }
    self.recorder.write(traces.Kind.END, row)

  # --- Wires.

  def open(self, bind: _addresses.BindAddress) -> None:
    """Opens the wires, and starts the thread of the snapshot server."""
    found = _addresses.listen(
      self.snapshots.inbox, self.layout.size, self._run, bind, self._stack
    )
    self._since = time.time()
    self._address = found.get('flight')
    if self._address is not None:
      self._registry.add(self._node, self._address, self._since)
    self._thread = threading.Thread(
      target=self.snapshots.run, name='jasgd-snapshots'
    )
    self._thread.start()
    # The stack calls this before it closes the listeners, which the thread
    # uses.
    self._stack.callback(self.close_snapshots)
    # Last: a client that finds this file can connect, and is answered.
    _addresses.write_address(
      self.folder, found, pid=os.getpid(), fingerprint=self._fingerprint
    )
    self._stack.callback(self.folder.server.unlink, missing_ok=True)

  def _note_node(self, node: int, address: str | None, since: float) -> None:
    """Notes a node that has contacted this one."""
    self.met.add(node)
    if self._started_at.setdefault(node, since) != since:
      self._started_at[node] = since
      self.returned.add(node)
      self._on_gone(node)
    if address is not None:
      self._registry.add(node, address, since)

  def make_hello(self) -> str:
    """Text of the HELLO to other nodes."""
    return _snapshot_server.make_hello(
      self._fingerprint, self._node, self._address, self._since
    )

  def close_snapshots(self) -> None:
    """Ends the snapshot server's thread. Calling it twice is no error.

    Raises:
      Exception: if an error has ended the thread before.
    """
    self.snapshots.stop()
    self._thread.join()
    self.snapshots.check()

  def close(self) -> None:
    """Closes wires and files."""
    try:
      self._checkpoints.wait()
    finally:
      self._stack.close()
