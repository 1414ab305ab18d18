"""Bounds the connections of strangers to a Flight server.

gRPC accepts every connection that comes, and each one takes a file descriptor,
which the run needs for its own files. The limits that gRPC has for this are not
open to users of pyarrow: `FlightServerBase` takes no options of gRPC. A proxy
in front of it would cost each message a copy.

So a thread watches the sockets below gRPC. A connection without an open
exchange may stay for some seconds. Of connections without a call that had the
token, only some may be there at a time; the oldest are cut first, so that
newcomers can still show their token. The thread wakes when a connection comes,
and once a second; it never touches a connection with an open exchange.

The bound is not exact: gRPC accepts some 10,000 connections a second, and the
thread needs some milliseconds to wake. So the limit of open files is raised far
above the bound, and the thread does its work even if no file descriptor is
left: gRPC tries again a second later, and the strangers are gone by then.
"""

from collections.abc import Callable
import logging
import os
import resource
import select
import threading
import time

from jasgd.runtime import _flight_sockets

_log = logging.getLogger(__name__)

# File descriptors that stay free for the run's own files.
RESERVE = 256
# The fewest clients that a server has room for, however low the limit is.
_MIN_CHANNELS = 16
# Seconds between two looks, if no connection comes.
_INTERVAL = 1.0
# Seconds from the arrival of a connection to the look at it: gRPC accepts it
# meanwhile, and a flood of connections does not keep this thread busy.
_PAUSE = 0.01
# Open files that a process is to be allowed, if the system permits it.
_LIMIT = 1 << 14


def make_room(max_channels: int, max_strangers: int) -> int:
  """Raises the limit of file descriptors of this process, if it is too low.

  Args:
    max_channels: Clients that are to have a connection.
    max_strangers: Connections besides those.

  Returns:
    Clients that may have one: fewer if the system does not allow as many file
    descriptors.
  """
  wanted = max(_LIMIT, max_channels + max_strangers + RESERVE)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY or soft >= wanted:
    return max_channels
  allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
  resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
  room = max(_MIN_CHANNELS, allowed - max_strangers - RESERVE)
  if room < max_channels:
    _log.warning(
      'There is room for %d clients, as this process may have only %d open '
      'files. Raise the hard limit (ulimit -Hn) for more.',
      room,
      allowed,
    )
  return min(room, max_channels)


class ConnectionGuard:
  """Cuts connections that are idle, or too many; a thread does the work.

  Args:
    port: Where the server listens.
    find_served: Gives the peers, as gRPC writes them, that have an open
      exchange.
    on_cut: Called with a peer, a word and a text for each connection that is
      cut.
    max_strangers: Connections without a call that had the token.
    patience: Seconds that a connection may have no exchange.
  """

  def __init__(
    self,
    port: int,
    *,
    find_served: Callable[[], set[str]],
    on_cut: Callable[[str, str, str], None],
    max_strangers: int,
    patience: float,
  ) -> None:
    self._end = f':{port}'
    self._find_served = find_served
    self._on_cut = on_cut
    self._max_strangers = max_strangers
    self._patience = patience
    # When each connection came, or was last seen with an exchange.
    self._since: dict[_flight_sockets.Ends, float] = {}
    # Connections that gRPC has not closed yet, though they were cut.
    self._cut: set[_flight_sockets.Ends] = set()
    self._known: set[str] = set()
    self._lock = threading.Lock()  # Guards `_known`.
    self._waker, self._alarm = os.pipe()
    self._listeners = _flight_sockets.find_listeners(port)
    self._thread = threading.Thread(
      target=self._run, name='jasgd-guard', daemon=True
    )
    self._thread.start()

  def recognize(self, peer: str) -> None:
    """Counts a connection no longer as a stranger's: a call had the token."""
    with self._lock:
      self._known.add(peer)

  def close(self) -> None:
    """Ends the thread."""
    os.write(self._alarm, b'!')
    self._thread.join()
    for listener in self._listeners:
      listener.close()
    os.close(self._waker)
    os.close(self._alarm)

  def _run(self) -> None:
    arrivals, alarm = select.poll(), select.poll()
    for poller in (arrivals, alarm):
      poller.register(self._waker, select.POLLIN)
    for listener in self._listeners:
      arrivals.register(listener.fileno(), select.POLLIN)
    while True:
      arrivals.poll(_INTERVAL * 1000)
      if alarm.poll(_PAUSE * 1000):
        return
      self._look()

  def _look(self) -> None:
    """Cuts what is to be cut."""
    chosen = self._choose()
    if chosen:
      _flight_sockets.cut_connections(chosen.__contains__)
    self._cut.update(chosen)
    for ends, (word, text) in chosen.items():
      self._on_cut(ends.there, word, text)

  def _choose(self) -> dict[_flight_sockets.Ends, tuple[str, str]]:
    """The connections to cut, each with a word and a text."""
    with self._lock:
      known = set(self._known)
    found = _flight_sockets.find_connections(
      lambda ends: ends.here.endswith(self._end)
    )
    # After the connections, so that each one that is served is known to be.
    served = self._find_served()
    now = time.monotonic()
    self._cut &= found
    self._since = {
      ends: now if ends.there in served else self._since.get(ends, now)
      for ends in found - self._cut
    }
    with self._lock:  # Only those are forgotten that were there before.
      self._known -= known - {ends.there for ends in found}
      known = served | self._known
    chosen, strangers = {}, []
    for ends, since in sorted(self._since.items(), key=lambda item: item[1]):
      if ends.there not in served and now - since > self._patience:
        text = f'There was no exchange for {self._patience:g} s.'
        chosen[ends] = ('idle', text)
      elif ends.there not in known:
        strangers.append(ends)
    for ends in strangers[: max(0, len(strangers) - self._max_strangers)]:
      text = f'There are {self._max_strangers} connections without a token.'
      chosen[ends] = ('crowded', text)
    return chosen
