"""Who else is in a run of nodes: found by the addresses in its folder."""

from collections.abc import Mapping

from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import _flight_security
from jasgd.runtime import _station
from jasgd.runtime import addresses
from jasgd.runtime import learner as learners

# Seconds to get a connection: one who is stopped must not keep others waiting.
_CONNECT_DEADLINE = 2.0


def list_members(run: workdirs.Workdir) -> list[int]:
  """The nodes that have ever come, and `traces.CENTRE`.

  Args:
    run: The folder of the run.

  Returns:
    Their numbers, sorted.
  """
  folder = _station.find_folder(run, traces.CENTRE).root.parent
  if not folder.is_dir():
    return []
  names = [path.name for path in folder.iterdir()]
  members = [int(name) for name in names if name.isdecimal()]
  if 'centre' in names:
    members.append(traces.CENTRE)
  return sorted(members)


def connect_member(
  run: workdirs.Workdir,
  member: int,
  *,
  wire: str = 'auto',
  tls: _flight_security.Tls | None = None,
) -> learners.Connect:
  """A function that connects to a node, wherever it is by then.

  Args:
    run: The folder of the run.
    member: The node, or `traces.CENTRE`.
    wire: As in `make_connect`.
    tls: For mutual TLS.

  Returns:
    A function of a payload's size.
  """
  return addresses.make_connect(
    _station.find_folder(run, member),
    wire=wire,
    tls=tls,
    deadline=_CONNECT_DEADLINE,
  )


def find_others(
  run: workdirs.Workdir,
  node: int,
  *,
  is_elastic: bool,
  wire: str = 'auto',
  tls: _flight_security.Tls | None = None,
) -> Mapping[int, learners.Connect]:
  """Ways to all whom a node may mix with.

  Args:
    run: The folder of the run.
    node: Who asks.
    is_elastic: Whether that is the centre, and nobody else.
    wire: As in `make_connect`.
    tls: For mutual TLS.

  Returns:
    Functions of a payload's size, by number.
  """
  return {
    member: connect_member(run, member, wire=wire, tls=tls)
    for member in list_members(run)
    if member != node and (member == traces.CENTRE) == is_elastic
  }
