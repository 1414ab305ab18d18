"""How many updates a server makes per second, against others who serve weights.

For each size: a raw loop over unix sockets, an MPI loop over shared memory,
torch RPC, and our server over each of its wires; each in fresh processes, in
turns, six rounds, medians. Every learner checks every weight of every answer.
"""

from launch.benchmarks import server_bandwidth
from launch.benchmarks import server_crowd
from launch.benchmarks import server_peers
from launch.benchmarks import server_rounds

_SIZES = (60_000, 1_000_000, 10_000_000, 25_000_000)
_LEARNERS = (2, 4)
_NUM_ROUNDS = 6


def run(quick: bool = False) -> None:
  """Measures, and prints a table for each size and number of learners."""
  sizes = _SIZES[:2] if quick else _SIZES
  peers = server_peers.list_peers()
  for num_parameters in sizes:
    for num_learners in _LEARNERS[:1] if quick else _LEARNERS:
      cases = {
        name: server_peers.make_case(name, num_parameters, num_learners)
        for name in (*peers, *server_peers.OURS)
      }
      medians = server_rounds.measure(cases, 1 if quick else _NUM_ROUNDS)
      server_rounds.print_table(num_parameters, num_learners, medians)
      _print_times(medians)
  server_bandwidth.print_bandwidth(1_000_000 if quick else 25_000_000)
  server_crowd.print_crowd(2.0 if quick else 60.0)


def _print_times(medians: server_rounds.Medians) -> None:
  """What our server's time goes to, as shares."""
  for name, spreads in medians.items():
    shares = ', '.join(
      f'{key.removeprefix("time_")} {100 * spread.median:.0f}%'
      for key, spread in spreads.items()
      if key.startswith('time_')
    )
    if shares:
      print(f'{name:12} {shares}', flush=True)
