"""`simulate_nodes`: peers that step and mix, in virtual time."""

from collections.abc import Sequence
import operator

import numpy as np

from jasgd import gossip
from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _node_allreduce
from jasgd.simulation import _node_elastic
from jasgd.simulation import _node_gossip
from jasgd.simulation import _node_loop
from jasgd.simulation import _times

_LOOPS: dict[type[gossip.Strategy], type[_node_loop.NodeLoop]] = {
  gossip.AllReduce: _node_allreduce.AllReduceLoop,
  gossip.Elastic: _node_elastic.ElasticLoop,
  gossip.Pairs: _node_gossip.PairsLoop,
  gossip.Pull: _node_gossip.PullLoop,
  gossip.Push: _node_gossip.PushLoop,
  gossip.PushSum: _node_gossip.PushSumLoop,
}


def simulate_nodes(
  strategy: gossip.Strategy,
  *,
  num_nodes: int,
  num_steps: int,
  compute: _times.ComputeTime | None = None,
  network: _network.Network | None = None,
  failures: Sequence[_failures.Failure] = (),
  seed: int = 0,
) -> traces.NodeTrace:
  """Runs nodes without a server in virtual time, and records what happens.

  Every node makes `num_steps` steps, in all its lives together: the one that it
  dies in is made again. A node that is done still answers, and mixes what it is
  sent.

  A dead node does nothing, and nobody waits for it. An all-reduce goes on, or
  begins again, without it. A question to it is refused, which costs two
  latencies, and its weight in the mix goes to the node that asked. A message to
  it is lost, and with push-sum the message's mass. What was sent by it before
  it died still arrives.

  A node that comes back asks for weights: the next node that is alive, by
  number, or the centre of elastic averaging. Until it has them, others see it
  as dead. With push-sum it gets half of that node's mass. If there is nobody,
  it goes on with the weights that it had (and a mass of 1).

  With all-reduce of period 1, nodes average their gradients, and each makes the
  same update; with a longer period they step on their own, and average their
  weights. In elastic averaging a node asks the centre, moves towards what it is
  answered, and sends the force by which it has moved, without waiting until the
  centre has moved too. If its order is 'easgd', the next gradient is still of
  the weights before that mix, although it is computed after it. Push-sum is of
  GoSGD's form: a node holds its weights, to which its steps are applied, beside
  its mass, by which they are mixed.

  A message between nodes takes the latency and its bytes over `bandwidth`; what
  one node pulls at once, or pushes, goes over its link one after another. The
  centre's link, `server_bandwidth` and `num_shards`, is shared by all, and its
  `server_time` too.

  Args:
    strategy: How they mix: one of `jasgd.gossip`, such as `Pull()`.
    num_nodes: Number of nodes.
    num_steps: Steps that each node makes.
    compute: How long a gradient takes. By default 1.
    network: How long messages take; every message with weights has
      `bytes_per_push` bytes. By default no time.
    failures: Nodes that die, and come back: as in `simulate`.
    seed: Of times and peers, below 2**64; as in `simulate`.

  Returns:
    The trace.

  Raises:
    ValueError: before any work, if an argument makes no sense.

  Examples:
    >>> from jasgd import gossip, simulation
    >>> trace = simulation.simulate_nodes(
    ...     gossip.AllReduce(), num_nodes=4, num_steps=3)
    >>> print(len(trace.steps), len(trace.mixes), trace.duration)
    12 12 3.0
  """
  compute = _times.constant() if compute is None else compute
  network = _network.Network() if network is None else network
  check_nodes(
    strategy,
    num_nodes=num_nodes,
    num_steps=num_steps,
    compute=compute,
    network=network,
    failures=failures,
    seed=seed,
  )
  failures = _failures.read_failures(failures, num_nodes)
  setup = _node_loop.Setup(
    strategy,
    operator.index(num_nodes),
    operator.index(num_steps),
    compute,
    network,
    failures,
    operator.index(seed),
  )
  make_loop = next(
    loop for kind, loop in _LOOPS.items() if isinstance(strategy, kind)
  )
  averages = {}
  if isinstance(strategy, gossip.AllReduce):
    averages['averages'] = 'gradients' if strategy.period == 1 else 'weights'
  return traces.NodeTrace(
    make_loop(setup).run(),
    {
      'strategy': strategy.describe(),
      'num_nodes': setup.num_nodes,
      'num_steps': setup.num_steps,
      'compute': compute.name,
      'seed': setup.seed,
      'bytes_per_message': network.bytes_per_push,
      'network': network.to_header(),
      'num_failures': len(failures),
      'numpy': np.__version__,
      **averages,
    },
  )


def check_nodes(
  strategy: gossip.Strategy,
  *,
  num_nodes: int,
  num_steps: int,
  compute: _times.ComputeTime,
  network: _network.Network,
  failures: Sequence[_failures.Failure],
  seed: int,
) -> None:
  """Raises a ValueError if `simulate_nodes` would refuse these arguments."""
  for name, value, kind in (
    ('strategy', strategy, tuple(_LOOPS)),
    ('compute', compute, _times.ComputeTime),
    ('network', network, _network.Network),
  ):
    if not isinstance(value, kind):
      raise ValueError(
        f'{name} is not one that simulate_nodes knows, got {value!r}. '
        '(Strategies are called, as in Pull(); protocols with a server go to '
        'simulate.)'
      )
  protocols.check_count('num_nodes', num_nodes, 1)
  protocols.check_count('num_steps', num_steps, 1)
  _times.check_seed(seed)
  strategy.check(num_nodes)
  compute.table(seed, 0, 1, num_nodes)  # Is it for as many nodes?
  network.check()
  _failures.read_failures(failures, num_nodes)
