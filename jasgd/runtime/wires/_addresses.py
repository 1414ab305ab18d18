"""Addresses: where owners of weights listen, and how clients find them.

A server or node writes its addresses into its workdir, and removes them when it
ends. Clients read them at each connection, as a restarted server has others.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import socket
from typing import Any

from jasgd import workdir as workdirs
from jasgd.runtime.wires import _memory
from jasgd.runtime.wires import _security
from jasgd.runtime.wires import _wire

WIRES = ('auto', 'memory', 'flight')

_ADDRESS = re.compile(r'(grpc\+(tcp|tls)://)?[^\s/:]+(:[^\s/:]+)*:\d{1,5}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class BindAddress:
  """Address at which a server or a node listens.

  Attributes:
    host: Name or IP address; a loopback address is for this machine only.
    port: Port of Arrow Flight; 0: any free one.
    wires: Wires to open: 'memory', 'flight', or both.
    tls: Certificates for mutual TLS; None: no TLS.
  """

  host: str = '127.0.0.1'
  port: int = 0
  wires: tuple[str, ...] = ('memory', 'flight')
  tls: _security.Tls | None = None


def listen(
  inbox: _wire.Inbox,
  payload_size: int,
  workdir: workdirs.Workdir,
  bind: BindAddress,
  stack: contextlib.ExitStack,
) -> dict[str, str]:
  """Opens wires.

  Args:
    inbox: Inbox of the requests.
    payload_size: Bytes of a payload.
    workdir: Folder of the token, which is made if there is none.
    bind: Address to listen at.
    stack: Stack that closes the wires.

  Returns:
    Addresses for clients, by the names of the wires.
  """
  found = {}
  if 'memory' in bind.wires:
    memory = _memory.MemoryListener(inbox, payload_size)
    stack.callback(memory.close)
    found['memory'] = memory.address
  if 'flight' in bind.wires:
    # Imported here, as importing pyarrow takes long.
    from jasgd.runtime.wires import _flight_server

    flight = _flight_server.FlightListener(
      inbox,
      payload_size,
      host=bind.host,
      port=bind.port,
      token=_security.make_token(workdir),
      tls=bind.tls,
    )
    stack.callback(flight.close)
    found['flight'] = _make_reachable(flight.address)
  return found


def find_free_port() -> int:
  """A port of this machine that is free now.

  It is for servers that must be given a port. Another process may take it
  before the server does.
  """
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def write_address(
  workdir: workdirs.Workdir, addresses: dict[str, str], **more: Any
) -> None:
  """Writes the file by which clients find a server or a node.

  Args:
    workdir: Folder of the server or node.
    addresses: Addresses by the names of the wires.
    **more: Other fields of the file, JSON-serialisable.
  """
  workdirs.write_json(
    workdir.server,
    {'addresses': addresses, 'host': identify_host(), **more},
  )


def make_connect(
  workdir: workdirs.Workdir | None = None,
  *,
  server: str = '',
  wire: str = 'auto',
  token: str | None = None,
  tls: _security.Tls | None = None,
  deadline: float = 20.0,
) -> _wire.Connect:
  """Makes a function that connects to a server or a node.

  The function finds the server's address each time that it is called.

  Args:
    workdir: Folder with address and token of the server.
    server: Address of the server, 'HOST:PORT', if there is no workdir.
    wire: One of `WIRES`; 'auto' takes shared memory on the server's own host.
    token: Token of the server. None: from the workdir, or from the environment
      variable JASGD_TOKEN.
    tls: Certificates for mutual TLS.
    deadline: Seconds to get a connection.

  Returns:
    A function of the bytes of a payload that gives a connection.

  Raises:
    ValueError: if neither a workdir nor a server is given, or the wire is
      unknown.
  """
  if wire not in WIRES:
    raise ValueError(f'Unknown wire {wire!r}. Known: {", ".join(WIRES)}.')
  if workdir is None and not server:
    raise ValueError("Give the server's workdir or its address.")
  if server:
    check_address(server)

  def connect(payload_size: int) -> _wire.Connection:
    addresses = {'flight': _complete(server, tls)}
    if not server:
      assert workdir is not None
      addresses = _find_addresses(workdir, wire)
    if 'memory' in addresses:
      return _memory.connect_memory(addresses['memory'], payload_size, deadline)
    # Imported here, as importing pyarrow takes long.
    from jasgd.runtime.wires import _flight_client

    return _flight_client.connect_flight(
      addresses['flight'],
      payload_size,
      token=token or _security.find_token(workdir),
      tls=tls,
      deadline=deadline,
    )

  return connect


def check_address(address: str) -> None:
  """Raises a ValueError if a text is no 'HOST:PORT', with or without a scheme.

  Args:
    address: Address of an Arrow Flight server.
  """
  if not _ADDRESS.fullmatch(address):
    raise ValueError(f'An address must be given as HOST:PORT, got {address!r}.')
  if int(address.rpartition(':')[2]) >= 1 << 16:
    raise ValueError(f'A port must be below 65536, got {address!r}.')


def _complete(server: str, tls: _security.Tls | None) -> str:
  """An address with its scheme."""
  if '://' in server:
    return server
  return f'grpc+{"tcp" if tls is None else "tls"}://{server}'


def _find_addresses(workdir: workdirs.Workdir, wire: str) -> dict[str, str]:
  """Addresses of the server of a workdir, for the wires that may be used."""
  try:
    said = workdirs.read_json(workdir.server)
    addresses = dict(said['addresses'])
  except (workdirs.WorkdirError, KeyError, TypeError):
    raise _wire.WireError(
      f'There is no server in {os.fspath(workdir)!r} now.'
    ) from None
  is_here = said.get('host') == identify_host()
  if wire == 'memory' and not is_here:
    raise _wire.WireError(
      'Shared memory cannot reach a server on another host.'
    )
  if wire == 'flight' or not is_here:
    addresses.pop('memory', None)
  if wire == 'memory':
    addresses.pop('flight', None)
  if not addresses:
    raise _wire.WireError(f'The server has no wire {wire!r}.')
  return addresses


def _make_reachable(address: str) -> str:
  """Replaces a wildcard address by the name of this host."""
  for wildcard in ('0.0.0.0', '[::]'):
    address = address.replace(f'//{wildcard}:', f'//{socket.gethostname()}:')
  return address


def identify_host() -> str:
  """A hash that is equal for two processes if they can share memory."""
  texts = []
  for path in ('/proc/sys/kernel/random/boot_id', '/proc/sys/kernel/hostname'):
    try:
      with open(path) as file:
        texts.append(file.read().strip())
    except OSError:  # Not on this system.
      texts.append('')
  try:  # Abstract sockets are visible in one network namespace only.
    texts.append(os.readlink('/proc/self/ns/net'))
  except OSError:
    texts.append('')
  # Hashed, so that files of a run contain no host names.
  return hashlib.sha256('\n'.join(texts).encode()).hexdigest()[:16]
