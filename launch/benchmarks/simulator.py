"""How many gradients the simulator handles per second.

The goals: 5 million per second for asynchronous and softsync at 1,000 learners
without a network, and at most 6 x dearer at 100,000 learners; 0.3 million for
every other protocol, and with a network.
"""

import time
from typing import NamedTuple

from jasgd import protocols
from jasgd import simulation

NETWORK = simulation.make_network(
  60_000, latency=1e-3, bandwidth=1e9, server_time=1e-5
)
SHARED = NETWORK._replace(server_bandwidth=1e9)


class Row(NamedTuple):
  """What is simulated."""

  protocol: protocols.Protocol
  num_gradients: int = 200_000
  num_learners: int = 1000
  network: simulation.Network | None = None


ROWS = {
  'asynchronous': Row(protocols.asynchronous(), 3_000_000),
  'softsync(10)': Row(protocols.softsync(10), 3_000_000),
  'asynchronous, 100k': Row(protocols.asynchronous(), 3_000_000, 100_000),
  'hardsync': Row(protocols.hardsync()),
  'backup(50)': Row(protocols.backup(50)),
  'ssp(5)': Row(protocols.ssp(5)),
  'rennala(100)': Row(protocols.rennala(100)),
  'ringmaster(2000)': Row(protocols.ringmaster(2000)),
  'downpour(2, 4)': Row(protocols.downpour(2, 4)),
  'asynchronous, network': Row(protocols.asynchronous(), network=NETWORK),
  'hardsync, network': Row(protocols.hardsync(), network=NETWORK),
  'asynchronous, shared link': Row(protocols.asynchronous(), network=SHARED),
}


def run(quick: bool) -> None:
  """Prints a table."""
  print(__doc__)
  print(f'{"protocol":26} {"gradients / s":>14}')
  for name, row in ROWS.items():
    num_gradients = row.num_gradients // (20 if quick else 1)
    best = float('inf')
    for _ in range(1 if quick else 3):
      start = time.perf_counter()
      simulation.simulate(
        row.protocol,
        num_learners=row.num_learners,
        num_gradients=num_gradients,
        compute=simulation.normal(1.0, 0.2),
        network=row.network,
      )
      best = min(best, time.perf_counter() - start)
    print(f'{name:26} {num_gradients / best:14,.0f}', flush=True)
