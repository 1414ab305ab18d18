"""Runs a server with its wires, in this process."""

from collections.abc import Callable
import contextlib
import os
import threading
import time

from jasgd import workdir as workdirs
from jasgd.runtime import _settings
from jasgd.runtime.server import _server
from jasgd.runtime.wires import _addresses
from jasgd.runtime.wires import _queue

# Seconds between two checks for a request to stop.
_TICK = 0.1


def serve(
  settings: _settings.ServerSettings,
  workdir: workdirs.Workdir,
  bind: _addresses.BindAddress,
  *,
  stopped: threading.Event | None = None,
  on_ready: Callable[[_server.Server], None] | None = None,
  on_step: Callable[[_server.Server], None] | None = None,
) -> _server.Server:
  """Runs a server for other processes until its run is over, or stopped.

  Args:
    settings: Settings of the run.
    workdir: Folder of its files; a run that it contains is resumed.
    bind: Address to listen at.
    stopped: Event that stops the run: the current update is finished, and all
      is saved. A run that has ended waits for this event for as long as the
      deadline `end` says, so that clients can ask how it ended.
    on_ready: Function called when learners can connect.
    on_step: Function called after each step of the loop.

  Returns:
    The server, after the run is over and its files are closed.
  """
  with contextlib.ExitStack() as stack:
    # An earlier server of this workdir may be about to end.
    stack.enter_context(
      workdirs.hold_workdir(workdir, 'server', patience=settings.deadlines.end)
    )
    server = _server.Server(settings, workdir, is_shared='memory' in bind.wires)
    stack.callback(server.close)
    found = _addresses.listen(
      server.inbox, server.layout.size, workdir, bind, stack
    )
    # After `listen`: a client that finds this file can connect.
    _addresses.write_address(
      workdir,
      found,
      pid=os.getpid(),
      incarnation=server.incarnation,
      fingerprint=server.fingerprint,
    )
    stack.callback(workdir.server.unlink, missing_ok=True)
    if on_ready is not None:
      on_ready(server)
    _run(server, settings, stopped, on_step)
  return server


def serve_threads(
  settings: _settings.ServerSettings,
  workdir: workdirs.Workdir | None,
  *,
  on_ready: Callable[[_queue.QueueListener], None],
  stopped: threading.Event | None = None,
  on_step: Callable[[_server.Server], None] | None = None,
) -> _server.Server:
  """Runs a server for threads of this process.

  Args:
    settings: Settings of the run.
    workdir: Folder of its files; None: no files.
    on_ready: Function called with the listener that gives connections, when
      learners can connect.
    stopped: Event that stops the run, as in `serve`.
    on_step: Function called after each step of the loop.

  Returns:
    The server, after the run is over and its files are closed.
  """
  with contextlib.ExitStack() as stack:
    if workdir is not None:
      stack.enter_context(workdirs.hold_workdir(workdir, 'server'))
    server = _server.Server(settings, workdir)
    stack.callback(server.close)
    listener = _queue.QueueListener(server.inbox, server.layout.size)
    stack.callback(listener.close)
    on_ready(listener)
    _run(server, settings, stopped, on_step)
  return server


def _run(
  server: _server.Server,
  settings: _settings.ServerSettings,
  stopped: threading.Event | None,
  on_step: Callable[[_server.Server], None] | None,
) -> None:
  """Serves until the run is over, or stopped; then saves."""
  while not server.is_over:
    server.step(_TICK)
    if on_step is not None:
      on_step(server)
    if stopped is not None and stopped.is_set():
      server.stop('It was stopped.')
  # The launcher may not have read the reason of the end yet: answer it until it
  # stops this process.
  deadline = time.monotonic() + settings.deadlines.end
  while stopped is not None and not stopped.is_set():
    server.step(_TICK)
    if time.monotonic() > deadline:
      break
  server.finish()
