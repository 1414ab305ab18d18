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


def make_strategy(
  config: dict[str, Any],
) -> protocols.Protocol | _base.PeerStrategy:
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

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016
  """
  return protocols.build(
    config,
    {**protocols.PROTOCOLS, **STRATEGIES},
    'strategy',
    parts={**topologies.KINDS, 'topology': topologies.Topology},
  )
