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


# Parameters -> our wire -> (peer, how many times as fast), for 2 learners.
GOALS = {
  60_000: {'our memory': ('mpi', 0.5), 'our flight': ('torch', 1.0)},
  1_000_000: {'our memory': ('mpi', 1.0), 'our flight': ('torch', 1.0)},
  10_000_000: {'our memory': ('mpi', 1.0), 'our flight': ('torch', 1.0)},
}


def run(quick: bool = False) -> None:
  """Measures, and prints a table for each size and number of learners.

  A speed below its goal is said, no more: machines differ. What is wrong, or
  did not run, or unfair, ends the suite with an error.
  """
  problems: list[str] = []
  peers = server_peers.list_peers()
  for num_parameters in _SIZES[:1] if quick else _SIZES:
    for num_learners in _LEARNERS[:1] if quick else _LEARNERS:
      cases = {
        name: server_peers.make_case(name, num_parameters, num_learners)
        for name in (*peers, *server_peers.OURS)
      }
      medians = server_rounds.measure(cases, 1 if quick else _NUM_ROUNDS)
      server_rounds.print_table(num_parameters, num_learners, medians)
      _print_times(medians)
      if num_learners == 2:
        _print_goals(num_parameters, medians)
      problems += find_problems(medians)
  server_bandwidth.print_bandwidth(1_000_000 if quick else 25_000_000)
  problems += server_crowd.print_crowd(2.0 if quick else 60.0)
  if problems:
    raise SystemExit('\n'.join(problems))


def find_problems(medians: server_rounds.Medians) -> list[str]:
  """What must not be: ours did not run, or anybody's weights were wrong."""
  problems = [
    f'{name} did not run.' for name in server_peers.OURS if name not in medians
  ]
  return problems + [
    f'{name} gave wrong weights, {spreads["num_errors"].high:.0f} times.'
    for name, spreads in medians.items()
    if spreads['num_errors'].high
  ]


def _print_goals(num_parameters: int, medians: server_rounds.Medians) -> None:
  """How ours stand against their goals."""
  for name, (peer, goal) in GOALS.get(num_parameters, {}).items():
    if name in medians and peer in medians:
      speeds = [medians[each]['updates_per_second'] for each in (name, peer)]
      ratio = speeds[0].median / speeds[1].median
      word = 'met' if ratio >= goal else 'missed'
      print(f'Goal: {name} is {goal} x {peer}: {word}, {ratio:.2f}', flush=True)


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
