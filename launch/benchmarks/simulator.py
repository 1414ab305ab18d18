"""How many gradients are simulated, planned and replayed per second.

Goals: 5 million simulated gradients per second for asynchronous and softsync at
1,000 learners without a network; 0.3 million for every other protocol, and with
a network; at most 6 x the time per gradient at 100,000 learners (--quick is too
short for this goal). Then the fast replay of a server's trace is compared, in
turns, with steps of the same task and optimizer without our engine: with `bare
steps`, a loop in Python over a compiled step, of which it takes at most 1.10 x
the time; and with `bare loop`, one compiled loop, which is faster where a step
is short. At last, ten million gradients are planned and replayed in a separate
process.

Bounds: planning takes at most 5 microseconds of processor time per gradient of
a server, and ten million gradients take at most 2.5 GiB, from the simulation to
the end of the replay. If one is missed, the exit code is 1 (not with --quick).
"""

from collections.abc import Callable, Mapping
import json
import subprocess
import sys
import time
from typing import Any

import jax
import optax

from jasgd import engine
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks
from launch.benchmarks import measuring

NETWORK = simulation.make_network(
  60_000, latency=1e-3, bandwidth=1e9, server_time=1e-5
)
# Each learner is up for 50 gradients, and down for 5.
FAILURES = simulation.draw_failures(1000, 400.0, 50.0, 5.0)
NUM_WORKERS = 1000
MANY = 100_000
MANY_SUFFIX = ', 100k'

_FAST = {'num_gradients': 3_000_000}
# Ten gradients of each learner, so that the time to set up hardly counts.
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

# Goal, and bounds.
MAX_REPLAY_RATIO = 1.10
MAX_PLANNING = 5.0  # Microseconds per gradient.
MAX_MEMORY = 2.5  # GiB, for ten million gradients.
BARE_STEPS, BARE_LOOP = 'bare steps', 'bare loop'

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
  """Prints a row for each strategy, and one of very many gradients.

  Raises:
    SystemExit: if a bound is missed, unless `quick`.
  """
  print(__doc__)
  num_turns, divisor = (1, 20) if quick else (3, 1)
  print(f'{"strategy":28} {"gradients / s":>14} {"planning, us each":>18}')
  rates: dict[str, float] = {}
  planning: dict[str, float] = {}
  for name, (strategy, options) in ROWS.items():
    arguments: dict[str, Any] = {'num_workers': NUM_WORKERS}
    arguments |= {'num_gradients': 200_000, **options}
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
    # Processor time: another program on this machine must not miss the bound.
    plan_seconds, _ = _get_best(
      num_turns,
      engine.make_plan,
      trace,
      num_samples=1000,
      batch=1,
      get_time=time.process_time,
    )
    each = plan_seconds / count * 1e6
    if trace.has_server:
      # A push is a sum of this many gradients.
      each /= trace.header.get('steps_per_push', 1)
      planning[name] = each
    rates[name] = count / seconds
    ratio = ''
    if name.endswith(MANY_SUFFIX) and not quick:
      few = rates[name.removesuffix(MANY_SUFFIX)]
      ratio = f'  {few / rates[name]:.1f} x the time'
    print(f'{name:28} {rates[name]:14,.0f} {each:18.2f}{ratio}', flush=True)
  print_replay(100 if quick else 2000, 1 if quick else 9)
  memory = measure_large(10_000_000 // (1000 if quick else 1))
  lines, is_met = judge(planning, memory)
  print('\n'.join(lines))
  if not is_met and not quick:
    sys.exit(1)


def judge(
  planning: Mapping[str, float], memory: float
) -> tuple[list[str], bool]:
  """Compares planning and memory with their bounds.

  Args:
    planning: Row of a protocol -> microseconds to plan a gradient.
    memory: Largest GiB of the process with very many gradients.

  Returns:
    A line for each bound, and whether both are met.
  """
  slowest = max(planning, key=lambda name: planning[name])
  is_fast = measuring.is_met(planning[slowest], at_most=MAX_PLANNING)
  is_small = measuring.is_met(memory, at_most=MAX_MEMORY)
  return [
    f'Bound: planning takes at most {MAX_PLANNING} us per gradient of a '
    f'server: {measuring.say_met(is_fast)}, at most {planning[slowest]:.2f} '
    f'({slowest})',
    f'Bound: ten million gradients take at most {MAX_MEMORY} GiB: '
    f'{measuring.say_met(is_small)}, {memory:.2f}',
  ], is_fast and is_small


def print_replay(num_steps: int, num_rounds: int) -> None:
  """Prints the time of a fast replay relative to bare steps.

  Args:
    num_steps: Steps, or updates, per turn.
    num_rounds: Turns of each program.
  """
  task = tasks.make_task('digits', model='mlp', batch=16)
  optimizer = optax.sgd(0.01, momentum=0.9)
  programs = {
    name: _make_bare(task, optimizer, num_steps, is_loop=name == BARE_LOOP)
    for name in (BARE_STEPS, BARE_LOOP)
  }
  for num_workers in (1, 8):
    trace = simulation.simulate(
      protocols.asynchronous(),
      num_workers=num_workers,
      num_gradients=num_steps * (num_rounds + 1),
    )
    plan = engine.make_plan(
      trace, num_samples=task.num_samples, batch=task.batch
    )
    run = engine.Replay(task, optimizer, plan, chunk=num_steps)
    programs[f'{num_workers} learners'] = _time(run.advance)
  seconds = measuring.run_in_turns(programs, num_rounds, num_warm_up=1)
  steps, loop = seconds.pop(BARE_STEPS), seconds.pop(BARE_LOOP)
  print(f'\nbare steps of an MLP: {min(steps) / num_steps * 1e6:.1f} us each')
  for name, found in seconds.items():
    ratio = measuring.get_ratio(found, steps)
    is_met = measuring.is_met(ratio, at_most=MAX_REPLAY_RATIO)
    print(
      f'replay, asynchronous, {name}: {ratio:.2f} x bare steps '
      f'({measuring.say_met(is_met)}), '
      f'{measuring.get_ratio(found, loop):.2f} x bare loop',
      flush=True,
    )


def _make_bare(
  task: tasks.Task,
  optimizer: optax.GradientTransformation,
  num_steps: int,
  *,
  is_loop: bool,
) -> Callable[[], float]:
  """Steps without our engine; a call returns the seconds of many of them."""
  key = jax.random.key(0)
  params, stats = task.init(key)
  carry = (params, optimizer.init(params))

  def step(number: Any, carry: Any, data: Any) -> Any:
    params, state = carry
    batch = task.batches(data, 0, 0, number)
    grads = jax.grad(lambda each: task.loss(each, stats, batch, key)[0])(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def loop(first: int, carry: Any, data: Any) -> Any:
    return jax.lax.fori_loop(
      0, num_steps, lambda i, carry: step(first + i, carry, data), carry
    )

  compiled = jax.jit(loop if is_loop else step, donate_argnums=1)
  numbers = (0,) if is_loop else range(num_steps)

  def advance() -> None:
    nonlocal carry
    for number in numbers:
      carry = compiled(number, carry, task.data)
    jax.block_until_ready(carry)

  return _time(advance)


def _time(function: Callable[[], Any]) -> Callable[[], float]:
  """A function that calls another, and returns the seconds that it took."""
  return lambda: _get_best(1, function)[0]


def measure_large(count: int) -> float:
  """Simulates, plans and replays very many gradients, and prints the times.

  Args:
    count: Number of gradients.

  Returns:
    The largest memory of the process that did so, in GiB.
  """
  command = [sys.executable, '-c', _LARGE, str(count)]
  done = subprocess.run(command, check=True, capture_output=True, text=True)
  result = json.loads(done.stdout.splitlines()[-1])
  print(
    f'\n{count:,} gradients, softsync(4), us each:',
    ', '.join(
      f'{name} {result[name] / count * 1e6:.2f}'
      for name in ('simulate', 'plan', 'replay')
    ),
  )
  return result['GiB']


def _get_best(
  num_turns: int,
  function: Callable[..., Any],
  *args: Any,
  get_time: Callable[[], float] = time.perf_counter,
  **kwargs: Any,
) -> tuple[float, Any]:
  """Seconds of the fastest of some calls, and the last result."""
  seconds, result = [], None
  for _ in range(num_turns):
    start = get_time()
    result = function(*args, **kwargs)
    seconds.append(get_time() - start)
  return min(seconds), result
