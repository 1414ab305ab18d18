"""Who is in a run of nodes, and where: the small registry that each one has.

A node leaves its address in the folder of the run, and tells it to all whom it
meets; they answer with every address that they know. So any node may be the
first, and one that sees no common folder needs the address of any that is
there. Nobody keeps the books for all, so nobody's end is the end of them.
"""

from collections.abc import Iterator, Mapping
import contextlib
import json
import logging
import threading
from typing import Any, NamedTuple

from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _flight_security
from jasgd.runtime import _messages
from jasgd.runtime import _wire
from jasgd.runtime import addresses
from jasgd.runtime import learner as learners

_log = logging.getLogger(__name__)

# Seconds to get a connection, and an answer: one who is stopped must not keep
# others waiting.
_DEADLINE = 2.0
# Seconds for others, who may be many, to make the numbers their own that they
# have found.
_CLAIM_DEADLINE = 600.0


class _Home(NamedTuple):
  """Where a member is."""

  address: str
  since: float  # By its own clock, so that its newest home is known.


class Registry:
  """Who is in a run, as far as one process knows.

  Args:
    run: The folder of the run, which others may share.
    peers: Where to find any who do not: 'HOST:PORT' each.
    wire: As in `make_connect`; it is for those who share the folder, as the
      others are reached by Flight.
    tls: For mutual TLS.
  """

  def __init__(
    self,
    run: workdirs.Workdir,
    peers: tuple[str, ...] = (),
    *,
    wire: str = 'auto',
    tls: _flight_security.Tls | None = None,
  ) -> None:
    if peers and wire == 'memory':
      raise ValueError(
        f'Shared memory reaches nobody by an address, got the wire {wire!r} '
        f'and {", ".join(peers)}.'
      )
    for peer in peers:
      addresses.check_address(peer)
    self._run = run
    self._wire = wire
    self._tls = tls
    self._strangers = list(peers)  # Nobody knows their numbers yet.
    self._heard: dict[int, _Home] = {}
    self._lock = threading.Lock()  # Of the two above.

  def note(self, member: int, address: str, since: float) -> None:
    """Keeps where a member is, unless it has moved since.

    Args:
      member: A node, or `traces.CENTRE`.
      address: Of its Flight.
      since: When it came there, by its own clock.
    """
    with self._lock:
      known = self._heard.get(member)
      if known is None or known.since < since:
        self._heard[member] = _Home(address, since)

  def tell(self) -> dict[str, list[Any]]:
    """Where all members are that were told of: [address, since], by number."""
    with self._lock:
      return {str(member): list(home) for member, home in self._heard.items()}

  def hear(self, told: Mapping[str, Any]) -> None:
    """Takes in what somebody else told; what is known already is no news.

    Args:
      told: As of `tell`, which may have come as JSON.
    """
    for number, home in told.items():
      try:
        address, since = home
        addresses.check_address(address)
        self.note(int(number), address, float(since))
      except (TypeError, ValueError) as error:
        _log.warning('What was told of node %.16r is no use: %s', number, error)

  def list_members(self) -> list[int]:
    """All who have ever come: nodes, and `traces.CENTRE`, sorted."""
    with self._lock:
      heard = set(self._heard)
    return sorted(heard.union(list_members(self._run)))

  def connect(self, member: int) -> learners.Connect:
    """A function that connects to a member, wherever it is by then.

    Args:
      member: The node, or `traces.CENTRE`.

    Returns:
      A function of a payload's size.
    """

    def connect(payload_size: int) -> _wire.Connection:
      folder = find_folder(self._run, member)
      if folder.server.exists():  # It shares our folder.
        where: dict[str, Any] = {'workdir': folder, 'wire': self._wire}
      else:
        with self._lock:
          home = self._heard.get(member)
        if home is None:
          raise _wire.WireError(
            f'Nobody has said where {name_member(member)} is.'
          )
        where = {'server': home.address}
      return self._make_connect(**where)(payload_size)

    return connect

  def ask_strangers(self) -> list[dict[str, Any]]:
    """Asks those of whom only the address is known who they are.

    Returns:
      How those who answered stand.
    """
    with self._lock:
      strangers = list(self._strangers)
    statuses = []
    for address in strangers:
      status = _ask(self._make_connect(server=address))
      if status is None:
        continue  # It is asked again.
      self.hear(status.get('members', {}))
      with self._lock:
        self._strangers.remove(address)
      statuses.append(status)
    return statuses

  def check_free(self, node: int) -> None:
    """Raises a ValueError if a node of this number is running elsewhere."""
    with self._lock:
      home = self._heard.get(node)
    if home is None:
      return
    # Somebody else may have the port by now.
    status = _ask(self._make_connect(server=home.address))
    if status is not None and status.get('node') == node:
      raise ValueError(
        f'Node {node} is running already, at {home.address}: give another '
        'number, or end that one first.'
      )

  def ask(self, member: int, payload_size: int) -> dict[str, Any] | None:
    """How a member stands; None if it is not there.

    Args:
      member: The node, or `traces.CENTRE`.
      payload_size: Of its messages, in bytes.

    Returns:
      What its `describe` says.
    """
    return _ask(self.connect(member), payload_size)

  def _make_connect(self, **where: Any) -> learners.Connect:
    return addresses.make_connect(
      **where,
      token=addresses.find_token(self._run),
      tls=self._tls,
      deadline=_DEADLINE,
    )


def _ask(
  connect: learners.Connect, payload_size: int = 0
) -> dict[str, Any] | None:
  """How somebody stands; None if there is nobody. Flight asks for no size."""
  try:
    with contextlib.closing(connect(payload_size)) as connection:
      answer = connection.request(
        _messages.Message(_messages.Verb.STATUS), deadline=_DEADLINE
      )
      return json.loads(answer.text)
  except _wire.WireError:
    return None


def name_member(member: int) -> str:
  """What people call a member."""
  return 'the centre' if member == traces.CENTRE else f'node {member}'


def find_folder(run: workdirs.Workdir, member: int) -> workdirs.Workdir:
  """Where a node, or the centre, keeps its address and its checkpoints."""
  folder = 'centre' if member == traces.CENTRE else str(member)
  return workdirs.Workdir(run.root / 'nodes' / folder)


def list_members(run: workdirs.Workdir) -> list[int]:
  """The members that have files in a folder, sorted.

  Args:
    run: The folder of the run.

  Returns:
    Numbers of nodes, and `traces.CENTRE`.
  """
  folder = find_folder(run, traces.CENTRE).root.parent
  if not folder.is_dir():
    return []
  names = [path.name for path in folder.iterdir()]
  members = [int(name) for name in names if name.isdecimal()]
  if 'centre' in names:
    members.append(traces.CENTRE)
  return sorted(members)


@contextlib.contextmanager
def claim_number(run: workdirs.Workdir, num_nodes: int) -> Iterator[int]:
  """Finds the lowest number that no living node of a folder has.

  Nobody else finds one meanwhile: whoever leaves this has made the number its
  own, by being a `Peer`.

  Args:
    run: The folder of the run.
    num_nodes: How many nodes there are.

  Yields:
    The number.

  Raises:
    WorkdirError: if all are taken, or another one does not come to an end.
  """
  run.root.mkdir(parents=True, exist_ok=True)
  path = run.root / 'numbers.lock'
  with workdirs.lock_file(path, patience=_CLAIM_DEADLINE) as is_mine:
    if not is_mine:
      raise workdirs.WorkdirError(
        f'Another node has been looking for a number for {_CLAIM_DEADLINE:g} s '
        f'(it holds {str(path)!r}): end it first, or give this one its number.'
      )
    for node in range(num_nodes):
      if not workdirs.is_held(find_folder(run, node), 'node'):
        break
    else:
      raise workdirs.WorkdirError(
        f'All {num_nodes} nodes of this run are there: strategy.num_nodes is '
        f'{num_nodes}.'
      )
    yield node
