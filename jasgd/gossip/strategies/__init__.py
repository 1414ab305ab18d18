"""Peer strategies: one algorithm, one file, with its paper on top.

===========  ================================================  ================
strategy     exchange, after every period of steps             waiting
===========  ================================================  ================
`Pull`       averages with the weights of a peer               for the answer
`Push`       sends its weights, averages received messages     never
`PushSum`    as `Push`, weighted by masses, keeps the mean     never
`Pairs`      a node and a peer take their mean at one moment   for the answer
`Elastic`    a node and a centre move towards each other       for the answer
`AllReduce`  mean of all nodes                                 for all nodes
===========  ================================================  ================

`PeerStrategy` and `PeerNode` are the base classes; their docstrings show how to
write your own strategy. `make_strategy` builds a strategy from its config.
"""

import inspect
from typing import Any

from jasgd import protocols
from jasgd.gossip import topologies
from jasgd.gossip.strategies import _allreduce
from jasgd.gossip.strategies import _base
from jasgd.gossip.strategies import _elastic
from jasgd.gossip.strategies import _pairs
from jasgd.gossip.strategies import _pull
from jasgd.gossip.strategies import _push
from jasgd.gossip.strategies import _push_sum

Strategy = protocols.Protocol | _base.PeerStrategy

# All peer strategies by name.
STRATEGIES: dict[str, type[_base.PeerStrategy]] = {
  kind.name: kind
  for kind in (
    _allreduce.AllReduce,
    _elastic.Elastic,
    _pairs.Pairs,
    _pull.Pull,
    _push.Push,
    _push_sum.PushSum,
  )
}


def find_strategy(name: str) -> type[Strategy]:
  """The class of a protocol or peer strategy.

  Args:
    name: Name of a protocol or of a peer strategy; or `'module:name'` of your
      own subclass of `Protocol` or `PeerStrategy`, which is imported.

  Returns:
    The class.

  Raises:
    ValueError: if the name is unknown, or not that of such a class.
  """
  known = {**protocols.PROTOCOLS, **STRATEGIES}
  kind = protocols.find_named('strategy', known, name)
  if inspect.isclass(kind) and issubclass(kind, Strategy):
    return kind
  raise ValueError(
    f'{name!r} must be the name of a subclass of jasgd.protocols.Protocol or '
    f'jasgd.gossip.PeerStrategy, but it is {kind!r:.80}.'
  )


def check_strategy(value: Any) -> None:
  """Raises a ValueError unless a value is a protocol or a peer strategy.

  Args:
    value: Argument that a user gave as a strategy.
  """
  if not isinstance(value, Strategy):
    raise ValueError(
      'strategy must be a protocol, such as jasgd.protocols.softsync(2), or a '
      f'peer strategy, such as jasgd.gossip.Pull(), got {value!r:.80}.'
    )


def make_strategy(config: dict[str, Any]) -> Strategy:
  """Builds a protocol or a peer strategy from its config.

  The inverse of `PeerStrategy.to_config` and `Protocol.to_config`.

  Args:
    config: `{'name': ..., 'arguments': {...}}`. The name is one of
      `jasgd.protocols`, such as 'softsync'; or that of a peer strategy
      ('allreduce', 'elastic', 'pairs', 'pull', 'push', 'push_sum'); or
      `'module:name'` of your own subclass of `Protocol` or `PeerStrategy`,
      which is imported. A topology among the arguments is such a dict too.
      Without 'arguments' there are none.

  Returns:
    A new protocol, before the start of a run, or a peer strategy.

  Raises:
    ValueError: if the config has another form, the name is unknown, the module
      cannot be imported, or the arguments do not fit.

  Examples:
    >>> from jasgd import gossip
    >>> gossip.make_strategy({'name': 'softsync', 'arguments': {'n': 2}})
    softsync(n=2)
    >>> ring = {'name': 'ring', 'arguments': {'num_nodes': 8}}
    >>> gossip.make_strategy({'name': 'pull', 'arguments': {'peers': ring}})
    Pull(period=1, peers=Topology(ring, num_nodes=8, ...), beta=0.5)
  """
  return protocols.build(
    config,
    {**protocols.PROTOCOLS, **STRATEGIES},
    'strategy',
    parts={**topologies.KINDS, 'topology': topologies.Topology},
  )
