"""The parts that configs are made of: each field is a flag."""

from collections.abc import Callable
import dataclasses
import inspect
from typing import Any

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation

_TIMES: dict[str, Callable[..., simulation.ComputeTime]] = {
  'constant': simulation.constant,
  'exponential': simulation.exponential,
  'gamma': simulation.gamma,
  'lognormal': simulation.lognormal,
  'normal': simulation.normal,
  'pareto': simulation.pareto,
  'recorded': lambda *times: simulation.recorded(times),
}


@dataclasses.dataclass(kw_only=True)
class ProtocolConfig:
  """When the server updates, and who waits."""

  # A function of `jasgd.protocols`.
  name: str = 'asynchronous'
  # Number of learners; a constant delay d has d + 1, whatever stands here.
  num_learners: int = 16
  # softsync: an update takes as many gradients as 1/n of the learners.
  n: int = 1
  # constant_delay: in updates.
  delay: int = 0
  # ssp: steps that a learner may lead by. rennala: gradients per update.
  s: int = 1
  # ringmaster: the largest staleness that counts.
  r: int = 1
  # backup: how many gradients an update does without.
  num_backups: int = 1
  # downpour: steps between pushes, and between fetches.
  n_push: int = 1
  n_fetch: int = 1
  # Updates over which the learners are introduced; 0: all at once.
  ramp_up: int = 0

  def make(self) -> protocols.Protocol:
    """The protocol."""
    known: dict[str, tuple[Callable[..., protocols.Protocol], Any]] = {
      'asynchronous': (protocols.asynchronous, ()),
      'backup': (protocols.backup, (self.num_backups,)),
      'constant_delay': (protocols.constant_delay, (self.delay,)),
      'downpour': (protocols.downpour, (self.n_push, self.n_fetch)),
      'hardsync': (protocols.hardsync, ()),
      'rennala': (protocols.rennala, (self.s,)),
      'ringmaster': (protocols.ringmaster, (self.r,)),
      'softsync': (protocols.softsync, (self.n,)),
      'ssp': (protocols.ssp, (self.s,)),
    }
    make, arguments = choose('protocol', known, self.name)
    protocol = make(*arguments)
    if self.ramp_up:
      protocol = protocols.ramp_up(protocol, self.ramp_up)
    return protocol

  def count_learners(self) -> int:
    """How many learners there are."""
    is_delay = self.name == 'constant_delay'
    return self.delay + 1 if is_delay else self.num_learners


@dataclasses.dataclass(kw_only=True)
class StrategyConfig:
  """How nodes without a server average."""

  # One of allreduce, elastic, pairs, pull, push, push_sum.
  name: str = 'pull'
  # Number of nodes.
  num_nodes: int = 16
  # Steps between two mixes.
  period: int = 1
  # elastic: how far a node and the centre move towards each other; Jin et al.
  # take 0.8 / num_nodes.
  rate: float = 0.05
  # elastic: where the gradient after an exchange is taken; a3: at the mixed
  # weights, easgd: at those before.
  order: str = 'a3'
  # pull: the weight of a random peer.
  beta: float = 0.5
  # gossip: 'independent', 'permutation' or 'matching' draws peers at random; a
  # kind of `jasgd.gossip.KINDS`, such as 'ring', is a fixed topology.
  peers: str = 'independent'
  # random_regular: peers of a node; other random topologies: rounds drawn.
  degree: int = 3
  num_rounds: int = 64

  def make(self, seed: int) -> gossip.PeerStrategy:
    """The strategy; the seed is that of a random topology."""
    known: dict[str, type[gossip.PeerStrategy]] = {
      'allreduce': gossip.AllReduce,
      'elastic': gossip.Elastic,
      'pairs': gossip.Pairs,
      'pull': gossip.Pull,
      'push': gossip.Push,
      'push_sum': gossip.PushSum,
    }
    make = choose('strategy', known, self.name)
    if issubclass(make, gossip.Elastic):
      return make(period=self.period, rate=self.rate, order=self.order)
    if issubclass(make, gossip.Pull):
      peers = self._make_peers(seed)
      return make(period=self.period, peers=peers, beta=self.beta)
    if issubclass(make, gossip.Gossip):
      return make(period=self.period, peers=self._make_peers(seed))
    return make(period=self.period)

  def _make_peers(self, seed: int) -> str | gossip.Topology:
    if self.peers in gossip.PEERS:
      return self.peers
    if self.peers not in gossip.KINDS:
      known = ', '.join(sorted({*gossip.PEERS, *gossip.KINDS}))
      raise ValueError(f'Unknown peers {self.peers!r}. Known: {known}.')
    given = {
      'degree': self.degree,
      'num_rounds': self.num_rounds,
      'seed': seed,
    }
    taken = inspect.signature(getattr(gossip, self.peers)).parameters
    return gossip.make_topology(
      self.peers,
      self.num_nodes,
      **{name: value for name, value in given.items() if name in taken},
    )


@dataclasses.dataclass(kw_only=True)
class TimeConfig:
  """How long a gradient takes."""

  # A function of `jasgd.simulation`; `recorded` takes the times themselves.
  name: str = 'normal'
  # Its arguments, in order.
  arguments: tuple[float, ...] = (1.0, 0.2)
  # The share of learners that is slower, and by which factor.
  slow_fraction: float = 0.0
  slow_factor: float = 1.0
  # In each period of steps a learner is slow for some of them; 0: never.
  spell_period: int = 0
  spell_length: int = 0
  spell_factor: float = 1.0
  # Of each learner; (): all are alike.
  speeds: tuple[float, ...] = ()

  def make(self) -> simulation.ComputeTime:
    """The time model."""
    make = choose('time', _TIMES, self.name)
    try:
      time = make(*self.arguments)
    except TypeError as error:
      raise ValueError(
        f'time {self.name!r} does not take arguments {self.arguments}: {error}.'
      ) from None
    if self.slow_fraction:
      time = simulation.with_slow_minority(
        time, self.slow_fraction, self.slow_factor
      )
    if self.spell_period:
      time = simulation.with_slow_spells(
        time, self.spell_period, self.spell_length, self.spell_factor
      )
    if self.speeds:
      time = simulation.with_speeds(time, self.speeds)
    return time


@dataclasses.dataclass(kw_only=True)
class NetworkConfig:
  """How long messages and updates take. By default they take no time."""

  # Size of the model. 1 stands for that of the task's model in training; else,
  # for messages whose size is of no matter.
  num_parameters: int = 1
  # Of the wire's dtype.
  bytes_per_parameter: int = 4
  # Of one message, in seconds.
  latency: float = 0.0
  # Of a learner's link, in bytes per second.
  bandwidth: float = float('inf')
  # Of the server's link, which all learners share.
  server_bandwidth: float = float('inf')
  # Of one update, in seconds.
  server_time: float = 0.0
  # Servers among which the weights are split.
  num_shards: int = 1

  def make(self) -> simulation.Network:
    """The network."""
    network = simulation.make_network(**dataclasses.asdict(self))
    if self.num_parameters == 1:  # The default: nobody gave a size.
      network = network._replace(bytes_per_push=0.0, bytes_per_pull=0.0)
    return network


@dataclasses.dataclass(kw_only=True)
class FailureConfig:
  """Who dies when, and comes back. By default nobody does."""

  # (time, learner, until) of each; leave `until` out: for good.
  given: tuple[tuple[float, ...], ...] = ()
  # Mean time for which a learner is up, then gone, at random; 0: always up.
  mean_time_between: float = 0.0
  mean_down_time: float = 1.0
  # Until when learners die at random.
  horizon: float = 1000.0

  def make(self, num_learners: int, seed: int) -> list[simulation.Failure]:
    """The failures."""
    for failure in self.given:
      # A flag may give the learner's number as 1.0.
      if not 2 <= len(failure) <= 3 or not float(failure[1]).is_integer():
        raise ValueError(
          'A failure is given as (time, learner, until), with a whole number '
          f'for the learner, got {failure}.'
        )
    failures = [
      simulation.Failure(failure[0], int(failure[1]), *failure[2:])
      for failure in self.given
    ]
    if self.mean_time_between:
      failures += simulation.draw_failures(
        num_learners,
        self.horizon,
        self.mean_time_between,
        self.mean_down_time,
        seed,
      )
    return failures


def choose(what: str, known: dict[str, Any], name: str) -> Any:
  """What a name stands for, or an error that says what there is."""
  if name not in known:
    raise ValueError(f'Unknown {what} {name!r}. Known: {", ".join(known)}.')
  return known[name]
