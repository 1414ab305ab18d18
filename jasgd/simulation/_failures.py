"""Workers that die and come back, and the nodes that notice it."""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import numpy as np

from jasgd import gossip
from jasgd import protocols
from jasgd.simulation import _times


class Failure(NamedTuple):
  """A worker is down from `time` until `until` (infinity: for good)."""

  time: float
  worker: int
  until: float = np.inf


def draw_failures(
  num_workers: int,
  horizon: float,
  mean_time_between: float,
  mean_down_time: float,
  seed: int = 0,
) -> list[Failure]:
  """Random failures up to `horizon`, exponential in both times.

  Args:
    num_workers: Number of learners or nodes.
    horizon: Time after which no worker dies.
    mean_time_between: Mean time for which a worker is up.
    mean_down_time: Mean time for which it is then down.
    seed: Seed of numpy's generator. The same seed gives the same failures on
      every machine, with the same release of numpy.

  Returns:
    The failures, in order of time.

  Raises:
    ValueError: if an argument makes no sense.

  Examples:
    >>> from jasgd import simulation
    >>> len(simulation.draw_failures(10, 100.0, 50.0, 5.0)) > 5
    True
  """
  protocols.check_count('num_workers', num_workers, 1)
  _times.check_seed(seed)
  _times.check_positive('horizon', horizon)
  _times.check_positive('mean_time_between', mean_time_between)
  _times.check_positive('mean_down_time', mean_down_time)
  failures = []
  for worker in range(num_workers):
    generator = _times.make_generator(seed, _times.FAILURES, worker)
    time = generator.exponential(mean_time_between)
    while time < horizon:
      until = time + generator.exponential(mean_down_time)
      failures.append(Failure(time, worker, until))
      time = until + generator.exponential(mean_time_between)
  return sorted(failures)


def read_failures(failures: Sequence[Any], num_workers: int) -> list[Failure]:
  """Checks failures, and sorts them by time.

  Args:
    failures: Failures, as `Failure` or as tuples with or without an end.
    num_workers: Number of workers.

  Returns:
    The failures.

  Raises:
    ValueError: if a worker does not exist, or two failures of one worker
      overlap.
  """
  if isinstance(failures, str) or not isinstance(failures, Sequence):
    raise ValueError(
      f'failures must be a list of Failure, got {failures!r}. See '
      'draw_failures for random ones.'
    )
  checked = sorted(map(_read_failure, failures))
  up_since = dict.fromkeys(range(num_workers), 0.0)
  for time, worker, until in checked:
    if worker not in up_since:
      raise ValueError(
        f'A failure names worker {worker}, but there are {num_workers}: they '
        f'are numbered from 0 to {num_workers - 1}.'
      )
    if not up_since[worker] <= time < until:
      raise ValueError(
        f'Worker {worker} cannot fail from {time} to {until}: it must be up '
        f'when it fails (it is up from {up_since[worker]} on), and come back '
        'later than it fails.'
      )
    up_since[worker] = until
  return checked


def _read_failure(failure: Any) -> Failure:
  """A failure, from a `Failure` or from a tuple with or without an end."""
  if not isinstance(failure, tuple) or not 2 <= len(failure) <= 3:
    raise ValueError(
      f'A failure is (time, worker) or (time, worker, until), got {failure!r}.'
    )
  time, worker, until = Failure(*failure)
  return Failure(
    protocols.check_number('time of a failure', time),
    protocols.check_count('worker of a failure', worker, 0),
    protocols.check_number('until of a failure', until),
  )


class Members:
  """The nodes that are up, and those that each node believes alive.

  A node believes that a peer is alive until it notices that it cannot reach it,
  and believes so again as soon as the peer is back.

  Args:
    machines: State machine of each node. The caller may replace entries. The
      machines are told when the nodes that they believe alive change.

  Attributes:
    is_up: Whether each node is up, and has weights.
  """

  def __init__(self, machines: Sequence[gossip.PeerNode]) -> None:
    self.is_up = [True] * len(machines)
    self._machines = machines
    # Peers that each node has found dead, and that have not come back since.
    self._dead: list[frozenset[int]] = [frozenset()] * len(machines)

  def introduce(self, node: int) -> None:
    """Tells the machine of a new process which other nodes are up.

    A real process knows this, too: before it begins, it tries all addresses of
    the run, and believes alive those nodes that answer.
    """
    down = [peer for peer, is_up in enumerate(self.is_up) if not is_up]
    self._dead[node] = frozenset(down) - {node}
    self._tell(node)

  def enter(self, node: int) -> None:
    """A node is up and has weights: all others believe that it is alive."""
    self.is_up[node] = True
    for other, dead in enumerate(self._dead):
      if node in dead:
        self._dead[other] = dead - {node}
        self._tell(other)

  def find_dead(self, node: int, peer: int) -> None:
    """A node notices that it cannot reach a peer, unless the peer is back."""
    if self.is_up[peer]:
      return
    self._dead[node] |= {peer}
    self._tell(node)

  def _tell(self, node: int) -> None:
    members = _list_members(len(self._machines), self._dead[node] - {node})
    self._machines[node].on_alive(members)


@functools.lru_cache(maxsize=256)
def _list_members(num_nodes: int, dead: frozenset[int]) -> Sequence[int]:
  """All nodes but the dead ones; nodes that agree share the list."""
  if not dead:
    return range(num_nodes)
  return tuple([node for node in range(num_nodes) if node not in dead])
