"""The config of a strategy: a protocol with a server, or a peer strategy."""

import copy
import dataclasses
import inspect
from typing import Any

from jasgd import gossip
from jasgd import protocols


@dataclasses.dataclass(kw_only=True)
class StrategyConfig:
  """How workers train in parallel: with a server, or with each other.

  A field has an effect only with the strategies that its comment names.
  """

  # With a server: asynchronous, backup, constant_delay, downpour, hardsync,
  # rennala, ringmaster, softsync, ssp. Without: allreduce, elastic, pairs,
  # pull, push, push_sum. Or 'module:name' of your own subclass of
  # `jasgd.protocols.Protocol` or `jasgd.gossip.PeerStrategy`.
  name: str = 'asynchronous'
  # Further arguments of your own class, such as (('patience', 3),).
  arguments: tuple[tuple[str, Any], ...] = ()
  # softsync: an update takes as many gradients as 1/n of the learners.
  n: int = 1
  # constant_delay: staleness of every gradient; there are delay + 1 learners.
  delay: int = 0
  # ssp: steps by which a learner may lead. rennala: gradients per update.
  s: int = 1
  # ringmaster: the largest staleness of a gradient that is taken.
  r: int = 1
  # backup: number of gradients that an update does not wait for.
  num_backups: int = 1
  # downpour: steps between pushes, and between fetches.
  n_push: int = 1
  n_fetch: int = 1
  # Any protocol: updates over which the learners are admitted; 0: all at once.
  ramp_up: int = 0
  # Any peer strategy: local steps between two exchanges.
  period: int = 1
  # elastic: share of the distance that a node and the centre move towards each
  # other; Jin et al. take 0.8 / num_workers.
  rate: float = 0.1
  # elastic: weights at which the gradient after an exchange is computed; a3:
  # those after the exchange, easgd: those before it.
  order: str = 'a3'
  # pull: weight of a random peer.
  beta: float = 0.5
  # pull, push, push_sum, pairs: 'independent', 'permutation' or 'matching'
  # draws peers at random; a name in `jasgd.gossip.topologies.KINDS`, such as
  # 'ring', is a fixed topology.
  peers: str = 'independent'
  # random_regular: number of peers of a node. Other random topologies: number
  # of rounds that are drawn.
  degree: int = 3
  num_rounds: int = 64

  @property
  def is_peer(self) -> bool:
    """Whether there is no server; False if there is no such strategy."""
    try:
      return not self.find_class().has_server
    except ValueError:
      return False

  def find_class(self) -> type[gossip.Strategy]:
    """The class of the strategy; a ValueError if there is none."""
    return gossip.find_strategy(self.name)

  def make(self, num_workers: int, seed: int) -> gossip.Strategy:
    """A new strategy, before the start of a run.

    Args:
      num_workers: Number of nodes of a topology.
      seed: Seed of a random topology.

    Returns:
      The protocol or peer strategy.

    Raises:
      ValueError: if the name or an argument makes no sense.
    """
    parameters = inspect.signature(self.find_class()).parameters
    arguments = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name not in ('name', 'arguments')
      and self._is_given(field, parameters)
    }
    if 'peers' in arguments:
      arguments['peers'] = self._make_peers(num_workers, seed)
    strategy: Any = gossip.make_strategy(
      {'name': self.name, 'arguments': arguments | dict(self.arguments)}
    )
    if not self.ramp_up:
      return strategy
    if not strategy.has_server:
      raise ValueError(
        'strategy.ramp_up is for protocols with a server, got '
        f'strategy.name={self.name!r}.'
      )
    return protocols.ramp_up(strategy, self.ramp_up)

  def _is_given(self, field: Any, parameters: Any) -> bool:
    """Whether a field is an argument: required, or not left at its default."""
    if field.name not in parameters:
      return False
    is_required = parameters[field.name].default is inspect.Parameter.empty
    return is_required or getattr(self, field.name) != field.default

  def _make_peers(
    self, num_workers: int, seed: int
  ) -> str | gossip.topologies.Topology:
    if self.peers in gossip.PEERS:
      return self.peers
    if self.peers not in gossip.topologies.KINDS:
      known = ', '.join(sorted({*gossip.PEERS, *gossip.topologies.KINDS}))
      raise ValueError(f'Unknown peers {self.peers!r}. Known: {known}.')
    given = {
      'degree': self.degree,
      'num_rounds': self.num_rounds,
      'seed': seed,
    }
    taken = inspect.signature(gossip.topologies.KINDS[self.peers]).parameters
    return gossip.topologies.make_topology(
      self.peers,
      num_workers,
      **{name: value for name, value in given.items() if name in taken},
    )


def count_workers(strategy: Any, num_workers: int) -> int:
  """Number of workers of a run.

  Args:
    strategy: A protocol or peer strategy.
    num_workers: Number that the config asks for.

  Returns:
    The only number that a protocol works with, if there is one, such as
    delay + 1 for a constant delay; otherwise the number asked for.
  """
  required = strategy.num_learners if strategy.has_server else None
  return num_workers if required is None else required


def count_gradients_per_update(strategy: Any, num_workers: int) -> int:
  """Number of gradients in an update while all workers are present.

  Args:
    strategy: A protocol or peer strategy; it is not changed.
    num_workers: Number of learners or nodes.

  Returns:
    For a protocol, the gradients until its first update, if all learners push
    in turn. For nodes, 1; or all of them if they average gradients.
  """
  if not strategy.has_server:
    return num_workers if strategy.averages_gradients else 1
  # A ramp-up begins with fewer learners.
  protocol = copy.deepcopy(strategy.without_ramp_up())
  protocol.init(num_workers)
  ready = list(range(num_workers))
  count = 0
  while ready:
    count += 1
    decision = protocol.on_push(ready.pop(0), 0, 0)
    if decision.updates:
      break
    ready += decision.released
  return count * protocol.steps_per_push
