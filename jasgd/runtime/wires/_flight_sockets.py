"""The sockets below gRPC: to cut connections, and to bound their number.

A Flight server cannot end a call that waits for its client, and its `shutdown`
waits for such calls forever. A client can cancel a call, but not while it
writes to a server that reads no more. When the socket is shut down, all of
these calls end at once.
"""

from collections.abc import Callable, Iterator
import contextlib
import errno
import functools
import ipaddress
import logging
import os
import resource
import select
import socket
import threading
import time
from typing import NamedTuple
import urllib.parse

# Errors of a process, or of a system, that has no file descriptor left.
_SHORTAGE = (errno.EMFILE, errno.ENFILE)

_log = logging.getLogger(__name__)

# File descriptors that stay free for the run's own files.
RESERVE = 256
# The fewest clients that a server has room for, however low the limit is.
_MIN_CHANNELS = 16
# Seconds between two checks of all connections, if no new one comes.
_INTERVAL = 1.0
# Seconds from the arrival of a connection to its check: gRPC accepts it
# meanwhile, and a flood of connections does not keep this thread busy.
_PAUSE = 0.01
# Open files that a process is to be allowed, if the system permits it.
_LIMIT = 1 << 14


class Ends(NamedTuple):
  """The two ends of a connection of this process, as gRPC writes them.

  An example of an end is 'ipv4:127.0.0.1:4242'.
  """

  here: str
  there: str


def find_connections(is_meant: Callable[[Ends], bool]) -> set[Ends]:
  """Connections of this process that a function accepts."""
  return {ends for ends, _ in _iterate() if is_meant(ends)}


def cut_connections(is_meant: Callable[[Ends], bool]) -> None:
  """Shuts down the connections that a function accepts."""
  for ends, connection in _iterate():
    if is_meant(ends):
      with contextlib.suppress(OSError):  # The other side has closed it.
        connection.shutdown(socket.SHUT_RDWR)


def find_listeners(port: int) -> list[socket.socket]:
  """Copies of the sockets of this process that listen at a port."""
  found = []
  for each in _iterate_sockets():
    is_listening = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if is_listening and each.getsockname()[1] == port:
      # Not `each.dup()`, which would make gRPC's own socket blocking.
      found.append(socket.socket(fileno=os.dup(each.fileno())))
  return found


def check_port(host: str, port: int) -> None:
  """Raises an OSError if another process listens at a port.

  gRPC would share the port, and clients would reach either server.
  """
  for family, kind, protocol, _, place in socket.getaddrinfo(
    host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
  ):
    with socket.socket(family, kind, protocol) as probe:
      # Connections that have ended do not count.
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      probe.bind(place)


def _iterate() -> Iterator[tuple[Ends, socket.socket]]:
  """All connections over IP that this process has."""
  for connection in _iterate_sockets():
    try:
      ends = Ends(
        _name(connection.getsockname()), _name(connection.getpeername())
      )
    except OSError:  # It is not connected.
      continue
    yield ends, connection


def _iterate_sockets() -> Iterator[socket.socket]:
  """Iterates over the IP sockets of this process.

  Each is a copy, which no other thread closes; or the socket itself if there is
  no file descriptor for a copy. It is valid for one turn of the loop.
  """
  for descriptor in _list_descriptors():
    try:
      found = socket.socket(fileno=os.dup(descriptor))
    except OSError as error:
      if error.errno not in _SHORTAGE:
        continue  # It was closed meanwhile.
      try:
        found = socket.socket(fileno=descriptor)
      except OSError:  # It is no socket.
        continue
    try:
      if found.family in (socket.AF_INET, socket.AF_INET6):
        yield found
    finally:
      if found.fileno() == descriptor:
        found.detach()  # It belongs to gRPC.
      else:
        found.close()


def _list_descriptors() -> list[int]:
  """The file descriptors of this process that are sockets, or may be."""
  try:
    entries = os.listdir('/proc/self/fd')
  except OSError as error:
    if error.errno not in _SHORTAGE:
      raise
    # No descriptor is left to list the folder: any number may be a socket.
    return list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
  return [int(entry) for entry in entries if _is_socket(entry)]


def _is_socket(entry: str) -> bool:
  try:
    return os.readlink(f'/proc/self/fd/{entry}').startswith('socket:')
  except OSError:  # It was closed meanwhile.
    return False


def _name(place: tuple[str, int]) -> str:
  """An end, as gRPC writes it."""
  host, port = place[:2]
  return f'{_name_host(host)}:{port}'


@functools.lru_cache(maxsize=1024)
def _name_host(host: str) -> str:
  address = ipaddress.ip_address(host)
  if isinstance(address, ipaddress.IPv6Address):
    if address.ipv4_mapped is None:
      return f'ipv6:{urllib.parse.quote(f"[{address}]", safe=":")}'
    address = address.ipv4_mapped
  return f'ipv4:{address}'


def make_room(max_channels: int, max_strangers: int) -> int:
  """Raises the limit of file descriptors of this process, if it is too low.

  Args:
    max_channels: Largest number of clients.
    max_strangers: Largest number of further connections.

  Returns:
    `max_channels`, or less if the system does not allow as many file
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

  gRPC accepts every connection, and each one takes a file descriptor, which the
  run needs for its own files. The limits that gRPC has for this are not open to
  users of pyarrow: `FlightServerBase` takes no options of gRPC. A proxy in
  front of it would cost each message a copy.

  So a thread watches the sockets below gRPC. A connection without an open
  exchange may stay for some seconds. The number of connections without a call
  that had the token is bounded; the oldest are cut first, so that newcomers can
  still show their token. The thread wakes when a connection comes, and once a
  second; it never touches a connection with an open exchange.

  The bound is not exact: gRPC accepts some 10,000 connections a second, and the
  thread needs some milliseconds to wake. So the limit of open files is raised
  far above the bound, and the thread works even if no file descriptor is left:
  gRPC tries again a second later, and the strangers are gone by then.

  Args:
    port: Port of the server.
    find_served: Function that gives the peers, as gRPC writes them, that have
      an open exchange.
    on_cut: Function called with peer, reason and text for each connection that
      is cut.
    max_strangers: Largest number of connections without a call that had the
      token.
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
    # Time when each connection came, or last had an exchange.
    self._since: dict[Ends, float] = {}
    # Connections that were cut, and that gRPC has not closed yet.
    self._cut: set[Ends] = set()
    self._known: set[str] = set()
    self._lock = threading.Lock()  # Guards `_known`.
    self._waker, self._alarm = os.pipe()
    self._listeners = find_listeners(port)
    self._thread = threading.Thread(
      target=self._run, name='jasgd-guard', daemon=True
    )
    self._thread.start()

  def recognize(self, peer: str) -> None:
    """Notes that a call of a peer had the token: it is no stranger."""
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
    """Cuts idle connections, and strangers that are too many."""
    chosen = self._choose()
    if chosen:
      cut_connections(chosen.__contains__)
    self._cut.update(chosen)
    for ends, (word, text) in chosen.items():
      self._on_cut(ends.there, word, text)

  def _choose(self) -> dict[Ends, tuple[str, str]]:
    """Connections to cut, each with reason and text."""
    with self._lock:
      known = set(self._known)
    found = find_connections(lambda ends: ends.here.endswith(self._end))
    # After the connections were listed: one that gets an exchange meanwhile
    # must count as served.
    served = self._find_served()
    now = time.monotonic()
    self._cut &= found
    self._since = {
      ends: now if ends.there in served else self._since.get(ends, now)
      for ends in found - self._cut
    }
    with self._lock:
      # A peer that was recognised meanwhile may not be in `found`: it stays.
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
