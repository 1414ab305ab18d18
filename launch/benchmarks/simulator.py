"""How many gradients the simulator handles per second.

The goals: 5 million per second for asynchronous and softsync at 1,000 learners
without a network; 0.3 million for every other protocol, and with a network; at
most 6 x dearer per gradient at 100,000 learners (--quick is too short to tell).
"""

from collections.abc import Callable
import time
from typing import Any

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation

NETWORK = simulation.make_network(
  60_000, latency=1e-3, bandwidth=1e9, server_time=1e-5
)
# Each learner is up for 50 gradients, and down for 5.
FAILURES = simulation.draw_failures(1000, 400.0, 50.0, 5.0)
NUM_LEARNERS = 1000
MANY = 100_000
MANY_SUFFIX = ', 100k'

_FAST = {'num_gradients': 3_000_000}
# Ten gradients of each learner, or the time to set up would count too much.
_MANY = {'num_learners': MANY, 'num_gradients': 10 * MANY}
_LINKED = {'network': NETWORK}

# Name of a row -> its protocol, and arguments of the simulation. A row that
# ends with `MANY_SUFFIX` is compared with the row of the name before it.
ROWS: dict[str, tuple[protocols.Protocol, dict[str, Any]]] = {
  'asynchronous': (protocols.asynchronous(), _FAST),
  'softsync(10)': (protocols.softsync(10), _FAST),
  'hardsync': (protocols.hardsync(), {}),
  'backup(50)': (protocols.backup(50), {}),
  'ssp(5)': (protocols.ssp(5), {}),
  'rennala(100)': (protocols.rennala(100), {}),
  'ringmaster(2000)': (protocols.ringmaster(2000), {}),
  'downpour(2, 4)': (protocols.downpour(2, 4), {}),
  'ramp_up(asynchronous, 50k)': (
    protocols.ramp_up(protocols.asynchronous(), 50_000),
    {},
  ),
  'asynchronous, failures': (protocols.asynchronous(), {'failures': FAILURES}),
  'hardsync, failures': (protocols.hardsync(), {'failures': FAILURES}),
  'asynchronous, network': (protocols.asynchronous(), _LINKED),
  'hardsync, network': (protocols.hardsync(), _LINKED),
  'asynchronous, 100k': (protocols.asynchronous(), _MANY),
  'softsync(10), 100k': (protocols.softsync(10), _MANY),
  'hardsync, 100k': (protocols.hardsync(), _MANY),
  'ssp(5), 100k': (protocols.ssp(5), _MANY),
  'asynchronous, network, 100k': (
    protocols.asynchronous(),
    {**_MANY, **_LINKED},
  ),
  'asynchronous, shared link': (
    protocols.asynchronous(),
    {'network': NETWORK._replace(server_bandwidth=1e9)},
  ),
}
STRATEGIES = {
  'allreduce': gossip.AllReduce(),
  'elastic': gossip.Elastic(),
  'pairs': gossip.Pairs(),
  'pull': gossip.Pull(),
  'push': gossip.Push(),
  'push_sum': gossip.PushSum(),
}
NUM_NODES = 1000
NUM_STEPS = 100


def get_best_seconds(
  simulate: Callable[..., Any], num_turns: int, *args: Any, **kwargs: Any
) -> float:
  """Seconds of the fastest of some calls."""
  seconds = []
  for _ in range(num_turns):
    start = time.perf_counter()
    simulate(*args, compute=simulation.normal(1.0, 0.2), **kwargs)
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def run(quick: bool) -> None:
  """Prints two tables."""
  print(__doc__)
  num_turns, divisor = (1, 20) if quick else (3, 1)
  print(f'{f"strategy, {NUM_NODES} nodes":28} {"node-steps / s":>14}')
  for name, strategy in STRATEGIES.items():
    num_steps = NUM_STEPS // divisor
    seconds = get_best_seconds(
      simulation.simulate_nodes,
      num_turns,
      strategy,
      num_nodes=NUM_NODES,
      num_steps=num_steps,
      network=NETWORK,
    )
    print(f'{name:28} {NUM_NODES * num_steps / seconds:14,.0f}', flush=True)
  print(f'\n{"protocol":28} {"gradients / s":>14}')
  rates: dict[str, float] = {}
  for name, (protocol, options) in ROWS.items():
    arguments = {'num_learners': NUM_LEARNERS, 'num_gradients': 200_000}
    arguments |= options
    arguments['num_gradients'] //= divisor
    if name.endswith(MANY_SUFFIX):
      arguments['num_learners'] //= divisor
    seconds = get_best_seconds(
      simulation.simulate, num_turns, protocol, **arguments
    )
    rates[name] = arguments['num_gradients'] / seconds
    ratio = ''
    if name.endswith(MANY_SUFFIX) and not quick:
      few = rates[name.removesuffix(MANY_SUFFIX)]
      ratio = f'  {few / rates[name]:.1f} x dearer'
    print(f'{name:28} {rates[name]:14,.0f}{ratio}', flush=True)
