"""`simulate`: from a strategy and time models to a trace, without weights."""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from jasgd import gossip
from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _peer_loop
from jasgd.simulation import _server_loop
from jasgd.simulation import _sorted
from jasgd.simulation import _times


def simulate(
  strategy: gossip.Strategy,
  *,
  num_workers: int | None = None,
  num_gradients: int,
  compute: _times.ComputeTime | None = None,
  network: _network.Network | None = None,
  failures: Sequence[_failures.Failure] = (),
  overlap: bool = False,
  batch: int = 1,
  detection_seconds: float = 0.0,
  checkpoint_seconds: float = math.inf,
  restart_seconds: float = 0.0,
  seed: int = 0,
) -> traces.Trace:
  """Runs a strategy in virtual time, and records all events.

  **With a protocol**, learners push to a server. A push is handled atomically:
  staleness is measured, the protocol decides, the clock advances by one if it
  updates, and only then does the learner's pull see the newest weights. So with
  c gradients per update the mean staleness is (num_workers - 1) / c, whatever
  the speeds; with overlap, where a learner pulls before its push is applied, it
  is num_workers / c. Overlap changes the versions that are read, but no times.

  **With a peer strategy**, nodes step on their own weights. Every node is
  driven by the state machine that a real process would have, see
  `jasgd.gossip.PeerNode`. Each makes equally many steps. A node that is done
  still answers questions, and mixes the messages that it receives.

  A dead node does nothing. Each other node believes that it is alive until it
  fails to reach it, which takes two latencies and `detection_seconds`; after
  that it chooses among the others, until the dead node is back. A message that
  was under way when its receiver died is lost, and with push-sum the message's
  mass. A message that a node sent before it died still arrives.

  A node that comes back goes on from its last checkpoint, if it has one. If it
  has none, it asks other nodes for weights, or the centre of elastic averaging:
  until it has them, others see it as dead. If no other node is up, it starts
  again from the first weights. An all-reduce stops when a node dies; once all
  nodes are up again, all of them go back to the last checkpoint, or to the
  start.

  With all-reduce of period 1, nodes average their gradients, and each makes the
  same update; with a longer period they step on their own, and average their
  weights. In elastic averaging a node asks the centre, moves towards its
  answer, and sends the force by which it has moved, without waiting until the
  centre has moved too. If its order is 'easgd', the next gradient, although it
  is computed after that mix, is still computed at the weights before the mix.
  Push-sum has GoSGD's form: steps are applied to the weights of a node, and its
  mass is the factor by which these are mixed.

  A message between nodes takes the latency and its bytes divided by
  `bandwidth`. Messages that a node sends, or the answers to its questions, go
  over its link one after another. All workers share the link of a server or
  centre (`server_bandwidth`, `num_shards`) and its `server_time`.

  Args:
    strategy: A protocol of `jasgd.protocols`, such as `softsync(2)`, or a peer
      strategy of `jasgd.gossip`, such as `Pull()`.
    num_workers: Number of learners or nodes. A `constant_delay` implies it.
    num_gradients: Number of gradients in all, dropped ones included. Nodes make
      equally many steps each: the number is rounded up to a multiple of
      `num_workers`.
    compute: Time model of a gradient, such as `simulation.exponential(1.0)`. By
      default a gradient takes 1 second.
    network: Durations of messages and updates; a message between nodes has
      `bytes_per_push` bytes. By default they take no time.
    failures: Workers that die and come back: `Failure`s, or tuples of time,
      worker and, unless it is gone for good, the time of its return.
    overlap: Whether a learner pulls before its push is applied.
    batch: Samples per minibatch, for the `samples` of the trace.
    detection_seconds: Time that a question to a dead node takes to fail, beyond
      two latencies.
    checkpoint_seconds: Time between two checkpoints of a node. Infinity: there
      are none.
    restart_seconds: Time that a node takes to start when it comes back.
    seed: Seed of all random times and peers, below 2**64. The same seed gives
      the same trace on every machine, with the same release of numpy, which may
      change how a distribution is drawn.

  Returns:
    The trace.

  Raises:
    ValueError: before any work, if an argument makes no sense.

  Examples:
    >>> import jasgd
    >>> from jasgd import gossip, protocols
    >>> trace = jasgd.simulate(
    ...     protocols.asynchronous(), num_workers=4, num_gradients=8)
    >>> print(trace.staleness)
    [0 1 2 3 3 3 3 3]
    >>> trace = jasgd.simulate(
    ...     gossip.AllReduce(), num_workers=4, num_gradients=12)
    >>> print(len(trace.steps), len(trace.mixes), trace.duration)
    12 12 3.0
  """
  compute = _times.constant(1.0) if compute is None else compute
  network = _network.Network() if network is None else network
  gossip.check_strategy(strategy)
  if num_workers is None and strategy.has_server:
    protocol: Any = strategy
    num_workers = protocol.num_learners
  check_simulation(
    strategy,
    num_workers=num_workers,
    num_gradients=num_gradients,
    compute=compute,
    network=network,
    failures=failures,
    overlap=overlap,
    batch=batch,
    detection_seconds=detection_seconds,
    checkpoint_seconds=checkpoint_seconds,
    restart_seconds=restart_seconds,
    seed=seed,
  )
  assert num_workers is not None  # It was checked.
  failures = _failures.read_failures(failures, num_workers)
  header = {
    'strategy': strategy.to_config(),
    'description': strategy.describe(),
    'num_workers': num_workers,
    'compute': compute.name,
    'batch': batch,
    'seed': seed,
    'bytes_per_push': network.bytes_per_push,
    'bytes_per_pull': network.bytes_per_pull,
    'network': network.to_header(),
    'num_failures': len(failures),
    'numpy': np.__version__,
  }
  if strategy.has_server:
    records, found = _run_server(
      *(strategy, num_workers, num_gradients, compute, network, failures),
      *(seed, overlap, batch),
    )
  else:
    setup = _peer_loop.Setup(
      *(strategy, num_workers, -(-num_gradients // num_workers), compute),
      *(network, failures, int(seed), float(detection_seconds)),
      *(float(checkpoint_seconds), float(restart_seconds)),
    )
    records, found = _run_nodes(setup, batch)
  return traces.Trace(records, header | found)


def check_simulation(
  strategy: gossip.Strategy,
  *,
  num_workers: int | None,
  num_gradients: int,
  compute: _times.ComputeTime,
  network: _network.Network,
  failures: Sequence[_failures.Failure] = (),
  overlap: bool = False,
  batch: int = 1,
  detection_seconds: float = 0.0,
  checkpoint_seconds: float = math.inf,
  restart_seconds: float = 0.0,
  seed: int = 0,
) -> None:
  """Raises a ValueError if `simulate` would refuse these arguments."""
  gossip.check_strategy(strategy)
  for name, value, kind, example in (
    ('compute', compute, _times.ComputeTime, 'simulation.constant(1.0)'),
    ('network', network, _network.Network, 'one that make_network returns'),
  ):
    if not isinstance(value, kind):
      raise ValueError(
        f'{name} must be a {kind.__name__}, such as {example}, got {value!r}.'
      )
  if num_workers is None:
    raise ValueError(
      'num_workers must be given: the number of learners or nodes.'
    )
  protocols.check_count('num_workers', num_workers, 1)
  protocols.check_count('num_gradients', num_gradients, 1)
  protocols.check_count('batch', batch, 1)
  _times.check_seed(seed)
  _times.check_not_negative('detection_seconds', detection_seconds)
  _times.check_not_negative('restart_seconds', restart_seconds)
  if not protocols.check_number('checkpoint_seconds', checkpoint_seconds) > 0:
    raise ValueError(
      f'checkpoint_seconds must be above 0, got {checkpoint_seconds}. With '
      'infinity there are no checkpoints.'
    )
  if not isinstance(overlap, (bool, np.bool_)):
    raise ValueError(f'overlap must be True or False, got {overlap!r}.')
  strategy.check(num_workers)
  compute.table(seed, 0, 1, num_workers)  # Raises for other numbers of workers.
  network.check()
  _failures.read_failures(failures, num_workers)
  if not strategy.has_server:
    if overlap:
      raise ValueError(
        'overlap is for learners, which pull from a server; nodes have none. '
        'Leave it out.'
      )
    return
  if (detection_seconds, checkpoint_seconds, restart_seconds) != (
    (0.0, math.inf, 0.0)
  ):
    raise ValueError(
      'detection_seconds, checkpoint_seconds and restart_seconds are for peer '
      'strategies: a simulated server notices a death at once, and never dies. '
      'Leave them out.'
    )
  _check_protocol(strategy, compute, network, failures, overlap)


def _check_protocol(
  protocol: Any,
  compute: _times.ComputeTime,
  network: _network.Network,
  failures: Sequence[_failures.Failure],
  overlap: bool,
) -> None:
  """Raises a ValueError if a protocol cannot work with these times."""
  if overlap and protocol.needs_current_clock:
    raise ValueError(
      'With overlap a learner pulls before its push is applied, so none of its '
      'gradients would be of the current clock, which this protocol needs: '
      f'{protocol.describe()} Use overlap=False.'
    )
  if protocol.needs_equal_times and not (
    compute.is_constant and network.is_free and not failures
  ):
    raise ValueError(
      'A constant delay comes from equal, constant times without a network or '
      f'failures; got compute={compute.name}, network={network} and '
      f'{len(failures)} failures. With other times use asynchronous().'
    )


def _run_server(
  protocol: Any,
  num_workers: int,
  num_gradients: int,
  compute: _times.ComputeTime,
  network: _network.Network,
  failures: Sequence[_failures.Failure],
  seed: int,
  overlap: bool,
  batch: int,
) -> tuple[np.ndarray, dict[str, Any]]:
  """The records of a run with a server, and its part of the header."""
  samples = batch * protocol.steps_per_push
  has_fetches = protocol.steps_per_fetch != protocol.steps_per_push
  # Whether the order of arrivals is independent of the server's answers.
  can_be_sorted = not protocol.holds_learners and not has_fetches
  result = None
  if can_be_sorted and network.is_free and not failures:
    result = _sorted.simulate_sorted(
      protocol, num_workers, num_gradients, compute, seed, overlap, samples
    )
  if result is None:
    result = _server_loop.ServerLoop(
      protocol, num_workers, compute, network, failures, seed, overlap
    ).run(num_gradients)
    result[0]['samples'][result[0]['kind'] == traces.Kind.PUSH] = samples
  records, in_flight = result
  num_made = np.count_nonzero(records['kind'] == traces.Kind.PUSH)
  return records, {
    'in_flight': in_flight,
    # All learners may be gone before all gradients are made.
    'num_missing': num_gradients - num_made,
    'overlap': overlap,
    'steps_per_push': protocol.steps_per_push,
    'steps_per_fetch': protocol.steps_per_fetch,
  }


def _run_nodes(
  setup: _peer_loop.Setup, batch: int
) -> tuple[np.ndarray, dict[str, Any]]:
  """The records of a run without a server, and its part of the header."""
  loop = _peer_loop.PeerLoop(setup)
  records = loop.run()
  records['samples'][records['kind'] == traces.Kind.STEP] = batch
  is_of_gradients = setup.strategy.averages_gradients
  return records, {
    'num_missing': loop.num_missing,
    'averages': 'gradients' if is_of_gradients else 'weights',
    'num_steps': setup.num_steps,
  }
