"""The common base of the members of a run without a server."""

import threading
from typing import Any

from jasgd import workdir as workdirs
from jasgd.runtime import _settings
from jasgd.runtime.nodes import _files
from jasgd.runtime.nodes import _registry
from jasgd.runtime.wires import _addresses
from jasgd.runtime.wires import _messages


class Member:
  """A member of a run, in this process; its method `run` does the work.

  Args:
    settings: Settings of the run.
    run: Folder of the run; a member that has files in it is resumed from its
      last checkpoint.
    registry: Addresses of the other members.
    bind: Address to listen at.
    node: Number of the node; for the centre, `traces.SERVER`.
    linger: Seconds for which it still answers after all nodes have made their
      steps, unless it is stopped: its launcher may want to evaluate it.
    stopped: Event that ends it after saving. In an all-reduce, all nodes end.
  """

  def __init__(
    self,
    settings: _settings.NodeSettings,
    run: workdirs.Workdir,
    registry: _registry.Registry,
    bind: _addresses.BindAddress,
    *,
    node: int,
    linger: float,
    stopped: threading.Event | None,
  ) -> None:
    self._settings = settings
    self._node = node
    self._registry = registry
    self._bind = bind
    self._linger = linger
    self._stopped = threading.Event() if stopped is None else stopped
    self._files = _files.NodeFiles(
      settings,
      run,
      node,
      registry,
      receive=self._receive,
      describe=self.describe,
      on_gone=self._note_gone,
      wires=bind.wires,
    )

  def describe(self) -> dict[str, Any]:
    """Status, as a JSON-serialisable dict."""
    raise NotImplementedError

  def _receive(self, message: _messages.Message) -> int:
    """Takes in a message of a node, in the snapshot server's thread."""
    raise NotImplementedError

  def _note_gone(self, node: int) -> None:
    """Notes that a process of a node has ended, in the same thread."""

  def _is_stopping(self) -> bool:
    """Whether it must end; raises errors of the snapshot server."""
    self._files.snapshots.check()
    return self._stopped.is_set() or self._files.snapshots.stopped.is_set()
