"""One mix against one all-reduce, and against a copy of the same bytes.

Mixes: every device holds so many megabytes. `x copy` is against a copy in
memory of what all devices of a process hold, in all processes at once. Devices
are those of one process, under pmap and shard_map, or of several processes,
under shard_map over jax.distributed (gloo). `pull` is what a real node waits
for that pulls from a random other one over a wire, until its weights are mixed;
there `x all-reduce` is against that of as many processes above.

Nodes: all nodes in virtual time on one device (batch 16; `mnist` is LeNet-5 on
28 x 28 random pixels, `digits` a small LeNet whose steps are short), from the
simulation to the last weights, against as many plain steps: value_and_grad and
an optax update, donated, without our engine (`bare loop`: compiled as one loop;
`bare steps`: a loop in Python over a compiled step), and against our engine
with one node. One thread, CPU time. The goal is at most 1.25 x what is faster
of the two bare ones.

All of it in turns; numbers are medians of rounds.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from typing import Any

from jasgd import runtime
from launch.benchmarks import gossip_nodes
from launch.benchmarks import gossip_tables as tables
from launch.benchmarks import gossip_wire
from launch.benchmarks import gossip_worker
from launch.benchmarks import training
from launch.benchmarks import workers

WIRES = ('memory', 'flight')
_TIMEOUT = 600.0  # Seconds, for one size, or one turn.
_LARGE = 64 << 20  # Bytes: it takes long, and is less noisy.

# (number of processes, bytes) -> seconds of its all-reduces.
AllReduces = dict[tuple[int, int], list[float]]


def run(quick: bool) -> None:
  """Prints tables, and a line for each strategy's goal."""
  print(__doc__)
  begin = time.monotonic()
  sizes = [size << 20 for size in ((1,) if quick else (1, 10, 100))]
  reduced: AllReduces = {}
  print(tables.MIX_HEADER, flush=True)
  for num_devices in (2,) if quick else (2, 4, 8):
    run_devices(num_devices, 1, sizes, 3 if quick else 7)
  for num_processes in (2,) if quick else (2, 3, 4):
    num_rounds = 3 if quick else 7
    reduced |= run_devices(num_processes, num_processes, sizes, num_rounds)
    run_wire(num_processes, sizes, 10 if quick else 30, reduced)
  _say(f'Mixes took {time.monotonic() - begin:.0f} s.')
  results = run_nodes(
    {'digits': 128} if quick else {'mnist': 1024, 'digits': 2048},
    (8,) if quick else (8, 32, 128),
    1 if quick else 5,
  )
  print('\n'.join(['', *tables.judge(results)]), flush=True)
  if quick:
    print('That was too short to judge by.', flush=True)
  _say(f'All took {time.monotonic() - begin:.0f} s.')


def run_devices(
  num_devices: int, num_processes: int, sizes: Sequence[int], num_rounds: int
) -> AllReduces:
  """Times mixes of so many devices, and prints lines as they are done.

  Args:
    num_devices: Of all processes.
    num_processes: That share them.
    sizes: Bytes that a device holds.
    num_rounds: Turns of each rule; of large sizes, half of it.

  Returns:
    The all-reduces under shard_map.

  Raises:
    WorkerError: if a process failed, or took too long.
  """
  where = f'{num_devices} in {num_processes}'
  cases = [
    (size, num_rounds if size < _LARGE else max(1, num_rounds // 2))
    for size in sizes
  ]
  reduced: AllReduces = {}
  with _start_devices(num_devices, num_processes, cases) as staff:
    for size in sizes:
      _say(f'... devices: {where} process(es), {size / 2**20:.4g} MB')
      # The others do the same, and wait for it.
      rows = staff[0].ask('next', _TIMEOUT)['rows']
      print('\n'.join(tables.format_mixes(where, rows)), flush=True)
      found = {(row['runner'], row['rule']): row['seconds'] for row in rows}
      reduced[num_processes, size] = found[
        'shard_map', gossip_worker.ALL_REDUCE
      ]
  return reduced


@contextlib.contextmanager
def _start_devices(
  num_devices: int, num_processes: int, cases: list[tuple[int, int]]
) -> Iterator[list[workers.Worker]]:
  """The processes of `gossip_worker`, ended whatever happens."""
  is_single = num_processes == 1
  count = num_devices // num_processes
  job: dict[str, Any] = {
    'num_devices': num_devices,
    'cases': cases,
    'runners': ['pmap', 'shard_map'] if is_single else ['shard_map'],
  }
  if not is_single:
    job['coordinator'] = f'127.0.0.1:{runtime.find_free_port()}'
    job['num_processes'] = num_processes
  variables = {
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={count}',
    'NPROC': str(training.count_cores() if is_single else 1),
  }
  jobs = [job | {'process': process} for process in range(num_processes)]
  with _start('launch.benchmarks.gossip_worker', jobs, variables) as staff:
    yield staff


def run_wire(
  num_processes: int,
  sizes: Sequence[int],
  num_steps: int,
  reduced: Mapping[tuple[int, int], Sequence[float]],
) -> None:
  """Times pulls of real nodes, and prints lines as they are done.

  Args:
    num_processes: How many nodes.
    sizes: Bytes of a node's weights.
    num_steps: Of each node, with a pull after each; of large sizes, fewer.
    reduced: All-reduces of as many processes, to compare with.

  Raises:
    WorkerError: if a process failed, or took too long.
  """
  cases = [
    (wire, size, num_steps if size < _LARGE else max(4, num_steps // 3))
    for size in sizes
    for wire in WIRES
  ]
  with tempfile.TemporaryDirectory(prefix='gossip-') as folder:
    jobs = [
      {
        'node': node,
        'num_nodes': num_processes,
        'folder': folder,
        'cases': cases,
      }
      for node in range(num_processes)
    ]
    module = 'launch.benchmarks.gossip_wire'
    with _start(module, jobs, {'NPROC': '1'}) as staff:
      for wire, size, _ in cases:
        _say(f'... wire: {num_processes} nodes, {wire}, {size / 2**20:.4g} MB')
        answers = [node.ask('next', _TIMEOUT) for node in staff]
        copies = [each for one in answers for each in one['copy_seconds']]
        seconds = gossip_wire.read_seconds(
          gossip_wire.find_run(folder, wire, size)
        )
        middle = statistics.median(seconds)
        base = reduced.get((num_processes, size))
        line = tables.format_mix(
          f'{num_processes} nodes',
          wire,
          size,
          'pull',
          seconds,
          None if base is None else middle / statistics.median(base),
          middle / statistics.median(copies),
          None,
        )
        print(line, flush=True)


def run_nodes(
  steps: Mapping[str, int], numbers: Sequence[int], num_rounds: int
) -> dict[tuple[str, int], dict[str, list[float]]]:
  """Times simulated nodes and plain steps, and prints lines as they are done.

  Args:
    steps: Task of `gossip_nodes` -> steps of all nodes together.
    numbers: How many nodes.
    num_rounds: Turns of each program, besides the one that compiles.

  Returns:
    (task, number of nodes) -> program -> seconds of its rounds.

  Raises:
    WorkerError: if the worker failed, or took too long.
  """
  programs = (*gossip_nodes.PLAIN, *gossip_nodes.STRATEGIES)
  results: dict[tuple[str, int], dict[str, list[float]]] = {}
  print(f'\n{tables.NODES_HEADER}', flush=True)
  variables = training.make_environment(num_threads=1)
  with _start('launch.benchmarks.gossip_nodes', [{}], variables) as (worker,):
    for (name, num_steps), number in itertools.product(steps.items(), numbers):
      measured: dict[str, list[float]] = {program: [] for program in programs}
      for turn in range(1 + num_rounds):
        what = f'round {turn} of {num_rounds}' if turn else 'compiling'
        _say(f'... simulated: {name}, {number} nodes, {what}')
        for program in programs:
          line = f'{name} {number} {num_steps} {program}'
          seconds = worker.ask(line, _TIMEOUT)['seconds']
          if turn:
            measured[program].append(seconds)
      results[name, number] = measured
      lines = tables.format_nodes(name, number, num_steps, measured)
      print('\n'.join(lines), flush=True)
  return results


@contextlib.contextmanager
def _start(
  module: str, jobs: Sequence[dict[str, Any]], variables: Mapping[str, str]
) -> Iterator[list[workers.Worker]]:
  """A worker for each job, in the environment that our processes have."""
  environment = {**runtime.CHILD_VARIABLES, 'JAX_PLATFORMS': 'cpu', **variables}
  with contextlib.ExitStack() as stack:
    yield [
      stack.enter_context(
        workers.Worker(
          f'{module} {number}',
          [sys.executable, '-m', module, json.dumps(job)],
          environment,
        )
      )
      for number, job in enumerate(jobs)
    ]


def _say(text: str) -> None:
  """A line of progress, which is no part of the tables."""
  print(text, file=sys.stderr, flush=True)
