"""A server with its wires, in this process."""

from collections.abc import Callable
import contextlib
import dataclasses
import os
import threading
import time

from jasgd import workdir as workdirs
from jasgd.runtime import _flight_security
from jasgd.runtime import _inbox
from jasgd.runtime import _memory_wire
from jasgd.runtime import _queue_wire
from jasgd.runtime import _settings
from jasgd.runtime import addresses
from jasgd.runtime import server as servers

# How often a request to stop is looked at, in seconds.
_TICK = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Where a server listens.

  Attributes:
    host: Others than this machine reach no loopback address.
    port: 0: any that is free.
    wires: 'memory', 'flight', or both.
    tls: For mutual TLS.
  """

  host: str = '127.0.0.1'
  port: int = 0
  wires: tuple[str, ...] = ('memory', 'flight')
  tls: _flight_security.Tls | None = None


def serve(
  settings: _settings.ServerSettings,
  workdir: workdirs.Workdir,
  place: Place,
  *,
  stopped: threading.Event | None = None,
  on_ready: Callable[[servers.Server], None] | None = None,
  on_step: Callable[[servers.Server], None] | None = None,
) -> servers.Server:
  """Runs a server until its run is over, or stopped.

  Args:
    settings: What to do.
    workdir: Where its files go; a run that is there goes on.
    place: Where to listen.
    stopped: Set, it stops the run: the update is finished, and all is saved.
      A run that has ended waits for it too, for as long as the deadline `end`
      says, so that one can look how it ended.
    on_ready: Called when learners can come.
    on_step: Called after each step of the loop.

  Returns:
    The server, when all is over and its files are closed.
  """
  with contextlib.ExitStack() as stack:
    # One that was here before may be ending.
    stack.enter_context(
      workdirs.hold_workdir(workdir, 'server', patience=settings.deadlines.end)
    )
    server = servers.Server(
      settings, workdir, is_shared='memory' in place.wires
    )
    stack.callback(server.close)
    found = listen(server.inbox, server.layout.size, workdir, place, stack)
    addresses.write_address(
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


def _run(
  server: servers.Server,
  settings: _settings.ServerSettings,
  stopped: threading.Event | None,
  on_step: Callable[[servers.Server], None] | None,
) -> None:
  """Serves until the run is over, or stopped; then saves."""
  while not server.is_over:
    server.step(_TICK)
    if on_step is not None:
      on_step(server)
    if stopped is not None and stopped.is_set():
      server.stop('It was stopped.')
  # Whoever started it, and will stop it, may not have seen how it ended.
  deadline = time.monotonic() + settings.deadlines.end
  while stopped is not None and not stopped.is_set():
    server.step(_TICK)
    if time.monotonic() > deadline:
      break
  server.finish()


def listen(
  inbox: _inbox.Inbox,
  size: int,
  workdir: workdirs.Workdir,
  place: Place,
  stack: contextlib.ExitStack,
) -> dict[str, str]:
  """Opens the wires.

  Args:
    inbox: Where requests go.
    size: Of a payload, in bytes.
    workdir: Where the token is, or will be.
    place: Where to listen.
    stack: Closes them.

  Returns:
    Their addresses, by the names of the wires.
  """
  found = {}
  if 'memory' in place.wires:
    memory = _memory_wire.MemoryListener(inbox, size)
    stack.callback(memory.close)
    found['memory'] = memory.address
  if 'flight' in place.wires:
    # Where it is needed: pyarrow takes its time.
    from jasgd.runtime import _flight_wire

    flight = _flight_wire.FlightListener(
      inbox,
      size,
      host=place.host,
      port=place.port,
      token=addresses.make_token(workdir),
      tls=place.tls,
    )
    stack.callback(flight.close)
    found['flight'] = addresses.make_reachable(flight.address)
  return found


def serve_threads(
  settings: _settings.ServerSettings,
  workdir: workdirs.Workdir | None,
  *,
  on_ready: Callable[[_queue_wire.QueueListener], None],
  stopped: threading.Event | None = None,
  on_step: Callable[[servers.Server], None] | None = None,
) -> servers.Server:
  """Runs a server for threads of this process.

  Args:
    settings: What to do.
    workdir: Where its files go; None: nowhere.
    on_ready: Called with what gives connections, when learners can come.
    stopped: As in `serve`.
    on_step: Called after each step of the loop.

  Returns:
    The server, when all is over and its files are closed.
  """
  with contextlib.ExitStack() as stack:
    if workdir is not None:
      stack.enter_context(workdirs.hold_workdir(workdir, 'server'))
    server = servers.Server(settings, workdir)
    stack.callback(server.close)
    listener = _queue_wire.QueueListener(server.inbox, server.layout.size)
    stack.callback(listener.close)
    on_ready(listener)
    _run(server, settings, stopped, on_step)
  return server
