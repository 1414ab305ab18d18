"""Ways to train without a server, or with one that only averages."""

import dataclasses
from typing import ClassVar

from jasgd import protocols
from jasgd.gossip import _checks
from jasgd.gossip import _draws
from jasgd.gossip import _measures
from jasgd.gossip import _topology

# Of elastic averaging: where the gradient after an exchange is taken.
ORDERS = ('a3', 'easgd')


@dataclasses.dataclass(frozen=True)
class Strategy:
  """Every node steps on its own weights, and mixes every `period` steps."""

  period: int = 1  # Local steps between two mixes.

  def __post_init__(self) -> None:
    _checks.check_count('period', self.period)

  def check(self, num_nodes: int) -> None:
    """Raises a ValueError if it cannot be used with this many nodes."""

  def check_together(self, num_nodes: int) -> None:
    """The same for nodes that all mix at once, as they do on devices."""
    self.check(num_nodes)

  def describe(self) -> str:
    """Who waits for what, in words."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class AllReduce(Strategy):
  """All nodes wait for each other and average; with period > 1, local SGD.

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016
  """

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'allreduce({self.period}): every {self.period} steps all nodes wait for '
      'the slowest, and average.'
    )


@dataclasses.dataclass(frozen=True)
class Elastic(Strategy):
  """Elastic averaging with a centre: EASGD.

  A node x and the centre c move towards each other by `rate` (x - c). With
  momentum in the nodes' own steps it is EAMSGD; who does what when is the same.

  References:
    Zhang et al., `Deep learning with Elastic Averaging SGD
    <https://arxiv.org/abs/1412.6651>`_, 2015
  """

  rate: float = 0.1  # 0: nobody moves, and all nodes are on their own.
  # Where the gradient after an exchange is taken: 'a3' at the mixed weights, as
  # Jin et al. do; 'easgd' at those before, as Zhang et al. do.
  order: str = 'a3'

  def __post_init__(self) -> None:
    super().__post_init__()
    if not 0 <= protocols.check_number('rate', self.rate) <= 1:
      raise ValueError(f'rate must be from 0 to 1, got {self.rate}.')
    _checks.check_choice('order', self.order, ORDERS)

  def describe(self) -> str:
    """Who waits for what, in words."""
    return (
      f'elastic({self.period}, {self.rate}): every {self.period} steps a node '
      'waits for the answer of the centre, for nobody else.'
    )


@dataclasses.dataclass(frozen=True)
class Gossip(Strategy):
  """Mixes with peers, drawn at random or given by a topology."""

  # A name in `jasgd.gossip.PEERS`, or a topology whose k-th round says whom a
  # node's k-th mix is with.
  peers: str | _topology.Topology = 'independent'
  _words: ClassVar[str] = ''

  def __post_init__(self) -> None:
    super().__post_init__()
    is_known = (
      self.peers in _draws.PEERS
      if isinstance(self.peers, str)
      else isinstance(self.peers, _topology.Topology)
    )
    if not is_known:
      raise ValueError(
        f'Unknown peers {self.peers!r}. Known: {", ".join(_draws.PEERS)}; or '
        'give a topology.'
      )

  def check(self, num_nodes: int) -> None:
    """Raises a ValueError if the topology is of another size."""
    if isinstance(self.peers, str):
      return
    if self.peers.num_nodes != num_nodes:
      raise ValueError(
        f'The topology has {self.peers.num_nodes} nodes, but there are '
        f'{num_nodes}.'
      )

  def describe(self) -> str:
    """Who waits for what, in words."""
    name = type(self).__name__.lower()
    peers = self.peers if isinstance(self.peers, str) else self.peers.kind
    return (
      f'{name}({self.period}): every {self.period} steps a node {self._words}; '
      f'peers: {peers}.'
    )


@dataclasses.dataclass(frozen=True)
class Pull(Gossip):
  """Pull-gossip: x <- (1 - beta) x + beta x_peer, as the peer is then.

  With a topology: the weighted mean that it says, of all peers of that round.

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016
  """

  beta: float = 0.5  # Of a random peer; a topology has weights of its own.
  _words: ClassVar[str] = 'waits for the weights of a peer and averages'

  def __post_init__(self) -> None:
    super().__post_init__()
    _checks.check_weight(self.beta, 'beta')
    if self.beta != 0.5 and not isinstance(self.peers, str):
      raise ValueError(
        'A topology has weights of its own (see with_constant_weights): leave '
        f'beta at 0.5, got {self.beta}.'
      )


@dataclasses.dataclass(frozen=True)
class Push(Gossip):
  """Push-gossip: sends x to a peer, then averages with all that has come.

  x <- (w x + sum of received) / (w + number of received); w is 1, or 2 if the
  draw was the node itself.

  With a topology a node sends to all peers of that round, and W_ij, the weight
  of peer j for node i, is the weight that i's message has for j. A node's own
  weight is what its peers leave of 1; the mean is divided by the sum of the
  weights that came together. If W is doubly stochastic and all nodes mix at
  once, that is `Topology.push`.

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016
  """

  _words: ClassVar[str] = (
    'sends its weights to a peer and averages what has come, and waits for '
    'nobody'
  )


@dataclasses.dataclass(frozen=True)
class PushSum(Gossip):
  """Push-gossip with masses, which keeps the mean: SGP, GoSGD.

  A node keeps half of its mass and sends the other half with its weights; a mix
  weighs by mass. All masses start at 1. With a topology, peer j gets the share
  W_ij of node i's mass: all nodes at once do `Topology.push`, on their weights
  times mass and on the masses.

  There are two forms, equal but for what a gradient does. On devices, where all
  are in step, it is SGP: nodes hold x = mass * z, and an update u(z) is added
  to x, so that z moves by u / mass. In virtual time and in real processes,
  where a node may send half of its mass time and again before it is sent any,
  it is GoSGD: nodes hold z, which moves by u itself, however small the mass is.
  The mean that is evaluated is that of z, weighted by mass, in both.

  References:
    Assran et al., `Stochastic Gradient Push
    <https://arxiv.org/abs/1811.10792>`_, 2019; Blot et al., `Gossip training
    for deep learning <https://arxiv.org/abs/1611.09726>`_, 2016
  """

  _words: ClassVar[str] = (
    'sends its weights and a part of its mass to a peer, and waits for nobody'
  )


@dataclasses.dataclass(frozen=True)
class Pairs(Gossip):
  """Symmetric averaging: x, x_peer <- (x + x_peer) / 2, at once: AD-PSGD.

  The peer goes on with the gradient it is computing.

  References:
    Lian et al., `Asynchronous Decentralized Parallel Stochastic Gradient
    Descent <https://arxiv.org/abs/1710.06952>`_, 2018
  """

  _words: ClassVar[str] = 'waits until it and a peer have averaged'

  def check(self, num_nodes: int) -> None:
    """Raises a ValueError if the topology does not fit, or makes no pairs."""
    super().check(num_nodes)
    if not isinstance(self.peers, str) and self.peers.max_degree > 1:
      raise ValueError(
        'Pairs need a topology with one peer per node and round, got '
        f'{self.peers.kind} with {self.peers.max_degree}.'
      )

  def check_together(self, num_nodes: int) -> None:
    """Both ends of a pair must have drawn each other."""
    super().check_together(num_nodes)
    peers = self.peers
    if peers == 'matching':
      return
    if isinstance(peers, str) or not _measures.is_symmetric(peers):
      name = repr(peers) if isinstance(peers, str) else peers.kind
      raise ValueError(
        "On devices, Pairs need peers='matching' or a symmetric topology with "
        f'one peer per node and round, got {name}.'
      )
