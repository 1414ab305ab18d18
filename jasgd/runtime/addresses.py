"""Where a server is, and how to get there.

A server leaves its address in the workdir, and removes it when it ends. Whoever
connects reads it each time, as a server that was started again has another.
"""

import contextlib
import hashlib
import os
import re
import secrets
import socket
import stat
from typing import Any

from jasgd import workdir as workdirs
from jasgd.runtime import _flight_security
from jasgd.runtime import _memory_client
from jasgd.runtime import _wire
from jasgd.runtime import learner as learners

WIRES = ('auto', 'memory', 'flight')

# Where a token is found by those who have no workdir.
TOKEN_VARIABLE = 'JASGD_TOKEN'

_ADDRESS = re.compile(r'(grpc\+(tcp|tls)://)?[^\s/:]+(:[^\s/:]+)*:\d{1,5}')


def find_free_port() -> int:
  """A port of this machine that is free now, for one who cannot look."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def write_address(
  workdir: workdirs.Workdir, addresses: dict[str, str], **more: Any
) -> None:
  """Says where a server can be found.

  Args:
    workdir: Of the run.
    addresses: From the name of a wire to the listener's address.
    **more: What else to say, as JSON can.
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
  tls: _flight_security.Tls | None = None,
  deadline: float = 20.0,
) -> learners.Connect:
  """A function that connects to a server, wherever it is by then.

  Args:
    workdir: Where its address and token are.
    server: Its address, if there is no workdir: 'HOST:PORT'.
    wire: One of `WIRES`; 'auto' takes shared memory on the server's own host.
    token: What the server wants to hear. None: from the workdir, or from the
      environment's JASGD_TOKEN.
    tls: For mutual TLS.
    deadline: Seconds to get a connection.

  Returns:
    A function of a payload's size.

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
      return _memory_client.connect_memory(
        addresses['memory'], payload_size, deadline
      )
    # Where it is needed: pyarrow takes its time.
    from jasgd.runtime import _flight_client

    return _flight_client.connect_flight(
      addresses['flight'],
      payload_size,
      token=token or find_token(workdir),
      tls=tls,
      deadline=deadline,
    )

  return connect


def check_address(address: str) -> None:
  """Raises a ValueError if a text is no 'HOST:PORT', with or without a scheme.

  Args:
    address: Where somebody may listen.
  """
  if not _ADDRESS.fullmatch(address):
    raise ValueError(f'An address must be given as HOST:PORT, got {address!r}.')
  if int(address.rpartition(':')[2]) >= 1 << 16:
    raise ValueError(f'A port must be below 65536, got {address!r}.')


def _complete(server: str, tls: _flight_security.Tls | None) -> str:
  """An address with its scheme."""
  if '://' in server:
    return server
  return f'grpc+{"tcp" if tls is None else "tls"}://{server}'


def _find_addresses(workdir: workdirs.Workdir, wire: str) -> dict[str, str]:
  """Where the server of a workdir is now: the ways that may be taken."""
  try:
    said = workdirs.read_json(workdir.server)
    addresses = dict(said['addresses'])
  except (workdirs.WorkdirError, KeyError, TypeError):
    raise _wire.WireError(
      f'There is no server in {os.fspath(workdir)!r} now.'
    ) from None
  is_here = said.get('host') == identify_host()
  if wire == 'memory' and not is_here:
    raise _wire.WireError('Shared memory reaches no server on another host.')
  if wire == 'flight' or not is_here:
    addresses.pop('memory', None)
  if wire == 'memory':
    addresses.pop('flight', None)
  if not addresses:
    raise _wire.WireError(f'The server has no wire {wire!r}.')
  return addresses


def make_reachable(address: str) -> str:
  """An address for others, of a server that listens on all of a host's."""
  for wildcard in ('0.0.0.0', '[::]'):
    address = address.replace(f'//{wildcard}:', f'//{socket.gethostname()}:')
  return address


def identify_host() -> str:
  """A text that two processes share if they can share memory."""
  texts = []
  for path in ('/proc/sys/kernel/random/boot_id', '/proc/sys/kernel/hostname'):
    try:
      with open(path) as file:
        texts.append(file.read().strip())
    except OSError:  # Not on this system.
      texts.append('')
  try:  # Sockets without a file are seen in their own network alone.
    texts.append(os.readlink('/proc/self/ns/net'))
  except OSError:
    texts.append('')
  # Nobody's names are written down.
  return hashlib.sha256('\n'.join(texts).encode()).hexdigest()[:16]


def make_token(workdir: workdirs.Workdir) -> str:
  """The token of a run: made once, for its owner's eyes.

  Args:
    workdir: Of the run. Several processes may ask at once.

  Returns:
    What is in its file; a new one has what the environment says, if it does.
  """
  if not workdir.token.exists():
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    part = workdir.token.with_name(f'token.{secrets.token_hex(4)}.part')
    with os.fdopen(os.open(part, flags, 0o600), 'w') as file:
      file.write(os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):  # Somebody was faster.
      os.link(part, workdir.token)
    part.unlink()
  token = find_token(workdir)
  assert token is not None  # It was written just now.
  return token


def find_token(workdir: workdirs.Workdir | None) -> str | None:
  """The token of a run, if there is one.

  Raises:
    WorkdirError: if others could read it.
  """
  if workdir is None or not workdir.token.exists():
    return os.environ.get(TOKEN_VARIABLE)
  mode = workdir.token.stat().st_mode
  if mode & (stat.S_IRWXG | stat.S_IRWXO):
    raise workdirs.WorkdirError(
      f'{os.fspath(workdir.token)!r} must be for its owner alone (mode 0600), '
      f'got mode {stat.S_IMODE(mode):04o}.'
    )
  return workdir.token.read_text().strip()
