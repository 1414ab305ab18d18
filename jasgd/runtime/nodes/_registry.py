"""Registry of the members of a run of nodes: their numbers and addresses.

Each process has its own registry. A node writes its address into the folder of
the run, and tells it to each node that it contacts, which answers with all
addresses that it knows. So any node may start first, and a node that does not
share the folder needs the address of one other node. There is no central
registry, hence no single point of failure.
"""

from collections.abc import Iterator, Mapping
import contextlib
import json
import logging
import threading
from typing import Any, NamedTuple

from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime.wires import _addresses
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _security
from jasgd.runtime.wires import _wire

_log = logging.getLogger(__name__)

# Seconds to get a connection, and an answer: a process that hangs must not keep
# others waiting.
_DEADLINE = 2.0


class _Address(NamedTuple):
  """Address of a member."""

  address: str
  since: float  # Start time, by its own clock: the newest address counts.


class Registry:
  """Members of a run that one process knows of.

  Args:
    run: Folder of the run, which others may share.
    peers: Addresses of nodes that do not share the folder: 'HOST:PORT' each.
    wire: Wire to nodes that share the folder, as in `make_connect`; all others
      are reached by Flight.
    tls: Certificates for mutual TLS.
  """

  def __init__(
    self,
    run: workdirs.Workdir,
    peers: tuple[str, ...] = (),
    *,
    wire: str = 'auto',
    tls: _security.Tls | None = None,
  ) -> None:
    if peers and wire == 'memory':
      raise ValueError(
        f'Shared memory cannot reach an address, got the wire {wire!r} '
        f'and {", ".join(peers)}.'
      )
    for peer in peers:
      _addresses.check_address(peer)
    self._run = run
    self._wire = wire
    self._tls = tls
    self._unknown = list(peers)  # Addresses of nodes with unknown numbers.
    self._addresses: dict[int, _Address] = {}
    self._lock = threading.Lock()  # Guards `_unknown` and `_addresses`.

  def add(self, member: int, address: str, since: float) -> None:
    """Adds the address of a member, unless a newer one is known.

    Args:
      member: Number of a node, or `traces.SERVER`.
      address: Address of its Flight.
      since: Time when it was started, by its own clock.
    """
    with self._lock:
      known = self._addresses.get(member)
      if known is None or known.since < since:
        self._addresses[member] = _Address(address, since)

  def list_addresses(self) -> dict[str, list[Any]]:
    """[address, since] of members, by number: JSON-serialisable."""
    with self._lock:
      return {
        str(member): list(entry) for member, entry in self._addresses.items()
      }

  def merge(self, entries: Mapping[str, Any]) -> None:
    """Adds the addresses that another process knows.

    Args:
      entries: Result of its `list_addresses`; bad entries are logged and left
        out.
    """
    for number, entry in entries.items():
      try:
        address, since = entry
        _addresses.check_address(address)
        self.add(int(number), address, float(since))
      except (TypeError, ValueError) as error:
        _log.warning('A bad address of node %.16r: %s', number, error)

  def list_members(self) -> list[int]:
    """Numbers of all known members: nodes and `traces.SERVER`, sorted."""
    with self._lock:
      known = set(self._addresses)
    return sorted(known.union(list_members(self._run)))

  def connect(self, member: int) -> _wire.Connect:
    """Makes a function that connects to a member.

    Args:
      member: Number of a node, or `traces.SERVER`.

    Returns:
      A function of the bytes of a payload, which finds the member's address
      each time that it is called.
    """

    def connect(payload_size: int) -> _wire.Connection:
      folder = find_folder(self._run, member)
      if folder.server.exists():  # It shares the folder of the run.
        where: dict[str, Any] = {'workdir': folder, 'wire': self._wire}
      else:
        with self._lock:
          entry = self._addresses.get(member)
        if entry is None:
          raise _wire.WireError(
            f'The address of {name_member(member)} is not known.'
          )
        where = {'server': entry.address}
      return self._make_connect(**where)(payload_size)

    return connect

  def contact_addresses(self) -> list[dict[str, Any]]:
    """Asks nodes of which only the address is known for their status.

    Returns:
      Statuses of those that answered.
    """
    with self._lock:
      addresses = list(self._unknown)
    statuses = []
    for address in addresses:
      status = _get_status(self._make_connect(server=address))
      if status is None:
        continue  # It is asked again the next time.
      self.merge(status.get('members', {}))
      with self._lock:
        self._unknown.remove(address)
      statuses.append(status)
    return statuses

  def check_free(self, node: int) -> None:
    """Raises a ValueError if a node of this number is running elsewhere."""
    with self._lock:
      entry = self._addresses.get(node)
    if entry is None:
      return
    # Another process may have the port by now.
    status = _get_status(self._make_connect(server=entry.address))
    if status is not None and status.get('node') == node:
      raise ValueError(
        f'Node {node} is running already, at {entry.address}: give another '
        'number, or end that one first.'
      )

  def get_status(self, member: int, payload_size: int) -> dict[str, Any] | None:
    """Status of a member; None if it does not answer.

    Args:
      member: Number of a node, or `traces.SERVER`.
      payload_size: Bytes of its payloads.

    Returns:
      Its status.
    """
    return _get_status(self.connect(member), payload_size)

  def _make_connect(self, **where: Any) -> _wire.Connect:
    return _addresses.make_connect(
      **where,
      token=_security.find_token(self._run),
      tls=self._tls,
      deadline=_DEADLINE,
    )


def _get_status(
  connect: _wire.Connect, payload_size: int = 0
) -> dict[str, Any] | None:
  """Status of a process; None if it does not answer. Flight needs no size."""
  try:
    with contextlib.closing(connect(payload_size)) as connection:
      answer = connection.request(
        _messages.Message(_messages.Verb.STATUS), deadline=_DEADLINE
      )
      return json.loads(answer.text)
  except _wire.WireError:
    return None


def name_member(member: int) -> str:
  """Name of a member, for people."""
  return 'the centre' if member == traces.SERVER else f'node {member}'


def find_folder(run: workdirs.Workdir, member: int) -> workdirs.Workdir:
  """Folder of the address and the checkpoints of a node, or of the centre."""
  folder = 'centre' if member == traces.SERVER else str(member)
  return workdirs.Workdir(run.root / 'nodes' / folder)


def list_members(run: workdirs.Workdir) -> list[int]:
  """Lists the members that have files in the folder of a run.

  Args:
    run: Folder of the run.

  Returns:
    Numbers of nodes and `traces.SERVER`, sorted.
  """
  folder = find_folder(run, traces.SERVER).root.parent
  if not folder.is_dir():
    return []
  names = [path.name for path in folder.iterdir()]
  members = [int(name) for name in names if name.isdecimal()]
  if 'centre' in names:
    members.append(traces.SERVER)
  return sorted(members)


@contextlib.contextmanager
def claim_number(
  run: workdirs.Workdir, num_nodes: int, *, patience: float = 600.0
) -> Iterator[int]:
  """Finds the lowest number that no living node of a folder has.

  One process at a time is in this context. The caller must make its `Peer`
  within it, which takes the number.

  Args:
    run: Folder of the run.
    num_nodes: Number of nodes.
    patience: Seconds to wait for other processes, possibly many, that look for
      a number.

  Yields:
    The number.

  Raises:
    WorkdirError: if all are taken, or another process does not finish.
  """
  run.root.mkdir(parents=True, exist_ok=True)
  path = run.root / 'numbers.lock'
  with workdirs.lock_file(path, patience=patience) as is_mine:
    if not is_mine:
      raise workdirs.WorkdirError(
        f'Another node has been looking for a number for {patience:g} s '
        f'(it holds {str(path)!r}): end it first, or give this one its number.'
      )
    for node in range(num_nodes):
      if not workdirs.is_held(find_folder(run, node), 'node'):
        break
    else:
      raise workdirs.WorkdirError(
        f'All {num_nodes} nodes of this run are running: num_workers is '
        f'{num_nodes}.'
      )
    yield node
