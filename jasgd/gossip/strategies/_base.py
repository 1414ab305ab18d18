"""Base classes of peer strategies, and the actions of their nodes.

A `PeerStrategy` is a set of parameters, such as `Pull(period=2)`. It makes a
`PeerNode` for every node: a deterministic state machine without clock, thread,
socket or array. The simulator and a real process drive the same object: they
report events to it, and carry out the actions that it returns.

A node makes steps on its own weights. After each step its driver calls
`on_step` and carries out the actions, in order, but questions after all others:

==============  ==============================================================
action          effect
==============  ==============================================================
`Ask`           Asks a peer for its weights. The node waits until all its
                questions have a reply; the replies go to `on_replies`.
`Send`          Sends the node's weights to a peer, without waiting. The outcome
                goes to `on_outcome`, possibly after further steps.
`MixWaiting`    Calls `mix_waiting` and carries out the `Mix` that it returns.
`Mix`           Takes a weighted mean of own and other weights.
`Attract`       Moves towards the centre, and sends the centre the force.
`Average`       Averages with a peer, which takes the same mean at once.
`JoinMean`      Takes part in a mean of all nodes, and waits for it.
==============  ==============================================================

`Attract` belongs to `Elastic`, `Average` to `Pairs` and `JoinMean` to
`AllReduce`; a strategy of your own uses the other actions.

When all actions are carried out and no reply is awaited, the exchange is over
and the node makes its next step.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
from typing import Any, ClassVar, NamedTuple, Self

from jasgd import protocols

# Number of the centre, as a peer. Nodes have the numbers 0, 1, 2 and so on.
CENTRE = -1


class Outcome(enum.IntEnum):
  """Outcome of a question or of a message."""

  TAKEN = 0  # The question was answered, or the message was accepted.
  FULL = 1  # The receiver has as many unmixed messages as it accepts.
  DONE = 2  # The receiver has made all its steps, or is ending.
  UNREACHABLE = 3  # The receiver could not be contacted; nothing was accepted.
  UNKNOWN = 4  # The connection was lost; the message may have been accepted.
  REFUSED = 5  # The centre does not move by the force.


class Message(NamedTuple):
  """Weights that another node sent, as the receiver's state machine sees them.

  Attributes:
    sender: Number of the node that sent it.
    version: Version of the sender's weights.
    step: Number of steps that the sender had made.
    share: Weight in the receiver's mix; 0 in push-sum, which uses the mass.
    handle: Key by which the driver finds the weights themselves.
    mass: Mass that comes with the weights, in push-sum.
  """

  sender: int
  version: int
  step: int
  share: float
  handle: int = 0
  mass: float = 0.0


class Reply(NamedTuple):
  """Reply to an `Ask`; one with an outcome other than `TAKEN` has no weights.

  Attributes:
    peer: Number of the peer that was asked.
    outcome: Whether the peer answered.
    version: Version of the peer's weights.
    step: Number of steps that the peer had made.
    handle: Key by which the driver finds the weights themselves.
  """

  peer: int
  outcome: Outcome
  version: int = -1
  step: int = -1
  handle: int = 0


class Ask(NamedTuple):
  """Asks a peer for its newest weights."""

  peer: int


class Send(NamedTuple):
  """Sends the node's weights to a peer.

  Attributes:
    peer: Number of the receiver.
    share: Weight in the receiver's mix; 0 in push-sum, which uses the mass.
    step: Number of steps that this node has made.
    mass: Mass that goes with the weights, in push-sum.
  """

  peer: int
  share: float
  step: int
  mass: float = 0.0


class MixWaiting(NamedTuple):
  """Mixes the messages that wait: see `PeerNode.mix_waiting`."""


class Mix(NamedTuple):
  """x <- own_weight x + the sum of weight_k x_k, added in this order."""

  own_weight: float
  sources: tuple[tuple[Message | Reply, float], ...]


class Attract(NamedTuple):
  """e = rate (x - c); x <- x - e; the centre receives e and adds it.

  Attributes:
    centre: Reply of the centre, with its weights c.
    rate: Factor of the difference.
    keeps_gradient: Whether the next gradient is computed at x before the move.
  """

  centre: Reply
  rate: float
  keeps_gradient: bool


class Average(NamedTuple):
  """x <- (1 - weight) x + weight x_peer; the peer does the same at once."""

  peer: Reply
  weight: float


class JoinMean(NamedTuple):
  """Takes part in a mean of all nodes.

  Attributes:
    number: Number of the mean, from 0 on. Records have `group` = number + 1. No
      two means that any node has recorded have the same number.
  """

  number: int


Action = Ask | Send | MixWaiting | Mix | Attract | Average | JoinMean
Actions = Sequence[Action]


@dataclasses.dataclass(frozen=True)
class PeerStrategy(protocols.Configurable):
  """Parameters of a training run without a server, equal on all nodes.

  **How to write your own strategy.** Subclass `PeerNode`, which has the rule,
  and `PeerStrategy`, which has the parameters as fields of a frozen dataclass;
  set `node_class`. Define both at the top level of a module: then `to_config`
  stores the strategy as `'module:name'`, which configs accept.

  =========================  =================================================
  class attribute            meaning
  =========================  =================================================
  `name`                     name in reports; by default the class's name
  `node_class`               the subclass of `PeerNode`
  `has_server`               False; a `jasgd.protocols.Protocol` has True
  `has_centre`               whether nodes ask a centre, not each other; then
                             the strategy has `make_centre`
  `has_mass`                 whether the mean of all nodes is weighted by masses
  `is_collective`            whether all nodes wait for each other, so that one
                             lost node stops all
  `refusal_of_processes`     reason why real processes cannot run the strategy,
                             as a sentence; '' if they can
  =========================  =================================================

  Override `check` for numbers of nodes that cannot work, and `describe` for a
  better description in reports.

  Examples:
    >>> import dataclasses
    >>> from jasgd import gossip, simulation
    >>> class NeighbourNode(gossip.PeerNode):
    ...   def exchange(self, step):
    ...     return [gossip.Ask((self.node + 1) % self.num_nodes)]
    ...   def on_replies(self, replies):
    ...     weight = self.strategy.weight
    ...     return [gossip.Mix(1 - weight, ((replies[0], weight),))]
    >>> @dataclasses.dataclass(frozen=True)
    ... class Neighbour(gossip.PeerStrategy):
    ...   weight: float = 0.1
    ...   node_class = NeighbourNode
    >>> trace = simulation.simulate(
    ...     Neighbour(period=2), num_workers=3, num_gradients=12)
    >>> len(trace.mixes)
    6

  Attributes:
    period: Number of local steps between two exchanges.
  """

  period: int = 1

  name: ClassVar[str] = ''
  node_class: ClassVar[type['PeerNode']]
  has_server: ClassVar[bool] = False
  has_centre: ClassVar[bool] = False
  has_mass: ClassVar[bool] = False
  is_collective: ClassVar[bool] = False
  refusal_of_processes: ClassVar[str] = ''

  def __post_init__(self) -> None:
    protocols.check_count('period', self.period)

  def __init_subclass__(cls) -> None:
    super().__init_subclass__()
    if 'name' not in cls.__dict__:
      cls.name = cls.__name__.lower()

  @property
  def averages_gradients(self) -> bool:
    """Whether nodes average gradients before each update, not weights."""
    return False

  def arguments(self) -> dict[str, Any]:
    """All fields by name, for `to_config`; numbers of numpy become Python's."""
    found = {}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      found[field.name] = value.item() if hasattr(value, 'item') else value
    return found

  def check(self, num_nodes: int) -> None:
    """Raises a ValueError if this number of nodes cannot work."""

  def check_together(self, num_nodes: int) -> None:
    """As `check`, for nodes that all mix at once, as devices do in `mix`."""
    self.check(num_nodes)

  def describe(self) -> str:
    """The rule in words: which nodes exchange what, and which of them wait."""
    return f'{self.name}({self.period}): an exchange every {self.period} steps.'

  def make_node(self, node: int, num_nodes: int, seed: int = 0) -> 'PeerNode':
    """The state machine of one node, before its first step.

    Args:
      node: Number of the node, from 0 to num_nodes - 1.
      num_nodes: Number of nodes in the run.
      seed: Seed of the run, equal on all nodes.

    Returns:
      A new state machine.
    """
    self.check(num_nodes)
    return self.node_class(self, node, num_nodes, seed)

  def make_centre(self) -> protocols.Protocol:
    """The state machine of the centre, in a strategy that has one.

    It is a protocol whose pushes are the forces: the centre moves by a force if
    the decision updates, and otherwise refuses it. As a force cannot wait for
    others, the protocol must have `updates_each`. Its clock is the centre's
    version. The read clock of a push is the centre's version from which the
    node computed its force. A node joins with its first force, and leaves when
    it is known to be dead.

    Returns:
      A new protocol, before the start of a run.
    """
    raise NotImplementedError(
      f'{type(self).__name__} must define make_centre(): the protocol by which '
      'the centre takes forces.'
    )


class PeerNode:
  """State machine of one node of a `PeerStrategy`.

  A driver calls one method at a time. A subclass overrides `exchange`, and the
  other hooks where the strategy needs them:

  ======================  ====================================================
  hook                    content
  ======================  ====================================================
  `exchange`              the actions after every period of steps
  `on_replies`            the actions when all questions have a reply
  `on_outcome`            what a message's outcome changes at the sender
  `on_message`            whether a message is accepted
  `mix_waiting`           the mix of the messages that wait
  `held_mass`             the mass that would be lost with this node
  `list_join_candidates`  the peers that a joining node asks, in order
  `on_join_reply`         what a joining node takes over from its peer
  `on_restart`            what changes when the node restarts
  `on_regroup`            what changes when all nodes begin together
  `save_state`            the subclass's own state, for checkpoints
  `restore_state`         the inverse of `save_state`
  ======================  ====================================================

  Args:
    strategy: Parameters of the strategy.
    node: Number of the node.
    num_nodes: Number of nodes in the run.
    seed: Seed of the run.

  Attributes:
    strategy: Parameters of the strategy.
    node: Number of the node.
    num_nodes: Number of nodes in the run.
    seed: Seed of the run.
    period: Number of local steps between two exchanges.
    step: Number of steps that the node has made.
    mass: Weight of the node in the mean of all; 0 if the strategy has no mass.
    members: Sorted numbers of the nodes that this node believes alive, itself
      included.
    is_done: Whether the node has made all its steps.
    has_ended: Whether the node accepts no more messages.
  """

  def __init__(
    self, strategy: PeerStrategy, node: int, num_nodes: int, seed: int
  ) -> None:
    self.strategy: Any = strategy
    self.node = node
    self.num_nodes = num_nodes
    self.seed = seed
    self.period = strategy.period
    self.step = 0
    self.mass = 1.0 if strategy.has_mass else 0.0
    self.members: Sequence[int] = range(num_nodes)
    self.is_done = False
    self.has_ended = False
    self._join_candidates: list[int] = []

  # --- Hooks, for subclasses to override.

  def exchange(self, step: int) -> Actions:
    """Begins an exchange.

    Mass that leaves with a message must be subtracted here, so that a driver
    that records `mass` before it sends never records too much.

    Args:
      step: Number of steps that the node has made, a multiple of the period.

    Returns:
      The actions.
    """
    raise NotImplementedError(
      f'{type(self).__name__} must define exchange(step): the actions after '
      'every period of steps.'
    )

  def on_replies(self, replies: Sequence[Reply]) -> Actions:
    """Continues the exchange when all questions have a reply.

    Args:
      replies: Replies in the order of the questions. After a `JoinMean`: one
        reply, of the node itself, when the mean is in its weights. It has their
        version.

    Returns:
      Further actions; none after a mean.
    """
    del replies
    return ()

  def on_outcome(self, send: Send, outcome: Outcome) -> None:
    """Handles the outcome of a message that this node sent.

    Args:
      send: The action that sent the message.
      outcome: Outcome at the receiver.
    """

  def on_message(self, message: Message) -> Outcome:
    """Accepts or refuses weights that another node sent.

    Args:
      message: The message.

    Returns:
      `TAKEN`, `FULL` or `DONE`.

    Raises:
      ValueError: if nodes of this strategy do not send weights.
    """
    raise ValueError(f'A node of {self.strategy.name!r} takes no weights.')

  def mix_waiting(self) -> Mix | None:
    """The mix of all messages that wait; None if there are none."""
    return None

  @property
  def takes_messages(self) -> bool:
    """Whether other nodes may send weights: whether `on_message` is given."""
    return type(self).on_message is not PeerNode.on_message

  @property
  def held_mass(self) -> float:
    """Mass that would be lost with this node: its own and that of messages."""
    return self.mass

  def list_join_candidates(self) -> list[int]:
    """Peers that a joining node asks, one by one, until one answers."""
    others = [peer for peer in self.members if peer != self.node]
    # Joining nodes begin with different peers, so that none must answer all.
    return sorted(others, key=lambda peer: (peer - self.node) % self.num_nodes)

  def save_state(self) -> dict[str, Any]:
    """The subclass's own state, as a JSON-serialisable dict."""
    return {}

  def restore_state(self, state: Mapping[str, Any]) -> None:
    """Sets the subclass's own state. The inverse of `save_state`."""

  # --- Events that drivers report.

  def on_alive(self, members: Sequence[int]) -> None:
    """Handles a change of the nodes that this node believes alive.

    Args:
      members: Sorted numbers of the nodes, this one included.
    """
    self.members = members

  def on_step(self, step: int) -> Actions:
    """Handles the end of a local step.

    Args:
      step: Number of steps that the node has made, with this one.

    Returns:
      Actions before the next step.
    """
    self.step = step
    return () if step % self.period else self.exchange(step)

  def on_done(self) -> Actions:
    """Handles the end of the last step; called again when messages arrive."""
    self.is_done = True
    return (MixWaiting(),)

  def on_end(self) -> Actions:
    """Handles the end of the node: a last mix, and no more messages.

    A node ends once, when no peer makes steps any more or it is stopped.
    """
    self.has_ended = True
    return (MixWaiting(),)

  def on_join(self) -> Actions:
    """Joins a run that has begun: asks a peer for its weights.

    Returns:
      One question, whose reply goes to `on_join_reply`; nothing if there is no
      peer to ask.
    """
    self._join_candidates = self.list_join_candidates()
    return self._ask_to_join()

  def on_join_reply(self, reply: Reply) -> Actions:
    """Takes over the weights and the step of the peer that answered.

    With the peer's step, the joining node continues the schedule of its peers
    instead of beginning anew; drivers set the counts of its optimizer from
    `step`. Its mass is 0: joining creates no mass. A peer that has made no step
    and no mix cannot help: it counts as one that did not answer.

    Args:
      reply: Reply to the question of a joining node.

    Returns:
      A `Mix` that replaces the weights by the peer's: then the node has joined.
      Or the next question, if the peer could not help; or nothing, if there is
      no further peer: then the node keeps its own weights.
    """
    has_begun = reply.version > 0 or reply.step > 0
    if reply.outcome != Outcome.TAKEN or not has_begun:
      return self._ask_to_join()
    self.mass = 0.0
    self.step = max(self.step, reply.step)
    return (Mix(0.0, ((reply, 1.0),)),)

  def on_restart(self, step: int, last_mass: float) -> None:
    """Continues from a checkpoint, or from the start if there is none.

    Called after `restore`. A node without a checkpoint may join after this.

    The mass is that of the last record, not of the checkpoint: mass that the
    node sent since the checkpoint has left, and mass that it mixed since is
    kept. Mass of messages that waited to be mixed is lost.

    Args:
      step: Number of steps in the checkpoint.
      last_mass: Mass in the last record that the node wrote.
    """
    self.step = step
    self.mass = last_mass

  def on_regroup(self, number: int) -> None:
    """Handles the beginning of all nodes together, in a collective strategy.

    Called on every node at the start of a run; and after `on_restart`, when all
    nodes have gone back to their last common checkpoint.

    Args:
      number: Number of the next mean, equal on all nodes: the least one that is
        above those of all means that any node has recorded. The saved number
        may be lower, as means after the checkpoint have been recorded.
    """

  def save(self) -> dict[str, Any]:
    """The whole state between two exchanges, as a JSON-serialisable dict."""
    return {'step': self.step, 'mass': self.mass, **self.save_state()}

  def restore(self, state: Mapping[str, Any]) -> Self:
    """Continues from a state that `save` of an equal node returned."""
    self.step = state['step']
    self.mass = state['mass']
    self.restore_state(state)
    return self

  def _ask_to_join(self) -> Actions:
    if not self._join_candidates:
      return ()
    return (Ask(self._join_candidates.pop(0)),)
