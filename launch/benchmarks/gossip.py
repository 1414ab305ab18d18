"""One mix against one all-reduce, and against a copy of the same bytes.

Mixes: `MB` is the size of the weights of each device. `x copy` is the ratio to
a copy in memory of the weights of all devices of a process, in all processes at
once. Devices are those of one process, under pmap and shard_map, or of several
processes, under shard_map over jax.distributed (gloo). `pull` is the time that
a real node waits until it has pulled the weights of a random other node over a
wire and mixed them; its `x all-reduce` is the ratio to the all-reduce, above,
of as many processes.

Nodes: all nodes in virtual time on one device (batch 16; `mnist` is LeNet-5 on
28 x 28 random pixels, `digits` a small LeNet whose steps are short), from the
simulation to the last weights, against as many plain steps: value_and_grad and
an optax update, donated, without our engine (`bare loop`: compiled as one loop;
`bare steps`: a loop in Python over a compiled step), and against our engine
with one node. One thread, CPU time. The goal is at most 1.25 x the faster one
of the two bare programs.

All programs run in turns; a ratio is the median of the ratios of rounds.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import functools
import itertools
import json
import statistics
import sys
import tempfile
from typing import Any

from jasgd import runtime
from launch.benchmarks import gossip_worker as worker
from launch.benchmarks import measuring
from launch.benchmarks import processes

GOAL = 1.25
WIRES = ('memory', 'flight')
_TIMEOUT = 600.0  # Seconds of one size, or one turn.
_LARGE = 64 << 20  # Bytes from which fewer rounds are enough.

# Seconds of the rounds, or mixes, of one program.
Seconds = Sequence[float]


@contextlib.contextmanager
def start(
  role: str, jobs: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
) -> Iterator[list[processes.Worker]]:
  """Starts a worker for each job, in the environment of our processes."""
  module = [sys.executable, '-m', 'launch.benchmarks.gossip_worker', role]
  variables = {**runtime.CHILD_VARIABLES, 'JAX_PLATFORMS': 'cpu', **variables}
  commands = [[*module, json.dumps(job)] for job in jobs]
  with processes.start_workers(commands, variables) as workers:
    yield workers


def print_mix(
  where: str,
  runner: str,
  size: int,
  rule: str,
  seconds: Seconds,
  *ratios: float | None,
) -> None:
  """Prints a line of the table of mixes.

  Args:
    where: The number of devices or nodes, and of processes.
    runner: 'pmap', 'shard_map', or the wire.
    size: Bytes of a device or node.
    rule: Name of the mix.
    seconds: Seconds of each round.
    *ratios: Ratios to an all-reduce, to a copy, and of pmap to shard_map; None
      if there is none.
  """
  cells = ['-' if ratio is None else f'{ratio:.2f}' for ratio in ratios]
  print(
    f'{where:12} {runner or "-":10} {size / 2**20:6.4g} {rule:12} '
    f'{1e3 * statistics.median(seconds):9.3f} '
    f'{cells[0]:>12} {cells[1]:>8} {cells[2]:>17}',
    flush=True,
  )


def run_devices(
  num_devices: int, num_processes: int, sizes: Sequence[int], num_rounds: int
) -> dict[int, Seconds]:
  """Times and prints mixes of devices.

  Args:
    num_devices: Devices of all processes.
    num_processes: Number of processes.
    sizes: Bytes of a device.
    num_rounds: Rounds of each rule; of large sizes, half of it.

  Returns:
    Size -> seconds of the all-reduces under shard_map.
  """
  count = num_devices // num_processes
  num_threads = processes.count_cores() if num_processes == 1 else 1
  jobs = [
    {
      'num_devices': num_devices,
      'num_processes': num_processes,
      'process': process,
      'coordinator': f'127.0.0.1:{runtime.find_free_port()}',
    }
    for process in range(num_processes)
  ]
  for job in jobs:
    job['coordinator'] = jobs[0]['coordinator']
  variables = {
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={count}',
    'NPROC': str(num_threads),
  }
  all_reduces = {}
  with start('devices', jobs, variables) as workers:
    for size in sizes:
      rounds = num_rounds if size < _LARGE else max(1, num_rounds // 2)
      question = json.dumps([size, rounds])
      rows = processes.ask_all(workers, question, _TIMEOUT)[0]['rows']
      found = {(runner, rule): seconds for runner, rule, seconds in rows}
      print_mixes(f'{num_devices} in {num_processes}', size, found)
      all_reduces[size] = found['shard_map', worker.ALL_REDUCE]
  return all_reduces


def print_mixes(
  where: str, size: int, found: Mapping[tuple[str, str], Seconds]
) -> None:
  """Prints the lines of one size: one for each (runner, rule), and the copy."""
  copy = found['', worker.COPY]
  for (runner, rule), seconds in found.items():
    if rule != worker.COPY:
      is_pmap = runner == 'pmap'
      print_mix(
        where,
        runner,
        size,
        rule,
        seconds,
        measuring.get_ratio(seconds, found[runner, worker.ALL_REDUCE]),
        measuring.get_ratio(seconds, copy),
        measuring.get_ratio(seconds, found['shard_map', rule])
        if is_pmap
        else None,
      )
  print_mix(where, '', size, worker.COPY, copy, None, None, None)


def run_wire(
  num_nodes: int, num_steps: int, all_reduces: Mapping[int, Seconds]
) -> None:
  """Times and prints pulls of real nodes.

  Args:
    num_nodes: Number of nodes, each a process.
    num_steps: Steps of each node, with a pull each; of large sizes, fewer.
    all_reduces: Bytes of a node's weights -> seconds of all-reduces of as many
      processes, to compare with.
  """
  with tempfile.TemporaryDirectory(prefix='gossip-') as folder:
    jobs = [
      {'node': node, 'num_nodes': num_nodes, 'folder': folder}
      for node in range(num_nodes)
    ]
    with start('nodes', jobs, {'NPROC': '1'}) as workers:
      for (size, base), wire in itertools.product(all_reduces.items(), WIRES):
        steps = num_steps if size < _LARGE else max(4, num_steps // 3)
        question = json.dumps([wire, size, steps])
        answers = processes.ask_all(workers, question, _TIMEOUT)
        copies = [each for one in answers for each in one['copy_seconds']]
        seconds = worker.read_pull_seconds(folder, wire, size)
        median = statistics.median(seconds)
        print_mix(
          f'{num_nodes} nodes',
          wire,
          size,
          'pull',
          seconds,
          median / statistics.median(base),
          median / statistics.median(copies),
          None,
        )


def run_simulations(
  steps: Mapping[str, int], numbers: Sequence[int], num_rounds: int
) -> dict[tuple[str, int], dict[str, list[float]]]:
  """Times and prints simulated nodes and plain steps.

  Args:
    steps: Task -> steps of all nodes together.
    numbers: Numbers of nodes.
    num_rounds: Rounds, besides the one that compiles.

  Returns:
    (task, number of nodes) -> program -> seconds of its rounds.
  """
  print(
    f'\n{"task":8} {"nodes":>5} {"strategy":11} {"us / step":>10} '
    f'{"x bare loop":>12} {"x bare steps":>13} {"x one node":>11}'
  )
  results = {}

  def ask(workers: list[processes.Worker], *case: Any) -> float:
    question = json.dumps(case)
    return processes.ask_all(workers, question, _TIMEOUT)[0]['seconds']

  with start('simulations', [{}], processes.limit_threads(1)) as workers:
    for (task, num_steps), num_nodes in itertools.product(
      steps.items(), numbers
    ):
      programs = {
        program: functools.partial(
          ask, workers, task, num_nodes, num_steps, program
        )
        for program in (*worker.PLAIN, *worker.STRATEGIES)
      }
      found = measuring.run_in_turns(programs, num_rounds, num_warm_up=1)
      results[task, num_nodes] = found
      for program, seconds in found.items():
        loop, steps_, one = (
          measuring.get_ratio(seconds, found[base])
          for base in (worker.BARE_LOOP, worker.BARE_STEPS, worker.ONE_NODE)
        )
        print(
          f'{task:8} {num_nodes:5} {program:11} '
          f'{1e6 * statistics.median(seconds) / num_steps:10.1f} '
          f'{loop:12.2f} {steps_:13.2f} {one:11.2f}',
          flush=True,
        )
  return results


def judge(
  results: Mapping[tuple[str, int], Mapping[str, Seconds]],
) -> list[str]:
  """Decides for every task and strategy whether the goal is met.

  The worst number of nodes counts, against the faster bare program.

  Args:
    results: (task, number of nodes) -> program -> seconds of its rounds.

  Returns:
    A line for each task and strategy.
  """
  lines = []
  tasks = dict.fromkeys(task for task, _ in results)
  for task, strategy in itertools.product(tasks, worker.STRATEGIES):
    ratios = {
      num_nodes: max(
        measuring.get_ratio(found[strategy], found[bare])
        for bare in (worker.BARE_LOOP, worker.BARE_STEPS)
      )
      for (other, num_nodes), found in results.items()
      if other == task
    }
    worst = max(ratios, key=lambda num_nodes: ratios[num_nodes])
    is_met = measuring.is_met(ratios[worst], at_most=GOAL)
    lines.append(
      f'{task:8} {strategy:11} Goal: at most {GOAL} x: '
      f'{measuring.say_met(is_met)}, {ratios[worst]:.2f} with {worst} nodes'
    )
  return lines


def run(quick: bool) -> None:
  """Prints tables, and a line for each strategy's goal."""
  print(__doc__)
  print(
    f'{"where":12} {"runner":10} {"MB":>6} {"rule":12} {"ms":>9} '
    f'{"x all-reduce":>12} {"x copy":>8} {"pmap / shard_map":>17}',
    flush=True,
  )
  sizes = [size << 20 for size in ((1,) if quick else (1, 10, 100))]
  num_rounds = 3 if quick else 7
  for num_devices in (2,) if quick else (2, 4, 8):
    run_devices(num_devices, 1, sizes, num_rounds)
  for number in (2,) if quick else (2, 3, 4):
    all_reduces = run_devices(number, number, sizes, num_rounds)
    run_wire(number, 10 if quick else 30, all_reduces)
  results = run_simulations(
    {'logistic': 64} if quick else {'mnist': 1024, 'digits': 2048},
    (8,) if quick else (8, 32, 128),
    1 if quick else 5,
  )
  print('\n'.join(['', *judge(results)]), flush=True)
  if quick:
    print('These runs are too short for a verdict.', flush=True)
