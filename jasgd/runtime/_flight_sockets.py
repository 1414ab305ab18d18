"""The sockets below gRPC.

Flight offers a server no way to end a call that waits for its client, and its
`shutdown` waits for such calls forever. A client can cancel a call, but not
while it writes to a server that reads no more. When their socket is shut down,
all of them end at once.
"""

from collections.abc import Callable, Iterator
import contextlib
import errno
import functools
import ipaddress
import os
import resource
import socket
from typing import NamedTuple
import urllib.parse

# Errors of a process, or of a system, that has no file descriptor left.
_SHORTAGE = (errno.EMFILE, errno.ENFILE)


class Ends(NamedTuple):
  """The two ends of a connection of this process, as gRPC writes them.

  Such as 'ipv4:127.0.0.1:4242'.
  """

  here: str
  there: str


def find_connections(is_meant: Callable[[Ends], bool]) -> set[Ends]:
  """The connections that are meant."""
  return {ends for ends, _ in _iterate() if is_meant(ends)}


def cut_connections(is_meant: Callable[[Ends], bool]) -> None:
  """Breaks the connections that are meant."""
  for ends, connection in _iterate():
    if is_meant(ends):
      with contextlib.suppress(OSError):  # The other side was faster.
        connection.shutdown(socket.SHUT_RDWR)


def find_listeners(port: int) -> list[socket.socket]:
  """Copies of the sockets of this process that listen at a port."""
  found = []
  for each in _iterate_sockets():
    is_listening = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if is_listening and each.getsockname()[1] == port:
      # Not `each.dup()`, which would make gRPC's own socket a blocking one.
      found.append(socket.socket(fileno=os.dup(each.fileno())))
  return found


def check_port(host: str, port: int) -> None:
  """Raises an OSError if someone listens at a port.

  gRPC would share it, and clients would find the one server or the other.
  """
  for family, kind, protocol, _, place in socket.getaddrinfo(
    host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
  ):
    with socket.socket(family, kind, protocol) as probe:
      # What is left of connections that have ended does not count.
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
  """Each socket for IP that this process has, for one turn of a loop.

  It is a copy, which nobody else closes; or the socket itself if there is no
  file descriptor for a copy.
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
        found.detach()  # It belongs to somebody else.
      else:
        found.close()


def _list_descriptors() -> list[int]:
  """The file descriptors of this process that are sockets, or may be."""
  try:
    entries = os.listdir('/proc/self/fd')
  except OSError as error:
    if error.errno not in _SHORTAGE:
      raise
    # There is none for the folder: all may be sockets, below the limit.
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
