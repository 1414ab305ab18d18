"""The sockets below gRPC.

Flight offers a server no way to end a call that waits for its client, and its
`shutdown` waits for such calls forever. A client can cancel a call, but not
while it writes to a server that reads no more. When their socket is shut down,
all of them end at once.
"""

from collections.abc import Callable, Iterator
import contextlib
import ipaddress
import os
import socket
from typing import NamedTuple
import urllib.parse


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
  for entry in os.listdir('/proc/self/fd'):
    try:
      if not os.readlink(f'/proc/self/fd/{entry}').startswith('socket:'):
        continue
      # A copy, which nobody else closes.
      connection = socket.socket(fileno=os.dup(int(entry)))
    except OSError:  # It was closed meanwhile.
      continue
    with connection:
      if connection.family not in (socket.AF_INET, socket.AF_INET6):
        continue
      try:
        ends = Ends(
          _name(connection.getsockname()), _name(connection.getpeername())
        )
      except OSError:  # It is not connected.
        continue
      yield ends, connection


def _name(place: tuple[str, int]) -> str:
  """An end, as gRPC writes it."""
  host, port = place[:2]
  address = ipaddress.ip_address(host)
  if isinstance(address, ipaddress.IPv6Address):
    if address.ipv4_mapped is None:
      return f'ipv6:{urllib.parse.quote(f"[{address}]", safe=":")}:{port}'
    address = address.ipv4_mapped
  return f'ipv4:{address}:{port}'
