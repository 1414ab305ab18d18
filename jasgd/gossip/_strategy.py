"""Peer strategies: how nodes train together without a server.

A `PeerStrategy` is a set of parameters, such as `Pull(period=2)`. For every
node it makes a `PeerNode`: a deterministic state machine without clock, thread,
socket or array. The simulator and a real process drive the same object. They
tell it what happened, and carry out the actions with which it answers.

A node makes steps on its own weights. After each step its driver calls
`on_step` and carries out the actions, in order:

==============  ==============================================================
action          what the driver does
==============  ==============================================================
`Ask`           Asks a peer for its weights. The node waits for the answers to
                all its questions, which go to `on_replies`.
`Send`          Sends the node's weights, and waits for nobody. What became of
                the message goes to `on_outcome`, now or later.
`MixWaiting`    Calls `mix_waiting` and carries out what it returns.
`Mix`           Takes a weighted mean of own and other weights.
`Attract`       Moves towards the centre, and sends the centre the force.
`Average`       Averages with a peer, which takes the same mean at once.
`JoinMean`      Takes part in a mean of all nodes; the node waits for it.
==============  ==============================================================

When nothing is left to carry out and no answer is awaited, the exchange is over
and the node makes its next step.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
from typing import Any, ClassVar, NamedTuple, Self

from jasgd.gossip import _checks

# The number of a centre, as a peer. Nodes have numbers from 0 on.
CENTRE = -2


class Outcome(enum.IntEnum):
  """What became of a question or of a message."""

  TAKEN = 0  # The question was answered; the message was taken.
  FULL = 1  # The receiver has more messages than it can mix.
  DONE = 2  # The receiver has made its steps, or ends.
  UNREACHABLE = 3  # The receiver is not there; nothing was taken.
  UNKNOWN = 4  # The receiver was lost meanwhile; it may have taken it.


class Message(NamedTuple):
  """Weights that another node sent, as the receiver's machine sees them."""

  sender: int
  version: int  # Of the sender's weights.
  step: int  # Steps that are in them.
  share: float  # Their weight in the receiver's mix.
  handle: int = 0  # By which the driver finds the weights themselves.


class Reply(NamedTuple):
  """The answer to an `Ask`, or that there is none."""

  peer: int
  outcome: Outcome
  version: int = -1
  step: int = -1
  handle: int = 0


class Ask(NamedTuple):
  """Asks a peer for its newest weights."""

  peer: int


class Send(NamedTuple):
  """Sends the node's weights to a peer."""

  peer: int
  share: float  # Their weight in the receiver's mix.
  step: int  # Steps that are in them.


class MixWaiting(NamedTuple):
  """Mixes what other nodes have sent: see `PeerNode.mix_waiting`."""


class Mix(NamedTuple):
  """x <- own_weight x + the sum of weight_k x_k, in this order."""

  own_weight: float
  sources: tuple[tuple[Message | Reply, float], ...]


class Attract(NamedTuple):
  """e = rate (x - c); x <- x - e; and sends e to the centre, which adds it."""

  centre: Reply
  rate: float
  keeps_gradient: bool  # Whether the next gradient is of the weights before.


class Average(NamedTuple):
  """x, x_peer <- (1 - weight) x + weight x_peer and vice versa, at once."""

  peer: Reply
  weight: float


class JoinMean(NamedTuple):
  """Takes part in a mean of all nodes."""

  number: int  # Counts the means; none is used twice.


Action = Ask | Send | MixWaiting | Mix | Attract | Average | JoinMean
Actions = Sequence[Action]


@dataclasses.dataclass(frozen=True)
class PeerStrategy:
  """How nodes train together: parameters, and a state machine for each node.

  Subclass it, and `PeerNode`, for a strategy of your own:

  Examples:
    >>> import dataclasses
    >>> from jasgd import gossip, simulation
    >>> class NeighbourNode(gossip.PeerNode):
    ...   def exchange(self, step):
    ...     return [gossip.Ask((self.node + 1) % self.num_nodes)]
    ...   def on_replies(self, replies):
    ...     return [gossip.Mix(0.9, ((replies[0], 0.1),))]
    >>> @dataclasses.dataclass(frozen=True)
    ... class Neighbour(gossip.PeerStrategy):
    ...   node_class = NeighbourNode
    >>> trace = simulation.simulate_nodes(
    ...     Neighbour(period=2), num_nodes=3, num_steps=4)
    >>> len(trace.mixes)
    6

  Attributes:
    period: Local steps between two exchanges.
  """

  period: int = 1

  # The state machine of a node.
  node_class: ClassVar[type['PeerNode']]
  # Whether there is a centre, which nodes ask instead of each other.
  has_centre: ClassVar[bool] = False
  # Whether nodes have masses, by which they are weighted.
  has_mass: ClassVar[bool] = False
  # Whether all nodes wait for each other, so that a lost one stops them all.
  is_collective: ClassVar[bool] = False
  # Why real processes cannot do it; '': they can.
  refusal_of_processes: ClassVar[str] = ''

  def __post_init__(self) -> None:
    _checks.check_count('period', self.period)

  @property
  def name(self) -> str:
    """The strategy's name in configs and headers."""
    return type(self).__name__.lower()

  @property
  def averages_gradients(self) -> bool:
    """Whether nodes average gradients before they update, not weights."""
    return False

  def check(self, num_nodes: int) -> None:
    """Raises a ValueError if it cannot be used with this many nodes."""

  def check_together(self, num_nodes: int) -> None:
    """The same for nodes that all mix at once, as they do on devices."""
    self.check(num_nodes)

  def describe(self) -> str:
    """Who waits for what, in words."""
    return f'{self.name}({self.period}): an exchange every {self.period} steps.'

  def make_node(self, node: int, num_nodes: int, seed: int = 0) -> 'PeerNode':
    """The state machine of one node, before its first step.

    Args:
      node: Number of the node, from 0 to num_nodes - 1.
      num_nodes: Number of nodes in the run.
      seed: Seed of the run; all nodes have the same.

    Returns:
      The machine.
    """
    self.check(num_nodes)
    return self.node_class(self, node, num_nodes, seed)


class PeerNode:
  """The state machine of one node of a `PeerStrategy`.

  A subclass overrides `exchange` and, as needed, `on_replies`, `on_outcome`,
  `on_message` and `mix_waiting`. State that must survive a restart goes through
  `save` and `restore`. Methods are called one at a time.

  Args:
    strategy: The strategy's parameters.
    node: Number of the node.
    num_nodes: Number of nodes in the run.
    seed: Seed of the run.

  Attributes:
    step: Steps that the node has made.
    mass: Weight of the node in the mean of all; 0 if the strategy has none.
    members: All nodes, itself included, that this node believes alive, sorted.
    is_done: Whether the node has made all its steps.
    has_ended: Whether the node takes nothing any more.
  """

  def __init__(
    self, strategy: PeerStrategy, node: int, num_nodes: int, seed: int
  ) -> None:
    self.strategy: Any = strategy
    self.node = node
    self.num_nodes = num_nodes
    self.seed = seed
    self.step = 0
    self.mass = 1.0 if strategy.has_mass else 0.0
    self.members: Sequence[int] = range(num_nodes)
    self.is_done = False
    self.has_ended = False
    self._join_candidates: list[int] = []
    self._period = strategy.period

  # --- What a subclass says.

  def exchange(self, step: int) -> Actions:
    """Begins an exchange; `step` steps were made, a multiple of the period."""
    raise NotImplementedError(
      f'{type(self).__name__} must define exchange(step): the actions after '
      'every period of steps.'
    )

  def on_replies(self, replies: Sequence[Reply]) -> Actions:
    """All questions of the last actions have a reply, in their order."""
    del replies
    return ()

  def on_outcome(self, send: Send, outcome: Outcome) -> None:
    """It is known what became of a message that this node sent."""

  def on_message(self, message: Message) -> Outcome:
    """Another node has sent its weights: takes them, or says why not.

    Raises:
      ValueError: if nodes of this strategy send nothing to each other.
    """
    raise ValueError(f'A node of {self.strategy.name!r} takes no weights.')

  def mix_waiting(self) -> Mix | None:
    """Mixes what was sent to this node, if anything was."""
    return None

  def save_state(self) -> dict[str, Any]:
    """The subclass's own state, as a JSON-serialisable dict."""
    return {}

  def restore_state(self, state: Mapping[str, Any]) -> None:
    """The inverse of `save_state`."""

  @property
  def held_mass(self) -> float:
    """Mass that would be lost with this node: its own, and what has come."""
    return self.mass

  def list_join_candidates(self) -> list[int]:
    """Peers to take the first weights from, if the others have begun.

    They are asked in this order until one answers.
    """
    others = [peer for peer in self.members if peer != self.node]
    # Joiners ask different peers, so that none has to answer them all.
    return sorted(others, key=lambda peer: (peer - self.node) % self.num_nodes)

  # --- What drivers call.

  def on_alive(self, members: Sequence[int]) -> None:
    """This node's belief about who is alive has changed.

    Args:
      members: Sorted numbers of the nodes, this one included.
    """
    self.members = members

  def on_step(self, step: int) -> Actions:
    """The node has made a step.

    Mass that leaves with a message is taken off at once, so that a driver which
    records `mass` before it sends anything never records too much.

    Args:
      step: Steps that it has made, with this one.

    Returns:
      What to do before the next step.
    """
    self.step = step
    return () if step % self._period else self.exchange(step)

  def on_done(self) -> Actions:
    """The node has made all its steps; called again when messages came."""
    self.is_done = True
    return (MixWaiting(),)

  def on_end(self) -> Actions:
    """The node ends: it mixes for the last time, and takes nothing more."""
    self.has_ended = True
    return (MixWaiting(),)

  def on_join(self) -> Actions:
    """The node comes when others have begun: asks one of them for weights.

    Returns:
      One question; its reply goes to `on_join_reply`.
    """
    self._join_candidates = self.list_join_candidates()
    return self._ask_to_join()

  def on_join_reply(self, reply: Reply) -> Actions:
    """The peer that a joiner asked has answered, or has not.

    A joiner takes over the peer's weights and its step, so that its schedule
    does not begin anew. It begins without mass: none is made.

    Args:
      reply: The reply.

    Returns:
      A `Mix` that takes the peer's weights; or the next question; or nothing,
      if there is nobody to ask.
    """
    if reply.outcome != Outcome.TAKEN:
      return self._ask_to_join()
    self.mass = 0.0
    self.step = max(self.step, reply.step)
    return (Mix(0.0, ((reply, 1.0),)),)

  def on_restart(self, step: int, last_mass: float) -> None:
    """The node goes on from a checkpoint.

    Mass that was sent since the checkpoint is gone, and mass that came since
    must not be lost: so the mass is that of the last record, not of the
    checkpoint. What had come and was not mixed is lost.

    Args:
      step: Steps in the checkpoint.
      last_mass: Mass in the last record that the node wrote.
    """
    self.step = step
    self.mass = last_mass

  def save(self) -> dict[str, Any]:
    """The whole state, as a JSON-serialisable dict; between exchanges."""
    return {'step': self.step, 'mass': self.mass, **self.save_state()}

  def restore(self, state: Mapping[str, Any]) -> Self:
    """Goes on from what `save` of an equal node returned."""
    self.step = state['step']
    self.mass = state['mass']
    self.restore_state(state)
    return self

  def _ask_to_join(self) -> Actions:
    if not self._join_candidates:
      return ()
    return (Ask(self._join_candidates.pop(0)),)
