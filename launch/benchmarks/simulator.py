"""How many gradients the simulator handles per second.

The goals: 5 million per second for asynchronous and softsync at 1,000 learners
without a network; 0.3 million for every other protocol, and with a network; at
most 6 x dearer per gradient at 100,000 learners (--quick is too short to tell).
"""

from collections.abc import Callable, Sequence
import functools
import time
from typing import NamedTuple

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation

NETWORK = simulation.make_network(
  60_000, latency=1e-3, bandwidth=1e9, server_time=1e-5
)
SHARED = NETWORK._replace(server_bandwidth=1e9)
# Learners are up for 50 gradients, and gone for 5.
FAILURES = simulation.draw_failures(1000, 400.0, 50.0, 5.0)
MANY = 100_000


class Row(NamedTuple):
  """What is simulated."""

  protocol: protocols.Protocol
  num_gradients: int = 200_000
  num_learners: int = 1000
  network: simulation.Network | None = None
  failures: Sequence[simulation.Failure] = ()
  than: str = ''  # The row of few learners that it is compared with.

  def run(self, num_gradients: int) -> None:
    """Simulates so many gradients."""
    simulation.simulate(
      self.protocol,
      num_learners=self.num_learners,
      num_gradients=num_gradients,
      compute=simulation.normal(1.0, 0.2),
      network=self.network,
      failures=self.failures,
    )


def _with_many(
  protocol: protocols.Protocol,
  than: str,
  network: simulation.Network | None = None,
) -> Row:
  # Ten of each learner, or what there is to set up would count too much.
  return Row(protocol, 10 * MANY, MANY, network, than=than)


ROWS = {
  'asynchronous': Row(protocols.asynchronous(), 3_000_000),
  'softsync(10)': Row(protocols.softsync(10), 3_000_000),
  'hardsync': Row(protocols.hardsync()),
  'backup(50)': Row(protocols.backup(50)),
  'ssp(5)': Row(protocols.ssp(5)),
  'rennala(100)': Row(protocols.rennala(100)),
  'ringmaster(2000)': Row(protocols.ringmaster(2000)),
  'downpour(2, 4)': Row(protocols.downpour(2, 4)),
  'ramp_up(asynchronous, 50k)': Row(
    protocols.ramp_up(protocols.asynchronous(), 50_000)
  ),
  'asynchronous, failures': Row(protocols.asynchronous(), failures=FAILURES),
  'hardsync, failures': Row(protocols.hardsync(), failures=FAILURES),
  'asynchronous, network': Row(protocols.asynchronous(), network=NETWORK),
  'hardsync, network': Row(protocols.hardsync(), network=NETWORK),
  'asynchronous, 100k': _with_many(protocols.asynchronous(), 'asynchronous'),
  'softsync(10), 100k': _with_many(protocols.softsync(10), 'softsync(10)'),
  'hardsync, 100k': _with_many(protocols.hardsync(), 'hardsync'),
  'ssp(5), 100k': _with_many(protocols.ssp(5), 'ssp(5)'),
  'asynchronous, network, 100k': _with_many(
    protocols.asynchronous(), 'asynchronous, network', NETWORK
  ),
  'asynchronous, shared link': Row(protocols.asynchronous(), network=SHARED),
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


def run(quick: bool) -> None:
  """Prints two tables."""
  print(__doc__)
  num_turns = 1 if quick else 3
  print(f'{f"strategy, {NUM_NODES} nodes":28} {"node-steps / s":>14}')
  for name, strategy in STRATEGIES.items():
    num_steps = NUM_STEPS // (20 if quick else 1)
    seconds = _measure(
      functools.partial(_run_nodes, strategy, num_steps), num_turns
    )
    print(f'{name:28} {NUM_NODES * num_steps / seconds:14,.0f}', flush=True)
  print(f'\n{"protocol":28} {"gradients / s":>14}')
  rates = {}
  for name, row in ROWS.items():
    num_gradients = row.num_gradients // (20 if quick else 1)
    seconds = _measure(functools.partial(row.run, num_gradients), num_turns)
    rates[name] = num_gradients / seconds
    ratio = ''
    if row.than and not quick:
      ratio = f'  {rates[row.than] / rates[name]:.1f} x dearer'
    print(f'{name:28} {rates[name]:14,.0f}{ratio}', flush=True)


def _run_nodes(strategy: gossip.PeerStrategy, num_steps: int) -> None:
  simulation.simulate_nodes(
    strategy,
    num_nodes=NUM_NODES,
    num_steps=num_steps,
    compute=simulation.normal(1.0, 0.2),
    network=NETWORK,
  )


def _measure(call: Callable[[], None], num_turns: int) -> float:
  """Seconds of the best of some turns."""
  best = float('inf')
  for _ in range(num_turns):
    start = time.perf_counter()
    call()
    best = min(best, time.perf_counter() - start)
  return best
