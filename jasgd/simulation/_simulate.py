"""`simulate`: who computes what when, without any weights."""

from collections.abc import Sequence

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _events
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _sorted
from jasgd.simulation import _times


def simulate(
  protocol: protocols.Protocol,
  *,
  num_learners: int | None = None,
  num_gradients: int,
  compute: _times.ComputeTime | None = None,
  network: _network.Network | None = None,
  failures: Sequence[_failures.Failure] = (),
  overlap: bool = False,
  batch: int = 1,
  seed: int = 0,
) -> traces.Trace:
  """Runs learners and a server in virtual time, and records what happens.

  A push is handled atomically: staleness is measured, the protocol decides, the
  clock advances by one if it updates, and only then does the learner's pull see
  the newest weights. So with c gradients per update the mean staleness is
  (num_learners - 1) / c, whatever the speeds; with overlap, where a learner
  pulls before its push is applied, it is num_learners / c. Overlap changes what
  is read, not when: the times are those without.

  Args:
    protocol: When the server updates and who waits: see `jasgd.protocols`.
    num_learners: Number of learners. A constant delay knows its own.
    num_gradients: How many gradients the server handles, dropped ones included.
    compute: How long a gradient takes: see `jasgd.simulation`. By default 1.
    network: How long messages and updates take. By default no time.
    failures: Learners that die and come back: each a `Failure`, or a tuple of
      time, learner and, unless it is for good, until when.
    overlap: Whether a learner pulls before its push is applied.
    batch: Samples per gradient, for the `samples` of the trace.
    seed: Of all random times, below 2**64. The same seed gives the same trace
      on every machine, with the same release of numpy: the times are drawn by
      numpy's generator, from the bits of Philox, and a release may change how.

  Returns:
    The trace.

  Raises:
    ValueError: before any work, if an argument makes no sense.

  Examples:
    >>> from jasgd import protocols, simulation
    >>> trace = simulation.simulate(
    ...     protocols.asynchronous(), num_learners=4, num_gradients=8)
    >>> print(trace.staleness)
    [0 1 2 3 3 3 3 3]
  """
  compute = _times.constant(1.0) if compute is None else compute
  network = _network.Network() if network is None else network
  if num_learners is None:
    inside = getattr(protocol, 'protocol', protocol)
    num_learners = getattr(inside, 'num_learners', None)
  check_setup(
    protocol,
    num_learners=num_learners,
    num_gradients=num_gradients,
    compute=compute,
    network=network,
    failures=failures,
    overlap=overlap,
    batch=batch,
    seed=seed,
  )
  assert num_learners is not None  # It was checked.
  strategy = protocol.to_config()  # Before the run: it may be refused.
  failures = _failures.read_failures(failures, num_learners)
  result = None
  if _can_be_sorted(protocol) and network.is_free and not failures:
    result = _sorted.simulate_sorted(
      protocol, num_learners, num_gradients, compute, seed, overlap
    )
  if result is None:
    result = _events.EventLoop(
      protocol, num_learners, compute, network, failures, seed, overlap
    ).run(num_gradients)
  records, in_flight = result
  num_arrived = num_gradients
  if failures:  # All may be gone before.
    num_arrived = np.count_nonzero(records['kind'] == traces.Kind.GRADIENT)
  _settle(records, protocol.clock, batch * protocol.steps_per_push)
  return traces.Trace(
    records,
    {
      'protocol': protocol.describe(),
      'strategy': strategy,
      'num_learners': num_learners,
      'compute': compute.name,
      'overlap': overlap,
      'batch': batch,
      'steps_per_push': protocol.steps_per_push,
      'steps_per_fetch': protocol.steps_per_fetch,
      'seed': seed,
      'bytes_per_push': network.bytes_per_push,
      'bytes_per_pull': network.bytes_per_pull,
      'network': network.to_header(),
      'num_failures': len(failures),
      'num_missing': num_gradients - num_arrived,
      'numpy': np.__version__,
      'in_flight': in_flight,
    },
  )


def check_setup(
  protocol: protocols.Protocol,
  *,
  num_learners: int | None,
  num_gradients: int,
  compute: _times.ComputeTime,
  network: _network.Network,
  failures: Sequence[_failures.Failure],
  overlap: bool,
  batch: int,
  seed: int,
) -> None:
  """Raises a ValueError if `simulate` would refuse these arguments."""
  for name, value, kind in (
    ('protocol', protocol, protocols.Protocol),
    ('compute', compute, _times.ComputeTime),
    ('network', network, _network.Network),
  ):
    if not isinstance(value, kind):
      raise ValueError(
        f'{name} must be a {kind.__name__}, got {value!r}. (Protocols are '
        'called, as in asynchronous(); strategies without a server go to '
        'simulate_nodes.)'
      )
  if num_learners is None:
    raise ValueError('num_learners must be given.')
  protocols.check_count('num_learners', num_learners, 1)
  protocols.check_count('num_gradients', num_gradients, 1)
  protocols.check_count('batch', batch, 1)
  _times.check_seed(seed)
  if not isinstance(overlap, (bool, np.bool_)):
    raise ValueError(f'overlap must be True or False, got {overlap!r}.')
  protocol.check(num_learners)
  compute.table(seed, 0, 1, num_learners)  # Is it for as many learners?
  network.check()
  _failures.read_failures(failures, num_learners)
  if overlap and protocol.needs_current_clock:
    raise ValueError(
      'With overlap a learner pulls before its push is applied, so none of its '
      'gradients would be of the current clock, which this protocol wants: '
      f'{protocol.describe()}'
    )
  if protocol.needs_equal_times and not (
    compute.is_constant and network.is_free and not failures
  ):
    raise ValueError(
      'A constant delay comes from equal, constant times without a network or '
      f'failures; got compute={compute.name}.'
    )


def _can_be_sorted(protocol: protocols.Protocol) -> bool:
  """Whether the order of arrivals does not depend on what the server does."""
  has_fetches = protocol.steps_per_fetch != protocol.steps_per_push
  return not protocol.holds_learners and not has_fetches


def _settle(
  records: np.ndarray, last_clock: int, samples_per_push: int
) -> None:
  """Marks the gradients of the last, unfinished group, and counts samples."""
  is_taken = (records['kind'] == traces.Kind.GRADIENT) & (
    records['fate'] == protocols.Fate.APPLIED
  )
  is_pending = is_taken & (records['arrive_clock'] == last_clock)
  records['fate'][is_pending] = protocols.Fate.PENDING
  records['apply_clock'][is_pending] = -1
  is_applied = is_taken & ~is_pending
  records['samples'] = np.cumsum(is_applied) * samples_per_push
