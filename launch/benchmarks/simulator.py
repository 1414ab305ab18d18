"""How many gradients are simulated, planned and replayed per second.

Goals: 5 million simulated gradients per second for asynchronous and softsync at
1,000 learners without a network; 0.3 million for every other protocol, and with
a network; at most 6 x dearer per gradient at 100,000 learners (--quick is too
short to tell). Planning takes at most 5 microseconds per gradient of a server.
At last, ten million gradients are planned and replayed, in a process of its
own, whose largest memory is printed.
"""

from collections.abc import Callable
import json
import subprocess
import sys
import time
from typing import Any

from jasgd import engine
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation

NETWORK = simulation.make_network(
  60_000, latency=1e-3, bandwidth=1e9, server_time=1e-5
)
# Each learner is up for 50 gradients, and down for 5.
FAILURES = simulation.draw_failures(1000, 400.0, 50.0, 5.0)
NUM_WORKERS = 1000
MANY = 100_000
MANY_SUFFIX = ', 100k'

_FAST = {'num_gradients': 3_000_000}
# Ten gradients of each learner, or the time to set up would count too much.
_MANY = {'num_workers': MANY, 'num_gradients': 10 * MANY}
_LINKED = {'network': NETWORK}

# Name of a row -> its strategy, and arguments of the simulation. A row that
# ends with `MANY_SUFFIX` is compared with the row of the name before it.
ROWS: dict[
  str, tuple[protocols.Protocol | gossip.PeerStrategy, dict[str, Any]]
] = {
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
  'allreduce': (gossip.AllReduce(), _LINKED),
  'elastic': (gossip.Elastic(), _LINKED),
  'pairs': (gossip.Pairs(), _LINKED),
  'pull': (gossip.Pull(), _LINKED),
  'push': (gossip.Push(), _LINKED),
  'push_sum': (gossip.PushSum(), _LINKED),
}

# Prints {seconds to simulate, to plan, to replay, and the largest GiB}.
_LARGE = """
import json, resource, sys, time
import jasgd, optax
from jasgd import engine, protocols, tasks
count, seconds = int(sys.argv[1]), {}
task = tasks.make_task('quadratic', batch=1)
start = time.perf_counter()
trace = jasgd.simulate(
  protocols.softsync(4), num_workers=64, num_gradients=count)
seconds['simulate'] = time.perf_counter() - start
start = time.perf_counter()
plan = engine.make_plan(trace, num_samples=task.num_samples, batch=1)
seconds['plan'] = time.perf_counter() - start
run = engine.Replay(task, optax.sgd(1e-3), plan, chunk=plan.num_updates // 10)
start = time.perf_counter()
while not run.is_done:
  run.advance()
seconds['replay'] = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({**seconds, 'GiB': peak}))
"""


def run(quick: bool) -> None:
  """Prints a row for each strategy, and one of very many gradients."""
  print(__doc__)
  num_turns, divisor = (1, 20) if quick else (3, 1)
  print(f'{"strategy":28} {"gradients / s":>14} {"planning, us each":>18}')
  rates: dict[str, float] = {}
  for name, (strategy, options) in ROWS.items():
    arguments = {'num_workers': NUM_WORKERS, 'num_gradients': 200_000}
    arguments |= options
    arguments['num_gradients'] //= divisor
    if name.endswith(MANY_SUFFIX):
      arguments['num_workers'] //= divisor
    count = arguments['num_gradients']
    seconds, trace = _get_best(
      num_turns,
      simulation.simulate,
      strategy,
      compute=simulation.normal(1.0, 0.2),
      **arguments,
    )
    planning, _ = _get_best(
      1, engine.make_plan, trace, num_samples=1000, batch=1
    )
    rates[name] = count / seconds
    ratio = ''
    if name.endswith(MANY_SUFFIX) and not quick:
      few = rates[name.removesuffix(MANY_SUFFIX)]
      ratio = f'  {few / rates[name]:.1f} x dearer'
    print(
      f'{name:28} {rates[name]:14,.0f} {planning / count * 1e6:18.2f}{ratio}',
      flush=True,
    )
  print_large(10_000_000 // (1000 if quick else 1))


def print_large(count: int) -> None:
  """Prints time and memory of very many gradients, simulated to replayed."""
  command = [sys.executable, '-c', _LARGE, str(count)]
  done = subprocess.run(command, check=True, capture_output=True, text=True)
  result = json.loads(done.stdout.splitlines()[-1])
  print(
    f'\n{count:,} gradients, softsync(4), us each:',
    ', '.join(
      f'{name} {result[name] / count * 1e6:.2f}'
      for name in ('simulate', 'plan', 'replay')
    )
    + f'; at most {result["GiB"]:.2f} GiB',
  )


def _get_best(
  num_turns: int, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[float, Any]:
  """Seconds of the fastest of some calls, and the last result."""
  seconds, result = [], None
  for _ in range(num_turns):
    start = time.perf_counter()
    result = function(*args, **kwargs)
    seconds.append(time.perf_counter() - start)
  return min(seconds), result
