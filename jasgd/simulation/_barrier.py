"""The barrier of an all-reduce in virtual time."""

from collections.abc import Callable
from typing import Any

from jasgd.simulation import _network

# Kind of event, beside those of `_peer_loop`: a mean of all nodes is made.
AVERAGED = 10


class Barrier:
  """Point at which each node waits for all others; then their mean is made.

  The mean takes the time of a ring all-reduce: 2 (n - 1) messages, each of 1/n
  of the weights. It fails if a node dies before it is made.

  Args:
    num_nodes: Number of nodes, n.
    network: Durations of messages.
    schedule: Adds an event: `(time, node, kind, data)`.

  Attributes:
    next_number: Least number above those of all means that were made.
  """

  def __init__(
    self,
    num_nodes: int,
    network: _network.Network,
    schedule: Callable[[float, int, int, Any], None],
  ) -> None:
    transfer = network.bytes_per_push / network.bandwidth
    self._seconds = (
      2 * (num_nodes - 1) * (network.latency + transfer / num_nodes)
    )
    self._num_nodes = num_nodes
    self._schedule = schedule
    self.next_number = 0
    self._waiting: dict[int, int] = {}  # Number of the mean, by node.
    self._attempt = 0  # Changes when a mean begins, and when it fails.

  def arrive(self, node: int, time: float, number: int) -> None:
    """A node begins to wait for a mean; the last one begins the mean."""
    self._waiting[node] = number
    if len(self._waiting) == self._num_nodes:
      self._attempt += 1
      # The event belongs to all nodes; it has the number of node 0.
      self._schedule(time + self._seconds, 0, AVERAGED, self._attempt)

  def finish(self, attempt: int) -> int | None:
    """Ends a mean.

    Args:
      attempt: Data of the event.

    Returns:
      The number of the mean; None if a node has died since it began.
    """
    if attempt != self._attempt:
      return None
    (number,) = set(self._waiting.values())  # It is equal on all nodes.
    self._waiting.clear()
    self.next_number = number + 1
    return number

  def fail(self, node: int) -> None:
    """A node dies: the mean that is under way fails."""
    self._attempt += 1
    # The dead node must not count as present for the next mean.
    self._waiting.pop(node, None)

  def restart(self) -> None:
    """All nodes go back to a checkpoint: no node waits any more."""
    self._waiting.clear()
