"""What becomes of a group if a process is lost: the others say so, and end."""

from collections.abc import Callable, Iterator
import contextlib
import re
import time

import jax

from jasgd.runtime import _wire
from jasgd.runtime import members

# The exit code of a process that ended for want of another one.
GROUP_LOST = 75
# What is said of collectives where somebody has hung up.
_LOST_WORDS = re.compile(
  'gloo|nccl|coordination|connection|peer', re.IGNORECASE
)
# Between two looks at the others, in seconds.
_INTERVAL = 0.05
# How long node 0 outlives others whom it cannot see yet, in seconds.
_BLIND_PATIENCE = 2.0


class GroupError(RuntimeError):
  """A process of a group was lost, and the others cannot go on without it."""


class Losses:
  """Tells of the loss of another process.

  Args:
    node: Which one this is.
    num_nodes: How many there are.
    registry: Where the others are.
    payload_size: Of their messages, in bytes.
    patience: Seconds for which node 0 waits for the end of the others.
    get_step: Where this node is.

  Attributes:
    have_met: Whether all have come, and so whoever does not answer is lost.
  """

  def __init__(
    self,
    node: int,
    num_nodes: int,
    registry: members.Registry,
    payload_size: int,
    patience: float,
    get_step: Callable[[], int],
  ) -> None:
    self.have_met = False
    self._node = node
    self._num_nodes = num_nodes
    self._registry = registry
    self._payload_size = payload_size
    self._patience = patience
    self._get_step = get_step

  @contextlib.contextmanager
  def mind(self) -> Iterator[None]:
    """For whatever all do together.

    Raises:
      GroupError: if another process is lost meanwhile.
    """
    try:
      yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # jax has both.
      if not _LOST_WORDS.search(str(error)):
        raise
      lost = self._find_lost()
      if self._node == 0:
        self._outlive_others()
      raise GroupError(
        f'At step {self._get_step()} {_name(lost)} was lost, and an all-reduce '
        'cannot go on without it. Started again, all nodes go on from the last '
        'checkpoint that they have in common, or from the start. '
        f'({error})'
      ) from None

  def _find_lost(self) -> list[int]:
    """The other nodes that do not answer any more."""
    if not self.have_met:
      return []
    return [
      node
      for node in self._registry.list_members()
      if node != self._node and self._is_gone(node)
    ]

  def _is_gone(self, node: int) -> bool:
    """Whether nobody is where a node was."""
    try:
      return self._registry.ask(node, self._payload_size) is None
    except _wire.RefusedError:  # It wants another token, so it is there.
      return False

  def _outlive_others(self) -> None:
    """Lets others say who is lost: where all meet, jax aborts those left."""
    patience = self._patience if self.have_met else _BLIND_PATIENCE
    deadline = time.monotonic() + patience
    while (
      len(self._find_lost()) < self._num_nodes - 1
      and time.monotonic() < deadline
    ):
      time.sleep(_INTERVAL)


def _name(lost: list[int]) -> str:
  """Who was lost. Some wait for others who wait for it, and end later."""
  names = list(map(members.name_member, lost)) or ['another process']
  if len(names) == 1:
    return names[0]
  return (
    f'one of {", ".join(names)} (the others of them have ended for want of it)'
  )
