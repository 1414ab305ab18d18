"""`simulate_nodes`: peers that step and mix, in virtual time."""

from collections.abc import Sequence
import operator

import numpy as np

from jasgd import gossip
from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _node_loop
from jasgd.simulation import _times


def simulate_nodes(
  strategy: gossip.PeerStrategy,
  *,
  num_nodes: int,
  num_steps: int,
  compute: _times.ComputeTime | None = None,
  network: _network.Network | None = None,
  failures: Sequence[_failures.Failure] = (),
  detection_seconds: float = 0.0,
  checkpoint_seconds: float = np.inf,
  restart_seconds: float = 0.0,
  seed: int = 0,
) -> traces.NodeTrace:
  """Runs nodes without a server in virtual time, and records what happens.

  Every node is driven by the state machine that a real process would have, see
  `jasgd.gossip.PeerNode`. It makes `num_steps` steps. A node that is done still
  answers, and mixes what it is sent.

  A dead node does nothing. Others believe it alive until they fail to reach it,
  which takes two latencies and `detection_seconds`; after that they choose
  among the others, until it is back. A message that was under way when its
  receiver died is lost, and with push-sum the message's mass. What a node sent
  before it died still arrives.

  A node that comes back goes on from its last checkpoint, if it has one. If it
  has none, it asks others for weights, or the centre of elastic averaging:
  until it has them, others see it as dead. If nobody is there, it starts again
  from the first weights. An all-reduce stops when a node dies; once all nodes
  are up again, all of them go back to the last checkpoint, or to the start.

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
    detection_seconds: Time that a question to a dead node takes to fail, beyond
      two latencies.
    checkpoint_seconds: Time between two checkpoints of a node. Infinity: there
      are none.
    restart_seconds: Time that a node takes to start when it comes back.
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
    detection_seconds=detection_seconds,
    checkpoint_seconds=checkpoint_seconds,
    restart_seconds=restart_seconds,
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
    float(detection_seconds),
    float(checkpoint_seconds),
    float(restart_seconds),
  )
  averages = 'gradients' if strategy.averages_gradients else 'weights'
  return traces.NodeTrace(
    _node_loop.NodeLoop(setup).run(),
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
      'averages': averages,
    },
  )


def check_nodes(
  strategy: gossip.PeerStrategy,
  *,
  num_nodes: int,
  num_steps: int,
  compute: _times.ComputeTime,
  network: _network.Network,
  failures: Sequence[_failures.Failure],
  seed: int,
  detection_seconds: float = 0.0,
  checkpoint_seconds: float = np.inf,
  restart_seconds: float = 0.0,
) -> None:
  """Raises a ValueError if `simulate_nodes` would refuse these arguments."""
  for name, value, kind in (
    ('strategy', strategy, gossip.PeerStrategy),
    ('compute', compute, _times.ComputeTime),
    ('network', network, _network.Network),
  ):
    if not isinstance(value, kind):
      raise ValueError(
        f'{name} is not one that simulate_nodes knows, got {value!r}. '
        '(Strategies are called, as in Pull(); protocols with a server go to '
        'simulate.)'
      )
  _times.check_not_negative('detection_seconds', detection_seconds)
  _times.check_not_negative('restart_seconds', restart_seconds)
  if not protocols.check_number('checkpoint_seconds', checkpoint_seconds) > 0:
    raise ValueError(
      f'checkpoint_seconds must be above 0, got {checkpoint_seconds}.'
    )
  protocols.check_count('num_nodes', num_nodes, 1)
  protocols.check_count('num_steps', num_steps, 1)
  _times.check_seed(seed)
  strategy.check(num_nodes)
  compute.table(seed, 0, 1, num_nodes)  # Is it for as many nodes?
  network.check()
  _failures.read_failures(failures, num_nodes)
